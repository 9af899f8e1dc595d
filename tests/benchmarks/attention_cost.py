"""Blockwise attention against the plain one: time and memory of result and gradients, in one process, interleaved.

python tests/benchmarks/attention_cost.py [--rounds=9]
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from fbt_jax.model.attention import attention

# Rows, positions, query heads, key/value heads, head width, window (0: full)
SHAPES = (
    (16, 32, 4, 2, 32, 0),
    (16, 64, 4, 2, 32, 0),
    (16, 128, 4, 2, 32, 64),
    (16, 128, 4, 2, 32, 0),
    (8, 512, 8, 4, 64, 128),
    (8, 512, 8, 4, 64, 0),
    (2, 2048, 8, 4, 64, 256),
    (2, 2048, 8, 4, 64, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f'{"B, T, N, M, H, window":>28} {"plain ms":>9} {"blockwise":>9} {"ratio":>6} {"temporaries MiB":>18}')
    for shape in SHAPES:
        batch, seq_len, heads, kv_heads, width, window = shape
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, dout = (
            jax.random.normal(key, (batch, seq_len, n, width))
            for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
        )
        segment_ids_BT = jnp.ones((batch, seq_len), jnp.int32)

        def run(name, q, k, v, dout, segment_ids_BT, window=window):  # type: ignore[no-untyped-def]
            options = {'segment_ids_BT': segment_ids_BT, 'window': window, 'implementation': name}
            out, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
            return out, pull(dout)

        args = (q, k, v, dout, segment_ids_BT)
        compiled = {n: jax.jit(functools.partial(run, n)).lower(*args).compile() for n in ('plain', 'blockwise')}
        times: dict[str, list[float]] = {name: [] for name in compiled}
        # Short ones more often: what they are measured in is noise.
        for round_ in range(1 + rounds * max(1, 1024 // seq_len)):
            for name, function in compiled.items():
                begin = time.perf_counter()
                jax.block_until_ready(function(*args))
                if round_:  # the first call is a warm-up
                    times[name].append(time.perf_counter() - begin)
        plain, blockwise = (statistics.median(times[name]) * 1e3 for name in compiled)
        mib = [function.memory_analysis().temp_size_in_bytes / 2**20 for function in compiled.values()]
        print(
            f'{", ".join(map(str, shape)):>28} {plain:9.1f} {blockwise:9.1f} {blockwise / plain:6.2f} '
            f'{mib[0]:8.1f} {mib[1]:9.1f}'
        )


if __name__ == '__main__':
    main()
