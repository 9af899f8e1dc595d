"""The three probing tasks of method.md section 8: texts that end in a colon, whose label was fixed before it.

    completion tracking   required=ka;completed=mo;x3;x7;...done:   1 if both are the same
    delayed memory        x4;x2;x9;state=1;x3;x7;...state:          the state
    last write            b=0;a=1;b=1;a=0;...x3;...x5;b:            what was last written to the register asked for

`x3;` are the label-neutral fillers, digits 2 to 9. Counts: completion 80 groups x 5 numbers of fillers x 4 members
(both names of a group in both places: 1600); memory 128 x 5 x 2 (1280); last write 128 groups x 2 members x each of m
registers asked for: m = 1, 2, 4, 8 with 16 writes in all (256 x 15 = 3840), and m = 8 with 2, 4, 8 writes each (256 x 8
= 2048), of which 2 each is 16 in all, once for both. What the paper leaves open (wording, names, who is in a group) is
our choice. No text comes twice: groups share no name, and memory begins with three fillers of its group's own. A pair
shares length, ending and, but for memory, where one token is the label, whatever is linear in the counts of tokens:
names cross like an exclusive or; a register's last two values swap (with two writes the first tells the last).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FILLERS = (0, 8, 32, 128, 256)
COMPLETION_GROUPS, GROUPS = 80, 128
LETTERS = 'abcdefghijklmnopqrstuvwyz'  # without the fillers' x
NAMES = tuple(a + b for a in LETTERS for b in LETTERS)
OPENING = 3  # fillers before the state
REGISTERS = 'abcdefgh'
# Registers, writes to each; with WRITE_FILLERS fillers.
WRITES = ((1, 16), (2, 8), (4, 4), (8, 2), (8, 4), (8, 8))
WRITE_FILLERS = 8


class Example(NamedTuple):
    text: str
    label: int  # 0 or 1
    group: int  # never split between training and test
    pair: int  # within the group: two examples, one of each label


class Setting(NamedTuple):
    task: str
    name: str
    examples: list[Example]


def completion_tracking(seed: int, names: Sequence[str] = NAMES) -> list[Setting]:
    """`names`: of items, of which every group has two for itself.

    Raises:
      ValueError: too few names.
    """
    rng = np.random.default_rng([seed, 0])
    if len(names) < 2 * COMPLETION_GROUPS:
        raise ValueError(f'{len(names)} names are too few for {COMPLETION_GROUPS} groups of two')
    chosen = rng.permutation(names)[: 2 * COMPLETION_GROUPS].reshape(COMPLETION_GROUPS, 2).tolist()
    fillers = [_fillers(rng, max(FILLERS)) for _ in chosen]

    def examples(count: int) -> list[Example]:
        return [
            Example(f'required={a};completed={b};{"".join(fillers[group][:count])}done:', int(a == b), group, pair)
            for group, both in enumerate(chosen)
            for pair, a in enumerate(both)
            for b in both
        ]

    return [Setting('completion tracking', f'{n} fillers', examples(n)) for n in FILLERS]


def delayed_memory(seed: int) -> list[Setting]:
    rng = np.random.default_rng([seed, 1])
    combinations = rng.permutation(8**OPENING)[:GROUPS]
    openings = [''.join(f'x{2 + c // 8**i % 8};' for i in range(OPENING)) for c in combinations]
    fillers = [_fillers(rng, max(FILLERS)) for _ in range(GROUPS)]

    def examples(count: int) -> list[Example]:
        return [
            Example(f'{openings[group]}state={state};{"".join(fillers[group][:count])}state:', state, group, 0)
            for group in range(GROUPS)
            for state in (0, 1)
        ]

    return [Setting('delayed memory', f'{n} fillers', examples(n)) for n in FILLERS]


def last_write(seed: int) -> list[Setting]:
    def setting(registers: int, writes: int) -> Setting:
        rng = np.random.default_rng([seed, 2, registers, writes])
        found = [x for group in range(GROUPS) for x in _last_writes(rng, registers, writes, group)]
        each = f'{registers} register{"s" if registers > 1 else ""}, {writes} writes each'
        return Setting('last write', each, found)

    return [setting(*sizes) for sizes in WRITES]


def _last_writes(rng: np.random.Generator, registers: int, writes: int, group: int) -> list[Example]:
    """One order of writes, asked for each of its registers; the label is the later of its last two values."""
    order = rng.permutation(np.repeat(np.arange(registers), writes))
    values = rng.integers(2, size=len(order))
    fillers = ''.join(_fillers(rng, WRITE_FILLERS))
    found = []
    for asked in range(registers):
        last_two = np.flatnonzero(order == asked)[-2:]
        for label in (0, 1):
            own = values.copy()
            own[last_two] = 1 - label, label
            text = ''.join(f'{REGISTERS[r]}={v};' for r, v in zip(order, own, strict=True))
            found.append(Example(f'{text}{fillers}{REGISTERS[asked]}:', label, group, asked))
    return found


def _fillers(rng: np.random.Generator, count: int) -> list[str]:
    return [f'x{digit};' for digit in rng.integers(2, 10, size=count)]


def all_settings(seed: int, tokens_in: Callable[[str], int]) -> list[Setting]:
    """All of them; `tokens_in` gives a text's number of tokens: only names of the commonest length are used."""
    lengths = [tokens_in(f'required={name};completed={name};') for name in NAMES]
    usual = max(set(lengths), key=lengths.count)
    names = [name for name, length in zip(NAMES, lengths, strict=True) if length == usual]
    return [*completion_tracking(seed, names), *delayed_memory(seed), *last_write(seed)]
