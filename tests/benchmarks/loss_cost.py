"""The chunked loss against whole logits: time and memory of loss and gradient at the paper's vocabulary, interleaved.

python tests/benchmarks/loss_cost.py [--vocab=100352 --width=256 --rows=4 --seq-len=256 --rounds=5]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fbt_jax.losses import chunk_count, token_losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (('vocab', 100_352), ('width', 256), ('rows', 4), ('seq-len', 256), ('rounds', 5)):
        parser.add_argument(f'--{flag}', type=int, default=default)
    args = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    hidden_BTD = jax.random.normal(keys[0], (args.rows, args.seq_len, args.width))
    embedding_VD = jax.random.normal(keys[1], (args.vocab, args.width)) * args.width**-0.5
    targets_BT = jax.random.randint(keys[2], (args.rows, args.seq_len), 0, args.vocab)

    def whole(hidden_BTD: jax.Array, embedding_VD: jax.Array) -> jax.Array:
        log_probs_BTV = jax.nn.log_softmax(jnp.einsum('btd,vd->btv', hidden_BTD, embedding_VD))
        return -jnp.sum(jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1))

    def chunked(chunks: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda hidden_BTD, embedding_VD: jnp.sum(
            token_losses(hidden_BTD, embedding_VD, targets_BT, vocab_size=args.vocab, chunks=chunks).nll_BT
        )

    default = chunk_count(hidden_BTD, args.vocab)
    losses = {'whole logits': whole, f'{default} chunks (default)': chunked(default)}
    losses |= {f'{c} chunks': chunked(c) for c in (1, 7, 28, 112) if c != default and args.vocab % c == 0}
    compiled = {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hidden_BTD, embedding_VD).compile()
        for name, loss in losses.items()
    }
    times: dict[str, list[float]] = {name: [] for name in losses}
    for round_ in range(args.rounds + 1):
        for name, run in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(hidden_BTD, embedding_VD))
            if round_:  # the first call is a warm-up
                times[name].append(time.perf_counter() - begin)
    base = statistics.median(times['whole logits'])
    print(f'{args.rows} x {args.seq_len} tokens, width {args.width}, vocabulary {args.vocab:,}; loss and gradient')
    print(f'{"":26} {"median s":>9} {"ratio":>6} {"temporaries MiB":>16}')
    for name, run in compiled.items():
        seconds = statistics.median(times[name])
        mib = run.memory_analysis().temp_size_in_bytes / 2**20
        print(f'{name:26} {seconds:9.2f} {seconds / base:6.2f} {mib:16.0f}')


if __name__ == '__main__':
    main()
