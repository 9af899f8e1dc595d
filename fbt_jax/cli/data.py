"""examples:
  fbt data tokenizer --source='text:books/*.txt.xz' --vocab-size=32768 --out=tokenizer.json
  fbt data prepare --source='jsonl:web-*.jsonl.zst#key=content' --tokenizer=tokenizer.json --out=data/web
  fbt data show --config=my_config.py --rows=2 --config.data.packing=best_fit
  fbt data show --workdir=runs/mine --step=5000 --passes=3

A source is FORMAT:PATH#OPTION=VALUE,...; PATH is a file or a glob, on disk or in a bucket. Formats and their options:
  text         unit=file (each file a document) or unit=line; .gz, .xz and .zst are unpacked
  jsonl        key=text, prompt_key= (text before it that no loss counts); .gz, .xz and .zst are unpacked
  parquet      key=text, prompt_key=
  arrayrecord  each record is a document
  tfds         PATH is DATA_DIR/NAME/VERSION; split=train, key=text, prompt_key=
  hf           a folder that datasets.save_to_disk wrote; key=text, prompt_key=
all with every=N (one document of N) or except_every=N (all others), to hold documents out.
"""

import argparse
import os
import sys

from fbt_jax.cli import config_overrides, no_more_arguments
from fbt_jax.config_data import BUILT_IN, FORMATS, DataConfig, Source, parse_source
from fbt_jax.config_file import load_config_file
from fbt_jax.errors import Ended, UserError

RAW = tuple(name for name in FORMATS if name != 'prepared')
SHOWN = 5  # of the documents left out

HELP = 'tokenise a source, look at rows, train a tokenizer'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_subparsers(dest='job', required=True, metavar='prepare|show|tokenizer', parser_class=type(parser))

    prepare = jobs.add_parser('prepare', help='tokenise a source once, into shards', allow_abbrev=False)
    prepare.add_argument('--source', required=True, metavar='FORMAT:PATH')
    prepare.add_argument('--tokenizer', required=True, metavar='NAME|FILE', help='bytes, bpe, or a file')
    prepare.add_argument('--tokenizer-pattern', default='', metavar='REGEX', help='how a .tiktoken file cuts text')
    prepare.add_argument('--bos', default='', metavar='TOKEN', help="default: the tokenizer file's own")
    prepare.add_argument('--eos', default='', metavar='TOKEN', help="default: the tokenizer file's own")
    prepare.add_argument('--out', required=True, metavar='DIR', help='the same command again goes on with it')
    prepare.add_argument('--workers', type=int, default=0, metavar='N', help='threads (default: all cores)')

    show = jobs.add_parser('show', help='print rows as the model sees them', allow_abbrev=False)
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument('--config', metavar='FILE', help='Python file with get_config(); --config.KEY=VALUE as in train')
    which.add_argument('--workdir', metavar='DIR', help='a run, with its own config')
    show.add_argument('--step', type=int, default=1, metavar='N', help='the step whose rows are shown (default: 1)')
    show.add_argument('--rows', type=int, default=1, metavar='N', help='how many of them (default: 1)')
    show.add_argument('--passes', type=int, default=2, metavar='K', help='plain prefixes of passes 2..K (default: 2)')

    tokenizer = jobs.add_parser('tokenizer', help='train a byte-level BPE', allow_abbrev=False)
    tokenizer.add_argument('--source', required=True, metavar='FORMAT:PATH')
    tokenizer.add_argument('--vocab-size', type=int, required=True, metavar='N', help='entries, BOS and EOS among them')
    tokenizer.add_argument('--out', required=True, metavar='FILE.json')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    if args.job == 'show' and args.config is not None:
        return _show(args, config_overrides(rest))
    no_more_arguments(rest)
    if args.job == 'show':
        return _show(args, {})
    return _prepare(args) if args.job == 'prepare' else _tokenizer(args)


def _prepare(args: argparse.Namespace) -> int:
    source = _raw_source(args.source)
    if args.tokenizer == 'none':
        raise UserError("--tokenizer='none': must be bytes, bpe or a file")
    if args.workers < 0:
        raise UserError(f'--workers={args.workers}: must not be negative')
    if args.workers:
        os.environ['RAYON_NUM_THREADS'] = str(args.workers)  # read when `tokenizers` is first used
    from fbt_jax.data.prepare import prepare
    from fbt_jax.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(
        DataConfig(tokenizer=args.tokenizer, tokenizer_pattern=args.tokenizer_pattern, bos=args.bos, eos=args.eos)
    )
    try:
        index = prepare(source, tokenizer, args.out)
    except Ended:
        print(f'fbt data: {args.out} is not complete; the same command goes on after its last shard', file=sys.stderr)
        raise
    print(
        f'{args.out}: {index["documents"]:,} documents, {index["tokens"]:,} tokens (BOS and EOS too), '
        f'{index["bytes"]:,} bytes of text in {len(index["shards"])} shards'
    )
    if index['token_bytes'] != index['bytes']:
        print(f'the tokenizer changes text: its tokens stand for {index["token_bytes"]:,} bytes')
    for reason, count in index['skipped'].items():
        print(f'left out, {reason}: {count:,}')
    for line in index['first_skipped'][:SHOWN]:
        print(f'  {line}')
    if sum(index['skipped'].values()) > SHOWN:
        print('  ...')
    print(f'data.source = prepared:{args.out}')
    return 0


def _tokenizer(args: argparse.Namespace) -> int:
    from pathlib import Path

    source, out = _raw_source(args.source), Path(args.out)
    if not args.out.endswith('.json'):
        raise UserError(f'--out={out}: must end in .json')
    if out.exists():
        raise UserError(f'--out={out}: is there already; remove it or name another')
    if not 258 <= args.vocab_size <= 2**24:
        raise UserError(f'--vocab-size={args.vocab_size}: must lie in 258..2**24 (256 bytes, BOS, EOS at least)')
    from tqdm import tqdm

    from fbt_jax.data import sources
    from fbt_jax.data.tokenizer import open_tokenizer, train_bpe
    from fbt_jax.files import replace

    files = sources.list_files(source)
    items = tqdm(sources.read(source, files), unit=' documents', mininterval=0.2 if sys.stderr.isatty() else 10)
    trained = train_bpe((part for item in items for part in (item.prompt, item.text) if part), args.vocab_size)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace(out, trained)
    except OSError as error:
        raise UserError(f'--out={out}: {error.strerror}') from None
    entries = open_tokenizer(DataConfig(tokenizer=args.out)).vocab_size
    print(f'{out}: a byte-level BPE of {entries:,} entries')
    if entries < args.vocab_size:
        print(f'fewer than --vocab-size={args.vocab_size}: the text has no more pairs to merge')
    return 0


def _raw_source(text: str) -> Source:
    source = parse_source(text, '--source')
    if source.format in (*BUILT_IN, 'prepared'):
        raise UserError(f'--source={text}: must be text to be read, FORMAT:PATH with one of {", ".join(RAW)}')
    return source


def _show(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    for name, value, least in (('step', args.step, 1), ('rows', args.rows, 1), ('passes', args.passes, 1)):
        if not least <= value < 2**31:
            raise UserError(f'--{name}={value}: must lie in {least}..2**31 - 1')
    config = load_config_file(args.config, overrides) if args.config is not None else None
    import jax.numpy as jnp
    import numpy as np

    from fbt_jax.batch import Batch
    from fbt_jax.data import open_data
    from fbt_jax.passes import Noise, plain_positions, step_key
    from fbt_jax.training.loop import resolve
    from fbt_jax.training.processes import settle_platform
    from fbt_jax.training.run_folder import data_folder, read_config

    settle_platform()
    config = resolve(config or read_config(args.workdir), args.workdir)
    if args.rows > config.data.batch_size:
        raise UserError(f'--rows={args.rows}: a step has data.batch_size = {config.data.batch_size} rows')
    data = open_data(config, data_folder(args.workdir) if args.workdir else None)
    count, first = args.rows, (args.step - 1) * config.data.batch_size
    batch = data.train_rows.batch(range(first, first + count))
    noise = Noise(
        step_key(config.seed, jnp.int32(args.step - 1)),
        jnp.arange(count, dtype=jnp.int32),
        config.passes.prefix_mixin,
        config.passes.jitter,
    )
    plain = {k: np.asarray(plain_positions(batch, k, noise)) for k in range(2, args.passes + 1)}
    for number in range(count):
        row = Batch(*(x[number] for x in batch))
        source = data.source_of(first + number)
        print(f'step {args.step}, row {number} (row {first + number} of the stream{source and f", {source}"})')
        for segment in range(1, int(row.segment_ids.max()) + 1):
            here = np.flatnonzero(row.segment_ids == segment)
            counted = int((row.weights[here] > 0).sum())
            prefixes = ', '.join(f'{int(plain[k][number][here].sum())} in pass {k}' for k in plain)
            print(
                f'  segment {segment}: positions {here[0]} to {here[-1]}, {counted} of {len(here)} targets count'
                + (f'; without feedback: the first {prefixes}' if prefixes else '')
            )
            print(f'    inputs {_ids(row.tokens[here])}; last target {row.targets[here[-1]]}')
            if data.tokenizer is not None:
                print(f'    {data.tokenizer.decode(row.tokens[here].tolist())!r}')
        padded = int((row.segment_ids == 0).sum())
        if padded:
            print(f'  padding: {padded} positions')
    return 0


def _ids(ids: 'list[int]', ends: int = 6) -> str:
    text = [str(i) for i in ids]
    return ' '.join(text if len(text) <= 2 * ends else [*text[:ends], '...', *text[-ends:]])
