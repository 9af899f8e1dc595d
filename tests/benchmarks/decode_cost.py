"""What feedback costs in decoding: soft against standard steps, fused against plain prompts, bytes against paper.

    python tests/benchmarks/decode_cost.py [--config=configs/small.py --rows=4 --prompt=512 --tokens=32 --rounds=5]

One process, rounds interleaved, medians; random parameters of the config's shapes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.config_file import load_config_file
from fbt_jax.inference.decode import advance, begin, read_prompts
from fbt_jax.inference.sampling import Sampling
from fbt_jax.model import kv_cache
from fbt_jax.model.transformer import Transformer, compute_dtype, init_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', default='configs/small.py')
    for flag, default in (('rows', 4), ('prompt', 512), ('tokens', 32), ('rounds', 5)):
        parser.add_argument(f'--{flag}', type=int, default=default)
    args = parser.parse_args()
    model = Transformer(load_config_file(args.config, {}).model)
    params = jax.jit(lambda: init_params(model, jax.random.key(0)))()
    count = sum(x.size for x in jax.tree.leaves(params))
    shape, capacity = (args.rows, args.prompt), args.prompt + args.tokens
    print(f'{args.config}: {count / 1e6:.0f}M parameters, {args.rows} rows, prompts of {args.prompt}', end='')
    print(f', {args.tokens} new tokens, {compute_dtype(model.config)} on {jax.devices()[0].device_kind}')
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).astype(np.int32)
    lengths = np.full(args.rows, args.prompt, np.int32)
    common: dict[str, Any] = {
        'stop_ids': jnp.array([-1]),
        'rows_B': jnp.arange(args.rows),
        'key': jax.random.key(0),
        'sampling': Sampling(),
        'kind': 'greedy',
    }

    def prompt(passes: int) -> Any:
        return read_prompts(model, params, tokens, lengths, num_passes=passes, capacity=capacity)

    def steps(feedback: bool) -> float:
        rows = jnp.arange(args.rows)
        state = begin(model, params, prompt(1), rows < 0, max_tokens=args.tokens, **common)
        jax.block_until_ready(state)
        start = time.perf_counter()
        jax.block_until_ready(advance(model, params, state, until=jnp.int32(args.tokens), feedback=feedback, **common))
        return (time.perf_counter() - start) / (args.tokens - 1)

    def timed(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    cases: dict[str, Callable[[], float]] = {
        'plain prompt': lambda: timed(lambda: prompt(1)),
        'fused prompt': lambda: timed(lambda: prompt(2)),
        'standard step': lambda: steps(False),
        'soft step': lambda: steps(True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(args.rounds + 1):
        for name, run in cases.items():
            took = run()
            if round_:
                seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f'{name:<14} {value * 1e3:9.2f} ms')
    for over, under in (('fused prompt', 'plain prompt'), ('soft step', 'standard step')):
        ratio = statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))
        print(f'{over} / {under}: {ratio:.3f}')

    rows = jnp.arange(args.rows)
    state = jax.eval_shape(lambda: begin(model, params, prompt(1), rows < 0, max_tokens=args.tokens, **common))
    compiled = advance.lower(model, params, state, until=jnp.int32(1), feedback=True, **common).compile()
    memory = compiled.memory_analysis()
    itemsize = compute_dtype(model.config).itemsize
    paper = sum(x.nbytes for x in jax.tree.leaves(params))
    paper += kv_cache.num_bytes(model.config, rows=args.rows, capacity=capacity, itemsize=itemsize)
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    used -= memory.alias_size_in_bytes
    print(f'memory of a step: {used / 2**20:.0f} MiB, weights and cache on paper {paper / 2**20:.0f}', end='')
    print(f': {used / paper:.3f}')


if __name__ == '__main__':
    main()
