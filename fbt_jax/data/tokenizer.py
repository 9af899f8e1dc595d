"""Tokenizers: text to ids and back, exactly, for any text that UTF-8 can hold. Two are built in: `bytes` and `bpe`.

`bytes` maps each byte to its value. `bpe` is byte-level BPE by Hugging Face's `tokenizers`, from `austen_bpe.json`,
trained on the corpus's training documents only; every byte is in its alphabet, so nothing is unknown to it. Others come
from files (tokenizer_files.py). BOS and EOS, which may be one id, are never the encoding of text, not even of text that
spells them: packing alone puts them in. They stand for no text: they decode to nothing and count 0 bytes, so the sum of
`token_bytes` over a text's ids is its length in UTF-8.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Protocol

import numpy as np

from fbt_jax.config_data import DataConfig
from fbt_jax.data.tokenizer_files import BOS, EOS, FileTokenizer, read_file

BPE_VOCAB_SIZE = 2048
BPE_FILE = 'austen_bpe.json'


class Tokenizer(Protocol):
    """What data, evaluation and decoding need of a tokenizer. V is `vocab_size`, the largest id + 1."""

    vocab_size: int
    bos_id: int
    eos_id: int
    token_bytes: np.ndarray  # (V,) int32, how many bytes of UTF-8 each id stands for
    fingerprint: str  # sha256 (hex) of all that decides the encoding
    file: tuple[str, bytes] | None  # name and content of the file it was read from, None for a built-in one

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; no BOS or EOS is added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, uint32 arrays, on all cores or RAYON_NUM_THREADS of them."""
        ...

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a character cut in two, say) become U+FFFD.

        after: ids that stand before them; without any, `ids` begin a document, whose first word is spelt as such.
        """
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text's UTF-8, 256 is BOS, 257 is EOS."""

    def __init__(self) -> None:
        self.vocab_size = 258
        self.bos_id = 256
        self.eos_id = 257
        self.token_bytes = np.array([1] * 256 + [0, 0], np.int32)
        self.fingerprint = hashlib.sha256(b'bytes 0..255, BOS 256, EOS 257').hexdigest()
        self.file: tuple[str, bytes] | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        del after  # bytes are the same anywhere
        return bytes(i for i in ids if i < 256).decode(errors='replace')


def open_tokenizer(data: DataConfig, saved: Path | None = None) -> Tokenizer:
    """The tokenizer of `data`, which must be of text; the same object on each call.

    saved: a folder in which a run keeps a copy of its tokenizer's file (`Tokenizer.file`). If the copy is there it is
    read, and what `data` names may be gone. With it goes what lay beside it: give the run's config to `resolved`.
    """
    assert data.tokenizer != 'none', 'rows that are not text have no tokenizer'
    return _built_in(data.tokenizer) if data.tokenizer in ('bytes', 'bpe') else _from_file(data, saved)


def resolved(data: DataConfig, saved: Path | None = None) -> DataConfig:
    """`data` with BOS and EOS named as its file declares them: it and the file's content alone decide the encoding."""
    if data.tokenizer in ('bytes', 'bpe', 'none'):
        return data
    found = _from_file(data, saved)
    return dataclasses.replace(data, bos=found.bos, eos=found.eos)


def _from_file(data: DataConfig, saved: Path | None) -> FileTokenizer:
    path = Path(data.tokenizer).absolute()
    return _read_once(path, saved=saved, bos=data.bos, eos=data.eos, pattern=data.tokenizer_pattern)


_read_once = functools.cache(read_file)


@functools.cache
def _built_in(name: str) -> Tokenizer:
    if name == 'bytes':
        return ByteTokenizer()
    path = Path(BPE_FILE)
    bpe = FileTokenizer((resources.files('fbt_jax.data') / BPE_FILE).read_bytes(), path, bos=BOS, eos=EOS)
    bpe.file = None
    return bpe


def train_bpe(documents: Iterable[str], vocab_size: int = BPE_VOCAB_SIZE) -> str:
    """JSON of a byte-level BPE of `vocab_size` ids, BOS and EOS among them, trained on `documents`. Deterministic."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer=trainer)
    return bpe.to_str()
