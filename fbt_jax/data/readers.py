"""One file of a source read item by item: what each format's library is asked, and what is left to check.

A reader is a generator over the items of one file that `Part.wants`, from item `Part.first` on. It decides nothing
about a document's content but that it is there and is a string. Files are read in pieces: however long a file is,
memory holds one item, or one batch of Parquet, Arrow or ArrayRecord as they were written, at a time.
"""

import dataclasses
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fbt_jax.config_data import Source
from fbt_jax.errors import UserError

_CHUNK_BYTES = 2**16  # what an error in a read loses, so that messages are that exact
_BATCH_ROWS = 64  # few, since a row may be a book
_ARROW_END = b'\xff\xff\xff\xff\x00\x00\x00\x00'
# What the libraries raise on damaged files; pyarrow's own errors are ValueErrors and RuntimeErrors.
DAMAGE = (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError)


class Raw(NamedTuple):
    """An item as its file holds it. `at` is 'line 12', 'record 7' or ''."""

    number: int
    text: str | bytes
    prompt: str | bytes
    at: str


@dataclasses.dataclass
class Part:
    """One file being read: from which item, and how far its reader has come."""

    source: Source
    fs: Any
    path: str
    size: int
    first: int
    index: int  # of the file
    reached: int = 0  # records, or bytes of text after decompression

    def wants(self, number: int) -> bool:
        return number >= self.first and (by_file(self.source) or chosen(self.source, self.index + number))


def by_file(source: Source) -> bool:
    return source.format == 'text' and source.option('unit', 'file') == 'file'


def chosen(source: Source, number: int) -> bool:
    """Whether `every` or `except_every`, which are exact complements, leave item `number` in.

    Items are numbered from their file's own number on, so that of many short files as many are taken as of a long one.
    """
    if 'every' in source.options:
        every = int(source.options['every'])
        return number % every == every - 1
    every = int(source.option('except_every', '0'))
    return every == 0 or number % every != every - 1


def utf8(value: str | bytes) -> str | None:
    """`value` as a string that UTF-8 can hold, which one with a lone surrogate (JSON's "\\ud800") is not; else None."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
    except UnicodeError:
        return None
    return value


def _text(part: Part) -> Iterator[Raw]:
    if by_file(part.source):
        yield Raw(0, b''.join(_pieces(part, lines=False)), b'', '')
        return
    for number, line in enumerate(_pieces(part, lines=True)):
        if part.wants(number):
            yield Raw(number, line.removesuffix(b'\n').removesuffix(b'\r'), b'', f'line {number + 1}')


def _jsonl(part: Part) -> Iterator[Raw]:
    for number, line in enumerate(_pieces(part, lines=True)):
        if not part.wants(number):
            continue
        at, told = f'line {number + 1}', f'line {number + 1} (byte {part.reached})'
        text = utf8(line.strip())
        if not text:
            yield Raw(number, line.strip(), b'', at)  # left out by the same rules as any other item
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = f'{error.msg} at its column {error.colno}' if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f'{part.path}: {told}: {why}; must be one JSON object a line') from error
        if not isinstance(record, dict):
            raise UserError(f'{part.path}: {told}: is no object; must be one JSON object a line')
        yield Raw(number, *_values(part, record, told), at)


def _pieces(part: Part, *, lines: bool) -> Iterator[bytes]:
    """A file's lines, or chunks of it, decompressed. While a piece is looked at, `reached` is where it starts."""
    with part.fs.open(part.path, 'rb') as file, _decompressed(part, file) as stream:
        for piece in stream if lines else iter(lambda: stream.read1(_CHUNK_BYTES), b''):
            yield piece
            part.reached += len(piece)


def _decompressed(part: Part, file: Any) -> io.BufferedIOBase:
    suffix = part.path.rpartition('.')[2]
    if suffix in ('gz', 'xz', 'zst') and part.size == 0:
        raise EOFError('empty, not even a header')  # which only xz's reader says by itself
    match suffix:
        case 'gz':
            return gzip.GzipFile(fileobj=file)
        case 'xz':
            return lzma.LZMAFile(file)
        case 'zst':
            import pyarrow

            # Not zstandard's own reader: that one ends a file which is cut short as if it were whole.
            file = pyarrow.CompressedInputStream(file, 'zstd')
    return io.BufferedReader(file, _CHUNK_BYTES)


def _parquet(part: Part) -> Iterator[Raw]:
    from pyarrow import parquet

    # A column is read piece by piece: without a buffer, or with `pre_buffer`, a whole row group of it at once.
    with part.fs.open(part.path, 'rb') as file:
        options = {'buffer_size': _CHUNK_BYTES, 'pre_buffer': False, 'page_checksum_verification': True}
        table = parquet.ParquetFile(file, **options)
        columns = _columns(part, table.schema_arrow)
        after = 0
        for group in range(table.num_row_groups):
            at, after = after, after + table.metadata.row_group(group).num_rows
            if after > part.first:
                yield from _rows(part, table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns), at)


def _hf(part: Part) -> Iterator[Raw]:
    from pyarrow import ipc

    with part.fs.open(part.path, 'rb') as file:
        # A stream cut between two batches reads as if it ended there.
        file.seek(max(0, part.size - len(_ARROW_END)))
        if file.read() != _ARROW_END:
            raise EOFError('no end-of-stream marker')
        file.seek(0)
        schema = ipc.open_stream(file).schema
        fields = [schema.get_field_index(name) for name in _columns(part, schema)]
        file.seek(0)
        with ipc.open_stream(file, options=ipc.IpcReadOptions(included_fields=fields)) as stream:
            pieces = (batch[i : i + _BATCH_ROWS] for batch in stream for i in range(0, batch.num_rows, _BATCH_ROWS))
            yield from _rows(part, pieces, 0)


def _columns(part: Part, schema: Any) -> list[str]:
    """The columns to read, each of strings or bytes; UserError otherwise."""
    from pyarrow import types

    for name in _keys(part.source):
        if schema.names.count(name) > 1:
            raise UserError(f'{part.path}: has {schema.names.count(name)} columns {name!r}; must have one')
        if name not in schema.names:
            raise UserError(f'{part.path}: no column {name!r}; there are {", ".join(map(repr, schema.names))}')
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not re.fullmatch(r'(large_)?(string|binary)(_view)?', str(kind)):
            raise UserError(f'{part.path}: column {name!r} holds {kind}; must hold strings')
    return list(dict.fromkeys(_keys(part.source)))


def _rows(part: Part, batches: Iterable[Any], number: int) -> Iterator[Raw]:
    """The items of record batches whose first row has this number."""
    import pyarrow

    for batch in batches:
        if number + batch.num_rows > part.first:
            _require_sound(batch.column(name) for name in _keys(part.source))
            # As bytes, since strings that are no UTF-8 are told later.
            columns = {name: batch.column(name).cast(pyarrow.large_binary()) for name in _keys(part.source)}
            for i in filter(part.wants, range(number, number + batch.num_rows)):
                record = {name: column[i - number].as_py() for name, column in columns.items()}
                yield Raw(i, *_values(part, record, f'record {i}'), f'record {i}')
        number += batch.num_rows
        part.reached = number


def _require_sound(columns: Iterable[Any]) -> None:
    """pyarrow's error for a damaged column, reading which would end the process. Invalid UTF-8 is no such damage."""
    for column in columns:
        try:
            column.validate(full=True)
        except ValueError as error:
            if 'UTF8' not in str(error):
                raise


def _arrayrecord(part: Part) -> Iterator[Raw]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(part.path, options='readahead_buffer_size:0,max_parallelism:0')
    try:
        count = reader.num_records()
        if part.first < count:
            reader.seek(part.first)
        for number in range(part.first, count):
            part.reached = number
            text = reader.read()
            if part.wants(number):
                yield Raw(number, text, b'', f'record {number}')
    finally:
        reader.close()


def tfds_shards(source: Source, path: str) -> tuple[Any, dict[str, int]]:
    """The builder, and each shard's name -> its records; the data source goes through them in this order."""
    if not (Path(path) / 'features.json').is_file():
        raise UserError(f'{source.path}: no features.json there; must be a TFDS folder, DATA_DIR/NAME/VERSION')
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(path)
    made_as = builder.info.file_format
    if made_as != tfds.core.FileFormat.ARRAY_RECORD:
        told = f"made as {made_as.value}; must be made with file_format='array_record'"
        raise UserError(f'{source.path}: {told}')
    splits, split = builder.info.splits, source.option('split', 'train')
    if split not in list(splits):
        raise UserError(f'{source.path}: no split {split!r}; must be one of {", ".join(splits)}')
    instructions = sorted(splits[split].file_instructions, key=lambda shard: shard.filename)
    return builder, {Path(shard.filename).name: shard.take for shard in instructions}


def _tfds(part: Part) -> Iterator[Raw]:
    folder, name = part.path.rsplit('/', 1)
    builder, shards = tfds_shards(part.source, folder)
    before = sum(count for shard, count in shards.items() if shard < name)
    documents = builder.as_data_source(part.source.option('split', 'train'))
    for number in filter(part.wants, range(part.first, shards[name])):
        part.reached = number
        yield Raw(number, *_values(part, documents[before + number], f'record {number}'), f'record {number}')


def _keys(source: Source) -> list[str]:
    """The key of the text, then that of the prompt if there is one."""
    return [source.option('key', 'text'), *([source.options['prompt_key']] if 'prompt_key' in source.options else [])]


def _values(part: Part, record: Mapping[str, Any], at: str) -> tuple[str | bytes, str | bytes]:
    """Text and prompt of a record."""
    values: list[str | bytes] = []
    for key in _keys(part.source):
        if key not in record:
            raise UserError(f'{part.path}: {at}: no key {key!r}; there are {", ".join(map(repr, record)) or "none"}')
        value = record[key]
        if not isinstance(value, str | bytes):
            kind = 'null' if value is None else type(value).__name__
            raise UserError(f'{part.path}: {at}: {key!r} is {kind}; must be a string')
        values.append(value)
    return values[0], values[1] if len(values) > 1 else b''


READERS: dict[str, Callable[[Part], Iterator[Raw]]] = {
    'text': _text,
    'jsonl': _jsonl,
    'parquet': _parquet,
    'arrayrecord': _arrayrecord,
    'tfds': _tfds,
    'hf': _hf,
}
