"""Latent feedback: turns the previous position's top state into this position's input (method.md section 2).

    gated (eq. 4):  fuse(e_t, h_{t-1}) = (W_U h_{t-1}) * sigmoid(W_G n(e_t))   the state is the value, the token gates
    add:            n(e_t) + W h_{t-1}                                         ablation
    concat:         W [n(e_t); h_{t-1}]                                        ablation

With h = 0 the gated input is exactly 0: no additive path lets a model switch the state off. Shapes: (B, T, D).
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


class Fusion(nn.Module):
    """The fusion matrices, D x D each (`joint` of concat: 2D x D), no biases.

    `dense(x, name=(features, logical axes))` gives [x W] with W the parameter `name/kernel`.
    """

    kind: str
    dense: Callable[..., list[jax.Array]]

    @nn.compact
    def __call__(self, gate_input_BTD: jax.Array, prev_BTD: jax.Array) -> jax.Array:
        """The fused input u of every position.

        Args:
          gate_input_BTD: n(e_t), the normed token embeddings.
          prev_BTD: h_{t-1} of the previous pass, after the final norm: already shifted by one position.
        """
        fused = (gate_input_BTD.shape[-1], ('embed', 'fused'))
        match self.kind:
            case 'gated':
                value_BTD, gate_BTD = self.dense(prev_BTD, state=fused)[0], self.dense(gate_input_BTD, gate=fused)[0]
                return value_BTD * nn.sigmoid(gate_BTD)
            case 'add':
                return gate_input_BTD + self.dense(prev_BTD, state=fused)[0]
            case 'concat':
                return self.dense(jnp.concatenate([gate_input_BTD, prev_BTD], axis=-1), joint=fused)[0]
        raise ValueError(f'model.fusion = {self.kind!r}: this model has no feedback, so it takes no previous states')
