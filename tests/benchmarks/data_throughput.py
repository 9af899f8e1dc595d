"""Prints what the input pipeline costs on one core, beside the tokenizer alone and a bare memmap reader.

    python tests/benchmarks/data_throughput.py [--source=FORMAT:PATH] [--tokenizer=bpe|FILE --bos=... --eos=...]

Raw text: files -> tokens -> shards -> packed batches of a whole epoch, against the tokenizer library's own batch call
on texts that are in memory already. Prepared: shards -> batches, against slices of a flat memmap of the same tokens.
Then the seconds from nothing to the first batch at several positions. The process keeps to one core; rounds alternate.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CORE = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})
os.environ['RAYON_NUM_THREADS'] = '1'

import numpy as np  # noqa: E402

from fbt_jax.config import Config, DataConfig  # noqa: E402
from fbt_jax.config_data import parse_source  # noqa: E402
from fbt_jax.data import corpus, open_data, sources  # noqa: E402
from fbt_jax.data.documents import Prepared  # noqa: E402
from fbt_jax.data.prepare import prepare  # noqa: E402
from fbt_jax.data.tokenizer import open_tokenizer  # noqa: E402

ROUNDS = 5


def median_rates(work: dict[str, Callable[[], int]], rounds: int = ROUNDS) -> dict[str, float]:
    """Tokens per second of each, in interleaved rounds."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            begin = time.perf_counter()
            tokens = run()
            rates[name].append(tokens / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--source', help='default: the embedded novels, a chapter a file')
    parser.add_argument('--tokenizer', default='bpe')
    parser.add_argument('--bos', default='')
    parser.add_argument('--eos', default='')
    parser.add_argument('--seq-len', type=int, default=2048)
    parser.add_argument('--batch-size', type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    if args.source is None:
        (folder / 'text').mkdir()
        for i, text in enumerate(corpus.split().train):
            (folder / 'text' / f'{i:03d}.txt').write_text(text)
        args.source = f'text:{folder}/text/*.txt'
    source = parse_source(args.source)
    keys = {'tokenizer': args.tokenizer, 'bos': args.bos, 'eos': args.eos}
    tokenizer = open_tokenizer(DataConfig(**keys))
    texts = [item.text for item in sources.read(source, sources.list_files(source)) if not item.skipped]
    print(f'{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f}M characters; rows of {args.seq_len:,}', end='')
    print(f', {args.batch_size} a batch; one core')

    def bare() -> int:
        return sum(
            len(ids)
            for start in range(0, len(texts), 1000)
            for ids in tokenizer.encode_batch(texts[start : start + 1000])
        )

    attempt = iter(range(10**6))

    def config(out: Path, workers: int = 0) -> Config:
        data = DataConfig(
            source=f'prepared:{out}', seq_len=args.seq_len, batch_size=args.batch_size, workers=workers, **keys
        )
        return Config(data=data)

    def read(out: Path, steps: int, workers: int = 0) -> int:
        iterator = open_data(config(out, workers)).train_iterator()
        for _ in range(steps):
            next(iterator)
        iterator.close()
        return steps * args.batch_size * args.seq_len

    def raw() -> int:
        out = folder / f'raw{next(attempt)}'
        tokens = prepare(source, tokenizer, out, progress_bar=False)['tokens']
        read(out, -(-tokens // (args.batch_size * args.seq_len)))
        return tokens

    rates = median_rates({'tokenizer': bare, 'raw': raw})
    print(f'tokenizer alone           {rates["tokenizer"] / 1e6:8.2f}M tokens/s')
    print(
        f'raw text to batches       {rates["raw"] / 1e6:8.2f}M tokens/s   {rates["raw"] / rates["tokenizer"]:.2f} of it'
    )

    out = folder / 'raw0'
    found = Prepared(out)
    flat = np.memmap(folder / 'flat', found.index['dtype'], 'w+', shape=(int(found.tokens_S.sum()),))
    flat[:] = np.resize(np.arange(found.index['vocab_size'], dtype=flat.dtype), flat.shape)
    steps = 200
    width = args.seq_len
    last = (len(flat) - 1) // width
    rows = np.random.default_rng(0).integers(0, last, (steps, args.batch_size))

    def memmap() -> int:
        for numbers in rows:
            batch = np.stack([flat[i * width : (i + 1) * width + 1] for i in numbers]).astype(np.int32)
            tokens, targets = np.ascontiguousarray(batch[:, :-1]), np.ascontiguousarray(batch[:, 1:])
            assert tokens.shape == targets.shape
        return rows.size * width

    rates = median_rates({'memmap': memmap, 'prepared': lambda: read(out, steps)})
    print(f'bare memmap               {rates["memmap"] / 1e6:8.1f}M tokens/s')
    share = rates['prepared'] / rates['memmap']
    print(f'prepared shards to batches{rates["prepared"] / 1e6:8.1f}M tokens/s   {share:.2f} of it')

    epoch = int(found.tokens_S.sum()) // (args.batch_size * args.seq_len)
    for step in (0, epoch // 2, 10 * epoch + 1, 10**6 * epoch + 1):
        seconds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            iterator = open_data(config(out, workers=1)).train_iterator()
            iterator.set_state({'next_index': step})
            next(iterator)
            seconds.append(time.perf_counter() - begin)
            iterator.close()
        print(f'first batch at step {step:>12,} after {statistics.median(seconds):.3f} s')


if __name__ == '__main__':
    main()
