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
import numpy as np

from fbt_jax.batch import Batch
from fbt_jax.config import Config
from fbt_jax.data import Data
from fbt_jax.inference.decode import advance, begin, cast, read_prompts
from fbt_jax.inference.sampling import Sampling
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import batch_shards, local_rows, make_mesh, place, require_divisible
from fbt_jax.training.compiler import Setup, make_setup
from fbt_jax.training.flops import peak_flops, train_flops
from fbt_jax.training.pass_schedule import draw_branch
from fbt_jax.training.plan import expected_shares
from fbt_jax.training.step import TrainState

DECODED_TOKENS = 32


class Timing(NamedTuple):
    """Of the whole step over all devices; `passes` 0 is the mean of the run's mixture."""

    passes: int
    seconds: float  # median
    spread: float  # (largest - smallest) / median
    tokens_per_second: float
    flops_per_second: float  # model FLOPs, all devices
    mfu: float | None  # None where the chip's peak is unknown


class Decoding(NamedTuple):
    """Medians. `soft_step` and `fused_prompt` None: the model has no feedback."""

    rows: int
    prompt: int  # tokens of each row's prompt
    plain_prompt: float  # seconds
    fused_prompt: float | None  # in two passes
    standard_step: float
    soft_step: float | None


class Bench(NamedTuple):
    timings: list[Timing]
    compile_seconds: float
    peak_bytes: int  # of the step on one device, by the compiler
    allocated_bytes: int | None  # most that the device had in use, where it tells
    input_tokens_per_second: float
    decoding: Decoding | None  # None where the mesh splits positions, which decoding doesn't


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
    decoding = None if config.mesh.context > 1 else _time_decoding(config, setup, rounds)
    return Bench(timings, compile_seconds, int(peak), stats.get('peak_bytes_in_use'), input_rate, decoding)


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


def _time_decoding(config: Config, setup: Setup, rounds: int) -> Decoding:
    """Steps of a few rows after prompts of half the context (at most 512 tokens), parameters in the compute dtype."""
    model, fed_back = setup.model, config.model.fusion != 'none'
    rows, prompt = max(4, batch_shards(setup.mesh)), min(config.data.seq_len // 2, 512)
    new = min(DECODED_TOKENS, config.data.seq_len - prompt)
    index_B = jnp.arange(rows)
    options: dict[str, Any] = {
        'stop_ids': jnp.array([-1]),
        'rows_B': index_B,
        'key': jax.random.key(0),
        'sampling': Sampling(),
        'kind': 'greedy',
    }
    with jax.set_mesh(setup.mesh):
        params = cast(setup.init().params, dtype=compute_dtype(model.config))
        tokens_BP, lengths_B = np.zeros((rows, prompt), np.int32), np.full(rows, prompt, np.int32)

        def read(passes: int) -> Any:
            return read_prompts(model, params, tokens_BP, lengths_B, num_passes=passes, capacity=prompt + new)

        def decode(feedback: bool) -> float:
            state = begin(model, params, read(1), index_B < 0, max_tokens=new, **options)
            jax.block_until_ready(state)
            begun = time.perf_counter()
            jax.block_until_ready(advance(model, params, state, until=jnp.int32(new), feedback=feedback, **options))
            return (time.perf_counter() - begun) / (new - 1)

        def timed(passes: int) -> float:
            begun = time.perf_counter()
            jax.block_until_ready(read(passes))
            return time.perf_counter() - begun

        cases: dict[str, Any] = {'plain_prompt': lambda: timed(1), 'standard_step': lambda: decode(False)}
        if fed_back:
            cases |= {'fused_prompt': lambda: timed(2), 'soft_step': lambda: decode(True)}
        times: dict[str, list[float]] = {name: [] for name in cases}
        for round_ in range(rounds + 1):
            for name, run in cases.items():
                seconds = run()
                if round_:
                    times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Decoding(
        rows,
        prompt,
        medians['plain_prompt'],
        medians.get('fused_prompt'),
        medians['standard_step'],
        medians.get('soft_step'),
    )


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
