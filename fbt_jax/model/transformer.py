"""The Full-bandwidth Transformer's stack as one pure function of (params, tokens, previous pass's shifted states).

    x = n(u);  per layer:  x += L^-1/2 n_post(attn(n_pre(x)));  x += L^-1/2 n_post'(mlp(n_pre'(x)));  h = n_final(x)

(method.md section 6; the config may leave parts out, see config_model.py). Shapes: B rows, T positions, D width, N
query heads, M key/value heads, H head width, F MLP width, V padded vocabulary, L layers. Parameters are float32
(float64 if asked); norms, softmax and RoPE run in promote_types(dtype, float32). Given a cache (kv_cache.py) the same
function reads prompts and decodes. How many passes there are and which positions are plain is decided outside, in
`passes.py`.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbt_jax.config_model import ModelConfig
from fbt_jax.errors import UserError
from fbt_jax.model import kv_cache
from fbt_jax.model.attention import attention, resolve_implementation, rope
from fbt_jax.model.dense import Axes, Kernel, products
from fbt_jax.model.embedding import look_up
from fbt_jax.model.feedback import Fusion
from fbt_jax.model.kv_cache import Cache, Part
from fbt_jax.sharding import constrain, parameter_specs

MASKED_LOGIT = -1e30  # of the rows that only pad the vocabulary: exp(MASKED_LOGIT - max) is exactly 0
# The name that policies know products by. Not jax's policies for dots: they don't look into `shard_map`.
PRODUCT = 'product'
# `model.remat`: what the backward pass of the layer scan recomputes. None: nothing is recomputed. `per_pass` recomputes
# each whole pass (in passes.py) and within it each layer; `offload` keeps products in the host's memory.
REMAT_POLICIES = {
    'nothing': None,
    'dots': jax.checkpoint_policies.save_only_these_names(PRODUCT),
    'per_layer': jax.checkpoint_policies.nothing_saveable,
    'per_pass': jax.checkpoint_policies.nothing_saveable,
    'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[PRODUCT],
        offload_src='device',
        offload_dst='pinned_host',
    ),
}


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """`model.dtype`; 'auto' is float32 on CPU, which has no fast bfloat16, and bfloat16 elsewhere."""
    if config.dtype == 'auto':
        return jnp.dtype('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
    if config.dtype == 'float64' and not jax.config.read('jax_enable_x64'):
        raise UserError("model.dtype = 'float64': needs jax_enable_x64, or JAX would compute in float32")
    return jnp.dtype(config.dtype)


def for_platform(config: ModelConfig, platform: str) -> ModelConfig:
    """`config` with every 'auto' settled for a platform ('cpu', 'gpu' or 'tpu') other than, perhaps, this process's."""
    dtype = ('float32' if platform == 'cpu' else 'bfloat16') if config.dtype == 'auto' else config.dtype
    return dataclasses.replace(config, dtype=dtype, attention=resolve_implementation(config.attention, platform))


def param_dtype(config: ModelConfig) -> jnp.dtype:
    return jnp.promote_types(compute_dtype(config), jnp.float32)


def _norm(config: ModelConfig, name: str, gain: float = 1.0) -> nn.RMSNorm:
    return nn.RMSNorm(
        epsilon=config.norm_epsilon,
        dtype=compute_dtype(config),
        param_dtype=param_dtype(config),
        scale_init=nn.with_logical_partitioning(nn.initializers.constant(gain), ('norm',)),
        name=name,
    )


def dense(config: ModelConfig, x_BTi: jax.Array, **outputs: tuple[int, Axes]) -> list[jax.Array]:
    """x W (+ b) for several W, given by name as (outputs, logical axes); parameters `name/kernel` and `name/bias`."""
    kernels, biases = zip(
        *(
            Kernel((x_BTi.shape[-1], features), axes, param_dtype(config), name in config.biases, name=name)()
            for name, (features, axes) in outputs.items()
        ),
        strict=True,
    )
    axes = tuple(axes for _, axes in outputs.values())
    x_BTi = x_BTi.astype(compute_dtype(config))
    ys = products(x_BTi, kernels, axes, fp32_gradient_reduction=config.fp32_gradient_reduction)
    ys = tuple(y if b is None else y + b.astype(y.dtype) for y, b in zip(ys, biases, strict=True))
    return [checkpoint_name(y, PRODUCT) for y in ys]


class Block(nn.Module):
    """One layer: attention and SwiGLU branches, each normed before and after and scaled by L^-1/2."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        windowed: jax.Array | bool,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        cache: Part | None = None,
    ) -> tuple[jax.Array, Part | None]:
        """The states after the layer, and its cache with these positions. Given one, `windowed` must be static."""
        branch_BTD, cache = self._attention(
            _norm(self.config, 'attention_norm')(x_BTD),
            windowed=windowed,
            positions_BT=positions_BT,
            segment_ids_BT=segment_ids_BT,
            cache=cache,
        )
        x_BTD = self._add(x_BTD, branch_BTD, 'attention_post_norm')
        branch_BTD = self._mlp(_norm(self.config, 'mlp_norm')(x_BTD))
        return self._add(x_BTD, branch_BTD, 'mlp_post_norm'), cache

    def _add(self, x_BTD: jax.Array, branch_BTD: jax.Array, norm: str) -> jax.Array:
        c = self.config
        if c.post_norms:
            branch_BTD = _norm(c, norm)(branch_BTD)
        return _state(x_BTD + (c.num_layers**-0.5 * branch_BTD if c.depth_scaling else branch_BTD))

    def _attention(
        self,
        y_BTD: jax.Array,
        *,
        windowed: jax.Array | bool,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        cache: Part | None,
    ) -> tuple[jax.Array, Part | None]:
        c = self.config
        heads, kv_heads = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        lead = y_BTD.shape[:2]
        kv = (c.num_kv_heads * c.head_dim, ('embed', 'kv_heads'))
        outputs = {'query': (c.attention_width, ('embed', 'heads')), 'key': kv, 'value': kv}
        if c.head_gate:
            outputs['head_gate'] = (c.num_heads, ('embed', 'heads'))
        q_BTn, k_BTm, v_BTm, *gates_BTN = dense(c, y_BTD, **outputs)
        if cache is not None:
            # A TPU's compiler lays matrices out as heads like their outputs, and a decode loop would keep such copies.
            q_BTn, k_BTm, v_BTm = jax.lax.optimization_barrier((q_BTn, k_BTm, v_BTm))
        q_BTNH = q_BTn.reshape(*lead, *heads)
        k_BTMH, v_BTMH = (x_BTm.reshape(*lead, *kv_heads) for x_BTm in (k_BTm, v_BTm))
        if c.qk_norm:
            q_BTNH, k_BTMH = _norm(c, 'query_norm')(q_BTNH), _norm(c, 'key_norm')(k_BTMH)
        rotate = partial(rope, positions_BT=positions_BT, theta=c.rope_theta, scaling=c.rope_scaling)
        attend = partial(attention, segment_ids_BT=segment_ids_BT, implementation=c.attention)
        qkv = rotate(q_BTNH), rotate(k_BTMH), v_BTMH
        if cache is not None:
            window = c.window if windowed else 0
            out_BTNH, cache = self._cached_attention(*qkv, positions_BT, segment_ids_BT, cache, window)
        elif len(set(c.layer_windows)) == 1:
            out_BTNH = attend(*qkv, window=c.layer_windows[0])
        else:
            # A conditional, because the kernels take no traced window.
            out_BTNH = jax.lax.cond(windowed, partial(attend, window=c.window), partial(attend, window=0), *qkv)
        if c.head_gate:
            out_BTNH = out_BTNH * nn.sigmoid(gates_BTN[0])[..., None]
        out_BTn = constrain(out_BTNH.reshape(*lead, c.attention_width), 'batch', 'length', 'heads')
        return dense(c, out_BTn, output=(c.width, ('heads', 'embed')))[0], cache

    def _cached_attention(
        self,
        q_BTNH: jax.Array,
        k_BTMH: jax.Array,
        v_BTMH: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        cache: Part,
        window: int,
    ) -> tuple[jax.Array, Part]:
        if q_BTNH.shape[1] == 1:
            positions_B = positions_BT[:, 0]
            cache = kv_cache.store_one(cache, k_BTMH, v_BTMH, positions_B)
            return kv_cache.attend_one(q_BTNH, cache, positions_B), cache
        kernel = self.config.attention
        out_BTNH = attention(
            q_BTNH, k_BTMH, v_BTMH, segment_ids_BT=segment_ids_BT, window=window, implementation=kernel
        )
        lengths_B = jnp.sum(segment_ids_BT > 0, axis=1)
        return out_BTNH, kv_cache.store_prompt(cache, k_BTMH, v_BTMH, lengths_B)

    def _mlp(self, y_BTD: jax.Array) -> jax.Array:
        c = self.config
        up = (c.mlp_width, ('embed', 'mlp'))
        gate_BTF, up_BTF = dense(c, y_BTD, mlp_gate=up, mlp_up=up)
        inner_BTF = constrain(nn.silu(gate_BTF) * up_BTF, 'batch', 'length', 'mlp')
        return dense(c, inner_BTF, mlp_down=(c.width, ('mlp', 'embed')))[0]


class Transformer(nn.Module):
    """`model.apply({'params': params}, tokens, prev, ...)` -> states; see `__call__`."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        prev_BTD: jax.Array | None = None,
        *,
        plain_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """One pass over the rows: the states h after the final norm, which the LM head reads.

        Args:
          tokens_BT: int, the inputs.
          prev_BTD: the previous pass's states, already shifted: prev[:, t] = h^{k-1}[:, t-1]. None: an ordinary forward
            pass, in which every position is plain and the fusion is not computed.
          plain_BT: bool, True where the input is the plain embedding although `prev_BTD` is given. Default: document
          starts. positions_BT: int, from 0 within each document's piece. Default: the index in the row.
          segment_ids_BT: int, which document each position belongs to; no position sees another segment. Default:
          one.
          cache: of kv_cache.py. With T = 1 it holds the positions before this one in each row, and takes this one up;
          with T > 1 the rows are prompts from position 0 on, and it is filled anew with the positions that belong to
          a document (segment ids above 0).

        Returns:
          (B, T, D) in the compute dtype; with a cache (states, cache). With one and `mutable='intermediates'` it keeps
          `depths`, (L + 1, B, T, D): the stack's input and the residual stream after each layer.

        Raises:
          ValueError: previous states are given to a model whose fusion is 'none'.
        """
        c = self.config
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)

        initializer = nn.with_logical_partitioning(nn.initializers.normal(c.width**-0.5), ('vocab', 'embed'))
        table = (c.padded_vocab_size, c.width), param_dtype(c)
        embedding_VD: Any = self.param('embedding', initializer, *table)
        if not c.tied_embedding:
            self.param('head', initializer, *table)  # see `head_table`
        # The gain at which a fused input is as large as those that no norm scales: the RMS of the embeddings.
        input_norm = _norm(c, 'input_norm', gain=1.0 if c.input_norm == 'all' else c.width**-0.5)
        x_BTD = _state(look_up(embedding_VD, tokens_BT, dtype=compute_dtype(c)))
        if c.input_norm == 'all':
            x_BTD = input_norm(x_BTD)
        if prev_BTD is not None:
            if plain_BT is None:
                plain_BT = positions_BT == 0
            gate_input_BTD = x_BTD if c.input_norm == 'all' else input_norm(x_BTD)
            fused_BTD = Fusion(c.fusion, partial(dense, c), name='fusion')(gate_input_BTD, prev_BTD.astype(x_BTD.dtype))
            x_BTD = _state(jnp.where(plain_BT[..., None], x_BTD, input_norm(_state(fused_BTD))))

        if cache is not None:
            x_BTD, cache = self._cached_layers(x_BTD, cache, positions_BT, segment_ids_BT)
            return _state(_norm(c, 'final_norm')(x_BTD)), cache

        block = Block
        if REMAT_POLICIES[c.remat] is not None:
            # Inside the scan over layers, which already keeps XLA from undoing the rematerialisation.
            block = nn.remat(Block, policy=REMAT_POLICIES[c.remat], prevent_cse=False)
        layers = nn.scan(
            block,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )(c, name='layers')
        x_BTD, _ = layers(x_BTD, jnp.array(c.layer_windows) > 0, positions_BT, segment_ids_BT)
        return _state(_norm(c, 'final_norm')(x_BTD))

    def _cached_layers(
        self, x_BTD: jax.Array, cache: Cache, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """The scan over layers in turns of one period, within which each layer's cache has a size of its own.

        Each layer takes its weights where they lie. Scanning over them too, a whole turn's at a time, took 1.09 times
        as long; a loop over all layers without a scan 1.2 times, with twice the temporaries (116M parameters, 2 CPU
        cores, 4 rows). The cache goes round as a carry: scanned over, a TPU's compiler needed 7.0 GiB of temporaries
        for the 1B model and 8 rows of 8192, and 2.5 this way.
        """
        c = self.config
        block, period = Block(c, parent=None), kv_cache.period(c)
        kept = self.is_mutable_collection('intermediates')
        layers = self.variables['params']['layers']

        def turn(carry: tuple[jax.Array, Cache], number: jax.Array) -> tuple[tuple[jax.Array, Cache], Any]:
            x_BTD, caches = carry
            out: list[Any] = []
            depths: list[Any] = []
            for i, cache in enumerate(caches):
                # Or a GPU compiler slices the weights of a whole turn at once: 1.11 of weights and cache, and not 1.04
                # (1B, 8 rows of 8192, compiled for an h100). Nothing changes on TPU and CPU.
                x_BTD, number = jax.lax.optimization_barrier((x_BTD, number))
                at = number * period + i
                one = {'params': jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=at, keepdims=False), layers)}
                windowed, part = c.layer_windows[i] > 0, Part(cache, number)
                result: Any = block.apply(one, x_BTD, windowed, positions_BT, segment_ids_BT, part)
                x_BTD, part = result
                out.append(part.cache)
                depths.append(x_BTD)
            return (x_BTD, tuple(out)), jnp.stack(depths) if kept else None

        result, after_RpBTD = jax.lax.scan(turn, (x_BTD, cache), jnp.arange(c.num_layers // period))
        if kept:
            after_LBTD = after_RpBTD.reshape(c.num_layers, *x_BTD.shape)
            self.sow('intermediates', 'depths', jnp.concatenate([x_BTD[None], after_LBTD]))
        return result


def _state(x_BTD: jax.Array) -> jax.Array:
    return constrain(x_BTD, 'batch', 'length', 'state')


def init_params(model: Transformer, key: jax.Array) -> dict:
    """Fresh parameters, fusion matrices included where the model has a fusion. Call it outside `jax.set_mesh`."""
    return nn.unbox(_init_boxed(model, key))


def param_specs(model: Transformer) -> dict:
    """PartitionSpec of every parameter, in the tree of `init_params`."""
    return parameter_specs(jax.eval_shape(lambda: _init_boxed(model, jax.random.key(0))))


def _init_boxed(model: Transformer, key: jax.Array) -> dict:
    tokens_BT = jnp.zeros((1, 2), jnp.int32)
    prev_BTD = None if model.config.fusion == 'none' else jnp.zeros((1, 2, model.config.width))
    return model.init(key, tokens_BT, prev_BTD)['params']


def head_table(params: Any) -> jax.Array:
    """(V, D), the rows that states are compared with: the embedding matrix where the two are tied."""
    return params.get('head', params['embedding'])


def logits(hidden_BTD: jax.Array, head_VD: jax.Array, *, vocab_size: int) -> jax.Array:
    """h E^T, (..., T, V) in promote_types(dtype, float32); entries that only pad the vocabulary are MASKED_LOGIT."""
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    logits_BTV = jnp.einsum('...d,vd->...v', hidden_BTD, head_VD.astype(hidden_BTD.dtype), preferred_element_type=dtype)
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BTV, MASKED_LOGIT)
