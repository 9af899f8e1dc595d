"""FLOP counts against brute counts over the real parameters' shapes and over every query's keys."""

from typing import Any

import jax
import pytest

from fbt_jax.config_model import ModelConfig
from fbt_jax.model.transformer import Transformer, init_params
from fbt_jax.training import flops

SMALL = ModelConfig(
    vocab_size=40,
    width=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=48,
    window=5,
    full_attention_every=2,
)
FULL = ModelConfig(
    vocab_size=300, width=16, num_layers=3, num_heads=2, num_kv_heads=1, mlp_width=40, window=0, full_attention_every=1
)
PAPER_1B = ModelConfig(vocab_size=100_352)


def kernel_sizes(config: ModelConfig) -> dict[str, int]:
    """{path: number of weights} of every matrix that a token is multiplied with, layers counted one by one."""
    shapes: Any = jax.eval_shape(lambda: init_params(Transformer(config), jax.random.key(0)))
    paths = jax.tree_util.tree_flatten_with_path(shapes)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.size for path, leaf in paths}
    return {name: size for name, size in named.items() if name.endswith('kernel') or name == 'embedding'}


def brute_forward(config: ModelConfig, *, seq_len: int, fused: bool) -> float:
    total = 0.0
    for name, size in kernel_sizes(config).items():
        if fused or not name.startswith('fusion'):
            total += 2 * size  # the embedding as the LM head; the look-up costs nothing
    for i in range(config.num_layers):
        full = (i + 1) % config.full_attention_every == 0 or config.window == 0
        keys = sum(t + 1 if full else min(t + 1, config.window) for t in range(seq_len))
        # Per key and head: 2 H for the score, 2 H for the sum of the values; averaged over the row's tokens.
        total += config.num_heads * (config.width // config.num_heads) * (2 + 2) * keys / seq_len
    return total


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('seq_len', [1, 4, 5, 6, 33])
@pytest.mark.parametrize('config', [SMALL, FULL], ids=['windows', 'full'])
def test_forward_equals_the_brute_count(config: ModelConfig, seq_len: int, fused: bool) -> None:
    expected = brute_forward(config, seq_len=seq_len, fused=fused)
    assert flops.forward_flops(config, seq_len=seq_len, fused=fused) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('fusion', ['gated', 'add', 'concat'])
def test_each_fusion_costs_its_matrices(fusion: str) -> None:
    config = ModelConfig(vocab_size=40, width=32, num_layers=6, num_heads=4, num_kv_heads=2, fusion=fusion)
    weights = sum(size for name, size in kernel_sizes(config).items() if name.startswith('fusion'))
    assert weights > 0
    plain, fused = (flops.forward_flops(config, seq_len=8, fused=fused) for fused in (False, True))
    assert fused - plain == pytest.approx(2 * weights, rel=1e-9)


def test_no_fusion_costs_nothing() -> None:
    config = ModelConfig(vocab_size=40, width=32, num_layers=6, num_heads=4, num_kv_heads=2, fusion='none')
    assert not any(name.startswith('fusion') for name in kernel_sizes(config))
    plain = brute_forward(config, seq_len=8, fused=False)
    assert flops.forward_flops(config, seq_len=8, fused=False) == pytest.approx(plain, rel=1e-12)
    assert flops.train_flops(config, seq_len=8, passes=1) == pytest.approx(3 * plain, rel=1e-12)


def test_the_1b_model() -> None:
    """Sizes of method.md section 6: 1.06B parameters, feedback under 1 % of the forward pass, 2 N and attention."""
    plain, fused = (flops.forward_flops(PAPER_1B, seq_len=8192, fused=fused) for fused in (False, True))
    assert plain == pytest.approx(brute_forward(PAPER_1B, seq_len=8192, fused=False), rel=1e-12)
    assert fused - plain == 2 * 2 * 1536**2
    assert (fused - plain) / plain < 0.01
    weights = sum(size for name, size in kernel_sizes(PAPER_1B).items() if not name.startswith('fusion'))
    assert weights == pytest.approx(1.06e9, rel=0.01)
    # 4 of the 24 layers see (T + 1) / 2 keys in the mean, 20 see a little less than 2048.
    windowed = (2048 * 2049 / 2 + (8192 - 2048) * 2048) / 8192
    attention = 4 * 1536 * (4 * 8193 / 2 + 20 * windowed)
    assert plain == pytest.approx(2 * weights + attention, rel=1e-12)


@pytest.mark.parametrize('passes', [1, 2, 3, 5])
def test_training_is_three_forward_passes_each(passes: int) -> None:
    plain, fused = (brute_forward(SMALL, seq_len=16, fused=fused) for fused in (False, True))
    expected = 3 * plain + 3 * fused * (passes - 1)
    assert flops.train_flops(SMALL, seq_len=16, passes=passes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ('seq_len', 'window', 'mean'),
    [
        (8, 0, 4.5),  # the causal half, (T + 1) / 2, not the square's T
        (8, 8, 4.5),
        (8, 100, 4.5),  # a window longer than the row is no window
        (8, 1, 1.0),  # itself only
        (8, 2, (1 + 7 * 2) / 8),
        (8, 7, (1 + 2 + 3 + 4 + 5 + 6 + 7 + 7) / 8),
        (1, 0, 1.0),
        (1, 3, 1.0),
    ],
)
def test_attention_counts_the_keys_left_by_mask_and_window(seq_len: int, window: int, mean: float) -> None:
    """The difference between two numbers of heads' worth of attention isolates it: projections don't depend on T."""
    config = ModelConfig(
        vocab_size=40,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_width=48,
        window=window,
        full_attention_every=2,
    )
    kernels = 2 * sum(size for name, size in kernel_sizes(config).items() if not name.startswith('fusion'))
    attention = flops.forward_flops(config, seq_len=seq_len, fused=False) - kernels
    full = (seq_len + 1) / 2  # the second layer
    assert attention == pytest.approx(4 * 32 * (mean + full), rel=1e-9)


def test_peak_counts_all_devices_and_is_none_where_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind = 'NVIDIA H200'

    monkeypatch.setattr(jax, 'devices', lambda: [Device()] * 8)
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    assert flops.peak_flops() == pytest.approx(8 * 989e12)
    Device.device_kind = 'abacus'
    assert flops.peak_flops() is None
