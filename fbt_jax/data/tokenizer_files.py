"""Tokenizers read from a file: tokenizer.json (Hugging Face), *.model (SentencePiece) or *.tiktoken (ranks).

Each kind leaves encoding to its own library and adds what a run needs: which ids are BOS and EOS, how many bytes of
text each id stands for, and a check that no text is encoded as BOS or EOS. Bytes are exact unless the file itself
changes text before encoding it; then the changed text is counted. That is a normalizer (NFC, NFKC), spaces it drops, or
the space it puts before each document (SentencePiece's add_dummy_prefix, ByteLevel's add_prefix_space: one byte too
many a document). To a file that spells spaces as U+2581, a U+2581 in the text is a space too. V is `vocab_size`.
"""

import base64
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fbt_jax.errors import UserError, require

BOS, EOS = '<|bos|>', '<|eos|>'  # as the files that `train_bpe` makes name them
MOST_BEFORE = 64  # ids that are looked at of those before a text's
_BYTE = re.compile('<0x[0-9A-F]{2}>')
# Bytes that a byte-level vocabulary may lack: those that occur in no text (0xC0, ...), in no character but those that
# control a device, or are in no Unicode plane in use (0xF1 to 0xF4 begin planes 4 to 16). SmolLM2's lacks eight of
# them; a text that does hold one loses it, which `fbt data prepare` tells ("stands for N bytes").
_DISPENSABLE = {*range(32), 0x7F, 0xC0, 0xC1, *range(0xF1, 256)} - {*b'\t\n\f\r'}
_PROBE = ' Ab,  12\r\n\n\té \U0001f469\u200d\U0001f467 '


class _File(NamedTuple):
    """A file and what `data.*` says of it. `bos`, `eos`: names, '' = those that the file declares."""

    path: Path
    content: bytes
    bos: str
    eos: str
    pattern: str

    def wrong(self, why: str) -> UserError:
        told = ' '.join(why.split())  # libraries write several lines
        return UserError(f'data.tokenizer = {str(self.path)!r}: {told}')

    def library(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            raise self.wrong(f"needs {name}: pip install 'fbt-jax[tokenizers]'") from None


class _Loaded(NamedTuple):
    """A file as its library understands it."""

    token_bytes: np.ndarray  # (V,) int32
    specials: dict[str, int]  # the tokens that no text is encoded as
    declared: tuple[str, str]  # names of BOS and EOS where the config gives none, '' = none
    encode_batch: Callable[[list[str]], Iterable[Sequence[int]]]
    decode: Callable[[list[int]], str]


class FileTokenizer:
    """A `Tokenizer` made of a file's content. `bos` and `eos` are the names that were found for them."""

    def __init__(self, content: bytes, path: Path, *, bos: str = '', eos: str = '', pattern: str = '') -> None:
        file = _File(path, content, bos, eos, pattern)
        if not content:
            raise file.wrong('the file is empty')
        self._loaded = _LOADERS[path.suffix](file)
        self.token_bytes = self._loaded.token_bytes
        self.vocab_size = len(self.token_bytes)
        self.bos, self.eos = bos or self._loaded.declared[0], eos or self._loaded.declared[1]
        self.bos_id, self.eos_id = self._special_id('bos', file), self._special_id('eos', file)
        deciding = repr((path.suffix, pattern, self.bos_id, self.eos_id)).encode()
        # Of the file rather than of the parsed object, whose serialisation may change with the library's version.
        self.fingerprint = hashlib.sha256(deciding + b'\0' + content).hexdigest()
        self.file: tuple[str, bytes] | None = (path.name, content)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.uint32) for ids in self._loaded.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        if not self._of_text(after[-MOST_BEFORE:]):
            return self._loaded.decode(self._of_text(ids))
        # SentencePiece and its like leave out the space that a text's first token begins with. What stands before
        # `ids` itself may end within a character, and would take all bytes next to it along.
        start = self._of_text(self.encode('a'))
        return self._loaded.decode([*start, *self._of_text(ids)])[len(self._loaded.decode(start)) :]

    def _of_text(self, ids: Sequence[int]) -> list[int]:
        # The libraries spell some ids of no text (tiktoken's, SentencePiece's unknown) and raise for others (those
        # between V and the padded vocabulary's size).
        ids_N = np.asarray(ids, np.int64)
        ids_N = ids_N[(ids_N >= 0) & (ids_N < self.vocab_size)]
        return ids_N[self.token_bytes[ids_N] > 0].tolist()

    def _special_id(self, key: str, file: _File) -> int:
        name, specials = getattr(self, key), self._loaded.specials
        some = ', '.join(itertools.islice(specials, 20)) + (', ...' if len(specials) > 20 else '')
        said = f'set data.bos and data.eos to special tokens of {file.path}, which has {some or "none"}'
        require(name in specials, f'data.{key}', name, said)
        ids = np.concatenate(self.encode_batch([name, f'{_PROBE}{name} {name}{name}']))
        require(specials[name] not in ids, f'data.{key}', name, f'{file.path} encodes text as this token')
        if max(ids) >= self.vocab_size:
            raise file.wrong(f'encodes text as {max(ids)}, past its largest id {self.vocab_size - 1}')
        return specials[name]


def read_file(path: Path, *, saved: Path | None, bos: str, eos: str, pattern: str) -> FileTokenizer:
    """The tokenizer in the file at `path`, or in its copy in the folder `saved` if there is one."""
    copy = path if saved is None else saved / path.name
    found = copy if copy.is_file() else path
    try:
        content = found.read_bytes()
    except OSError as error:
        raise UserError(f'data.tokenizer = {str(path)!r}: {error.strerror}') from None
    try:
        return FileTokenizer(content, path, bos=bos, eos=eos, pattern=pattern)
    except UserError as error:
        raise error if found is path else UserError(f'{error} (read from its copy {found})') from None


def _hugging_face(file: _File) -> _Loaded:
    """A tokenizer.json that is byte-level (a character of a token is a byte) or falls back to bytes (`<0xAB>`)."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_buffer(file.content)
    except Exception as error:  # the library has no narrower type
        raise file.wrong(f'no tokenizer.json: {error}') from None
    library.no_truncation()
    library.no_padding()
    # Without this, text that spells a special token would be encoded as that token. It isn't stored in the file.
    library.encode_special_tokens = True
    parsed = json.loads(file.content)
    if parsed['model'].get('dropout'):
        raise file.wrong('has a dropout, so that a text has no one encoding; set it to null')
    byte_level = 'ByteLevel' in _types([parsed.get(part) for part in ('normalizer', 'pre_tokenizer', 'decoder')])
    if not (byte_level or parsed['model'].get('byte_fallback')):
        raise file.wrong('loses text: must be byte-level or fall back to bytes')
    vocab = library.get_vocab(with_added_tokens=True)
    spelt = byte_characters() if byte_level else [f'<0x{b:02X}>' for b in range(256)]
    if missing := [b for b in range(256) if b not in _DISPENSABLE and spelt[b] not in vocab]:
        raise file.wrong(f'loses text: lacks {len(missing)} single bytes, {missing[0]} for one')
    if max(vocab.values()) >= 2**24:
        raise file.wrong(f'its largest id is {max(vocab.values())}; must be below 2**24')
    token_bytes = np.zeros(max(vocab.values()) + 1, np.int32)
    for token, index in vocab.items():
        token_bytes[index] = len(token) if byte_level else _piece_bytes(token, is_byte=bool(_BYTE.fullmatch(token)))
    specials = {}
    for index, added in sorted(library.get_added_tokens_decoder().items()):  # these are spelt as text
        if added.special:
            specials[added.content] = index
        literal = len(added.content.encode()) if byte_level else _piece_bytes(added.content, is_byte=False)
        token_bytes[index] = 0 if added.special else literal
    return _Loaded(
        token_bytes,
        specials,
        _declared_beside(file, specials),
        # `_fast` leaves out the offsets, which nobody reads.
        lambda texts: (e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False)),
        lambda ids: library.decode(ids, skip_special_tokens=False),
    )


def _declared_beside(file: _File, specials: dict[str, int]) -> tuple[str, str]:
    """BOS and EOS as the files that Hugging Face puts beside a tokenizer.json name them, else as our own files do."""
    if file.bos and file.eos:
        return '', ''  # so that a broken file beside it, which nobody needs, is no error
    found = {'bos_token': BOS if BOS in specials else '', 'eos_token': EOS if EOS in specials else ''}
    for name in ('special_tokens_map.json', 'tokenizer_config.json'):  # the latter wins
        path = file.path.with_name(name)
        try:
            declared = json.loads(path.read_bytes()) if path.is_file() else {}
            said = {key: declared.get(key) for key in found}
            found |= {key: t if isinstance(t, str) else t['content'] for key, t in said.items() if t}
        except (ValueError, AttributeError, TypeError, KeyError, OSError) as error:
            raise file.wrong(f'{name} beside it is broken ({error!r}): set data.bos and data.eos') from None
    return found['bos_token'], found['eos_token']


def _types(part: Any) -> set[str]:
    """The types of a part of tokenizer.json and of the parts within it."""
    if isinstance(part, dict):
        return {str(part.get('type'))} | _types(list(part.values()))
    return set().union(*map(_types, part)) if isinstance(part, list) else set()


def _sentencepiece(file: _File) -> _Loaded:
    """A *.model. One made with add_dummy_prefix counts one byte too many a document: the space that it adds.

    One made without byte_fallback loses the characters that it doesn't know: they count 0 bytes and decode to nothing.
    """
    try:
        library = file.library('sentencepiece').SentencePieceProcessor(model_proto=file.content)
    except RuntimeError as error:
        raise file.wrong(f'no SentencePiece model: {error}') from None
    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
    token_bytes = np.array([_piece_bytes(p, is_byte=library.is_byte(i)) for i, p in enumerate(pieces)], np.int32)
    specials = {piece: i for i, piece in enumerate(pieces) if library.is_control(i)}
    token_bytes[[*specials.values(), library.unk_id()]] = 0
    bos, eos = (pieces[i] if i >= 0 else '' for i in (library.bos_id(), library.eos_id()))  # -1: made without
    encode_batch = functools.partial(library.encode, num_threads=_threads())
    return _Loaded(token_bytes, specials, (bos, eos), encode_batch, library.decode)


def _threads() -> int:
    """What the other libraries use too: as many as the one that reads this variable by itself."""
    return int(os.environ.get('RAYON_NUM_THREADS', 0)) or len(os.sched_getaffinity(0))


def byte_characters() -> list[str]:
    """What ByteLevel spells each byte with: its character where Latin-1 has a visible one, else U+0100 and on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def _piece_bytes(piece: str, *, is_byte: bool) -> int:
    return 1 if is_byte else len(piece.replace('\u2581', ' ').encode())


def _tiktoken(file: _File) -> _Loaded:
    """A *.tiktoken: lines of a token in base64 and its rank, which is its id. BOS and EOS get the first ids after."""
    for key, name in (('bos', file.bos), ('eos', file.eos)):
        require(name != '', f'data.{key}', name, f'{file.path} names no tokens: give data.bos and data.eos a name each')
    library = file.library('tiktoken')
    try:
        lines = (line.split() for line in file.content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise file.wrong(f'lines must be a token in base64 and its rank: {error}') from None
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise file.wrong(f'loses text: lacks {len(missing)} single bytes, {missing[0]} for one')
    first = max(ranks.values()) + 1
    if len({*ranks.values()}) < len(ranks) or min(ranks.values()) < 0 or first > 2**24:
        raise file.wrong('its ranks must be different numbers in 0..2**24 - 1')
    specials = {name: first + i for i, name in enumerate(dict.fromkeys((file.bos, file.eos)))}
    token_bytes = np.zeros(first + len(specials), np.int32)
    token_bytes[[*ranks.values()]] = [len(token) for token in ranks]
    try:
        encoding = library.Encoding('', pat_str=file.pattern, mergeable_ranks=ranks, special_tokens=specials)
    except ValueError as error:
        why = ' '.join(str(error).split())
        raise UserError(f'data.tokenizer_pattern = {file.pattern!r}: no regular expression: {why}') from None
    # tiktoken drops what the expression doesn't match without a word.
    kept = encoding.decode_bytes(encoding.encode_ordinary(_PROBE)) == _PROBE.encode()
    require(kept, 'data.tokenizer_pattern', file.pattern, 'loses text: every character must belong to a match')
    encode_batch = functools.partial(encoding.encode_ordinary_batch, num_threads=_threads())
    return _Loaded(token_bytes, specials, ('', ''), encode_batch, encoding.decode)


_LOADERS = {'.json': _hugging_face, '.model': _sentencepiece, '.tiktoken': _tiktoken}
