"""Configuration of the model: the stack of method.md section 6, and what sets ordinary decoders apart from it.

The defaults are the paper's. The keys from `attention_head_dim` on describe models that were trained elsewhere, which
`fbt import` writes down: each turns off, or adds, one part of a layer, so that one model function computes both.
Imports no jax.
"""

import dataclasses

from fbt_jax.errors import require

FUSIONS = ('gated', 'add', 'concat', 'none')
REMAT = ('nothing', 'dots', 'per_layer', 'per_pass', 'offload')
ATTENTION = ('auto', 'plain', 'blockwise', 'splash')
DTYPES = ('auto', 'bfloat16', 'float32', 'float64')
INPUT_NORMS = ('all', 'fused')
PRODUCTS = ('query', 'key', 'value', 'output', 'mlp_gate', 'mlp_up', 'mlp_down')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """`vocab_size` None: the tokenizer's; `window` 0: full attention everywhere.

    attention_head_dim: width of a head, None: width / num_heads.
    head_gate, qk_norm, post_norms, depth_scaling: whether each head's output is gated, queries and keys are normed, the
      branches' outputs are normed, and the branches are multiplied by num_layers^-1/2.
    biases: which of PRODUCTS add one. tied_embedding: whether the head is the embedding matrix, or has one of its own.
    input_norm: 'all' norms whatever enters the stack, 'fused' fused inputs alone (method.md section 2).
    rope_scaling: (): none; (factor,): positions are divided by it; (factor, low, high, length): Llama 3.1's, see
      `attention.rope_frequencies`.
    """

    vocab_size: int | None = None
    width: int = 1536
    num_layers: int = 24
    num_heads: int = 16
    num_kv_heads: int = 8
    mlp_width: int = 6656
    window: int = 2048
    full_attention_every: int = 6
    rope_theta: float = 10_000.0
    fusion: str = 'gated'
    dtype: str = 'auto'
    attention: str = 'auto'
    remat: str = 'per_layer'
    fp32_gradient_reduction: bool = False
    attention_head_dim: int | None = None
    head_gate: bool = True
    qk_norm: bool = True
    post_norms: bool = True
    depth_scaling: bool = True
    biases: tuple[str, ...] = ()
    tied_embedding: bool = True
    input_norm: str = 'all'
    norm_epsilon: float = 1e-6
    rope_scaling: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ('width', 'num_layers', 'num_heads', 'num_kv_heads', 'mlp_width'):
            require(getattr(self, name) >= 1, f'model.{name}', getattr(self, name), 'must be at least 1')
        if self.vocab_size is not None:
            require(self.vocab_size >= 2, 'model.vocab_size', self.vocab_size, 'must be at least 2')
        if self.attention_head_dim is None:
            require(
                self.width % self.num_heads == 0,
                'model.width',
                self.width,
                f'must be divisible by model.num_heads = {self.num_heads}; '
                f'the nearest is {max(1, round(self.width / self.num_heads)) * self.num_heads}',
            )
        require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            *(
                ('model.width', self.width)
                if self.attention_head_dim is None
                else ('model.attention_head_dim', self.attention_head_dim)
            ),
            f'gives heads of width {self.head_dim}, but RoPE needs an even one',
        )
        divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
        require(
            self.num_kv_heads in divisors,
            'model.num_kv_heads',
            self.num_kv_heads,
            f'must divide model.num_heads = {self.num_heads}: one of {", ".join(map(str, divisors))}',
        )
        require(self.window >= 0, 'model.window', self.window, 'must be 0 (full attention) or a number of keys')
        every = self.full_attention_every
        require(every >= 0, 'model.full_attention_every', every, 'must not be negative')
        require(every > 0 or self.window > 0, 'model.full_attention_every', every, 'has no effect without model.window')
        require(
            not self.window or every == 0 or self.num_layers % every == 0,
            'model.full_attention_every',
            every,
            f'must divide model.num_layers = {self.num_layers} when model.window is set, '
            'so that the last layer sees the whole context, or be 0: no layer does',
        )
        require(self.rope_theta > 0, 'model.rope_theta', self.rope_theta, 'must be positive')
        require(self.fusion in FUSIONS, 'model.fusion', self.fusion, f'must be one of {", ".join(FUSIONS)}')
        require(self.dtype in DTYPES, 'model.dtype', self.dtype, f'must be one of {", ".join(DTYPES)}')
        require(
            self.attention in ATTENTION, 'model.attention', self.attention, f'must be one of {", ".join(ATTENTION)}'
        )
        require(self.remat in REMAT, 'model.remat', self.remat, f'must be one of {", ".join(REMAT)}')
        require(set(self.biases) <= set(PRODUCTS), 'model.biases', self.biases, f'must be among {", ".join(PRODUCTS)}')
        require(
            self.input_norm in INPUT_NORMS,
            'model.input_norm',
            self.input_norm,
            f'must be one of {", ".join(INPUT_NORMS)}',
        )
        require(self.norm_epsilon > 0, 'model.norm_epsilon', self.norm_epsilon, 'must be positive')
        s = self.rope_scaling
        require(
            len(s) in (0, 1, 4) and all(x > 0 for x in s) and (len(s) < 4 or s[1] < s[2]),
            'model.rope_scaling',
            s,
            'must be (), (factor,) or (factor, low, high, length) with low < high, all positive',
        )

    @property
    def head_dim(self) -> int:
        return self.attention_head_dim or self.width // self.num_heads

    @property
    def attention_width(self) -> int:
        """Of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: the vocabulary, padded to a multiple of 128."""
        assert self.vocab_size is not None, 'vocab_size is filled in by `resolve`'
        return -(-self.vocab_size // 128) * 128

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Keys that each layer sees, itself included; 0 = all. The last of every `full_attention_every` is full."""
        every = self.full_attention_every
        return tuple(0 if every and (i + 1) % every == 0 else self.window for i in range(self.num_layers))
