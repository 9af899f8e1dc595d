"""`fbt plan`: the real train step compiled for devices that need not be there, and what the compiler's program costs.

For each pass count a step that always draws it is compiled, so that memory and collectives can be told apart; for the
mixture the very step that training runs. Time is a roofline: FLOPs at the chip's peak, bytes through the interconnect
and between slices at theirs, the larger of these if communication hides behind computation, their sum if none does.
Both are bounds, not predictions: a real step adds what the compiler's program loses on each.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.config import Config, MeshConfig, PassesConfig
from fbt_jax.errors import UserError
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import MESH_AXES, make_mesh, require_divisible
from fbt_jax.training.chips import Chip
from fbt_jax.training.collectives import KINDS, Collective, in_program, newton_schulz_stacks, on_paper
from fbt_jax.training.compiler import Setup, make_setup
from fbt_jax.training.flops import newton_schulz_flops, train_flops
from fbt_jax.training.pass_schedule import expected_passes
from fbt_jax.training.summary import GIB, bytes_per_device, table


class Cost(NamedTuple):
    """Of one step of `passes` passes (0: the mixture), per device unless stated. Bytes, FLOPs and seconds."""

    passes: int
    parameters: int
    optimizer: int
    batch: int
    activations: int  # peak less what is above: activations, gradients, gathered matrices
    peak: int
    memory: float  # what the chip has; inf where unknown
    model_flops: float  # forward and backward, once
    recomputed_flops: float
    optimizer_flops: float
    compiler_flops: float  # XLA's own count, which takes a loop's body once
    collectives: dict[str, float]  # bytes by kind, from the program
    on_paper: dict[str, float]
    between_slices: float  # bytes of the above that cross slices
    largest_all_gather: int  # elements
    compile_seconds: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """(communication hidden, nothing hidden)."""
        compute = (self.model_flops + self.recomputed_flops + self.optimizer_flops) / chip.flops
        within = sum(self.collectives.values()) - self.between_slices
        transfer = within / (chip.link * chip.links_per_ring)
        network = self.between_slices / chip.network
        return max(compute, transfer, network), compute + transfer + network


def plan(config: Config, devices: Sequence[Any], chip: Chip | None, *, say: Callable[[str], None]) -> list[Cost]:
    """Costs of each pass count, then of the mixture (where there is more than one)."""
    mesh = make_mesh(config.mesh, devices)
    require_divisible(config, mesh)
    costs = []
    for passes in config.passes.pass_counts:
        say(f'compiling {passes} pass{"es" if passes > 1 else ""} ...')
        only = PassesConfig(phases=((0, (*[0.0] * (passes - 1), 1.0)),))
        costs.append(_cost(dataclasses.replace(config, passes=only), make_setup(config, mesh), chip, passes))
    if len(costs) > 1:
        say('compiling the mixture ...')
        peak, seconds = _peak(config, make_setup(config, mesh))
        costs.append(_mixture(config, costs, peak, seconds))
    return costs


def _cost(config: Config, setup: Setup, chip: Chip | None, passes: int) -> Cost:
    begin = time.perf_counter()
    compiled = _compile(config, setup)
    seconds = time.perf_counter() - begin
    mesh, devices = dict(setup.mesh.shape), setup.mesh.size
    tokens = config.data.batch_size * config.data.seq_len / devices
    forward = train_flops(config.model, seq_len=config.data.seq_len, passes=passes) / 3 * tokens
    recomputed = {'nothing': 0, 'dots': 0, 'offload': 0, 'per_layer': 1, 'per_pass': 2}[config.model.remat] * forward
    stacks = newton_schulz_stacks(config, passes)
    found = in_program(
        compiled.as_text(),
        branch_shares=lambda name, branches: _branch_shares(config, name, branches),
        devices_per_slice=devices // config.mesh.slices,
    )
    state, batch = setup.state, setup.batch
    parameters, optimizer = bytes_per_device(state.params), bytes_per_device(state.opt_state)
    peak, batch_bytes = _peak_of(compiled), bytes_per_device(batch)
    element = compute_dtype(setup.model.config).itemsize
    return Cost(
        passes=passes,
        parameters=parameters,
        optimizer=optimizer,
        batch=batch_bytes,
        activations=peak - parameters - optimizer - batch_bytes,
        peak=peak,
        memory=chip.memory if chip else math.inf,
        model_flops=3 * forward,
        recomputed_flops=recomputed,
        optimizer_flops=sum(-(-s.matrices // devices) * newton_schulz_flops(s.m, s.n) for s in stacks),
        compiler_flops=float((compiled.cost_analysis() or {}).get('flops', 0.0)),
        collectives=_by_kind(found),
        on_paper=on_paper(config, mesh, passes=passes, element_bytes=element),
        between_slices=sum(c.bytes for c in found if c.crosses_slices),
        largest_all_gather=max((c.largest for c in found if c.kind == 'all-gather'), default=0),
        compile_seconds=seconds,
    )


def _compile(config: Config, setup: Setup) -> Any:
    try:
        return setup.compile(config)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' in str(error) or 'Ran out of memory' in str(error):
            raise OutOfMemoryError(str(error).splitlines()[0][:300]) from error
        raise


class OutOfMemoryError(RuntimeError):
    """The compiler found no way to fit the program into the device's memory."""


def _peak(config: Config, setup: Setup) -> tuple[int, float]:
    begin = time.perf_counter()
    return _peak_of(_compile(config, setup)), time.perf_counter() - begin


def _peak_of(compiled: Any) -> int:
    """The larger of the compiler's two accounts: its peak, and what it sets aside for the whole program."""
    m = compiled.memory_analysis()
    aside = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return int(max(m.peak_memory_in_bytes, aside))


def _mixture(config: Config, costs: list[Cost], peak: int, seconds: float) -> Cost:
    """The mean step of the whole run; its peak is that of the step that training runs."""
    mean = expected_shares(config)

    def average(value: Callable[[Cost], float]) -> float:
        return sum(share * value(cost) for share, cost in zip(mean, costs, strict=True))

    first = costs[0]
    return first._replace(
        passes=0,
        peak=peak,
        activations=peak - first.parameters - first.optimizer - first.batch,
        model_flops=average(lambda c: c.model_flops),
        recomputed_flops=average(lambda c: c.recomputed_flops),
        optimizer_flops=average(lambda c: c.optimizer_flops),
        compiler_flops=average(lambda c: c.compiler_flops),
        collectives={k: average(lambda c, k=k: c.collectives[k]) for k in KINDS},  # type: ignore[misc]
        on_paper={k: average(lambda c, k=k: c.on_paper[k]) for k in KINDS},  # type: ignore[misc]
        between_slices=average(lambda c: c.between_slices),
        largest_all_gather=max(c.largest_all_gather for c in costs),
        compile_seconds=seconds,
    )


def expected_shares(config: Config) -> list[float]:
    """Share of the run's steps that draw each of `passes.pass_counts`."""
    counts, steps = config.passes.pass_counts, config.training.steps
    phases = config.passes.phase_steps(steps)
    ends = [min(start, steps) for start, _ in phases[1:]] + [steps]
    return [
        sum(max(0, end - start) * p[i] for (start, p), end in zip(phases, ends, strict=True)) / steps
        for i in range(len(counts))
    ]


def _branch_shares(config: Config, op_name: str, branches: int) -> list[float]:
    """Layers choose between full and windowed attention; the optimizer's conditionals are all taken."""
    if branches == 2 and 'layers' in op_name:
        full = sum(w == 0 for w in config.model.layer_windows) / config.model.num_layers
        return [full, 1 - full]
    return [*[0.0] * (branches - 1), 1.0]


def _by_kind(found: Iterable[Collective]) -> dict[str, float]:
    total = dict.fromkeys(KINDS, 0.0)
    for collective in found:
        total[collective.kind] += collective.bytes
    return total


# What is shown


def lines(config: Config, costs: list[Cost], chip: Chip | None, num_devices: int) -> list[str]:
    names = [str(c.passes) if c.passes else 'mixture' for c in costs]

    def row(name: str, value: Callable[[Cost], str]) -> tuple[str, ...]:
        return (name, *(value(c) for c in costs))

    def gib(value: Callable[[Cost], float]) -> Callable[[Cost], str]:
        return lambda c: f'{value(c) / GIB:.3f}'

    tokens = config.data.batch_size * config.data.seq_len
    rows = [
        ('passes', *names),
        row('parameters GiB per device', gib(lambda c: c.parameters)),
        row('optimizer state GiB', gib(lambda c: c.optimizer)),
        row('batch GiB', gib(lambda c: c.batch)),
        row('activations and temporaries GiB', gib(lambda c: c.activations)),
        row('peak GiB', gib(lambda c: c.peak)),
        row('model TFLOPs per device', lambda c: f'{c.model_flops / 1e12:.3g}'),
        row('recomputed TFLOPs', lambda c: f'{c.recomputed_flops / 1e12:.3g}'),
        row('optimizer TFLOPs', lambda c: f'{c.optimizer_flops / 1e12:.3g}'),
        row('optimizer / model', lambda c: f'{c.optimizer_flops / c.model_flops:.1%}'),
        row("compiler's TFLOPs (loop bodies once)", lambda c: f'{c.compiler_flops / 1e12:.3g}'),
    ]
    if math.isfinite(costs[0].memory):
        rows.insert(6, row(f'fits into {costs[0].memory / GIB:.0f} GiB', lambda c: 'yes' if c.fits else 'NO'))
    if num_devices > 1:
        rows += _collective_rows(row)
    if chip:
        rows += [
            row('step s, communication hidden', lambda c: f'{c.seconds(chip)[0]:.3g}'),
            row('step s, nothing hidden', lambda c: f'{c.seconds(chip)[1]:.3g}'),
            row('M tokens per s', lambda c: f'{tokens / c.seconds(chip)[0] / 1e6:.3g}'),
        ]
    rows.append(row('compiled in s', lambda c: f'{c.compile_seconds:.0f}'))
    out = table(rows)
    if chip:
        hidden, exposed = (s * config.training.steps / 86_400 for s in costs[-1].seconds(chip))
        out += [
            f'{config.training.steps:,} steps, {config.training.steps * tokens / 1e9:,.4g}B tokens, '
            f'{expected_passes(config.passes, config.training.steps):.3f} passes each on average: '
            f'{hidden:.2g} to {exposed:.2g} days, {hidden * 24 * num_devices:,.3g} to '
            f'{exposed * 24 * num_devices:,.3g} device-hours at the roofline',
        ]
    return out


def _collective_rows(row: Callable[[str, Callable[[Cost], str]], tuple[str, ...]]) -> list[tuple[str, ...]]:
    rows = []
    for kind in KINDS:
        rows.append(row(f'{kind} GB', lambda c, k=kind: f'{c.collectives[k] / 1e9:.3g}'))  # type: ignore[misc]
        rows.append(row('  on paper', lambda c, k=kind: f'{c.on_paper[k] / 1e9:.3g}'))  # type: ignore[misc]
    return [
        *rows,
        row('all collectives GB', lambda c: f'{sum(c.collectives.values()) / 1e9:.3g}'),
        row('  program / paper', lambda c: f'{ratio(c):.2f}'),
        row('between slices GB', lambda c: f'{c.between_slices / 1e9:.3g}'),
        row('largest all-gather, M elements', lambda c: f'{c.largest_all_gather / 1e6:.3g}'),
    ]


def ratio(cost: Cost) -> float:
    paper = sum(cost.on_paper.values())
    return sum(cost.collectives.values()) / paper if paper else 1.0


def as_json(config: Config, costs: list[Cost], chip: Chip | None) -> dict[str, Any]:
    return {
        'mesh': dataclasses.asdict(config.mesh),
        'remat': config.model.remat,
        'batch_size': config.data.batch_size,
        'seq_len': config.data.seq_len,
        'costs': [
            c._asdict()
            | {'memory': c.memory if math.isfinite(c.memory) else None, 'fits': c.fits, 'program_over_paper': ratio(c)}
            | (dict(zip(('seconds_hidden', 'seconds_exposed'), c.seconds(chip), strict=True)) if chip else {})
            for c in costs
        ],
    }


# The sweep


def candidates(config: Config, num_devices: int) -> Iterator[Config]:
    """Every legal mesh with tensor and context up to 8, fsdp as large as it can be, and each remat policy."""
    per_slice = num_devices // config.mesh.slices
    for tensor in (1, 2, 4, 8):
        for context in (1, 2, 4, 8):
            if per_slice % (tensor * context):
                continue
            left = per_slice // (tensor * context)
            for data in (1, 2, 4):
                if left % data:
                    continue
                mesh = MeshConfig(config.mesh.slices, data, left // data, tensor, context)
                for remat in ('dots', 'per_layer', 'per_pass'):
                    model = dataclasses.replace(config.model, remat=remat)
                    yield dataclasses.replace(config, mesh=mesh, model=model)


def sweep(
    config: Config, devices: Sequence[Any], chip: Chip, *, tries: int, say: Callable[[str], None]
) -> list[tuple[Config, Cost | None]]:
    """The `tries` candidates that are fastest on paper, compiled at the largest pass count; fastest that fits first.

    A candidate that the compiler cannot fit has None for its cost.
    """
    passes = config.passes.pass_counts[-1]
    only = PassesConfig(phases=((0, (*[0.0] * (passes - 1), 1.0)),))
    ranked = []
    for candidate in candidates(config, len(devices)):
        mesh = make_mesh(candidate.mesh, devices)
        try:
            require_divisible(candidate, mesh)
        except UserError:
            continue
        ranked.append((_paper_seconds(candidate, mesh, chip, passes), candidate))
    ranked.sort(key=lambda pair: pair[0])
    if not ranked:
        raise UserError(f'no mesh of {len(devices)} devices divides this model and data.batch_size')
    results: list[tuple[Config, Cost | None]] = []
    for seconds, candidate in ranked[:tries]:
        m = candidate.mesh
        say(f'{_name(candidate)}: {seconds:.3f} s on paper; compiling ...')
        mesh = make_mesh(m, devices)
        try:
            alone = dataclasses.replace(candidate, passes=only)
            results.append((candidate, _cost(alone, make_setup(candidate, mesh), chip, passes)))
        except OutOfMemoryError:
            results.append((candidate, None))
    results.sort(key=lambda r: (r[1] is None or not r[1].fits, sum(r[1].seconds(chip)) if r[1] else 0.0))
    return results


def sweep_lines(results: list[tuple[Config, Cost | None]], chip: Chip) -> list[str]:
    rows = [('mesh and remat', 'peak GiB', 'fits', 'hidden s', 'exposed s', 'program / paper')]
    for candidate, cost in results:
        if cost is None:
            rows.append((_name(candidate), '', 'NO', '', '', ''))
        else:
            hidden, exposed = cost.seconds(chip)
            fits = 'yes' if cost.fits else 'NO'
            rows.append(
                (
                    _name(candidate),
                    f'{cost.peak / GIB:.2f}',
                    fits,
                    f'{hidden:.3f}',
                    f'{exposed:.3f}',
                    f'{ratio(cost):.2f}',
                )
            )
    return table(rows)


def _name(config: Config) -> str:
    sizes = ' '.join(f'{axis}={getattr(config.mesh, axis)}' for axis in MESH_AXES)
    return f'{sizes} {config.model.remat}'


def _paper_seconds(config: Config, mesh: Any, chip: Chip, passes: int) -> float:
    """Without compiling: FLOPs and bytes from the shapes, half of the communication hidden."""
    tokens = config.data.batch_size * config.data.seq_len / mesh.size
    forward = train_flops(config.model, seq_len=config.data.seq_len, passes=passes) / 3 * tokens
    again = {'dots': 0, 'per_layer': 1, 'per_pass': 2}[config.model.remat]
    element = jnp.dtype('bfloat16').itemsize
    moved = sum(on_paper(config, dict(mesh.shape), passes=passes, element_bytes=element).values())
    compute, transfer = (3 + again) * forward / chip.flops, moved / (chip.link * chip.links_per_ring)
    return max(compute, transfer) + min(compute, transfer) / 2
