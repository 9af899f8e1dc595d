"""The one-token map h_{t-1} -> h_t on real text: how much it can stretch a difference, and where it leads when it runs.

    J = d h_t / d h_{t-1},   sigma(J) = max |J v| / |v|   by power iteration:  v <- J^T J v / |J^T J v|

h_{t-1} enters at position t alone; the tokens and the keys and values of all earlier positions stay fixed. A rollout is
soft decoding (method.md section 5). Shapes: B samples, P positions of padded prompts, D width, N tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.inference.decode import advance, begin, read_prompts
from fbt_jax.inference.generate import LEAST, padded_rows, rounded
from fbt_jax.inference.sampling import Sampling
from fbt_jax.sharding import replicated

ITERATIONS = 64
PROMPT = 8  # tokens of text before a rollout


class Stretch(NamedTuple):
    sigma_B: jax.Array
    residual_B: jax.Array  # |J^T J v - sigma^2 v| / sigma^2: 0 when the iteration has come to its end


class Prompts(NamedTuple):
    tokens_BP: np.ndarray  # int32
    lengths_B: np.ndarray  # int32
    next_B: np.ndarray  # int32, the token that follows


def largest_singular_values(function: Callable[[jax.Array], jax.Array], x_BD: jax.Array) -> Stretch:
    """Of the Jacobian at each row of `x_BD`; row b of `function`'s value must depend on row b alone."""
    y_BD, pull = jax.vjp(function, x_BD)
    # J as the transpose of J^T, for the model's products have rules for reverse mode alone.
    _, push = jax.vjp(lambda w_BD: pull(w_BD)[0], jnp.zeros_like(y_BD))
    wide = jnp.promote_types(x_BD.dtype, jnp.float32)
    tiny = jnp.finfo(wide).tiny

    def norm(v_BD: jax.Array) -> jax.Array:
        return jnp.linalg.norm(v_BD, axis=-1, keepdims=True)

    def gram(v_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        stretched_BD = push(v_BD.astype(x_BD.dtype))[0]
        return norm(stretched_BD.astype(wide)), pull(stretched_BD)[0].astype(wide)

    def turn(_: Any, v_BD: jax.Array) -> jax.Array:
        w_BD = gram(v_BD)[1]
        return w_BD / jnp.maximum(norm(w_BD), tiny)

    start_BD = jax.random.normal(jax.random.key(0), x_BD.shape, wide)
    v_BD = jax.lax.fori_loop(0, ITERATIONS, turn, start_BD / norm(start_BD))
    sigma_B1, w_BD = gram(v_BD)
    residual_B1 = norm(w_BD - sigma_B1**2 * v_BD) / jnp.maximum(sigma_B1**2, tiny)
    return Stretch(sigma_B1[:, 0], residual_B1[:, 0])


@partial(jax.jit, static_argnames=('model', 'num_passes'))
def stretches(model: Any, params: Any, prompts: Prompts, *, num_passes: int) -> Stretch:
    """Of the map at the token after each prompt, which is read in `num_passes` passes."""
    room = prompts.tokens_BP.shape[1]
    read = read_prompts(model, params, prompts.tokens_BP, prompts.lengths_B, num_passes=num_passes, capacity=room)

    def one_token(fed_BD: jax.Array) -> jax.Array:
        hidden_B1D, _ = model.apply(
            {'params': params},
            prompts.next_B[:, None],
            fed_BD[:, None],
            plain_BT=jnp.zeros((len(fed_BD), 1), bool),
            positions_BT=prompts.lengths_B[:, None],
            cache=read.cache,
        )
        return hidden_B1D[:, 0]

    return replicated(largest_singular_values(one_token, read.hidden_BD))


def prompts_of(pieces: Sequence[np.ndarray], lengths: Sequence[int], *, context: int) -> Prompts:
    """The first tokens of each piece, that many; rows are repeated up to a number that the devices share evenly."""
    rows = padded_rows(len(pieces))
    tokens_BP = np.zeros((rows, rounded(max(max(lengths) + 1, LEAST), context)), np.int32)
    lengths_B, next_B = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row in range(rows):
        piece, length = pieces[row % len(pieces)], lengths[row % len(pieces)]
        tokens_BP[row, :length], lengths_B[row], next_B[row] = piece[:length], length, piece[length]
    return Prompts(tokens_BP, lengths_B, next_B)


def rollout_norms(model: Any, params: Any, prompts: Prompts, *, tokens: int, context: int) -> np.ndarray:
    """(N, B): the RMS of the state after each of `tokens` soft steps, sampled at temperature 1, past EOS too."""
    rows = len(prompts.lengths_B)
    longest = int(prompts.lengths_B.max())
    read = read_prompts(
        model,
        params,
        prompts.tokens_BP,
        prompts.lengths_B,
        num_passes=1,
        capacity=rounded(max(longest + tokens, LEAST), context),
    )
    common: dict[str, Any] = {
        'stop_ids': jnp.array([-1]),
        'rows_B': jnp.arange(rows),
        'key': jax.random.key(0),
        'sampling': Sampling(jnp.float32(1), jnp.int32(0), jnp.float32(1)),
        'kind': 'free',
    }
    going_B = jnp.zeros(rows, bool)
    room = rounded(max(tokens, LEAST), context)
    state = begin(model, params, read, going_B, max_tokens=room, **common)
    norms = []
    for step in range(1, tokens + 1):
        norms.append(_rms(state.hidden_BD))
        if step < tokens:
            state = advance(model, params, state, until=jnp.int32(step + 1), feedback=True, **common)
    return np.stack([np.asarray(x) for x in norms])


@jax.jit
def _rms(hidden_BD: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden_BD.dtype, jnp.float32)
    return replicated(jnp.sqrt(jnp.mean(jnp.square(hidden_BD.astype(wide)), axis=-1)))
