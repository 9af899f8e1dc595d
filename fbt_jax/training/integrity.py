"""Integrity of what a checkpoint holds: digests of arrays, sealed JSON, and telling damage from other failures.

Orbax and TensorStore keep no checksum of array bytes: a flipped bit restores without an error. So each leaf is hashed
on the device at save and again at restore, and JSON carries a CRC. Leaves go by the names of `named_leaves`.
"""

import contextlib
import gc
import json
import logging
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

# What says nothing about the bytes on disk: with these a step is neither called damaged nor moved away.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_NOT_DAMAGE_STATUS = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'PERMISSION_DENIED', 'UNAUTHENTICATED', 'RESOURCE_EXHAUSTED')


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Hides the pages of traceback that abandoned reads, or writes to a full disk, print beside the error raised.

    What they print when they are freed ends with this context. One that TensorStore's threads finish after their
    event loop was closed complains whenever that is, so that complaint stays hidden.
    """
    _ignore_late_reads()
    hook, asyncio_log = sys.unraisablehook, logging.getLogger('asyncio')

    def is_wanted(record: logging.LogRecord) -> bool:
        return 'never retrieved' not in record.getMessage()

    sys.unraisablehook = lambda info: None if 'coroutine' in repr(info.object) else hook(info)
    asyncio_log.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='coroutine .* was never awaited')
            try:
                yield
            finally:
                gc.collect()  # they complain when they are freed, which must happen in here
    finally:
        sys.unraisablehook = hook
        asyncio_log.removeFilter(is_wanted)


def _ignore_late_reads() -> None:
    hook = sys.unraisablehook
    if getattr(hook, 'ignores_late_reads', False):
        return

    def ignoring(info: Any) -> None:
        if not (isinstance(info.exc_value, RuntimeError) and str(info.exc_value) == 'Event loop is closed'):
            hook(info)

    ignoring.ignores_late_reads = True  # type: ignore[attr-defined]
    sys.unraisablehook = ignoring


class DamagedError(Exception):
    """Something was read, but it isn't what was saved."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """{'params/layers/w': leaf, ...}: the names under which leaves are saved, compared and reported.

    A NamedTuple's field, a dict's key and a sequence's index all give plain names, so that the trees of `load_tree` and
    the optimizer state they were saved from have the same ones; optax's empty nodes have none.
    """
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')


def seal(value: Any) -> str:
    """JSON text that carries its own checksum: a flipped digit in JSON would otherwise read as another number."""
    text = json.dumps(value, allow_nan=False)
    return f'{zlib.crc32(text.encode()):08x} {text}'


def unseal(sealed: str) -> Any:
    """The value that `seal` was given; DamagedError if the text is another."""
    checksum, _, text = sealed.partition(' ')
    if checksum != f'{zlib.crc32(text.encode()):08x}':
        raise DamagedError('the checksum of its JSON differs')
    return json.loads(text)


def manifest_of(state: Any) -> dict[str, dict[str, Any]]:
    """{name: {shape, dtype, digest}} of every leaf: JSON."""
    leaves = named_leaves(state)
    digest_of = digests(leaves)
    return {
        name: {'shape': list(leaf.shape), 'dtype': str(leaf.dtype), 'digest': digest_of[name]}
        for name, leaf in leaves.items()
    }


def require_digests(leaves: dict[str, Any], manifest: dict[str, dict[str, Any]]) -> None:
    """Raises DamagedError unless the arrays are bit for bit those of the manifest."""
    digest_of = digests(leaves)
    wrong = [name for name in manifest if digest_of[name] != manifest[name]['digest']]
    if wrong:
        raise DamagedError(
            f'the bytes of {", ".join(wrong[:3])}{" and others" if wrong[3:] else ""} are not those saved'
        )


def digests(leaves: dict[str, Any]) -> dict[str, int]:
    """32-bit digest of the bits of each array, the same on every mesh.

    One program for all that lie on the same devices: as one program an array, each with its sum over devices, they
    starved each other of threads on CPU meshes (2 cores, 2 devices: stuck within 50 saves).
    """
    together: dict[Any, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        devices = frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else None
        together.setdefault(devices, {})[name] = leaf
    with jax.enable_x64(True):  # numpy's 64-bit arrays must not be narrowed on the way
        values = [jax.device_get(_digests(group)) for group in together.values()]
    return {name: int(value) for group in values for name, value in group.items()}


@jax.jit
def _digests(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _digest(leaf) for name, leaf in leaves.items()}


def _digest(x: jax.Array) -> jax.Array:
    """Sum over words of mix(word + f(position)) modulo 2**32, `mix` being murmur3's finaliser.

    A bijection of each word, so that a change within one word is always found, and others up to 1 in 2**32. Only
    elementwise operations and one sum: nothing is gathered or reordered on a sharded array.
    """
    bits = jnp.dtype(f'uint{8 * min(x.dtype.itemsize, 4)}')
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    words = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
    for axis in range(words.ndim):
        odd = jnp.uint32(pow(0x9E3779B1, axis + 1, 2**32))
        words = words + odd * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)


def damage(error: Exception) -> str:
    """One line on what is wrong with the bytes of a step; raises `error` again where it says nothing about them."""
    reason = brief(error)
    if isinstance(error, _NOT_DAMAGE) or any(status in reason for status in _NOT_DAMAGE_STATUS):
        raise error
    return reason


def brief(error: BaseException) -> str:
    """One line: the first of the deepest cause, which is where TensorStore says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [''])[0][:200]
    return text if isinstance(error, DamagedError) else f'{type(error).__name__}: {text}'
