"""The order in which a source is read, epoch after epoch: a pure function of (seed, epoch), found at any position at
once.

Units (documents, or rows packed beforehand) lie in shards. An epoch shuffles the shards, takes them in groups of about
GROUP_UNITS units, and shuffles the units of each group: a source of up to that many units is shuffled as a whole, a
larger one never holds more than a group's order in memory. Every unit comes once in each epoch.
Lengths and positions count whatever the units are made of (tokens, rows). S shards, G groups, U units of a group.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fbt_jax.data.documents import OPEN_SHARDS, Parts

GROUP_UNITS = 2**20


def shuffled(count: int, *, seed: int, epoch: int, group: int = 0, shards: bool = False) -> np.ndarray:
    """A permutation of range(count), int64, that depends on the arguments alone."""
    # Sorting raw bits rather than Generator.permutation: NumPy promises the bits of Philox for good, its methods not.
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, shards, group], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(count), kind='stable')


class _Epoch(NamedTuple):
    groups: list[np.ndarray]  # the shards of each group
    ends_G: np.ndarray  # where each group ends, from the epoch's start


class _Group(NamedTuple):
    ends_U: np.ndarray  # where each unit ends, from the group's start
    shard_U: np.ndarray
    unit_U: np.ndarray  # its number in the shard


class Order:
    """The endless sequence of a source's units.

    units_S, lengths_S: (S,) int64, how many units each shard has, and how long they are together.
    unit_lengths: shard -> (units,) int64; None where every unit has length 1.
    seed: None leaves shards and units in their own order, the same in every epoch.
    """

    def __init__(
        self,
        units_S: np.ndarray,
        lengths_S: np.ndarray,
        unit_lengths: Callable[[int], np.ndarray] | None,
        *,
        seed: int | None,
        group_units: int = GROUP_UNITS,
    ) -> None:
        self._units_S, self._lengths_S, self._unit_lengths = units_S, lengths_S, unit_lengths
        self._seed, self._group_units = seed, group_units
        self.epoch_length = int(lengths_S.sum())
        self._epoch = functools.lru_cache(maxsize=4)(self._make_epoch)
        self._group = functools.lru_cache(maxsize=4)(self._make_group)

    def parts(self, start: int, stop: int) -> Parts:
        """What lies at the positions [start, stop), in order; units at either end in part."""
        found = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_length)
            ends_G = self._epoch(epoch).ends_G
            number = int(np.searchsorted(ends_G, offset, side='right'))
            group = self._group(epoch, number)
            origin = epoch * self.epoch_length + int(ends_G[number]) - int(group.ends_U[-1])
            first, last = start - origin, min(stop - origin, int(group.ends_U[-1]))
            a, b = np.searchsorted(group.ends_U, (first, last - 1), side='right')
            ends = group.ends_U[a : b + 1]
            begins = np.concatenate([group.ends_U[a - 1 : a] if a else [0], ends[:-1]])
            chosen = slice(a, b + 1)
            parts = Parts(
                group.shard_U[chosen],
                group.unit_U[chosen],
                np.maximum(first - begins, 0),
                np.minimum(last, ends) - begins,
            )
            found.append(parts)
            start = origin + last
        return found[0] if len(found) == 1 else Parts(*map(np.concatenate, zip(*found, strict=True)))

    def _make_epoch(self, epoch: int) -> _Epoch:
        count = len(self._units_S)
        shards = np.arange(count)
        if self._seed is not None:
            shards = shuffled(count, seed=self._seed, epoch=epoch, shards=True)
        groups: list[list[int]] = [[]]
        units = 0
        for shard in shards.tolist():
            if self._units_S[shard] == 0:
                continue
            if groups[-1] and (units + self._units_S[shard] > self._group_units or len(groups[-1]) == OPEN_SHARDS):
                groups.append([])
                units = 0
            groups[-1].append(shard)
            units += int(self._units_S[shard])
        arrays = [np.array(group, np.int64) for group in groups]
        return _Epoch(arrays, np.cumsum([self._lengths_S[group].sum() for group in arrays]))

    def _make_group(self, epoch: int, number: int) -> _Group:
        shards = self._epoch(epoch).groups[number]
        units = self._units_S[shards]
        shard_U = np.repeat(shards, units).astype(np.int32)
        unit_U = np.concatenate([np.arange(n, dtype=np.int32) for n in units])
        if self._unit_lengths is None:
            lengths_U = np.ones(len(unit_U), np.int64)
        else:
            lengths_U = np.concatenate([self._unit_lengths(shard) for shard in shards.tolist()])
        if self._seed is not None:
            order_U = shuffled(len(unit_U), seed=self._seed, epoch=epoch, group=number)
            shard_U, unit_U, lengths_U = shard_U[order_U], unit_U[order_U], lengths_U[order_U]
        return _Group(np.cumsum(lengths_U), shard_U, unit_U)
