"""FLOP counts from the shapes alone (XLA's own analysis counts a scan's body once).

Convention: a product of (m, n) by (n, p) is 2 m n p; attention counts the keys that the causal mask and the window
leave, once, over a row that holds one document; training is three forward passes (backward twice the forward;
recomputation isn't counted); norms, softmax, gates and the optimizer aren't counted. FLOPs are per token, tokens per
row.
"""

import jax

from fbt_jax.config_model import ModelConfig
from fbt_jax.training.chips import chip_of


def forward_flops(config: ModelConfig, *, seq_len: int, fused: bool) -> float:
    """FLOPs per token of one forward pass with the LM head; `fused` adds the feedback map."""
    c = config
    gates = c.num_heads if c.head_gate else 0
    projections = c.width * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + gates)
    mlp = 3 * c.width * c.mlp_width
    attention = sum(2 * c.num_heads * c.head_dim * _mean_keys(seq_len, window) for window in c.layer_windows)
    head = c.width * c.padded_vocab_size
    fusion_matrices = {'gated': 2, 'add': 1, 'concat': 2, 'none': 0}[c.fusion] if fused else 0
    return 2.0 * (c.num_layers * (projections + mlp) + attention + head + fusion_matrices * c.width**2)


def train_flops(config: ModelConfig, *, seq_len: int, passes: int) -> float:
    """FLOPs per token of a training step of `passes` passes, forward and backward."""
    fused = forward_flops(config, seq_len=seq_len, fused=True)
    return 3.0 * (forward_flops(config, seq_len=seq_len, fused=False) + (passes - 1) * fused)


def newton_schulz_flops(m: int, n: int) -> float:
    """Of one m x n matrix: five times X X^T, its square, and their product with X."""
    small, large = min(m, n), max(m, n)
    return 5 * (4.0 * small**2 * large + 2.0 * small**3)


def peak_flops() -> float | None:
    """FLOP/s of all devices together, None where the kind is not in the table."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip.flops * jax.device_count() if chip else None


def _mean_keys(seq_len: int, window: int) -> float:
    """Keys per query under a causal mask, a window of `window` keys (0 = full) and one document of seq_len tokens."""
    w = min(window or seq_len, seq_len)
    return w - w * (w - 1) / (2 * seq_len)
