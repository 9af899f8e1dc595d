"""Latent feedback: the map that turns the previous position's top state into this position's input (method.md section
2).

    gated (eq. 4):  fuse(e_t, h_{t-1}) = (W_U h_{t-1}) * sigmoid(W_G n(e_t))     the state is the value, the token
    only gates add:            n(e_t) + W h_{t-1}                                           ablation concat:         W
    [n(e_t); h_{t-1}]                                          ablation

With h = 0 the gated input is exactly 0: no additive path lets a model switch the state off. Shapes: (B, T, D).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Fusion(nn.Module):
    """The fusion matrices, D x D each (`joint` of concat: 2D x D), no biases, normal with std fan_in^-1/2."""

    kind: str
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, gate_input_BTD: jax.Array, prev_BTD: jax.Array) -> jax.Array:
        """The fused input u of every position.

        Args:
          gate_input_BTD: n(e_t), the normed token embeddings.
          prev_BTD: h_{t-1} of the previous pass, after the final norm: already shifted by one position.
        """

        def dense(name: str) -> nn.Dense:
            return nn.Dense(
                gate_input_BTD.shape[-1],
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=nn.initializers.variance_scaling(1.0, 'fan_in', 'normal'),
                name=name,
            )

        match self.kind:
            case 'gated':
                return dense('state')(prev_BTD) * nn.sigmoid(dense('gate')(gate_input_BTD))
            case 'add':
                return gate_input_BTD + dense('state')(prev_BTD)
            case 'concat':
                return dense('joint')(jnp.concatenate([gate_input_BTD, prev_BTD], axis=-1))
        raise ValueError(f'model.fusion = {self.kind!r}: this model has no feedback, so it takes no previous states')
