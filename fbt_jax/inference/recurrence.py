"""The exact recurrence over given rows, token by token: what soft decoding computes when the tokens are known.

    u_t = e_t at a document's first token, else fuse(e_t, h_{t-1});   h_t from the cached positions before t

K = T passes come to the same states (method.md section 3). Shapes: B rows, T positions, D width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.model import kv_cache
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import constrain


def recurrent_states(model: Any, params: Any, batch: Batch) -> jax.Array:
    """(B, T, D), also of packed rows; positions must lie undivided. Padding's states mean nothing.

    A row's documents follow each other through one cache. As positions start anew with each, what the one before left
    lies in slots that count as empty (`kv_cache.attend_one`).
    """
    rows, seq_len = batch.tokens.shape
    dtype = compute_dtype(model.config)

    def step(carry: tuple[Any, jax.Array], column: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        cache, hidden_BD = carry
        token_B, position_B = column
        hidden_B1D, cache = model.apply(
            {'params': params},
            token_B[:, None],
            hidden_BD[:, None],
            plain_BT=position_B[:, None] == 0,
            positions_BT=position_B[:, None],
            cache=cache,
        )
        return (cache, hidden_B1D[:, 0]), hidden_B1D[:, 0]

    first_BD = constrain(jnp.zeros((rows, model.config.width), dtype), 'batch', None)
    cache = kv_cache.empty(model.config, rows=rows, capacity=seq_len, dtype=dtype)
    _, hidden_TBD = jax.lax.scan(step, (cache, first_BD), (batch.tokens.T, batch.positions.T))
    return constrain(jnp.moveaxis(hidden_TBD, 0, 1), 'batch', 'length', 'state')
