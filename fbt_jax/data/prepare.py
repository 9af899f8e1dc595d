"""Tokenises a source once: sources.py -> tokenizer -> shards of tokenised documents (documents.py).

Documents keep their order, and a shard ends with the document that fills it, so the shards are the same bytes whatever
the number of threads and however often the work was killed. Each finished shard is renamed into place and then gets a
line in progress.jsonl, from whose last line the same command goes on; index.json, written last, makes the folder
whole. The tokenizers' own threads do the work in parallel (1.7 times one core's speed on two, measured): there are no
worker processes to start, feed or lose.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from fbt_jax.config_data import Source
from fbt_jax.data import sources
from fbt_jax.data.documents import FORMAT, RECORD_TOKENS, read_index, shard_name
from fbt_jax.data.tokenizer import Tokenizer
from fbt_jax.errors import UserError
from fbt_jax.files import held, replace

SHARD_TOKENS = 2**24
MEAN_TOKENS = (
    64  # where documents are shorter on average, their number fills a shard: ArrayRecord's indices grow with it
)
# What is encoded at a time: tokenizers need a hundred bytes and more for each token on the way.
BLOCK_CHARACTERS = 2**22
# A longer text is encoded in pieces, cut where a line begins if there is such a place in a piece's second half, else
# before a space, else anywhere. Byte-level tokenizers encode word by word, so for them only the last changes tokens.
PIECE_CHARACTERS = 2**20
PROGRESS = 'progress.jsonl'
SHARD_KEYS = ('documents', 'tokens', 'bytes', 'sha256', 'lengths_sha256', 'size')  # what the index tells of each
FIRST_SKIPPED = 20  # of the documents left out, how many the index names
_CUTS = (re.compile(r'(?<=\n)(?=\S)'), re.compile(r'(?<=\S)(?= \S)'))


class _Encoded(NamedTuple):
    tokens: np.ndarray  # as stored
    text_bytes: int
    token_bytes: int  # that the tokens stand for: others where the tokenizer changes text
    item: sources.Item


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    poll: Callable[[], None] = lambda: None,
    progress_bar: bool = True,
) -> dict[str, Any]:
    """Makes or completes the folder `out`, and returns its index. `poll` is called between blocks; it may raise.

    Raises:
      UserError: the source can't be read, `out` holds something else, another process is at work there, or the
      tokenizer puts its BOS or EOS into a text.
    """
    with held(out, str(out), 'another process is preparing data there'):
        done = read_index(out) if (Path(out) / 'index.json').exists() else None
        try:
            files = sources.list_files(source)
        except UserError:
            if done is None or done['path'] != source.path:
                raise
            # The text is gone; what was made of it is whole.
            files = tuple(sources.File(*file) for file in done['source']['files'])
        header = _header(source, files, tokenizer, shard_tokens)
        if done is not None:
            _require_same(header, done, out)
            (Path(out) / PROGRESS).unlink(missing_ok=True)
            return done
        work = _Work(Path(out), header)
        reader = sources.read(source, work.files, work.position)
        seconds = 0.2 if sys.stderr.isatty() else 10  # a log file is no place for a moving bar
        bar = tqdm(
            desc=Path(out).name,
            unit=' documents',
            mininterval=seconds,
            delay=seconds,
            leave=False,
            disable=not progress_bar,
        )
        with bar:
            bar.update(work.total('documents'))
            for encoded in _encode(reader, tokenizer, work, poll):
                work.add(encoded)
                bar.update()
                if not bar.n % 1000:
                    bar.set_postfix_str(f'file {encoded.item.next.file + 1} of {len(work.files)}', refresh=False)
        return work.finish(tokenizer)


def _header(source: Source, files: tuple[sources.File, ...], tokenizer: Tokenizer, shard_tokens: int) -> dict[str, Any]:
    """All that decides what the shards hold."""
    masks = 'prompt_key' in source.options
    bits = (tokenizer.vocab_size - 1).bit_length() + masks
    return {
        'format': FORMAT,
        'path': source.path,
        'source': {'format': source.format, 'options': source.options, 'files': [list(file) for file in files]},
        'source_fingerprint': sources.fingerprint(source, files),
        'tokenizer_fingerprint': tokenizer.fingerprint,
        'vocab_size': tokenizer.vocab_size,
        'bos_id': tokenizer.bos_id,
        'eos_id': tokenizer.eos_id,
        'dtype': 'uint16' if bits <= 16 else 'uint32',
        'masks': masks,
        'shard_tokens': shard_tokens,
        'record_tokens': RECORD_TOKENS,
    }


def _require_same(header: dict[str, Any], found: dict[str, Any], out: str | Path) -> None:
    """UserError that says what differs, unless the folder was begun with these settings."""
    if found.get('tokenizer_fingerprint') != header['tokenizer_fingerprint']:
        raise UserError(f'{out} holds data made with another tokenizer; use a new folder')
    before, now = ({tuple(file) for file in h['source']['files']} for h in (found, header))
    if before != now:
        changed = sorted(name for name, _ in before ^ now)
        raise UserError(
            f'{out} was made from other files: {", ".join(sorted(set(changed))[:3])} came, went or changed size; '
            'use a new folder'
        )
    told_apart = dict.fromkeys(('source', 'source_fingerprint', 'files', 'path'))
    flat = [{**h, **h['source'], **told_apart} for h in (found, header)]
    for key, value in flat[1].items():
        if flat[0].get(key) != value:
            raise UserError(f'{out} was made with {key} = {flat[0].get(key)!r}, not {value!r}; use a new folder')


class _Work:
    """The folder in the making. What is not in progress.jsonl does not count, and is made again."""

    def __init__(self, out: Path, header: dict[str, Any]) -> None:
        self.out, self.header = out, header
        self.files = tuple(sources.File(*file) for file in header['source']['files'])
        self._progress = out / PROGRESS
        self._shards: list[dict[str, Any]] = []
        if self._progress.exists():
            began, *lines = _whole_lines(self._progress)
            if lines:  # else nothing was made yet, and another beginning is as good
                _require_same(header, began, out)
            self._shards = lines
        elif any(path.name != f'{PROGRESS}.tmp' for path in out.iterdir()):
            raise UserError(f'{out} is not empty and holds no prepared data: use a new folder')
        # Also drops the end of a line that a kill cut short.
        replace(self._progress, ''.join(json.dumps(line) + '\n' for line in (header, *self._shards)))
        self.position, self.skipped, self.first_skipped = sources.START, dict[str, int](), list[str]()
        if self._shards:
            last = self._shards[-1]
            self.position = sources.Position(*last['position'])
            self.skipped, self.first_skipped = dict(last['skipped']), list(last['first_skipped'])
        self._begin()

    def _begin(self) -> None:
        self._lengths: list[int] = []
        self._tokens = self._bytes = self._token_bytes = 0
        self._writer: Any = None

    def skip(self, item: sources.Item) -> None:
        self.skipped[item.skipped] = self.skipped.get(item.skipped, 0) + 1
        if len(self.first_skipped) < FIRST_SKIPPED:
            self.first_skipped.append(f'{item.where}: {item.skipped}')
        self.position = item.next

    def add(self, encoded: _Encoded) -> None:
        if encoded.item.skipped:
            return self.skip(encoded.item)
        if self._writer is None:
            from array_record.python.array_record_module import ArrayRecordWriter

            # Documents are read one by one and in any order: a record is a chunk of its own.
            self._writer = ArrayRecordWriter(f'{self._stem}.array_record.tmp', 'group_size:1,zstd:1')
        data = encoded.tokens.tobytes()
        size = RECORD_TOKENS * encoded.tokens.itemsize
        for start in range(0, len(data), size):
            self._writer.write(data[start : start + size])
        self._lengths.append(len(encoded.tokens))
        self._tokens += len(encoded.tokens)
        self._bytes += encoded.text_bytes
        self._token_bytes += encoded.token_bytes
        self.position = encoded.item.next
        full = self.header['shard_tokens']
        if self._tokens >= full or len(self._lengths) >= full // MEAN_TOKENS:
            self._end_shard()

    @property
    def _stem(self) -> Path:
        return self.out / shard_name(len(self._shards))

    def _end_shard(self) -> None:
        self._writer.close()
        stem = self._stem
        records = Path(f'{stem}.array_record')
        Path(f'{records}.tmp').replace(records)
        np.save(f'{stem}.npy', np.array(self._lengths, np.uint32))
        digest = hashlib.sha256(records.read_bytes() + Path(f'{stem}.npy').read_bytes())
        shard = {
            'documents': len(self._lengths),
            'tokens': self._tokens,
            'bytes': self._bytes,
            'token_bytes': self._token_bytes,
            'sha256': digest.hexdigest(),
            'lengths_sha256': hashlib.sha256(Path(f'{stem}.npy').read_bytes()).hexdigest(),
            'size': records.stat().st_size,
            'position': list(self.position),
            'skipped': self.skipped,
            'first_skipped': self.first_skipped,
        }
        with self._progress.open('a') as file:
            file.write(json.dumps(shard) + '\n')
        self._shards.append(json.loads(json.dumps(shard)))
        self._begin()

    def total(self, what: str) -> int:
        return sum(shard[what] for shard in self._shards)

    def finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        if self._writer is not None:
            self._end_shard()
        if not self._shards:
            left_out = ', '.join(f'{n} {reason}' for reason, n in self.skipped.items())
            files, options = (self.header['source'][key] for key in ('files', 'options'))
            read = ', '.join([f'{len(files)} file{"s" * (len(files) > 1)}', *(f'{k}={v}' for k, v in options.items())])
            told = f' ({left_out})' if left_out else ''
            raise UserError(f'{self.header["path"]} holds no document{told}: {read}')
        shards = [{k: shard[k] for k in SHARD_KEYS} for shard in self._shards]
        identity = [self.header['tokenizer_fingerprint'], *(shard['sha256'] for shard in shards)]
        index = self.header | {
            'documents': self.total('documents'),
            'tokens': self.total('tokens'),
            'bytes': self.total('bytes'),
            'token_bytes': self.total('token_bytes'),
            'skipped': self.skipped,
            'first_skipped': self.first_skipped,
            'fingerprint': hashlib.sha256('\n'.join(identity).encode()).hexdigest(),
            'shards': shards,
        }
        if tokenizer.file is not None:
            (self.out / 'tokenizer').mkdir(exist_ok=True)
            replace(self.out / 'tokenizer' / tokenizer.file[0], tokenizer.file[1])
        replace(self.out / 'index.json', json.dumps(index, indent=1) + '\n')
        self._progress.unlink()
        return index


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that was appended to, without a last one that was cut short."""
    lines = path.read_bytes().split(b'\n')[:-1]
    try:
        found = [json.loads(line) for line in lines]
        assert found and all(isinstance(line, dict) for line in found)
    except (ValueError, AssertionError):
        raise UserError(f'{path} is damaged: remove the folder and prepare it anew') from None
    return found


def _encode(
    items: Iterator[sources.Item], tokenizer: Tokenizer, work: _Work, poll: Callable[[], None]
) -> Iterator[_Encoded]:
    """The items in order, with their tokens as they are stored."""
    block: list[sources.Item] = []
    size = 0
    for item in items:
        block.append(item)
        size += len(item.text) + len(item.prompt)
        if size >= BLOCK_CHARACTERS or len(block) >= BLOCK_CHARACTERS // 64:
            yield from _encode_block(block, tokenizer, work.header)
            block, size = [], 0
            poll()
    if block:
        yield from _encode_block(block, tokenizer, work.header)


def _encode_block(block: list[sources.Item], tokenizer: Tokenizer, header: dict[str, Any]) -> Iterator[_Encoded]:
    """Put together in one array for all: documents may be as short as a line."""
    dtype = np.dtype(header['dtype']).newbyteorder('<')
    prompts, texts = (
        [pieces_of(text) for text in column] for column in zip(*((i.prompt, i.text) for i in block), strict=True)
    )
    encoded = _encode_pieces([p for both in zip(prompts, texts, strict=True) for ps in both for p in ps], tokenizer)
    ends = np.array([tokenizer.bos_id], np.uint32), np.array([tokenizer.eos_id], np.uint32)
    parts: list[np.ndarray] = []
    stops, masked = [], []  # where each document ends, and which parts are its prompt
    place = 0
    for prompt, text in zip(prompts, texts, strict=True):
        own = [ends[0], *(next(encoded) for _ in range(len(prompt) + len(text))), ends[1]]
        before = sum(len(ids) for ids in own[1 : 1 + len(prompt)])
        masked.append((place + 1, place + 1 + before))
        place += sum(map(len, own))
        stops.append(place)
        parts += own
    stream = np.concatenate(parts)
    _require_no_ends_in_text(stream, np.array(stops), block, tokenizer)
    bytes_N = np.cumsum(tokenizer.token_bytes[stream])
    token_bytes = np.diff(bytes_N[np.array(stops) - 1], prepend=0).tolist()
    stream = stream.astype(dtype)
    if header['masks']:
        for start, stop in masked:
            stream[start:stop] |= dtype.type(1 << (8 * dtype.itemsize - 1))
    for item, start, stop, stands_for in zip(block, [0, *stops[:-1]], stops, token_bytes, strict=True):
        yield _Encoded(stream[start:stop], len(item.text.encode()) + len(item.prompt.encode()), stands_for, item)


def _require_no_ends_in_text(
    stream_N: np.ndarray, stops_D: np.ndarray, block: list[sources.Item], tokenizer: Tokenizer
) -> None:
    """UserError unless each document has BOS at its start, EOS at its end and neither in between."""
    inner_N = (stream_N == tokenizer.bos_id) | (stream_N == tokenizer.eos_id)
    inner_N[stops_D - 1] = False
    inner_N[0] = False
    inner_N[stops_D[:-1]] = False
    if inner_N.any():
        item = block[int(np.searchsorted(stops_D, np.argmax(inner_N), side='right'))]
        raise UserError(f'{item.where}: the tokenizer encodes a text to BOS or EOS, which only mark its ends')


def _encode_pieces(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """`texts` encoded, about a block's characters at a time: a block with one long text is larger than a block."""
    start = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= BLOCK_CHARACTERS or end == len(texts):
            yield from tokenizer.encode_batch(texts[start:end])
            start, size = end, 0


def pieces_of(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """`text` in pieces of at most `limit` characters, see PIECE_CHARACTERS. '' is no piece."""
    pieces = []
    start = 0
    while len(text) - start > limit:
        end = start + limit
        for cut in _CUTS:
            places = [match.start() for match in cut.finditer(text, start + limit // 2, end + 1)]
            if places:
                end = places[-1]
                break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]] if text else []
