"""Rows split over `context`: what attention.py does with keys and values against a ring of them, the same blocks.

attention.py gathers them from all devices or, within a window, takes them from the nearest ones before.

    python tests/benchmarks/context_cost.py [--rounds=5]

For context = 2, 4 and 8 of 8 devices, result and gradients: median wall times on fake CPU devices, bytes that a device
receives by kind of collective, and peak memory per device of the paper's shapes compiled for TPU v5e:2x4 (needs
libtpu). The ring lives only here: device i starts with its own keys and hands them on, and results are joined by
their log-sum-exp; steps that no window reaches are left out.
"""

import os

os.environ |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}  # before jax

import argparse
import importlib.util
import math
import re
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fbt_jax.config import MeshConfig
from fbt_jax.model import flash
from fbt_jax.model.attention import attention, first_visible
from fbt_jax.sharding import axis_size, make_mesh, mesh_axes
from fbt_jax.training.topologies import devices_of

KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'collective-permute', 'all-to-all')


# The ring


def ring_attention(q: Any, k: Any, v: Any, *, segment_ids_BT: Any, window: int) -> jax.Array:
    q_spec = mesh_axes('batch', 'length', 'heads', None)
    kv_spec, ids_spec = mesh_axes('batch', 'length', 'kv_heads', None), mesh_axes('batch', 'length')

    def on_device(q: Any, k: Any, v: Any, ids: Any) -> Any:
        seq_len = q.shape[1]
        offset = jax.lax.axis_index('context') * seq_len
        first_BS = first_visible(jax.lax.all_gather(ids, 'context', axis=1, tiled=True), window)
        first_BT = jax.lax.dynamic_slice_in_dim(first_BS, offset, seq_len, axis=1)
        # Behind its own keys a device needs window - 1 more.
        size = axis_size('context')
        steps = min(size, 1 + -(-(window - 1) // seq_len)) if window else size
        return ring(q, k, v, first_BT, (size, steps))

    in_specs = (q_spec, kv_spec, kv_spec, ids_spec)
    run = jax.shard_map(on_device, in_specs=in_specs, out_specs=q_spec, check_vma=False)
    return run(q, k, v, segment_ids_BT)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring(q: Any, k: Any, v: Any, first_BT: Any, size: tuple[int, int]) -> Any:
    return ring_forward(q, k, v, first_BT, size)[0]


def hand_on(arrays: Any, size: int, by: int = 1) -> Any:
    order = [(i, (i + by) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, 'context', order), arrays)


def relative(first_BT: Any, step: int) -> tuple[Any, Any, Any]:
    """Whether the keys of this step are behind the queries; first keys and offset of the queries relative to them."""
    index, seq_len = jax.lax.axis_index('context'), first_BT.shape[1]
    return index >= step, jnp.maximum(first_BT - (index - step) * seq_len, 0), jnp.int32(step * seq_len)


def ring_forward(q: Any, k: Any, v: Any, first_BT: Any, size: tuple[int, int]) -> Any:
    devices, steps = size
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    out, lse = jnp.zeros(q.shape, dtype), jnp.full(q.shape[:3], -jnp.inf, dtype)
    kv = k, v
    for step in range(steps):
        behind, first, offset = relative(first_BT, step)

        def join(out: Any, lse: Any, kv: Any, first: Any = first, offset: Any = offset) -> Any:
            part, part_lse = flash._by_platform(flash._forward, q, *kv, first, offset)
            both = jnp.logaddexp(lse, part_lse)
            # Blocks with no key to see have log 0 and 0/0.
            part = jnp.where(jnp.isfinite(part_lse)[..., None], part.astype(dtype), 0)
            weigh = lambda log: jnp.exp(log - both)[..., None]  # noqa: E731
            return out * weigh(lse) + part * weigh(part_lse), both

        out, lse = jax.lax.cond(behind, join, lambda out, lse, kv: (out, lse), out, lse, kv)
        if step < steps - 1:
            kv = hand_on(kv, devices)
    out = out.astype(q.dtype)
    return out, (q, k, v, first_BT, out, lse)


def ring_backward(size: tuple[int, int], saved: Any, dout: Any) -> Any:
    devices, steps = size
    q, k, v, first_BT, out, lse = saved
    dtype = lse.dtype
    kv, dkv, dq = (k, v), (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)), jnp.zeros(q.shape, dtype)
    for step in range(steps):
        behind, first, offset = relative(first_BT, step)

        def add(dq: Any, dkv: Any, kv: Any, first: Any = first, offset: Any = offset) -> Any:
            parts = flash._by_platform(flash._backward, q, *kv, first, offset, out, lse, dout)
            return dq + parts[0], (dkv[0] + parts[1], dkv[1] + parts[2])

        dq, dkv = jax.lax.cond(behind, add, lambda dq, dkv, kv: (dq, dkv), dq, dkv, kv)
        if step < steps - 1:
            kv, dkv = hand_on((kv, dkv), devices)
    dkv = hand_on(dkv, devices, 1 - steps)  # back home in one go
    return dq.astype(q.dtype), dkv[0].astype(k.dtype), dkv[1].astype(v.dtype), None


ring.defvjp(ring_forward, ring_backward)


# The comparison


def compile_one(name: str, mesh: Any, shape: tuple[int, ...], dtype: Any, implementation: str = 'blockwise') -> Any:
    """(compiled program, its arguments' shapes) of result and gradients."""
    batch, seq_len, heads, kv_heads, width, window = shape
    layout = NamedSharding(mesh, mesh_axes('batch', 'length', 'heads', None))
    like = lambda n: jax.ShapeDtypeStruct((batch, seq_len, n, width), dtype, sharding=layout)  # noqa: E731
    ids_layout = NamedSharding(mesh, mesh_axes('batch', 'length'))
    ids = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32, sharding=ids_layout)
    fetch = partial(attention, implementation=implementation)

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        attend = fetch if name == 'fetch' else ring_attention
        out, pull = jax.vjp(partial(attend, segment_ids_BT=ids, window=window), q, k, v)
        return out, pull(dout)

    args = (like(heads), like(kv_heads), like(kv_heads), like(heads), ids)
    with jax.set_mesh(mesh):
        return jax.jit(run, out_shardings=(layout, (layout,) * 3)).lower(*args).compile(), args


def received_bytes(text: str, context: int) -> dict[str, int]:
    """Bytes that a device receives, by kind, from the program's text; no collective is within a loop here."""
    sizes = {'f32': 4, 'bf16': 2, 's32': 4, 'pred': 1, 'u32': 4}
    share = (context - 1) / context
    factor = {'all-gather': share, 'reduce-scatter': context - 1, 'all-reduce': 2 * share, 'all-to-all': share}
    found: Counter[str] = Counter()
    for line in text.splitlines():
        for kind in KINDS:
            if match := re.search(rf'= (.*?) {kind}(-start)?\(', line):
                parts = re.findall(r'(\w+)\[([\d,]*)\]', match[1])
                if match[2]:
                    parts = parts[len(parts) // 2 :]
                whole = sum(sizes[t] * math.prod(int(n) for n in dims.split(',') if n) for t, dims in parts)
                found[kind] += round(whole * factor.get(kind, 1))
    return dict(found)


def measure(context: int, window: int, rounds: int) -> None:
    mesh = make_mesh(MeshConfig(fsdp=8 // context, context=context))
    shape = (8 // context, 2048, 4, 2, 64, window)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {'fetch': [], 'ring': []}
    results, runs, args = {}, {}, []
    for name in times:
        runs[name], shapes = compile_one(name, mesh, shape, jnp.float32)
        if not args:
            args = [jax.device_put(rng.normal(size=s.shape).astype(np.float32), s.sharding) for s in shapes[:4]]
            ids_BT = np.sort(rng.integers(1, 4, size=shapes[4].shape), axis=1).astype(np.int32)
            args.append(jax.device_put(ids_BT, shapes[4].sharding))
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            results[name] = jax.block_until_ready(run(*args))
            if round_:  # the first call is a warm-up
                times[name].append(time.perf_counter() - begin)
    for one, other in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    fetch, ring_ = (statistics.median(t) * 1e3 for t in times.values())
    print(f'{context:7} {window:7} {fetch:10.0f} {ring_:8.0f} {ring_ / fetch:6.2f}', end='   ')
    counts = {name: received_bytes(run.as_text(), context) for name, run in runs.items()}
    told = [
        f'{name} {sum(c.values()) / 2**20:.2f} ({", ".join(f"{k} {v / 2**20:.2f}" for k, v in c.items())})'
        for name, c in counts.items()
    ]
    print('; '.join(told))


def peaks(context: int, seq_len: int, window: int) -> None:
    devices = devices_of('v5e:2x4', slices=1)
    mesh = make_mesh(MeshConfig(fsdp=8 // context, context=context), devices)
    shape = (8 // context, seq_len, 16, 8, 96, window)
    programs = {
        'fetch': ('fetch', 'blockwise'),
        'ring': ('ring', 'blockwise'),
        'fetch, splash': ('fetch', 'splash'),
    }
    peak = {
        label: compile_one(name, mesh, shape, jnp.bfloat16, kernel)[0].memory_analysis().peak_memory_in_bytes / 2**20
        for label, (name, kernel) in programs.items()
    }
    print(f'{context:7} {seq_len:7} {window:7} ' + ' '.join(f'{mib:14.0f}' for mib in peak.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=5)
    rounds = parser.parse_args().rounds
    print('float32, T = 2048, N = 4, M = 2, H = 64, 8/context rows, on 8 fake CPU devices')
    print(f'{"context":>7} {"window":>7} {"fetch ms":>10} {"ring ms":>8} {"ratio":>6}   MiB received per device')
    for window in (0, 256):
        for context in (2, 4, 8):
            measure(context, window, rounds)
    if importlib.util.find_spec('libtpu') is None:
        print('\nno libtpu: nothing is compiled for TPU')
        return
    print('\nTPU v5e:2x4, bfloat16, N = 16, M = 8, H = 96, 8/context rows: peak MiB per device')
    print(f'{"context":>7} {"T":>7} {"window":>7} {"fetch":>14} {"ring":>14} {"fetch, splash":>14}')
    for seq_len, window in ((8192, 0), (8192, 2048), (32768, 0)):
        for context in (2, 4, 8):
            peaks(context, seq_len, window)


if __name__ == '__main__':
    main()
