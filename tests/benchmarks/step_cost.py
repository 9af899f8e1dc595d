"""What a step costs by its number of passes, against a hand-written single-pass step of the same model; in one
process, interleaved.

    python tests/benchmarks/step_cost.py                      # tiny, and a model of width 512
    python tests/benchmarks/step_cost.py --config=configs/tiny.py --rounds=15

Prints medians and their ratios, compile times and peak memory by number of passes. Not a test: the machine may be
noisy, so look at the ratios.
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
import optax

from fbt_jax.batch import Batch
from fbt_jax.config import Config, PassesConfig
from fbt_jax.config_file import load_config_file
from fbt_jax.losses import token_losses
from fbt_jax.model.transformer import Transformer
from fbt_jax.training.compiler import batch_shapes, make_init
from fbt_jax.training.optimizer import make_optimizer
from fbt_jax.training.pass_schedule import draw_branch
from fbt_jax.training.step import TrainState, make_train_step

ROOT = Path(__file__).parents[2]


def single_pass_step(config: Config, model: Transformer, optimizer: Any) -> Callable[..., Any]:
    """What one would write without any feedback: forward, loss, gradient, update."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        def loss(params: Any) -> jax.Array:
            hidden_BTD = model.apply(
                {'params': params}, batch.tokens, positions_BT=batch.positions, segment_ids_BT=batch.segment_ids
            )
            losses = token_losses(hidden_BTD, params['embedding'], batch.targets, vocab_size=model.config.vocab_size)
            return jnp.sum(losses.nll_BT * batch.weights) / jnp.sum(batch.weights)

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, step=state.step, fused=jnp.array(False)
        )
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), (value, optax.tree.norm(grads))

    return step


def random_batch(config: Config) -> Batch:
    shapes = batch_shapes(config)
    assert config.model.vocab_size is not None
    tokens = jax.random.randint(
        jax.random.key(0), (shapes.tokens.shape[0], shapes.tokens.shape[1] + 1), 0, config.model.vocab_size, jnp.int32
    )
    ones = jnp.ones(shapes.tokens.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(shapes.tokens.shape[1], dtype=jnp.int32), ones.shape)
    return Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones(ones.shape, jnp.float32), ones, positions)


def measure(config: Config, rounds: int) -> None:
    model = Transformer(config.model)
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    init = jax.jit(make_init(config, model, optimizer))
    batch = random_batch(config)

    def mixture(phases: Any) -> Callable[..., Any]:
        return make_train_step(dataclasses.replace(config, passes=PassesConfig(phases=phases)), model, optimizer)

    full = PassesConfig(phases=((0, (0.4, 0.3, 0.3)),))
    steps = {'single, by hand': single_pass_step(config, model, optimizer), 'mixture of 1, 2, 3': mixture(full.phases)}
    steps |= {
        'only 1': mixture(((0, (1.0,)),)),
        'only 2': mixture(((0, (0.0, 1.0)),)),
        'only 3': mixture(((0, (0.0, 0.0, 1.0)),)),
    }
    compiled, baseline = {}, 0.0
    print(f'{"step":20} {"compile s":>10} {"ratio":>6} {"peak MiB":>9} {"ratio":>6}')
    for name, step in steps.items():
        jax.clear_caches()
        begin = time.perf_counter()
        compiled[name] = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(init), batch_shapes(config)).compile()
        seconds = time.perf_counter() - begin
        memory = compiled[name].memory_analysis()
        peak = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**20
        if not baseline:
            baseline, base_peak = seconds, peak
        print(f'{name:20} {seconds:10.2f} {seconds / baseline:6.2f} {peak:9.0f} {peak / base_peak:6.2f}')

    # A step at which the mixture draws each number of passes: the compiled step is the same.
    draw = jax.jit(lambda s: draw_branch(full, seed=config.seed, step=s, total_steps=config.training.steps))
    at_step: dict[int, int] = {}
    for s in range(100):
        at_step.setdefault(int(draw(jnp.int32(s))) + 1, s)
    runs: dict[str, tuple[Callable[..., Any], int]] = {'single, by hand': (compiled['single, by hand'], 0)}
    runs |= {f'mixture drawing {k}': (compiled['mixture of 1, 2, 3'], at_step[k]) for k in (1, 2, 3)}
    states = {name: init() for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, (step, at) in runs.items():
            state = states[name]._replace(step=jnp.int32(at))
            jax.block_until_ready(state)
            begin = time.perf_counter()
            states[name], _ = step(state, batch)
            jax.block_until_ready(states[name])
            if round_:  # the first call is a warm-up
                times[name].append(time.perf_counter() - begin)
    hand = times['single, by hand']
    print(f'\n{"step":20} {"median s":>9} {"ratio of medians":>17} {"median of ratios":>17}')
    for name, values in times.items():
        paired = statistics.median(v / h for v, h in zip(values, hand, strict=True))
        ratio = statistics.median(values) / statistics.median(hand)
        print(f'{name:20} {statistics.median(values):9.3f} {ratio:17.3f} {paired:17.3f}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', help='config file (default: configs/tiny.py, then a model of width 512)')
    parser.add_argument('--rounds', type=int, default=9)
    args = parser.parse_args()
    tiny = load_config_file(args.config or str(ROOT / 'configs/tiny.py'), {'model.vocab_size': '2048'})
    print(f'{args.config or "tiny"}: {tiny.model}\n')
    measure(tiny, args.rounds)
    if not args.config:
        wide = dataclasses.replace(
            tiny,
            data=dataclasses.replace(tiny.data, batch_size=16, seq_len=256),
            model=dataclasses.replace(
                tiny.model, width=512, num_layers=6, num_heads=8, num_kv_heads=4, mlp_width=1408, full_attention_every=6
            ),
        )
        print(f'\nwidth 512: {wide.model}\n')
        measure(wide, args.rounds)


if __name__ == '__main__':
    main()
