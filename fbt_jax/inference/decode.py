"""Decoding in the three modes of method.md section 5, as two compiled programs: prefill, and a loop of steps.

    standard   prompt: one plain pass                       then plain embeddings
    soft       prompt: one plain pass                       then u_t = fuse(e_t, h_{t-1}), h_{t-1} the step's before
    fused      prompt: 1 + f passes, cache of the last one  then as soft

A step feeds each row's last token at that row's own position, chooses the next and stores it; rows that have met a stop
token only keep time. Sizes are rounded up to powers of two, so that few programs serve all requests.
Shapes: B rows, P positions of the padded prompts, N generated tokens at most, D width, V padded vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.inference.sampling import Sampling, choose
from fbt_jax.model import kv_cache
from fbt_jax.model.transformer import Transformer, compute_dtype, head_table, logits
from fbt_jax.passes import prefill
from fbt_jax.sharding import constrain, replicated

MODES = ('standard', 'soft', 'fused')
# Or a CPU's compiler copies the weights of all layers of a turn at once, to run what can run in parallel: 1.016 of
# weights and cache instead of 1.35, and 0.64 of the time a step (116M parameters, 4 rows, 2 cores). Others ignore it.
COMPILER_OPTIONS = {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}


@partial(jax.jit, static_argnames='dtype')
def cast(params: Any, *, dtype: jnp.dtype) -> Any:
    """Matrices in the dtype that they are multiplied in anyway, so that each step reads no more bytes than it needs.

    Results stay the same to the bit; norms' scales stay as they are.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key == 'scale' else x.astype(dtype), params)


class Read(NamedTuple):
    """Prompts that have been read."""

    cache: kv_cache.Cache
    hidden_BD: jax.Array  # the state of each prompt's last position
    lengths_B: jax.Array  # int32


class Decoding(NamedTuple):
    """Where the rows of a request have come to."""

    cache: kv_cache.Cache
    hidden_BD: jax.Array  # the state that chose `token_B`
    token_B: jax.Array  # the last token chosen: not fed yet
    position_B: jax.Array  # where it will be
    done_B: jax.Array  # bool: a stop token was chosen, or nothing is asked of the row
    steps: jax.Array  # int32: tokens chosen so far
    tokens_BN: jax.Array
    log_probs_BN: jax.Array  # float32


@partial(jax.jit, static_argnames=('model', 'num_passes', 'capacity'))
def read_prompts(
    model: Transformer, params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, *, num_passes: int, capacity: int
) -> Read:
    """Reads prompts, padded at their ends, in `num_passes` passes. capacity: positions that a row may come to."""
    index_P = jnp.arange(tokens_BP.shape[1], dtype=jnp.int32)
    batch = Batch(
        tokens=tokens_BP,
        targets=None,
        weights=None,
        segment_ids=(index_P < lengths_B[:, None]).astype(jnp.int32),
        positions=jnp.broadcast_to(index_P, tokens_BP.shape),
    )
    dtype = compute_dtype(model.config)
    cache = kv_cache.empty(model.config, rows=len(tokens_BP), capacity=capacity, dtype=dtype)
    hidden_BPD, cache = prefill(model, params, batch, num_passes=num_passes, cache=cache)
    last_B11 = (lengths_B - 1)[:, None, None]
    return Read(cache, jnp.take_along_axis(hidden_BPD, last_B11, axis=1)[:, 0], lengths_B)


@jax.jit
def spread(read: Read, prompt_B: jax.Array) -> Read:
    """Rows that each go on from the prompt that `prompt_B` names, several from one perhaps."""
    cache = jax.tree.map(lambda x: x[:, prompt_B], read.cache)
    return Read(cache, constrain(read.hidden_BD[prompt_B], 'batch', None), read.lengths_B[prompt_B])


@partial(jax.jit, static_argnames=('model', 'kind', 'max_tokens'), donate_argnames='read')
def begin(
    model: Transformer,
    params: Any,
    read: Read,
    done_B: jax.Array,
    *,
    stop_ids: jax.Array,
    rows_B: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    kind: str,
    max_tokens: int,
) -> Decoding:
    """Chooses each row's first token. The cache of `read` becomes that of the result: there is only one."""
    shape = (len(done_B), max_tokens)
    blank = Decoding(
        read.cache,
        read.hidden_BD,
        token_B=jnp.zeros(shape[0], jnp.int32),
        position_B=read.lengths_B,
        done_B=done_B,
        steps=jnp.int32(0),
        tokens_BN=jnp.zeros(shape, jnp.int32),
        log_probs_BN=jnp.zeros(shape, jnp.float32),
    )
    return _readable(
        _choose(model, params, blank, stop_ids=stop_ids, rows_B=rows_B, key=key, sampling=sampling, kind=kind)
    )


@partial(
    jax.jit, static_argnames=('model', 'kind', 'feedback'), donate_argnames='state', compiler_options=COMPILER_OPTIONS
)
def advance(
    model: Transformer,
    params: Any,
    state: Decoding,
    *,
    until: jax.Array,
    stop_ids: jax.Array,
    rows_B: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    kind: str,
    feedback: bool,
) -> Decoding:
    """Steps until `until` tokens are chosen or all rows are done. feedback: soft steps, not plain ones."""

    def going(state: Decoding) -> jax.Array:
        return (state.steps < until) & ~jnp.all(state.done_B)

    def step(state: Decoding) -> Decoding:
        result: Any = model.apply(
            {'params': params},
            state.token_B[:, None],
            state.hidden_BD[:, None] if feedback else None,
            plain_BT=jnp.zeros_like(state.token_B[:, None], bool) if feedback else None,
            positions_BT=state.position_B[:, None],
            cache=state.cache,
        )
        hidden_B1D, cache = result
        state = state._replace(cache=cache, hidden_BD=hidden_B1D[:, 0], position_B=state.position_B + 1)
        return _choose(model, params, state, stop_ids=stop_ids, rows_B=rows_B, key=key, sampling=sampling, kind=kind)

    return _readable(jax.lax.while_loop(going, step, state))


def _readable(state: Decoding) -> Decoding:
    """What the host looks at whole on each device, so that every process can."""
    tokens_BN, log_probs_BN = replicated((state.tokens_BN, state.log_probs_BN))
    return state._replace(tokens_BN=tokens_BN, log_probs_BN=log_probs_BN)


def _choose(
    model: Transformer,
    params: Any,
    state: Decoding,
    *,
    stop_ids: jax.Array,
    rows_B: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    kind: str,
) -> Decoding:
    """`state` with the token that its hidden states choose."""
    vocab_size: Any = model.config.vocab_size
    logits_BV = logits(state.hidden_BD, head_table(params), vocab_size=vocab_size)
    token_B, log_prob_B = choose(logits_BV, sampling, kind=kind, key=key, rows_B=rows_B, step=state.steps)
    return state._replace(
        token_B=token_B,
        done_B=state.done_B | jnp.any(token_B[:, None] == stop_ids, axis=1),
        steps=state.steps + 1,
        tokens_BN=state.tokens_BN.at[:, state.steps].set(token_B),
        log_probs_BN=state.log_probs_BN.at[:, state.steps].set(log_prob_B),
    )
