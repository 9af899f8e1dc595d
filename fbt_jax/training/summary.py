"""What a run prints about itself before step 1 and after the last: parameters, memory, FLOPs, losses by pass."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fbt_jax.config import Config
from fbt_jax.evaluation.intervals import FEW, LEVEL, Ends
from fbt_jax.evaluation.per_pass import PassResults, places
from fbt_jax.sharding import MAX_REPLICATED, placements
from fbt_jax.training.compiler import Setup, shardings_of
from fbt_jax.training.flops import train_flops
from fbt_jax.training.optimizer import parameter_group
from fbt_jax.training.pass_schedule import expected_passes
from fbt_jax.training.step import TrainState

GIB = 2.0**30


def mesh_lines(mesh: Mesh, options: dict[str, Any]) -> list[str]:
    """The mesh and the compiler's options."""
    kind = mesh.devices.flat[0].device_kind
    sizes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
    count = jax.process_count()
    lines = [f'{mesh.size} x {kind} in {count} process{"" if count == 1 else "es"}; mesh: {sizes}']
    return [*lines, f'compiler options: {", ".join(f"{k}={v}" for k, v in options.items())}'] if options else lines


def require_split(setup: Setup) -> None:
    """Raises UserError if parameters would lie whole on devices that could share them, see `placements`."""
    placements(setup.state.params, shardings_of(setup.state.params), setup.mesh)


def parameter_table(setup: Setup) -> list[str]:
    """One line a parameter: path, shape, count, bytes on each device, optimizer group; then the totals by group."""
    params = setup.state.params
    rows = [('parameter', 'shape', 'count', 'bytes per device', 'optimizer')]
    counts: dict[str, int] = {}
    placed: dict[str, int] = {}
    lies = placements(params, shardings_of(params), setup.mesh)
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(params), lies, strict=True):
        group = parameter_group(path)
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        whole = ' whole' if place.replicated else ''
        rows.append(
            (name, 'x'.join(map(str, leaf.shape)), f'{leaf.size:,}', f'{place.bytes_per_device:,}{whole}', group)
        )
        counts[group] = counts.get(group, 0) + leaf.size
        placed[group] = placed.get(group, 0) + place.bytes_per_device
    labels = {'matrix': 'NorMuon', 'fusion': 'NorMuon, frozen in steps of one pass', 'adam': 'Adam'}
    totals = [f'{g} {n:,} ({labels[g]}; {placed[g] / 2**20:.1f} MiB per device)' for g, n in counts.items()]
    lines = [*table(rows), f'{sum(counts.values()):,} parameters: {", ".join(totals)}']
    if setup.mesh.size > 1:
        share = sum(p.bytes for p in lies if p.replicated) / sum(p.bytes for p in lies)
        lines.append(
            f"whole: undivided on devices that could share it, {share:.2%} of the parameters' bytes (at most "
            f'{MAX_REPLICATED:.0%})'
        )
    return lines


def bytes_per_device(tree: Any) -> int:
    """Of arrays or their shapes, by their shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cost_lines(config: Config, state: TrainState, compiled: Any) -> list[str]:
    """Bytes per device, FLOPs per pass and peak memory of the compiled step."""
    tokens = config.data.batch_size * config.data.seq_len
    flops = [
        f'{k}: {train_flops(config.model, seq_len=config.data.seq_len, passes=k) * tokens:.3g}'
        for k in config.passes.pass_counts
    ]
    lines = [
        f'per device: parameters {bytes_per_device(state.params) / GIB:.3f} GiB, optimizer state '
        f'{bytes_per_device(state.opt_state) / GIB:.3f} GiB',
        f'FLOPs of a step by passes: {", ".join(flops)} ({tokens:,} tokens)',
        f'expected passes per step: {expected_passes(config.passes, config.training.steps):.3f}',
    ]
    memory = compiled.memory_analysis()
    if memory is not None:
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        lines.append(f'peak memory of the step: {peak / GIB:.3f} GiB (arguments and temporaries, by the compiler)')
    return lines


def loss_table(results: PassResults, passes: Iterable[int], *, soft: bool = False) -> list[str]:
    """Validation loss after each of `passes` passes; per token and byte for text, with the accuracy elsewhere.

    soft: the results' last entry is the exact recurrence's.
    """
    text = results.bits_per_byte_K is not None
    header = ('passes', 'nats/token', 'perplexity') + (('nats/byte', 'bits/byte') if text else ('accuracy',))
    rows = [(*header, 'update norm')]
    for name, i in places(passes, soft).items():
        columns: list[float]
        if results.nats_per_byte_K is not None and results.bits_per_byte_K is not None:
            columns = [results.nats_per_byte_K[i], results.bits_per_byte_K[i]]
        else:
            columns = [results.accuracy_K[i]]
        loss = results.loss_K[i]
        update = f'{results.update_norm_K[i]:.4f}' if i else ''
        rows.append((name, f'{loss:.4f}', f'{np.exp(loss):.2f}', *(f'{c:.4f}' for c in columns), update))
    return table(rows)


def interval_table(intervals: dict[str, Any]) -> list[str]:
    """Of `intervals.pass_intervals`."""
    names = {'loss': 'nats/token', 'perplexity': 'perplexity', 'bits_per_byte': 'bits/byte'}
    names = {name: told for name, told in names.items() if name in intervals}
    rows = [('passes', *names.values(), 'nats/token less those of pass 1')]
    for k in intervals['loss']:
        difference = intervals['difference_from_pass_1'].get(k)
        told = '' if difference is None else _difference(difference['loss'], difference['interval'])
        rows.append((k, *(_ends(intervals[name][k]) for name in names), told))
    count = intervals['documents']
    few = f'; of so few (< {FEW}) they are likely too narrow' if count < FEW else ''
    return [f'{LEVEL:.0%} intervals, bootstrap over {count} documents{few}', *table(rows)]


def difference_table(difference: dict[str, Any]) -> list[str]:
    """Of `scoring.run_difference`."""
    rows = [('passes', 'its passes', difference['unit'])]
    for k, entry in difference['passes'].items():
        rows.append((k, str(entry['other_passes']), _difference(entry['difference'], entry['interval'])))
    return [f'less {difference["workdir"]}, step {difference["step"]}, on the same documents', *table(rows)]


def _difference(value: float, interval: Ends) -> str:
    return f'{value:+.4f} ({_ends(interval, sign="+")})'


def _ends(interval: Ends, sign: str = '') -> str:
    return '?' if interval is None else f'{interval[0]:{sign}.4f} to {interval[1]:{sign}.4f}'


def position_table(accuracy_KP: np.ndarray, passes: Iterable[int], *, soft: bool = False) -> list[str]:
    """Accuracy by position within the document (columns, from 1) after each of `passes` passes (rows)."""
    positions = [p for p in range(accuracy_KP.shape[1]) if np.isfinite(accuracy_KP[0, p])]
    rows = [('passes', *(str(p + 1) for p in positions))]
    rows += [(k, *(f'{accuracy_KP[i, p]:.3f}' for p in positions)) for k, i in places(passes, soft).items()]
    return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to equal width; the first is flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        '  '.join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def printer(write: Callable[[str], object]) -> Callable[[Iterable[str]], None]:
    """Prints lines, indented by two."""

    def emit(lines: Iterable[str]) -> None:
        for line in lines:
            write(f'  {line}')

    return emit
