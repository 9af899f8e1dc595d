"""Bytes through each kind of collective of a step: as the compiled program has them, and as counted on paper.

Bytes are those one device receives, with the usual algorithms on a group of n: all-gather and reduce-scatter move
(n - 1) / n of the whole, all-reduce twice that, all-to-all (n - 1) / n of a device's array, a permute its array. From
the program: every instruction times the trip counts of the loops around it (XLA's own analysis counts a loop once),
conditionals by the share of each branch. On paper: from shapes, mesh and rematerialisation alone, see `on_paper`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fbt_jax.config import Config

KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')
_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8}
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$')


class Collective(NamedTuple):
    """One instruction of the program."""

    kind: str
    bytes: float  # received by a device in the whole step
    executions: float  # in the whole step
    largest: int  # elements of its largest array
    group: int
    crosses_slices: bool


# From the program


def in_program(
    text: str, *, branch_shares: Callable[[str, int], list[float]], devices_per_slice: int
) -> list[Collective]:
    """All collectives of an HLO module's text. `branch_shares`: (op_name, branches) -> how often each is taken."""
    computations = dict(_computations(text))
    entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
    found: list[Collective] = []

    def visit(name: str, times: float, seen: set[str]) -> None:
        for line in computations[name][1]:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            op, rest = match['op'], match['rest']
            kind = op.removesuffix('-start')
            if kind in KINDS:
                chain = re.search(r'chain_id="(\d+)"', rest)
                if chain and chain[1] in seen:  # a TPU writes one collective into each fusion that it runs beside
                    continue
                seen.add(chain[1] if chain else line)
                if 'all-reduce-scatter' in name:  # TPU's fusion of an all-reduce and the slice that is kept
                    kind = 'reduce-scatter'
                collective = _collective(kind, op, match['type'], rest, times, devices_per_slice)
                if collective.group > 1:  # an axis of one device
                    found.append(collective)
            elif op == 'while':
                visit(_called(rest, 'body')[0], times * _trips(rest, computations), set())
            elif op == 'conditional':
                branches = _called(rest, 'branch_computations') or [
                    *_called(rest, 'false_computation'),
                    *_called(rest, 'true_computation'),
                ]
                name_of = re.search(r'op_name="([^"]*)"', rest)
                shares = branch_shares(name_of[1] if name_of else '', len(branches))
                for branch, share in zip(branches, shares, strict=True):
                    visit(branch, times * share, set())
            elif op in ('fusion', 'call', 'async-start'):
                for called in _called(rest, 'calls') + _called(rest, 'to_apply'):
                    visit(called, times, seen)

    visit(entry, 1.0, set())
    return found


def _trips(rest: str, computations: dict[str, tuple[bool, list[str]]]) -> int:
    """Of a while loop: what the compiler states, else the bound that its condition compares with (1: unknown)."""
    if known := re.search(r'known_trip_count[^0-9]*(\d+)', rest):
        return int(known[1])
    condition = computations[_called(rest, 'condition')[0]][1]
    bounds = [int(n) for line in condition for n in re.findall(r's32\[\]\S* constant\((\d+)\)', line)]
    return max(bounds, default=1)


def _computations(text: str) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    """(name, (is it the entry, its lines))."""
    name, is_entry = '', False
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r'^(ENTRY )?%?([\w.-]+) .*\{\s*$', line)
        if head and not line.startswith(' '):
            name, is_entry, lines = head[2], bool(head[1]), []
        elif line.startswith('}') and name:
            yield name, (is_entry, lines)
            name = ''
        else:
            lines.append(line)


def _called(rest: str, attribute: str) -> list[str]:
    match = re.search(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.-]+)', rest)
    return re.findall(r'[\w.-]+', match[1]) if match else []


def _collective(kind: str, op: str, types: str, rest: str, times: float, devices_per_slice: int) -> Collective:
    arrays = [
        (_BYTES.get(dtype, 4), math.prod(int(n) for n in shape.split(',') if n))
        for dtype, shape in re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', types)
    ]
    whole = float(sum(size * elements for size, elements in arrays))
    groups = _groups(rest)
    n = groups.shape[1] if groups.size else 2
    if op == 'all-gather-start':
        whole = whole * n / (n + 1)  # the operand stands beside the result
    elif op == 'collective-permute-start':
        whole = whole / 2
    scale = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1.0}.get(kind, (n - 1) / n)
    if kind == 'reduce-scatter' and op.startswith('reduce-scatter'):
        scale = n - 1  # its type is the part that is kept
    crosses = bool(groups.size) and bool(np.any(groups // devices_per_slice != groups[:, :1] // devices_per_slice))
    return Collective(kind, times * whole * scale, times, max((e for _, e in arrays), default=0), n, crosses)


def _groups(rest: str) -> np.ndarray:
    """(groups, n) devices; empty where the instruction has none."""
    if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        dims = [int(n) for n in iota[3].split(',')]
        order = [int(n) for n in iota[4].split(',')] if iota[4] else range(len(dims))
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if mesh := re.search(r'replica_groups=mesh\[([^\]]*)\](?:\(([\d,]+)\))? ?\{([^}]*)\}', rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        grid = np.arange(math.prod(int(n) for n in sizes.values())) if mesh[2] is None else None
        grid = np.array([int(n) for n in mesh[2].split(',')]) if grid is None else grid
        grid = grid.reshape([int(n) for n in sizes.values()])
        names = list(sizes)
        over = [names.index(name) for name in re.findall(r"'?(\w+)'?", mesh[3])]
        kept = [i for i in range(len(names)) if i not in over]
        return grid.transpose(kept + over).reshape(-1, math.prod(grid.shape[i] for i in over))
    explicit = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}', rest)
    if not explicit:
        return np.zeros((0, 0), int)
    return np.array([[int(n) for n in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', explicit[1])])


# On paper


def on_paper(config: Config, mesh: dict[str, int], *, passes: int, element_bytes: int) -> dict[str, float]:
    """Bytes that a device receives in a step of `passes` passes, by kind of collective.

    Per pass and layer: each matrix is gathered for the forward and for the backward pass (once more under `per_pass`,
    which recomputes whole passes) and its gradient reduce-scattered; keys and values come along `context` as often
    as attention is computed, and their gradients go back; `tensor` sums the state twice forward and twice backward.
    Per pass: the embedding's chunks likewise, the tokens' embeddings by all-to-all, the shift by a permute. Per step:
    Newton-Schulz's two exchanges.
    """
    m, b = config.model, element_bytes
    data, tensor, context = mesh['data'], mesh['tensor'], mesh['context']
    split = mesh['fsdp'] * context
    shards = data * mesh['fsdp']
    rows = config.data.batch_size / shards
    length = config.data.seq_len / context
    state = rows * length * m.width * b  # bytes of one device's activations
    f, t, c = (split - 1) / split, (tensor - 1) / tensor, (context - 1) / context
    again = m.remat == 'per_pass'
    # How often a layer's attention, and its products, are computed again: `dots` keeps products alone.
    attended = (m.remat != 'nothing') + again
    recomputed = (m.remat in ('per_layer', 'per_pass')) + again
    reduce_bytes = 4 if m.fp32_gradient_reduction else b
    total: dict[str, float] = dict.fromkeys(KINDS, 0.0)

    kv_width = m.num_kv_heads * m.head_dim
    gates = m.num_heads if m.head_gate else 0
    layer = m.width * (2 * m.attention_width + 2 * kv_width + 3 * m.mlp_width + gates)
    fusion = {'gated': 2, 'add': 1, 'concat': 2, 'none': 0}[m.fusion] * m.width**2 if passes > 1 else 0
    matrices = (m.num_layers * layer + fusion) / tensor
    table = m.padded_vocab_size * m.width / tensor
    total['all-gather'] += passes * (matrices + table) * b * f * (2 + again)
    total['reduce-scatter'] += passes * (matrices * reduce_bytes + table * 4) * f
    total['all-reduce'] += passes * (matrices * reduce_bytes + 2 * table * 4) / split * 2 * (data - 1) / data

    for window in m.layer_windows:
        keys = rows * length * 2 * kv_width / tensor * b
        behind = min(context - 1, -(-(window - 1) // int(length))) if window else context - 1
        if behind == context - 1:
            total['all-gather'] += passes * keys * context * c * (1 + attended)
            total['reduce-scatter'] += passes * keys * context * c
        else:
            total['collective-permute'] += passes * keys * behind * (2 + attended)
    total['all-reduce'] += passes * m.num_layers * state * 2 * t * (4 + recomputed)
    total['all-reduce'] += passes * state * 2 * t * (2 + 4 / b)  # the embeddings; the loss's gradient in float32
    if fusion:
        inputs = {'gated': 2, 'add': 1, 'concat': 2}[m.fusion]
        total['all-reduce'] += passes * state * 2 * t * inputs
        total['all-gather'] += passes * state * t * (1 + again)
    total['all-to-all'] += passes * state * f * (2 + again)
    if context > 1 and passes > 1:
        total['collective-permute'] += passes * rows * m.width * b * (2 + again)

    for size in newton_schulz_stacks(config, passes):
        devices = data * split * tensor
        local = -(-size.matrices // devices) * devices * size.m * size.n / (split * tensor) * 4
        total['all-to-all'] += 2 * local * (f + t)
        total['all-gather'] += local * (data - 1) / data
    return total


class Stack(NamedTuple):
    """Matrices of one shape that Newton-Schulz takes together."""

    matrices: int
    m: int
    n: int


def newton_schulz_stacks(config: Config, passes: int) -> list[Stack]:
    m = config.model
    kv_width = m.num_kv_heads * m.head_dim
    layers = [(m.width, m.attention_width)] * 2 + [(m.width, kv_width)] * 2 + [(m.width, m.mlp_width)] * 3
    fusion = {'gated': [(m.width, m.width)] * 2, 'add': [(m.width, m.width)], 'concat': [(2 * m.width, m.width)]}
    sizes = Counter((min(s), max(s)) for s in layers)
    stacks = [Stack(n * m.num_layers, *size) for size, n in sizes.items()]
    if passes > 1:
        stacks += [Stack(n, *size) for size, n in Counter((min(s), max(s)) for s in fusion.get(m.fusion, [])).items()]
    return stacks
