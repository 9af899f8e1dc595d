"""`fbt bench`: how fast the train step of a config runs on the devices that are here, by the number of passes it draws.

Each pass count is timed in the compiled step of the mixture, at a step number at which it draws that count; the
mixture's time is the mean over the run's schedule. MFU counts the model's FLOPs, forward and backward, with causal
attention counted once (the keys that mask and window leave), recomputation and optimizer left out, against the
chip's dense bfloat16 peak; see flops.py and chips.py.
"""

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbt_jax.batch import Batch
from fbt_jax.config import Config
from fbt_jax.data import Data
from fbt_jax.sharding import local_rows, make_mesh, place, require_divisible
from fbt_jax.training.compiler import Setup, make_setup
from fbt_jax.training.flops import peak_flops, train_flops
from fbt_jax.training.pass_schedule import draw_branch
from fbt_jax.training.plan import expected_shares
from fbt_jax.training.step import TrainState


class Timing(NamedTuple):
    """Of the whole step over all devices; `passes` 0 is the mean of the run's mixture."""

    passes: int
    seconds: float  # median
    spread: float  # (largest - smallest) / median
    tokens_per_second: float
    flops_per_second: float  # model FLOPs, all devices
    mfu: float | None  # None where the chip's peak is unknown


class Bench(NamedTuple):
    timings: list[Timing]
    compile_seconds: float
    peak_bytes: int  # of the step on one device, by the compiler
    allocated_bytes: int | None  # most that the device had in use, where it tells
    input_tokens_per_second: float


def bench(config: Config, data: Data, *, rounds: int) -> Bench:
    """Times `rounds` steps for each pass count, interleaved, after one to warm up."""
    mesh = make_mesh(config.mesh)
    require_divisible(config, mesh)
    setup = make_setup(config, mesh)
    begin = time.perf_counter()
    compiled = setup.compile(config)
    compile_seconds = time.perf_counter() - begin
    batch, input_rate = _read(config, data, setup)
    seconds = _time_steps(config, setup, compiled, batch, rounds)
    timings = [_timing(config, k, seconds[k]) for k in config.passes.pass_counts]
    if len(timings) > 1:
        timings.append(_mixture(config, timings))
    memory = compiled.memory_analysis()
    peak = max(memory.peak_memory_in_bytes, memory.argument_size_in_bytes + memory.temp_size_in_bytes)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Bench(timings, compile_seconds, int(peak), stats.get('peak_bytes_in_use'), input_rate)


def _read(config: Config, data: Data, setup: Setup) -> tuple[Batch, float]:
    """A batch on the devices; tokens per second of reading batches on this host alone, all its rows counted."""
    rows = local_rows(setup.mesh, config.data.batch_size)
    iterator = data.train_iterator(rows)
    first = next(iterator)
    count, begin = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - begin < 1:
        next(iterator)
        count += 1
    rate = count * len(rows) * config.data.seq_len / (time.perf_counter() - begin)
    iterator.close()
    return place(first, setup.mesh, rows=rows, num_rows=config.data.batch_size), rate


def _time_steps(config: Config, setup: Setup, compiled: Any, batch: Batch, rounds: int) -> dict[int, list[float]]:
    state = setup.init()
    times: dict[int, list[float]] = {k: [] for k in config.passes.pass_counts}
    with jax.set_mesh(setup.mesh):
        at = _steps_that_draw(config)
        for round_ in range(rounds + 1):
            for k, values in times.items():
                state = _at_step(state, at[k])
                jax.block_until_ready(state)
                begin = time.perf_counter()
                state, metrics = compiled(state, batch)
                jax.block_until_ready((state, metrics))
                if round_:
                    values.append(time.perf_counter() - begin)
                assert int(metrics.passes) == k
    return times


def _at_step(state: TrainState, step: int) -> TrainState:
    return state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))


def _steps_that_draw(config: Config) -> dict[int, int]:
    """{pass count: a step of the run that draws it}; the search goes through the phases, so that it ends early."""
    counts, steps = config.passes.pass_counts, config.training.steps
    draw = jax.jit(lambda step: draw_branch(config.passes, seed=config.seed, step=step, total_steps=steps))
    found: dict[int, int] = {}
    starts = [start for start, _ in config.passes.phase_steps(steps)]
    for offset in range(1000):
        for start in starts:
            if start + offset < steps:
                found.setdefault(counts[int(draw(jnp.int32(start + offset)))], start + offset)
        if len(found) == len(counts):
            return found
    raise RuntimeError(f'no step near the start of a phase draws each of {counts} passes')


def _timing(config: Config, passes: int, seconds: list[float]) -> Timing:
    median = statistics.median(seconds)
    tokens = config.data.batch_size * config.data.seq_len
    flops = tokens * train_flops(config.model, seq_len=config.data.seq_len, passes=passes) / median
    return _with_rates(passes, median, (max(seconds) - min(seconds)) / median, tokens, flops)


def _mixture(config: Config, timings: list[Timing]) -> Timing:
    shares = expected_shares(config)
    seconds = sum(share * t.seconds for share, t in zip(shares, timings, strict=True))
    flops = sum(share * t.seconds * t.flops_per_second for share, t in zip(shares, timings, strict=True)) / seconds
    return _with_rates(0, seconds, 0.0, config.data.batch_size * config.data.seq_len, flops)


def _with_rates(passes: int, seconds: float, spread: float, tokens: int, flops: float) -> Timing:
    peak = peak_flops()
    return Timing(passes, seconds, spread, tokens / seconds, flops, flops / peak if peak else None)
