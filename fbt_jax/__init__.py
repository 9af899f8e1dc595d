"""fbt_jax: pretraining of Full-bandwidth Transformers (latent feedback) in JAX and Flax.

Importing the package imports nothing heavy; the names below load what they need when they are first used.
"""

import importlib
from typing import Any

_LAZY = {
    'load_run': 'fbt_jax.training.run_folder',
    'Run': 'fbt_jax.training.run_folder',
    'generate': 'fbt_jax.inference.generate',
    'Generations': 'fbt_jax.inference.generate',
    'multi_pass': 'fbt_jax.passes',
    'Noise': 'fbt_jax.passes',
    'MultiPass': 'fbt_jax.passes',
    'Batch': 'fbt_jax.batch',
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
