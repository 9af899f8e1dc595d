"""Documents out of files, one after another, each format by an existing library's reader behind one interface.

`list_files` names the files of a source, sorted; `read` goes through their items in that order from any `Position`.
Lines count from 1, records from 0. What is left out by a rule (empty, not UTF-8) is told in the item; what can't be
read as meant, a damaged file or a missing key, stops the reading with a `UserError`. Nothing is left out silently.
Paths are fsspec's: local, gs://, s3://, memory://; ArrayRecord's readers know local paths only.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fbt_jax.config_data import Source
from fbt_jax.data.readers import DAMAGE, READERS, Part, Raw, by_file, chosen, tfds_shards, utf8
from fbt_jax.errors import UserError

_LIBRARIES = {'gs': 'gcsfs', 'gcs': 'gcsfs', 's3': 's3fs', 's3a': 's3fs'}


class File(NamedTuple):
    """A file of a source. `name` is relative to the folder that the source's path names, '/'-separated."""

    name: str
    size: int


class Position(NamedTuple):
    """Where to go on: the file's number, and how many of its items lie behind."""

    file: int = 0
    item: int = 0


START = Position()


class Item(NamedTuple):
    """A document, or the reason why it is left out."""

    text: str  # '' if it is left out
    prompt: str  # text before it that is read but never a target
    skipped: str  # '', 'empty' or 'not UTF-8'
    where: str  # 'name:line 12', 'name:record 7', or the name of a file that is one document
    next: Position  # to read on after this item


def list_files(source: Source) -> tuple[File, ...]:
    """The files of `source`, sorted by name: the same list on every machine.

    Raises:
      UserError: nothing there, a folder in place of a glob or the other way round, or a library is missing.
    """
    fs, path = _filesystem(source)
    lister = {'tfds': _tfds_files, 'hf': _hf_files}.get(source.format, _matching_files)
    root = _root(source, path)
    files = [File(found.removeprefix(f'{root}/'), size) for found, size in lister(source, fs, path).items()]
    return tuple(sorted(files))


def fingerprint(source: Source, files: Iterable[File]) -> str:
    """sha256 (hex) of what is read, but not of the folder: a data set that has moved is the same."""
    parts = [source.format, sorted(source.options.items()), [[file.name, file.size] for file in files]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read(source: Source, files: tuple[File, ...], start: Position = START) -> Iterator[Item]:
    """The items of `files`, as `list_files` gave them, from `start` on. Those that `every` takes away aren't seen.

    Raises:
      UserError: a file has changed since it was listed, is damaged, or an item isn't what the format says.
    """
    fs, path = _filesystem(source)
    root = _root(source, path)
    for index in range(start.file, len(files)):
        name, size = files[index]
        part = Part(source, fs, f'{root}/{name}', size, start.item if index == start.file else 0, index)
        if by_file(source) and (part.first > 0 or not chosen(source, index)):
            continue
        _check_unchanged(part)
        try:
            for raw in READERS[source.format](part):
                where = f'{name}:{raw.at}' if raw.at else name
                yield _item(raw, where=where, following=Position(index, raw.number + 1))
        except UserError:
            raise
        except PermissionError as error:
            raise UserError(f'{part.path}: {error.strerror}') from None
        except DAMAGE as error:
            told = ' '.join(str(error).split())
            reached = f'{"byte" if source.format in ("text", "jsonl") else "record"} {part.reached}'
            raise UserError(
                f'{part.path}: readable up to {reached} only ({told}); copy it again or leave it out'
            ) from error


def _item(raw: Raw, *, where: str, following: Position) -> Item:
    text, prompt = utf8(raw.text), utf8(raw.prompt)
    if text is None or prompt is None:
        return Item('', '', 'not UTF-8', where, following)
    return Item(text, prompt, '', where, following) if text else Item('', '', 'empty', where, following)


# Finding the files.


def _filesystem(source: Source) -> tuple[Any, str]:
    """fsspec's file system and the path in it."""
    import fsspec

    protocol = fsspec.utils.get_protocol(source.path)
    if source.format in ('arrayrecord', 'tfds') and protocol not in ('file', 'local'):
        raise UserError(
            f'{source.path}: {source.format} reads local paths only: mount the bucket, give the mounted path'
        )
    try:
        return fsspec.core.url_to_fs(source.path)
    except Exception as error:  # each file system has its own
        if protocol not in _LIBRARIES:
            raise UserError(f'{source.path}: {" ".join(str(error).split())}') from error
        library = _LIBRARIES[protocol]
        raise UserError(f'{source.path}: {protocol}:// needs {library}: pip install {library}') from error


def _root(source: Source, path: str) -> str:
    """The folder that names are relative to: the data set's own, or what stands before a glob's first wild card."""
    if source.format in ('tfds', 'hf'):
        return path
    return re.split(r'[*?[]', path, maxsplit=1)[0].rpartition('/')[0]


def _require_readable(path: str) -> None:
    """UserError for a folder below the glob that can't be looked into: fsspec would leave it out without a word."""

    def refuse(error: OSError) -> None:
        raise UserError(f'{error.filename}: {error.strerror}')

    for _ in os.walk(re.split(r'[*?[]', path, maxsplit=1)[0].rpartition('/')[0] or '/', onerror=refuse):
        pass


def _matching_files(source: Source, fs: Any, path: str) -> dict[str, int]:
    """Full path -> bytes. A file whose very name has a wild card in it comes before what the glob would match."""
    import fsspec

    if fs.isfile(path):
        return {path: fs.size(path)}
    if fs.isdir(path):
        raise UserError(f'{source.path}: is a folder; must be a file or a glob, such as {source.path.rstrip("/")}/*')
    try:
        infos = fs.glob(path, detail=True)
    except ValueError as error:  # ** within a name
        raise UserError(f'{source.path}: {error}') from error
    # A link is of type `other`, whatever it leads to; so is a pipe or a device, which has no end.
    found = {name: info['size'] for name, info in infos.items() if info['type'] == 'file' or fs.isfile(name)}
    if '**' in path and isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        _require_readable(path)
    if not found:
        raise UserError(f'{source.path}: no file matches; must be a file or a glob (** for any depth of folders)')
    return found


def _hf_files(source: Source, fs: Any, path: str) -> dict[str, int]:
    """The files that state.json lists."""
    if fs.isfile(f'{path}/dataset_dict.json'):
        splits = _entry(fs, f'{path}/dataset_dict.json', 'splits')
        names = splits if isinstance(splits, list) else ['SPLIT']
        folders = ' or '.join(f'{source.path.rstrip("/")}/{split}' for split in names)
        raise UserError(f'{source.path}: holds several splits; must be the folder of one: {folders}')
    if not fs.isfile(f'{path}/state.json'):
        raise UserError(f'{source.path}: no state.json there; must be a folder written by Dataset.save_to_disk')
    listed = _entry(fs, f'{path}/state.json', '_data_files')
    try:
        names = [entry['filename'] for entry in listed]
    except (KeyError, TypeError):
        raise UserError(f'{path}/state.json: _data_files is no list of files; copy the data set again') from None
    return _sizes(source, fs, (f'{path}/{name}' for name in names))


def _entry(fs: Any, path: str, key: str) -> Any:
    try:
        return json.loads(fs.cat_file(path))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path}: no JSON with an entry {key!r}; copy the data set again') from error


def _tfds_files(source: Source, fs: Any, path: str) -> dict[str, int]:
    """The shards of one split."""
    return _sizes(source, fs, (f'{path}/{name}' for name in tfds_shards(source, path)[1]))


def _sizes(source: Source, fs: Any, paths: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for path in paths:
        try:
            sizes[path] = fs.size(path)
        except FileNotFoundError:
            raise UserError(f'{source.path}: {path} is missing; copy the data set again') from None
    if not sizes:
        raise UserError(f'{source.path}: holds no documents')
    return sizes


def _check_unchanged(part: Part) -> None:
    try:
        now = part.fs.size(part.path)
    except FileNotFoundError:
        raise UserError(f'{part.path}: has vanished since it was listed; must stay while it is read') from None
    if now != part.size:
        told = f'had {part.size} bytes when it was listed, has {now} now; must not change while it is read'
        raise UserError(f'{part.path}: {told}')
