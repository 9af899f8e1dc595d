"""Our one-pass train step against a minimal single-file JAX step and a PyTorch step of equal shapes; one process,
interleaved.

    python tests/benchmarks/peer_step.py [--rows=4 --seq-len=512 --rounds=5] [--no-torch]

The same architecture (norms around branches, QK norm, RoPE, grouped queries, head gates, SwiGLU, tied embedding) with
Muon for the matrices and Adam for the rest, float32, whole rows of one document, full attention. The minimal JAX step
has what one would write first: attention over all T x T scores, all logits at once. PyTorch has its fused attention
and its own Muon. Not a test: look at the ratios.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from fbt_jax.batch import Batch
from fbt_jax.config import Config, MeshConfig, PassesConfig
from fbt_jax.config_file import load_config_file
from fbt_jax.sharding import make_mesh
from fbt_jax.training.compiler import make_setup

ROOT = Path(__file__).parents[2]
EPS = 1e-6


def make_config(rows: int, seq_len: int) -> Config:
    """30M parameters."""
    config = load_config_file(str(ROOT / 'configs/tiny.py'), {'model.vocab_size': '8192'})
    model = dataclasses.replace(
        config.model, width=512, num_layers=8, num_heads=8, num_kv_heads=4, mlp_width=1408, window=0, remat='nothing'
    )
    data = dataclasses.replace(config.data, batch_size=rows, seq_len=seq_len)
    return dataclasses.replace(
        config, model=model, data=data, passes=PassesConfig(phases='one_pass'), mesh=MeshConfig(fsdp=1)
    )


# The minimal JAX step


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)


def rope(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def minimal_loss(params: Any, tokens: jax.Array, targets: jax.Array, c: Any) -> jax.Array:
    embedding = params['embedding']
    x = norm(embedding[tokens], params['input_norm'])
    batch, length = tokens.shape
    mask = jnp.tril(jnp.ones((length, length), bool))

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = norm(x, p['attention_norm'])
        q = rope(norm((y @ p['query']).reshape(batch, length, c.num_heads, -1), p['query_norm']))
        k = rope(norm((y @ p['key']).reshape(batch, length, c.num_kv_heads, -1), p['key_norm']))
        v = (y @ p['value']).reshape(batch, length, c.num_kv_heads, -1)
        k, v = (jnp.repeat(a, c.num_heads // c.num_kv_heads, axis=2) for a in (k, v))
        scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) * c.head_dim**-0.5
        out = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
        out = (out * jax.nn.sigmoid(y @ p['head_gate'])[..., None]).reshape(batch, length, -1) @ p['output']
        x += c.num_layers**-0.5 * norm(out, p['attention_post_norm'])
        y = norm(x, p['mlp_norm'])
        out = (jax.nn.silu(y @ p['mlp_gate']) * (y @ p['mlp_up'])) @ p['mlp_down']
        return x + c.num_layers**-0.5 * norm(out, p['mlp_post_norm']), None

    x, _ = jax.lax.scan(layer, x, params['layers'])
    logits = norm(x, params['final_norm']) @ embedding.T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def minimal_step(params: Any, c: Any) -> tuple[Callable[..., Any], Any]:
    """(step, initial state) for the parameters of our model, with `kernel` and `scale` levels removed."""

    def is_matrix(path: Any) -> bool:
        return path[0].key == 'layers' and path[-1].key not in ('head_gate',) and 'norm' not in path[-1].key

    axes = jax.tree_util.tree_map_with_path(
        lambda path, _: MuonDimensionNumbers(reduction_axis=1, output_axis=2) if is_matrix(path) else None, params
    )
    optimizer = muon(1e-2, muon_weight_dimension_numbers=axes)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(minimal_loss)(params, *batch, c)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def stripped(tree: Any) -> Any:
    """Without the last level of {'kernel': x} and {'scale': x}."""
    if not isinstance(tree, dict):
        return tree
    return next(iter(tree.values())) if set(tree) & {'kernel', 'scale'} else {k: stripped(v) for k, v in tree.items()}


# The PyTorch step


def torch_step(params: Any, tokens: np.ndarray, targets: np.ndarray, c: Any) -> Callable[[], float]:
    import torch
    from torch.nn import functional

    torch.set_num_threads(2)
    leaves = {k: torch.tensor(np.asarray(v), requires_grad=True) for k, v in params.items() if k != 'layers'}
    layers = [
        {k: torch.tensor(np.asarray(v[i]), requires_grad=True) for k, v in params['layers'].items()}
        for i in range(c.num_layers)
    ]
    matrices = [p for layer in layers for k, p in layer.items() if 'norm' not in k and k != 'head_gate']
    others = [p for layer in layers for k, p in layer.items() if 'norm' in k or k == 'head_gate'] + [*leaves.values()]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3, fused=True)]
    tokens_t, targets_t = torch.tensor(tokens).long(), torch.tensor(targets).long()
    batch, length = tokens.shape
    half = c.head_dim // 2
    angle = torch.arange(length)[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = torch.cos(angle), torch.sin(angle)

    def rotate(x: Any) -> Any:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def rms(x: Any, scale: Any) -> Any:
        return functional.rms_norm(x, (x.shape[-1],), scale, EPS)

    def step() -> float:
        x = rms(functional.embedding(tokens_t, leaves['embedding']), leaves['input_norm'])
        for p in layers:
            y = rms(x, p['attention_norm'])
            q = rotate(rms((y @ p['query']).view(batch, length, c.num_heads, -1), p['query_norm']))
            k = rotate(rms((y @ p['key']).view(batch, length, c.num_kv_heads, -1), p['key_norm']))
            v = (y @ p['value']).view(batch, length, c.num_kv_heads, -1)
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            out = (out * torch.sigmoid(y @ p['head_gate'])[..., None]).reshape(batch, length, -1) @ p['output']
            x = x + c.num_layers**-0.5 * rms(out, p['attention_post_norm'])
            y = rms(x, p['mlp_norm'])
            out = (functional.silu(y @ p['mlp_gate']) * (y @ p['mlp_up'])) @ p['mlp_down']
            x = x + c.num_layers**-0.5 * rms(out, p['mlp_post_norm'])
        logits = rms(x, leaves['final_norm']) @ leaves['embedding'].T
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets_t.view(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (('rows', 4), ('seq-len', 512), ('rounds', 5)):
        parser.add_argument(f'--{flag}', type=int, default=default)
    parser.add_argument('--no-torch', action='store_true')
    args = parser.parse_args()
    config = make_config(args.rows, args.seq_len)
    setup = make_setup(config, make_mesh(config.mesh, jax.devices()[:1]))
    stream = np.random.default_rng(0).integers(8192, size=(args.rows, args.seq_len + 1), dtype=np.int32)
    tokens, targets = stream[:, :-1], stream[:, 1:]
    ones = np.ones(tokens.shape, np.int32)
    positions = np.broadcast_to(np.arange(args.seq_len, dtype=np.int32), tokens.shape)
    batch = Batch(tokens, targets, ones.astype(np.float32), ones, positions)

    state = {'ours': setup.init()}
    params = stripped({k: v for k, v in state['ours'].params.items() if k != 'fusion'})
    minimal, state['minimal JAX'] = minimal_step(jax.tree.map(jnp.copy, params), setup.model.config)
    compiled = {'ours': setup.compile(config), 'minimal JAX': minimal}
    inputs: dict[str, Any] = {'ours': batch, 'minimal JAX': (tokens, targets)}
    print(f'{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f}M parameters, {args.rows} rows of {args.seq_len}')

    def run(name: str) -> float:
        state[name], out = compiled[name](state[name], inputs[name])
        return float(out.loss if name == 'ours' else out)

    steps: dict[str, Callable[[], float]] = {name: (lambda name=name: run(name)) for name in compiled}  # type: ignore[misc]
    if not args.no_torch:
        steps['PyTorch'] = torch_step(params, tokens, targets, setup.model.config)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            loss = step()
            times[name].append(time.perf_counter() - begin)
            if round_ == 0:
                print(f'{name}: loss of the first step {loss:.4f}')
    print(f'{"":12} {"median s":>9} {"ours / it":>10}')
    for name, values in times.items():
        paired = statistics.median(o / v for o, v in zip(times['ours'][1:], values[1:], strict=True))
        print(f'{name:12} {statistics.median(values[1:]):9.3f} {paired:10.3f}')


if __name__ == '__main__':
    main()
