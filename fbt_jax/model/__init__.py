"""The model: pure functions of (params, inputs, previous pass's states). Linen stays inside this package."""
