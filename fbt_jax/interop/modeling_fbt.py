"""The Full-bandwidth Transformer in PyTorch, for `transformers` (trust_remote_code); needs nothing but those two.

    u_t = e_t                                             a plain position
    u_t = (W_U h_{t-1}) * sigmoid(W_G n(e_t))             a fused one: the state of the position before, gated
    x = n(u);  per layer:  x += L^-1/2 n_post(attn(n_pre(x)));  x += L^-1/2 n_post'(mlp(n_pre'(x)));  h = n_final(x)

The config may leave parts of it out, as models that were imported do.

`generate(..., mode=)`: 'standard' reads the prompt in one plain pass and goes on plainly; 'soft' feeds each position
that it generates with the state of the one before; 'fused' first reads the prompt in 1 + fused_passes passes, and the
last of them fills the cache from position 0. `forward(..., num_passes=K, labels=)` gives the loss NLL_1 + mean of
NLL_2..NLL_K.
Rows are one document each, padded on the left or on the right as `attention_mask` says.
Shapes: B rows, T positions, S keys, D width, N query heads, M key/value heads, H head width, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

MODES = ('standard', 'soft', 'fused')
FUSIONS = ('gated', 'add', 'concat', 'none')
# What `transformers` calls the key/value cache: `cache` in its newer versions.
_CACHE = 'cache' if 'cache' in CausalLMOutputWithPast.__dataclass_fields__ else 'past_key_values'

_GROWING = "this model needs a cache that grows, which is the default ('dynamic')"


class FbtConfig(PreTrainedConfig):
    """`trained_feedback`: whether the fusion has been trained; without it only `mode='standard'` means anything."""

    model_type = 'fbt'
    keys_to_ignore_at_inference = ['cache', 'past_key_values', 'last_hidden_state', 'fed_hidden_states', 'plain_mask']  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 258,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        max_position_embeddings: int = 128,
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,
        rope_theta: float = 10_000.0,
        rms_norm_eps: float = 1e-6,
        rope_factors: list[float] | None = None,
        head_dim: int | None = None,
        head_gate: bool = True,
        qk_norm: bool = True,
        post_norms: bool = True,
        depth_scaling: bool = True,
        biases: list[str] | None = None,
        input_norm: str = 'all',
        fusion: str = 'gated',
        trained_feedback: bool = False,
        feedback_loss_weight: float = 1.0,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        if fusion not in FUSIONS:
            raise ValueError(f'fusion = {fusion!r}: must be one of {", ".join(FUSIONS)}')
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.sliding_window = sliding_window  # how many keys a position sees, itself included
        self.layer_types = layer_types or ['full_attention'] * num_hidden_layers
        self.rope_theta = rope_theta
        self.rope_factors = rope_factors or []  # (factor,) or Llama 3.1's (factor, low, high, length)
        self.rms_norm_eps = rms_norm_eps
        self.head_gate = head_gate
        self.qk_norm = qk_norm
        self.post_norms = post_norms
        self.depth_scaling = depth_scaling
        self.biases = biases or []  # names of the products that add one
        self.input_norm = input_norm  # 'all': of whatever enters the stack, 'fused': of fused inputs alone
        self.fusion = fusion
        self.trained_feedback = trained_feedback
        self.feedback_loss_weight = feedback_loss_weight
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


@dataclass
class FbtOutput(CausalLMOutputWithPast):
    """With the states after the final norm, (B, T, D), and what the last pass was fed with where it was fed."""

    last_hidden_state: torch.Tensor | None = None
    fed_hidden_states: torch.Tensor | None = None  # already shifted: of position t - 1 at t
    plain_mask: torch.Tensor | None = None  # (B, T), True where the last pass took the embedding alone


class FbtRMSNorm(nn.Module):
    """g x / sqrt(mean(x^2) + eps), in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * (torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(wide.dtype))
        return wide.to(x.dtype)


def rotate(x_BNTH: torch.Tensor, cos_B1Th: torch.Tensor, sin_B1Th: torch.Tensor) -> torch.Tensor:
    """RoPE: turns each pair (i, i + H/2)."""
    first, second = x_BNTH.to(cos_B1Th.dtype).chunk(2, dim=-1)
    turned = [first * cos_B1Th - second * sin_B1Th, second * cos_B1Th + first * sin_B1Th]
    return torch.cat(turned, dim=-1).to(x_BNTH.dtype)


def rope_frequencies(config: FbtConfig, half: int) -> torch.Tensor:
    """Radians a position, (H/2,) float64, slow ones divided by a factor where the config says so."""
    frequency_h = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if not config.rope_factors:
        return frequency_h
    factor, *band = config.rope_factors
    kept_h = torch.zeros_like(frequency_h)
    if band:
        low, high, length = band
        kept_h = ((length * frequency_h / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
    return frequency_h * (kept_h + (1 - kept_h) / factor)


class _Rows:
    """What all layers of one pass need to know of its rows: rotations, and which keys each position sees."""

    def __init__(
        self,
        config: FbtConfig,
        positions_BT: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past: int,
        dtype: torch.dtype,
    ) -> None:
        half = config.head_dim // 2
        dtype = torch.promote_types(dtype, torch.float32)
        frequency_h = rope_frequencies(config, half).to(positions_BT.device, dtype)
        angle_B1Th = positions_BT[:, None, :, None].to(dtype) * frequency_h
        self.cos, self.sin = angle_B1Th.cos(), angle_B1Th.sin()
        self.length, self.past = positions_BT.shape[1], past
        self._attention_mask = attention_mask
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}
        self._elsewhere: dict[torch.device, _Rows] = {}

    def on(self, device: torch.device) -> '_Rows':
        """The same for the layers that lie there: a device map splits them, and its hooks move tensors alone."""
        if device == self.cos.device:
            return self
        if device not in self._elsewhere:
            rows = self._elsewhere[device] = copy.copy(self)
            rows.cos, rows.sin = self.cos.to(device), self.sin.to(device)
            rows._masks, rows._elsewhere = {}, {}
            if self._attention_mask is not None:
                rows._attention_mask = self._attention_mask.to(device)
        return self._elsewhere[device]

    def attend(self, q_BNTH: torch.Tensor, k_BMSH: torch.Tensor, v_BMSH: torch.Tensor, window: int) -> torch.Tensor:
        """softmax(q k / sqrt(H)) v, (B, N, T, H). Query head n reads key head n // (N/M). `window` 0: all keys."""
        keys = k_BMSH.shape[2]
        if (keys, window) not in self._masks:
            self._masks[keys, window] = self._mask(keys, window)
        mask = self._masks[keys, window]
        causal = mask is None and self.length > 1
        return F.scaled_dot_product_attention(
            q_BNTH, k_BMSH, v_BMSH, attn_mask=mask, is_causal=causal, enable_gqa=q_BNTH.shape[1] != k_BMSH.shape[1]
        )

    def _mask(self, keys: int, window: int) -> torch.Tensor | None:
        """(B or 1, 1, T, S) bool, None where plain causality says it all. The keys are the last that there are."""
        alone = self.length == 1 or self.length == keys
        if self._attention_mask is None and alone and (not window or keys <= window):
            return None
        end = self.past + self.length
        key_S = torch.arange(end - keys, end, device=self.cos.device)
        behind_TS = torch.arange(self.past, end, device=self.cos.device)[:, None] - key_S
        seen_BTS = (behind_TS >= 0)[None]
        if window:
            seen_BTS = seen_BTS & (behind_TS < window)
        if self._attention_mask is not None:
            # Padding sees itself, so that it has a softmax; nobody else sees it.
            seen_BTS = seen_BTS & self._attention_mask[:, None, key_S].bool() | (behind_TS == 0)
        return seen_BTS[:, None]


class FbtBlock(GradientCheckpointingLayer):
    """One layer: attention and SwiGLU branches, each normed before and after and scaled by L^-1/2."""

    def __init__(self, config: FbtConfig, index: int) -> None:
        super().__init__()
        width, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.index, self.head_dim = index, head_dim
        self.scale = config.num_hidden_layers**-0.5 if config.depth_scaling else 1.0
        windowed = config.layer_types[index] == 'sliding_attention'
        self.window = (config.sliding_window or 0) if windowed else 0

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in config.biases)

        def norm(of: int, present: bool = True) -> nn.Module:
            return FbtRMSNorm(of, eps) if present else nn.Identity()

        self.attention_norm, self.attention_post_norm = norm(width), norm(width, config.post_norms)
        self.mlp_norm, self.mlp_post_norm = norm(width), norm(width, config.post_norms)
        self.query_norm, self.key_norm = norm(head_dim, config.qk_norm), norm(head_dim, config.qk_norm)
        self.query = linear('query', width, heads_width)
        self.key = linear('key', width, kv_width)
        self.value = linear('value', width, kv_width)
        if config.head_gate:
            self.head_gate = nn.Linear(width, config.num_attention_heads, bias=False)
        self.output = linear('output', heads_width, width)
        self.mlp_gate = linear('mlp_gate', width, config.intermediate_size)
        self.mlp_up = linear('mlp_up', width, config.intermediate_size)
        self.mlp_down = linear('mlp_down', config.intermediate_size, width)

    def forward(self, x_BTD: torch.Tensor, rows: _Rows, cache: Any = None) -> torch.Tensor:
        branch_BTD = self._attention(self.attention_norm(x_BTD), rows.on(x_BTD.device), cache)
        x_BTD = x_BTD + self.scale * self.attention_post_norm(branch_BTD)
        y_BTD = self.mlp_norm(x_BTD)
        branch_BTD = self.mlp_down(F.silu(self.mlp_gate(y_BTD)) * self.mlp_up(y_BTD))
        return x_BTD + self.scale * self.mlp_post_norm(branch_BTD)

    def _attention(self, y_BTD: torch.Tensor, rows: _Rows, cache: Any) -> torch.Tensor:
        heads = (*y_BTD.shape[:2], -1, self.head_dim)
        q_BNTH = rotate(self.query_norm(self.query(y_BTD).view(heads)).transpose(1, 2), rows.cos, rows.sin)
        k_BMSH = rotate(self.key_norm(self.key(y_BTD).view(heads)).transpose(1, 2), rows.cos, rows.sin)
        v_BMSH = self.value(y_BTD).view(heads).transpose(1, 2)
        if cache is not None:
            k_BMSH, v_BMSH = cache.update(k_BMSH, v_BMSH, self.index)
        out_BTNH = rows.attend(q_BNTH, k_BMSH, v_BMSH, self.window).transpose(1, 2)
        if hasattr(self, 'head_gate'):
            out_BTNH = out_BTNH * torch.sigmoid(self.head_gate(y_BTD))[..., None]
        return self.output(out_BTNH.flatten(2))


class FbtFusion(nn.Module):
    """What makes a position's input of its normed embedding and the state of the position before."""

    def __init__(self, config: FbtConfig) -> None:
        super().__init__()
        self.kind, width = config.fusion, config.hidden_size
        if self.kind == 'concat':
            self.joint = nn.Linear(2 * width, width, bias=False)
        else:
            self.state = nn.Linear(width, width, bias=False)
        if self.kind == 'gated':
            self.gate = nn.Linear(width, width, bias=False)

    def forward(self, gate_input_BTD: torch.Tensor, prev_BTD: torch.Tensor) -> torch.Tensor:
        if self.kind == 'concat':
            return self.joint(torch.cat([gate_input_BTD, prev_BTD], dim=-1))
        if self.kind == 'add':
            return gate_input_BTD + self.state(prev_BTD)
        return self.state(prev_BTD) * torch.sigmoid(self.gate(gate_input_BTD))


class FbtForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FbtConfig
    base_model_prefix = ''
    _no_split_modules = ['FbtBlock', 'FbtFusion']  # noqa: RUF012
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = False

    def __init__(self, config: FbtConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.input_norm == 'all' or config.fusion != 'none':
            self.input_norm = FbtRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.fusion != 'none':
            self.fusion = FbtFusion(config)
        self.layers = nn.ModuleList(FbtBlock(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = FbtRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        elif isinstance(module, FbtRMSNorm):
            nn.init.ones_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """None where the head is the input embedding itself."""
        return getattr(self, 'head', None)

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head = value

    def _logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        if hasattr(self, 'head'):
            return self.head(hidden_BTD)
        return F.linear(hidden_BTD.to(self.embedding.weight.device), self.embedding.weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_passes: int = 1,
        prev_hidden_states: torch.Tensor | None = None,
        plain_mask: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> FbtOutput | tuple:
        """`num_passes` passes over the rows; logits, states and the cache are those of the last.

        Args:
          attention_mask: (B, past + T), 0 where there is padding. position_ids: default: counted by the mask from 0.
          labels: as `input_ids`, -100 where a token doesn't count; shifted here. What padding predicts never counts.
          num_passes: K >= 1. Passes from the second on are fed with the states of the pass before.
          prev_hidden_states: (B, T, D), already shifted by one, for the only pass: None is a plain one.
          plain_mask: (B, T) bool: where a fed pass takes the embedding alone. First positions are plain in any case.
          num_items_in_batch: what the sum of the labels' losses is divided by; default: their number.
        """
        cache = past_key_values if cache is None else cache
        if self.training and torch.is_grad_enabled() and any(block.gradient_checkpointing for block in self.layers):
            if cache is not None:  # the backward pass reads a layer once more, and would fill it twice
                raise ValueError(f'cache = {type(cache).__name__}: gradient checkpointing trains without a cache')
            use_cache = False
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if getattr(cache, 'is_compileable', False):
            raise ValueError(f'cache = {type(cache).__name__}: {_GROWING}')
        past = 0 if cache is None else int(cache.get_seq_length())
        positions_BT = self._positions(input_ids, attention_mask, position_ids, past)
        plain_BT = positions_BT == 0 if plain_mask is None else plain_mask.bool() | (positions_BT == 0)
        self._require_passes(num_passes, prev_hidden_states, past)
        if labels is not None and attention_mask is not None:
            # Else padding on the left would predict its row's first token.
            labels = labels.masked_fill(F.pad(attention_mask[:, past:-1], (1, 0), value=1) == 0, -100)

        fed_BTD, nlls, hidden_BTD = prev_hidden_states, [], torch.empty(0)
        every: list[torch.Tensor] | None = None
        rows = _Rows(self.config, positions_BT, attention_mask, past, self.dtype)
        for k in range(1, num_passes + 1):
            last = k == num_passes
            if k > 1:
                fed_BTD = F.pad(hidden_BTD[:, :-1], (0, 0, 1, 0))
            every = [] if last and output_hidden_states else None
            hidden_BTD = self._one_pass(input_ids, fed_BTD, plain_BT, rows, cache if last else None, every)
            if labels is not None:
                nlls.append(self._nll(hidden_BTD, labels, num_items_in_batch))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = FbtOutput(
            loss=self._loss(nlls) if nlls else None,
            logits=self._logits(hidden_BTD[:, kept]),
            hidden_states=None if every is None else (*every[:-1], hidden_BTD),
            last_hidden_state=hidden_BTD,
            fed_hidden_states=fed_BTD,
            plain_mask=None if fed_BTD is None else plain_BT,
            **{_CACHE: cache},
        )
        return output if return_dict is not False else output.to_tuple()

    def _positions(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, past: int
    ) -> torch.Tensor:
        batch, length = input_ids.shape
        if attention_mask is not None and attention_mask.shape != (batch, past + length):
            told = f'{batch} rows of {past + length} positions, those in the cache too'
            raise ValueError(f'attention_mask has the shape {tuple(attention_mask.shape)}: must be {told}')
        if position_ids is not None:
            return position_ids.expand(batch, length)
        if attention_mask is not None:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        return torch.arange(past, past + length, device=input_ids.device).expand(batch, length)

    def _require_passes(self, num_passes: int, prev_hidden_states: torch.Tensor | None, past: int) -> None:
        if num_passes < 1:
            raise ValueError(f'num_passes = {num_passes}: must be at least 1')
        if num_passes == 1 and prev_hidden_states is None:
            return
        if self.config.fusion == 'none':
            raise ValueError(f'num_passes = {num_passes}: this model has no feedback, so it makes one plain pass')
        if num_passes > 1 and prev_hidden_states is not None:
            raise ValueError(f'num_passes = {num_passes}: prev_hidden_states feed a single pass')
        if num_passes > 1 and past:
            told = f'the cache holds {past} positions, but several passes read their text from its start'
            raise ValueError(f'num_passes = {num_passes}: {told}')

    def _one_pass(
        self,
        input_ids: torch.Tensor,
        prev_BTD: torch.Tensor | None,
        plain_BT: torch.Tensor,
        rows: _Rows,
        cache: Any,
        every: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        x_BTD = self.embedding(input_ids)
        if self.config.input_norm == 'all':
            x_BTD = self.input_norm(x_BTD)
        if prev_BTD is not None:
            gate_input_BTD = x_BTD if self.config.input_norm == 'all' else self.input_norm(x_BTD)
            fused_BTD = self.input_norm(self.fusion(gate_input_BTD, prev_BTD.to(x_BTD.dtype)))
            device = fused_BTD.device
            x_BTD = torch.where(plain_BT[..., None].to(device), x_BTD.to(device), fused_BTD)
        for block in self.layers:
            if every is not None:
                every.append(x_BTD)
            x_BTD = block(x_BTD, rows, cache=cache)
        if every is not None:
            every.append(x_BTD)
        return self.final_norm(x_BTD)

    def _nll(self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor, count: Any) -> torch.Tensor:
        """Of a pass, in nats per token."""
        logits_NV = self._logits(hidden_BTD[:, :-1]).flatten(0, 1).float()
        targets_N = labels_BT[:, 1:].flatten().to(logits_NV.device)
        total = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction='sum')
        count = (targets_N != -100).sum() if count is None else torch.as_tensor(count, device=total.device)
        return total / count

    def _loss(self, nlls: list[torch.Tensor]) -> torch.Tensor:
        first, *later = nlls
        return first + self.config.feedback_loss_weight * torch.stack(later).mean() if later else first

    # Decoding

    @torch.no_grad()
    def generate(self, *args: Any, mode: str = 'standard', fused_passes: int | None = None, **kwargs: Any) -> Any:
        """As of `transformers`, in one of three modes. fused_passes: after the plain one, for mode 'fused' (1).

        Raises:
          ValueError: the model was not trained with feedback and the mode needs it, or searches with several beams or
            an assistant in a mode whose steps are fed.
        """
        if mode not in MODES:
            raise ValueError(f'mode = {mode!r}: must be one of {", ".join(MODES)}')
        if mode != 'standard' and not self.config.trained_feedback:
            raise ValueError(f'mode = {mode!r}: this model was not trained with feedback; only standard is possible')
        if fused_passes is not None and (mode != 'fused' or fused_passes < 1):
            told = 'must be at least 1' if mode == 'fused' else f'has no effect with mode = {mode!r}'
            raise ValueError(f'fused_passes = {fused_passes}: {told}')
        if kwargs.get('cache_implementation') in ('static', 'paged'):
            raise ValueError(f'cache_implementation = {kwargs["cache_implementation"]!r}: {_GROWING}')
        given = next((kwargs[k] for k in ('cache', 'past_key_values') if kwargs.get(k) is not None), None)
        if mode == 'soft' and given is not None and given.get_seq_length() > 0:  # fused: `_require_passes`
            told = 'the state of its last position, which the next is fed with, is not in it'
            raise ValueError(f'mode = {mode!r}: goes on from no cache that was filled before; {told}')
        if mode != 'standard':
            kwargs['feedback'] = True
        if mode == 'fused':
            kwargs['num_passes'] = 1 + (fused_passes or 1)
        return super().generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """What `generate_batch` starts with."""
        raise ValueError(f'continuous batching pages its cache: {_GROWING}')

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache_position: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        feedback: bool = False,
        num_passes: int = 1,
        prev_hidden_states: torch.Tensor | None = None,
        plain_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Of one step: the prompt first, with the cache then the newest token alone."""
        cache = past_key_values if cache is None else cache
        if next_sequence_length is None and cache_position is not None and cache is not None:
            next_sequence_length = len(cache_position)
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        if position_ids is not None:
            position_ids = position_ids[:, -input_ids.shape[1] :]
        return {
            'input_ids': input_ids.contiguous(),
            'cache': cache,
            'attention_mask': attention_mask,
            'position_ids': position_ids,
            'use_cache': use_cache,
            'logits_to_keep': logits_to_keep,
            'num_passes': num_passes if prev_hidden_states is None else 1,
            'prev_hidden_states': prev_hidden_states,
            'plain_mask': plain_mask,
            'output_hidden_states': kwargs.get('output_hidden_states'),
        }

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Carries the newest state to the step that it feeds; without a cache also what fed the positions before."""
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if not model_kwargs.get('feedback'):
            return model_kwargs
        hidden_BTD = outputs.last_hidden_state
        fed_BTD, plain_BT = hidden_BTD[:, -1:], torch.zeros_like(hidden_BTD[:, -1:, 0], dtype=torch.bool)
        if outputs.get(_CACHE) is None:
            before = outputs.fed_hidden_states, outputs.plain_mask
            if before[0] is None:
                before = torch.zeros_like(hidden_BTD), torch.ones_like(hidden_BTD[..., 0], dtype=torch.bool)
            fed_BTD, plain_BT = torch.cat([before[0], fed_BTD], dim=1), torch.cat([before[1], plain_BT], dim=1)
        return model_kwargs | {'prev_hidden_states': fed_BTD, 'plain_mask': plain_BT}

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        self._require_unfed('num_beams > 1', kwargs)
        return super()._beam_search(*args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        self._require_unfed('assisted decoding', kwargs)
        return super()._assisted_decoding(*args, **kwargs)

    def _require_unfed(self, what: str, model_kwargs: dict[str, Any]) -> None:
        if model_kwargs.get('feedback'):
            raise ValueError(f"{what}: is possible with mode = 'standard' only; the fed-back state follows one row")
