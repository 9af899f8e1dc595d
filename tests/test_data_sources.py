"""Sources read as they were written, resumed at every item; each kind of damage told in one line, none passed over."""

import functools
import gzip
import itertools
import json
import lzma
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from fbt_jax.config_data import parse_source
from fbt_jax.data.sources import START, File, Item, Position, fingerprint, list_files, read
from fbt_jax.errors import UserError

# No newlines, so that each can be a line too. One is longer than a read of the reader's buffer.
DOCUMENTS = ['one', 'zwei: äöü', '三 🙂', ' spaces ', 'x' * 3_000_000, 'a\tb', '\ufeffmark', 'eight', 'nine', 'ten']
COMPRESSED = ('', '.gz', '.xz', '.zst')


def compress(data: bytes, suffix: str) -> bytes:
    match suffix:
        case '.gz':
            return gzip.compress(data)
        case '.xz':
            return lzma.compress(data)
        case '.zst':
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, 'zstd') as stream:
                stream.write(data)
            return sink.getvalue().to_pybytes()
    return data


def json_lines(documents: Sequence[str]) -> bytes:
    lines = [json.dumps({'text': text, 'before': f'p{i}'}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    return ''.join(f'{line}\n' for line in lines).encode()


def table(documents: Sequence[str]) -> pa.Table:
    prompts = [f'p{i}' for i in range(len(documents))]
    return pa.table({'other': list(range(len(documents))), 'text': list(documents), 'before': prompts})


def write_arrayrecord(path: Path, records: Sequence[bytes], options: str = 'group_size:1') -> None:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def write_hf(folder: Path, *shards: Sequence[str]) -> None:
    """As `Dataset.save_to_disk` writes (test_a_folder_of_datasets)."""
    folder.mkdir()
    names = [f'data-{i:05}-of-{len(shards):05}.arrow' for i in range(len(shards))]
    for name, documents in zip(names, shards, strict=True):
        with pa.ipc.new_stream(str(folder / name), table(documents).schema) as stream:
            stream.write_table(table(documents), max_chunksize=2)
    (folder / 'state.json').write_text(json.dumps({'_data_files': [{'filename': name} for name in names]}))


@functools.cache
def tfds_builder() -> Any:
    """Made once, since TFDS knows each by its name."""
    import tensorflow_datasets as tfds

    class Told(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version('1.0.0')

        def _info(self) -> Any:
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict({'text': text, 'before': text, 'n': tfds.features.Scalar(np.int64)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {'train': self._generate_examples(DOCUMENTS), 'test': self._generate_examples(['x', 'y', 'z'])}

        def _generate_examples(self, documents: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
            for i, text in enumerate(documents):
                yield i, {'text': text, 'before': f'p{i}', 'n': i}

    return Told


def write_tfds(folder: Path) -> Path:
    import tensorflow_datasets as tfds

    builder = tfds_builder()(data_dir=folder, file_format='array_record')
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    return folder / 'told/1.0.0'


def write_text_files(folder: Path) -> str:
    for i, text in enumerate(DOCUMENTS):
        suffix = COMPRESSED[i % 4]
        (folder / f'{i}.txt{suffix}').write_bytes(compress(text.encode(), suffix))
    return f'text:{folder}/*.txt*'


def write_lines(folder: Path) -> str:
    """A file without a newline at its end, one that has gone through Windows, a compressed one."""
    (folder / 'a.txt').write_text('\n'.join(DOCUMENTS[:4]))
    (folder / 'b.txt').write_bytes('\r\n'.join([*DOCUMENTS[4:7], '']).encode())
    (folder / 'c.txt.gz').write_bytes(compress('\n'.join([*DOCUMENTS[7:], '']).encode(), '.gz'))
    return f'text:{folder}/*#unit=line'


def write_jsonl(folder: Path) -> str:
    for i, suffix in enumerate(COMPRESSED):
        (folder / f'{i}.jsonl{suffix}').write_bytes(compress(json_lines(DOCUMENTS[3 * i : 3 * i + 3]), suffix))
    return f'jsonl:{folder}/*'


def write_parquet(folder: Path) -> str:
    parquet.write_table(table(DOCUMENTS[:7]), folder / 'a.parquet', row_group_size=3)
    short = table(DOCUMENTS[7:])
    parquet.write_table(short.set_column(1, 'text', short['text'].dictionary_encode()), folder / 'b.parquet')
    return f'parquet:{folder}/*.parquet'


def write_arrayrecords(folder: Path) -> str:
    write_arrayrecord(folder / 'a', [text.encode() for text in DOCUMENTS[:7]])
    write_arrayrecord(folder / 'b', [text.encode() for text in DOCUMENTS[7:]], 'group_size:2')
    return f'arrayrecord:{folder}/*'


def write_hf_shards(folder: Path) -> str:
    write_hf(folder / 'set', DOCUMENTS[:7], DOCUMENTS[7:])
    return f'hf:{folder}/set'


WRITERS: dict[str, Callable[[Path], str]] = {
    'text files': write_text_files,
    'lines': write_lines,
    'jsonl': write_jsonl,
    'parquet': write_parquet,
    'arrayrecord': write_arrayrecords,
    'tfds': lambda folder: f'tfds:{write_tfds(folder)}',
    'hf': write_hf_shards,
}
KEYED = ('jsonl', 'parquet', 'tfds', 'hf')


def items(text: str, start: Position = START) -> list[Item]:
    source = parse_source(text)
    return list(read(source, list_files(source), start))


def with_option(text: str, option: str) -> str:
    return f'{text},{option}' if '#' in text else f'{text}#{option}'


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The name of a writer and the source it wrote."""
    return request.param, WRITERS[request.param](tmp_path)


def failure(text: str, start: Position = START) -> str:
    with pytest.raises(UserError) as caught:
        items(text, start)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_documents_come_back_and_reading_goes_on_after_any_of_them(written: tuple[str, str]) -> None:
    name, source = written
    whole = items(source)
    found = [item.text for item in whole]
    assert (sorted(found) if name == 'tfds' else found) == (sorted(DOCUMENTS) if name == 'tfds' else DOCUMENTS)
    assert {item.prompt for item in whole} == {''} == {item.skipped for item in whole}
    assert len({item.where for item in whole}) == len(whole)
    for i, item in enumerate(whole):
        assert items(source, item.next) == whole[i + 1 :]


def test_of_many_short_files_every_takes_its_share(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f'{number:02}.txt').write_text(''.join(f'{number} {i}\n' for i in range(5)))
    held_out = items(f'text:{tmp_path}/*.txt#unit=line,every=10')
    assert len(held_out) == 15
    assert len(items(f'text:{tmp_path}/*.txt#unit=line,except_every=10')) == 135


def test_every_and_except_every_are_complements_and_resume(written: tuple[str, str]) -> None:
    _, source = written
    whole = items(source)
    for every in (2, 3):
        held_out = items(with_option(source, f'every={every}'))
        rest = items(with_option(source, f'except_every={every}'))
        # Counted from the number of its file on.
        numbers = {item.where: item.next.file + item.next.item - 1 for item in whole}
        assert held_out == [item for item in whole if numbers[item.where] % every == every - 1]
        assert rest == [item for item in whole if item not in held_out]
        assert held_out
        for option, part in (('every', held_out), ('except_every', rest)):
            for i, item in enumerate(part):
                assert items(with_option(source, f'{option}={every}'), item.next) == part[i + 1 :]


@pytest.mark.parametrize('name', KEYED)
def test_keys_and_prompts(tmp_path: Path, name: str) -> None:
    source = WRITERS[name](tmp_path)
    whole = items(source)
    prompted = items(with_option(source, 'prompt_key=before'))
    assert [item.text for item in prompted] == [item.text for item in whole]
    swapped = items(with_option(source, 'key=before,prompt_key=text'))
    assert [(item.prompt, item.text) for item in prompted] == [(item.text, item.prompt) for item in swapped]
    assert {item.text for item in swapped} <= {f'p{i}' for i in range(len(DOCUMENTS))}
    assert {item.text for item in items(with_option(source, 'key=text,prompt_key=text'))} == set(DOCUMENTS)


@pytest.mark.parametrize(
    ('name', 'told'),
    [
        ('jsonl', "{0}/0.jsonl: line 1 (byte 0): no key 'content'; there are 'text', 'before'"),
        ('parquet', "{0}/a.parquet: no column 'content'; there are 'other', 'text', 'before'"),
        ('hf', "{0}/set/data-00000-of-00002.arrow: no column 'content'; there are 'other', 'text', 'before'"),
        (
            'tfds',
            '{0}/told/1.0.0/told-train.array_record-00000-of-00003: record 0: '
            "no key 'content'; there are 'before', 'n', 'text'",
        ),
    ],
)
def test_a_missing_key_is_told_with_those_that_are_there(tmp_path: Path, name: str, told: str) -> None:
    source = WRITERS[name](tmp_path)
    assert failure(with_option(source, 'key=content')) == told.format(tmp_path)
    assert failure(with_option(source, 'prompt_key=content')) == told.format(tmp_path)


@pytest.mark.parametrize(
    ('line', 'told'),
    [
        ('{"text": "b"', "Expecting ',' delimiter at its column 13; must be one JSON object a line"),
        ('{"text": "b"} {}', 'Extra data at its column 15; must be one JSON object a line'),
        ('["b"]', 'is no object; must be one JSON object a line'),
        ('{"text": null}', "'text' is null; must be a string"),
        ('{"text": ["b"]}', "'text' is list; must be a string"),
        ('{"text": 1}', "'text' is int; must be a string"),
        ('{}', "no key 'text'; there are none"),
        ('[' * 100_000, 'maximum recursion depth exceeded'),
        ('9' * 5000, 'Exceeds the limit (4300 digits)'),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, line: str, told: str) -> None:
    """Places are those in the decompressed text; the same line in a part that isn't asked for harms nobody."""
    path = tmp_path / 'a.jsonl.gz'
    path.write_bytes(gzip.compress(f'{{"text": "ä"}}\n{line}\n'.encode()))
    assert failure(f'jsonl:{path}').startswith(f'{path}: line 2 (byte 15): {told}')
    assert failure(f'jsonl:{path}', Position(0, 1)).startswith(f'{path}: line 2 (byte 15): {told}')
    assert [item.text for item in items(f'jsonl:{path}#except_every=2')] == ['ä']


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    path = tmp_path / 'a.jsonl'
    lines = [b'{"text": "a"}', b'', b'{"text": ""}', b' \r', b'{"text": "\xff"}', b'\xff', b'{"text": "\\ud800"}']
    path.write_bytes(b'\n'.join([*lines, b'{"text": "\\ud83d\\ude42"}', b'{"text": " "}', b'']))
    expected = [
        *[('a', ''), ('', 'empty'), ('', 'empty'), ('', 'empty'), ('', 'not UTF-8'), ('', 'not UTF-8')],
        *[('', 'not UTF-8'), ('🙂', ''), (' ', '')],
    ]
    found = items(f'jsonl:{path}')
    assert [(item.text, item.skipped) for item in found] == expected
    assert [item.where for item in found] == [f'a.jsonl:line {i + 1}' for i in range(9)]
    for i, item in enumerate(found):
        assert items(f'jsonl:{path}', item.next) == found[i + 1 :]

    path.write_bytes(b'{"text": "a", "p": "\\ud800"}')
    assert items(f'jsonl:{path}#prompt_key=p') == [Item('', '', 'not UTF-8', 'a.jsonl:line 1', Position(0, 1))]
    path.write_bytes(b'a\n\n\xff\n\xed\xa0\x80')
    assert [item.skipped for item in items(f'text:{path}#unit=line')] == ['', 'empty', 'not UTF-8', 'not UTF-8']
    assert items(f'text:{path}') == [Item('', '', 'not UTF-8', 'a.jsonl', Position(0, 1))]
    path.write_bytes(b'')
    assert items(f'text:{path}') == [Item('', '', 'empty', 'a.jsonl', Position(0, 1))]
    assert items(f'text:{path}#unit=line') == [] == items(f'jsonl:{path}')


def test_records_that_are_left_out(tmp_path: Path) -> None:
    write_arrayrecord(tmp_path / 'a', [b'a', b'', b'\xff'])
    assert [item.skipped for item in items(f'arrayrecord:{tmp_path}/a')] == ['', 'empty', 'not UTF-8']
    offsets = pa.array([0, 1, 1, 2], pa.int32()).buffers()[1]
    strings = pa.table({'text': pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b'a\xff')])})
    parquet.write_table(strings, tmp_path / 'b')
    found = items(f'parquet:{tmp_path}/b')
    assert [item.skipped for item in found] == ['', 'empty', 'not UTF-8']
    assert [item.where for item in found] == ['b:record 0', 'b:record 1', 'b:record 2']


@pytest.mark.parametrize('suffix', COMPRESSED[1:])
@pytest.mark.parametrize('unit', ['file', 'line'])
@pytest.mark.parametrize('frames', [1, 2])
def test_a_compressed_file_cut_anywhere_is_an_error(tmp_path: Path, suffix: str, unit: str, frames: int) -> None:
    """Also in a second frame, at its very start, and of a file with nothing in it."""
    path = tmp_path / f'a.txt{suffix}'
    lines = [random.Random(i).randbytes(20).hex() for i in range(10_000)]
    frame = compress('\n'.join([*lines, '']).encode(), suffix)
    path.write_bytes(frame * frames)
    assert sum(len(item.text) for item in items(f'text:{path}#unit={unit}')) > frames * 100_000
    data = frame * frames
    start = len(frame) * (frames - 1)
    for end in (0, start + 3, start + 20, start + len(frame) // 2, len(data) - 9, len(data) - 1):
        path.write_bytes(data[:end])
        told = failure(f'text:{path}#unit={unit}')
        pattern = rf'{re.escape(str(path))}: readable up to byte (\d+) only \(.+\); copy it again or leave it out'
        found = re.fullmatch(pattern, told)
        assert found, told
        assert (int(found[1]) > 0) == (end > len(frame) // 3), told


@pytest.mark.parametrize('suffix', COMPRESSED[1:])
def test_a_compressed_file_that_is_none_or_is_damaged(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f'a.jsonl{suffix}'
    whole = compress(json_lines(['a', 'b']), suffix)
    for data in (json_lines(['a', 'b']), whole[:10] + b'\xff' * 10 + whole[20:]):
        path.write_bytes(data)
        assert failure(f'jsonl:{path}').startswith(f'{path}: readable up to byte 0 only (')
    data = bytearray(compress(b''.join(b'{"text": "%d"}\n' % (i * 7919) for i in range(50_000)), suffix))
    for i in range(40):
        data[len(data) // 2 + i] ^= 255
    path.write_bytes(data)
    assert re.match(
        rf'{re.escape(str(path))}: (readable up to byte \d+ only|line \d+ \(byte)', failure(f'jsonl:{path}')
    )


def test_the_messages_of_cut_files(tmp_path: Path) -> None:
    end = 'copy it again or leave it out'
    path = tmp_path / 'a.jsonl.gz'
    path.write_bytes(gzip.compress(b'{"text": "a"}\n')[:-4])
    why = 'Compressed file ended before the end-of-stream marker was reached'
    assert failure(f'jsonl:{path}') == f'{path}: readable up to byte 14 only ({why}); {end}'
    path = tmp_path / 'a.zst'
    path.write_bytes(compress(b'text', '.zst')[:-2])
    assert failure(f'text:{path}') == f'{path}: readable up to byte 0 only (Truncated compressed stream); {end}'
    path.write_bytes(b'')
    assert failure(f'text:{path}') == f'{path}: readable up to byte 0 only (empty, not even a header); {end}'


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / 'a.parquet'
    documents = [f'{i * 7919}' * 100 for i in range(1000)]
    options = {'use_dictionary': False, 'compression': 'none', 'write_page_checksum': True}
    parquet.write_table(table(documents), path, row_group_size=100, **options)
    assert [item.text for item in items(f'parquet:{path}')] == documents
    data = path.read_bytes()
    column = parquet.ParquetFile(path).metadata.row_group(5).column(1)
    damaged = bytearray(data)
    damaged[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(damaged)
    assert failure(f'parquet:{path}').startswith(f'{path}: readable up to record 500 only (')
    for end in (0, 2, 8, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        assert failure(f'parquet:{path}').startswith(f'{path}: readable up to record 0 only (')


@pytest.mark.parametrize('kind', ['parquet', 'hf'])
def test_columns_that_are_no_strings(tmp_path: Path, kind: str) -> None:
    write_hf(tmp_path / 'set', ['a'])
    parquet.write_table(table(['a']), tmp_path / 'a')
    path = tmp_path / ('a' if kind == 'parquet' else 'set')
    file = path if kind == 'parquet' else path / 'data-00000-of-00001.arrow'
    assert failure(f'{kind}:{path}#key=other') == f"{file}: column 'other' holds int64; must hold strings"


def test_nulls(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    parquet.write_table(pa.table({'text': ['a', None]}), path)
    assert failure(f'parquet:{path}') == f"{path}: record 1: 'text' is null; must be a string"


def test_a_damaged_arrow_stream(tmp_path: Path) -> None:
    """Cut between two batches too, which reads as a shorter stream."""
    write_hf(tmp_path / 'set', [f'{i}' for i in range(6)])
    path = tmp_path / 'set/data-00000-of-00001.arrow'
    data = path.read_bytes()
    for end in (0, 4, len(data) // 2, len(data) - 8, len(data) - 4):
        path.write_bytes(data[:end])
        told = f'{path}: readable up to record 0 only (no end-of-stream marker); copy it again or leave it out'
        assert failure(f'hf:{tmp_path}/set') == told
    path.write_bytes(data[: len(data) - 208] + data[-8:])
    assert failure(f'hf:{tmp_path}/set').startswith(f'{path}: readable up to record 4 only (')


def test_damaged_arrayrecords(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    write_arrayrecord(path, [f'{i}'.encode() * 5000 for i in range(100)], 'group_size:1,uncompressed')
    data = path.read_bytes()
    assert len(items(f'arrayrecord:{path}')) == 100
    for end in (0, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        assert failure(f'arrayrecord:{path}').startswith(f'{path}: readable up to record 0 only (')
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    path.write_bytes(damaged)
    found = re.match(rf'{path}: readable up to record (\d+) only \(', failure(f'arrayrecord:{path}'))
    assert found
    assert 20 < int(found[1]) < 90


def test_a_file_that_vanishes_or_changes(tmp_path: Path) -> None:
    source = parse_source(write_jsonl(tmp_path))
    files = list_files(source)
    reading = read(source, files)
    next(reading)
    with (tmp_path / '2.jsonl.xz').open('ab') as file:
        file.write(b'x')
    size = files[2].size
    message = f'2.jsonl.xz: had {size} bytes when it was listed, has {size + 1} now; must not change while it is read'
    with pytest.raises(UserError, match=re.escape(f'{tmp_path}/{message}')):
        list(reading)
    (tmp_path / '0.jsonl').unlink()
    message = '0.jsonl: has vanished since it was listed; must stay while it is read'
    with pytest.raises(UserError, match=re.escape(f'{tmp_path}/{message}')):
        next(read(source, files))
    assert len(list(itertools.islice(read(source, files, Position(1, 1)), 2))) == 2  # it isn't needed any more


def test_files_are_listed_by_name(tmp_path: Path) -> None:
    for name in ('b/10.txt', 'b/9.txt', 'B.txt', 'a.txt', 'ä.txt', 'b.txt', 'b/.hidden.txt', 'b/c/d.txt'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / 'folder.txt').mkdir()
    (tmp_path / 'link.txt').symlink_to('b/9.txt')
    (tmp_path / 'link_to_folder.txt').symlink_to('b')
    names = [file.name for file in list_files(parse_source(f'text:{tmp_path}/**/*.txt'))]
    assert names == sorted(names)
    seen = {'B.txt', 'a.txt', 'b.txt', 'b/10.txt', 'b/9.txt', 'b/.hidden.txt', 'b/c/d.txt', 'link.txt', 'ä.txt'}
    assert set(names) == seen
    assert list_files(parse_source(f'text:{tmp_path}/b/9.txt')) == (File('9.txt', 7),)
    assert list_files(parse_source(f'text:{tmp_path}//b/c/../9*')) == (File('9.txt', 7),)
    assert [item.text for item in items(f'text:{tmp_path}/b/*.txt')] == ['b/.hidden.txt', 'b/10.txt', 'b/9.txt']


def test_a_name_with_a_wild_card_in_it(tmp_path: Path) -> None:
    (tmp_path / 'a[1].txt').write_text('this one')
    (tmp_path / 'a1.txt').write_text('not this one')
    assert [item.text for item in items(f'text:{tmp_path}/a[1].txt')] == ['this one']


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'a.txt').write_text('text')
    monkeypatch.chdir(tmp_path)
    assert [item.text for item in items('text:a.txt')] == ['text'] == [item.text for item in items('text:./*')]


@pytest.mark.parametrize(
    ('source', 'told'),
    [
        ('text:{0}/x*.txt', '{0}/x*.txt: no file matches; must be a file or a glob (** for any depth of folders)'),
        ('jsonl:{0}/x.txt', '{0}/x.txt: no file matches; must be a file or a glob (** for any depth of folders)'),
        ('text:{0}/fold*', '{0}/fold*: no file matches; must be a file or a glob (** for any depth of folders)'),
        ('text:{0}/folder/', '{0}/folder/: is a folder; must be a file or a glob, such as {0}/folder/*'),
        ('hf:{0}/folder', '{0}/folder: no state.json there; must be a folder written by Dataset.save_to_disk'),
        ('tfds:{0}/folder', '{0}/folder: no features.json there; must be a TFDS folder, DATA_DIR/NAME/VERSION'),
        ('text:{0}/a**', "{0}/a**: Invalid pattern: '**' can only be an entire path component"),
        ('text:nosuch://b/a', 'nosuch://b/a: Protocol not known: nosuch'),
    ],
)
def test_sources_that_are_not_there(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / 'folder').mkdir()
    assert failure(source.format(tmp_path)) == told.format(tmp_path)


@pytest.mark.parametrize(('protocol', 'library'), [('gs', 'gcsfs'), ('s3', 's3fs')])
def test_a_bucket_without_its_library(monkeypatch: pytest.MonkeyPatch, protocol: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    path = f'{protocol}://bucket/*.jsonl'
    assert failure(f'jsonl:{path}') == f'{path}: {protocol}:// needs {library}: pip install {library}'


@pytest.mark.parametrize('kind', ['arrayrecord', 'tfds'])
def test_arrayrecord_in_a_bucket(kind: str) -> None:
    told = f'gs://bucket/a: {kind} reads local paths only: mount the bucket, give the mounted path'
    assert failure(f'{kind}:gs://bucket/a') == told


def test_a_hf_folder_of_several_splits_or_not_whole(tmp_path: Path) -> None:
    (tmp_path / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
    told = f'holds several splits; must be the folder of one: {tmp_path}/train or {tmp_path}/test'
    assert failure(f'hf:{tmp_path}') == f'{tmp_path}: {told}'
    path = tmp_path / 'train'
    write_hf(path, ['a'], ['b'])
    (path / 'data-00001-of-00002.arrow').unlink()
    missing = f'{path}/data-00001-of-00002.arrow is missing; copy the data set again'
    assert failure(f'hf:{path}') == f'{path}: {missing}'
    for content in ('{', '{}', '[]'):
        (path / 'state.json').write_text(content)
        told = f"{path}/state.json: no JSON with an entry '_data_files'; copy the data set again"
        assert failure(f'hf:{path}') == told
    (path / 'state.json').write_text('{"_data_files": []}')
    assert failure(f'hf:{path}') == f'{path}: holds no documents'


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip('datasets')
    documents = [f'document {i}' for i in range(2500)]  # more than one record batch
    data_set = datasets.Dataset.from_dict({'n': list(range(2500)), 'text': documents})
    data_set.save_to_disk(tmp_path / 'a', num_shards=2)
    assert [item.text for item in items(f'hf:{tmp_path}/a')] == documents
    datasets.DatasetDict({'x': data_set}).save_to_disk(tmp_path / 'b')
    assert failure(f'hf:{tmp_path}/b').endswith(f'must be the folder of one: {tmp_path}/b/x')
    assert len(items(f'hf:{tmp_path}/b/x')) == 2500


def test_tfds_splits_and_formats(tmp_path: Path) -> None:
    folder = write_tfds(tmp_path)
    assert {item.text for item in items(f'tfds:{folder}#split=test')} == {'x', 'y', 'z'}
    assert [file.name for file in list_files(parse_source(f'tfds:{folder}'))] == [
        f'told-train.array_record-{i:05}-of-00003' for i in range(3)
    ]
    assert items(f'tfds:{folder.parent}//./../told/1.0.0/') == items(f'tfds:{folder}')
    for split in ('valid', 'train[:50%]'):
        assert failure(f'tfds:{folder}#split={split}') == f'{folder}: no split {split!r}; must be one of train, test'
    shard = folder / 'told-train.array_record-00000-of-00003'
    assert failure(f'tfds:{folder}#key=n') == f"{shard}: record 0: 'n' is int; must be a string"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert failure(f'tfds:{folder}').startswith(f'{shard}: readable up to record 0 only (')
    shard.unlink()
    assert failure(f'tfds:{folder}') == f'{folder}: {shard} is missing; copy the data set again'
    info = folder / 'dataset_info.json'
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))
    assert failure(f'tfds:{folder}') == f"{folder}: made as tfrecord; must be made with file_format='array_record'"


def run_python(code: str, *arguments: object, path: str = '') -> str:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [path, str(Path(__file__).parents[1])])))
    command = [sys.executable, '-c', code, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


_PEAK = r"""
import itertools, re, sys
from fbt_jax.config_data import parse_source
from fbt_jax.data.sources import START, File, Item, Position, fingerprint, list_files, read
def peak():  # MB; not getrusage's, which starts at what pytest held
    return int(re.search(r'VmHWM:\s*(\d+)', open('/proc/self/status').read())[1]) // 1024
source = parse_source(sys.argv[1])
reading = read(source, list_files(source))
length = sum(len(item.text) for item in itertools.islice(reading, int(sys.argv[2])))
before = peak()
length += sum(len(item.text) for item in reading)
print(before, peak(), length)
"""


def test_tfds_without_tensorflow(tmp_path: Path) -> None:
    """Also where TensorFlow is installed, as one that ends the process is here."""
    (tmp_path / 'tensorflow').mkdir()
    (tmp_path / 'tensorflow/__init__.py').write_text("raise SystemExit('TensorFlow was imported')")
    folder = write_tfds(tmp_path / 'data')
    code = _PEAK + "assert 'tensorflow' not in sys.modules\n"
    assert run_python(code, f'tfds:{folder}', 0, path=str(tmp_path)).split()[2] == str(sum(map(len, DOCUMENTS)))


@pytest.mark.parametrize('name', ['a.jsonl.zst', pytest.param('a.jsonl.gz', marks=pytest.mark.slow)])
def test_memory_is_flat_over_a_million_short_items(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(compress(b''.join(b'{"text": "line %d"}\n' % i for i in range(1_000_000)), path.suffix))
    before, after, length = map(int, run_python(_PEAK, f'jsonl:{path}', 10_000).split())
    assert length == sum(5 + len(str(i)) for i in range(1_000_000))
    assert after - before < 16


def test_memory_does_not_hold_a_row_group(tmp_path: Path) -> None:
    """200 MB in one; what is counted includes the import of pyarrow."""
    path = tmp_path / 'a.parquet'
    texts = [random.Random(i).randbytes(1000).hex() for i in range(100_000)]
    parquet.write_table(pa.table({'text': texts}), path, row_group_size=10**6, compression='none')
    before, after, length = map(int, run_python(_PEAK, f'parquet:{path}', 0).split())
    assert length == 200_000_000
    assert after - before < 120


@pytest.mark.parametrize(
    'kind', [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ('text', 'text line')), 'jsonl']
)
def test_a_document_of_200_mb(tmp_path: Path, kind: str) -> None:
    path = tmp_path / 'a'
    document = b'0123456789' * 20_000_000
    path.write_bytes(b'{"text": "%b"}\n' % document if kind == 'jsonl' else document)
    source = f'{kind.split()[0]}:{path}' + ('#unit=line' if kind == 'text line' else '')
    before, after, length = map(int, run_python(_PEAK, source, 0).split())
    assert length == len(document)
    assert after - before < 5 * 200


def test_paths_of_other_file_systems() -> None:
    memory = fsspec.filesystem('memory')
    try:
        memory.pipe('/there/a/1.jsonl', json_lines(['a', 'b']))
        memory.pipe('/there/a/2.jsonl.zst', compress(json_lines(['c']), '.zst'))
        memory.pipe('/there/3.jsonl.gz', compress(json_lines(['d']), '.gz'))
        found = items('jsonl:memory://there/**/*.jsonl*')
        assert [item.text for item in found] == ['d', 'a', 'b', 'c']
        assert [item.where for item in found] == [
            *['3.jsonl.gz:line 1', 'a/1.jsonl:line 1', 'a/1.jsonl:line 2', 'a/2.jsonl.zst:line 1']
        ]
        with memory.open('/there/a.parquet', 'wb') as file:
            parquet.write_table(table(['x', 'y']), file)
        assert [item.text for item in items('parquet:memory://there/a.parquet')] == ['x', 'y']
        with memory.open('/there/set/data.arrow', 'wb') as file, pa.ipc.new_stream(file, table(['x']).schema) as stream:
            stream.write_table(table(['x', 'y']))
        memory.pipe('/there/set/state.json', b'{"_data_files": [{"filename": "data.arrow"}]}')
        assert [item.text for item in items('hf:memory://there/set')] == ['x', 'y']
        assert failure('text:memory://there/a').startswith('memory://there/a: is a folder; ')
        source = parse_source('jsonl:memory://there/a/1.jsonl')
        files = list_files(source)
        memory.rm('/there/a/1.jsonl')
        with pytest.raises(UserError, match='has vanished'):
            list(read(source, files))
    finally:
        memory.rm('/there', recursive=True)


def test_the_fingerprint_is_of_what_is_read(tmp_path: Path) -> None:
    def of(text: str) -> str:
        source = parse_source(text)
        return fingerprint(source, list_files(source))

    for folder in ('here', 'there'):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder)
    first = of(f'jsonl:{tmp_path}/here/*')
    assert len(first) == 64
    assert first == of(f'jsonl:{tmp_path}/there/*') == of(f'jsonl:{tmp_path}/here/*.jsonl*')
    others = [of(f'text:{tmp_path}/here/*'), of(f'jsonl:{tmp_path}/here/*#key=before'), of(f'jsonl:{tmp_path}/*/*')]
    (tmp_path / 'there/0.jsonl').rename(tmp_path / 'there/00.jsonl')
    others.append(of(f'jsonl:{tmp_path}/there/*'))
    with (tmp_path / 'here/0.jsonl').open('a') as file:
        file.write('\n')
    others.append(of(f'jsonl:{tmp_path}/here/*'))
    assert len({first, *others}) == 6
    assert of(f'jsonl:{tmp_path}/here/*#key=a,every=2') == of(f'jsonl:{tmp_path}/here/*#every=2,key=a')
