"""Tokenizers: text to ids and back, exactly, for any text that UTF-8 can hold. Two are built in: `bytes` and `bpe`.

`bytes` maps each byte to its value. `bpe` is byte-level BPE by Hugging Face's `tokenizers`, from `austen_bpe.json`,
trained on the corpus's training documents only; every byte is in its alphabet, so nothing is unknown to it. BOS and EOS
are never the encoding of text, not even of text that spells them: packing alone puts them in. They stand for no text:
they decode to nothing and count 0 bytes, so the sum of `token_bytes` over a text's ids is its length in UTF-8.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Protocol

import numpy as np

BPE_VOCAB_SIZE = 2048
BPE_FILE = 'austen_bpe.json'
_BOS, _EOS = '<|bos|>', '<|eos|>'


class Tokenizer(Protocol):
    """What data, evaluation and decoding need of a tokenizer. V is `vocab_size`; ids run from 0 to V - 1."""

    vocab_size: int
    bos_id: int
    eos_id: int
    token_bytes: np.ndarray  # (V,) int32, how many bytes of UTF-8 each id stands for
    fingerprint: str  # sha256 (hex) of all that decides the encoding

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; no BOS or EOS is added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, using all cores where it can."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a character cut in two, say) become U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text's UTF-8, 256 is BOS, 257 is EOS."""

    def __init__(self) -> None:
        self.vocab_size = 258
        self.bos_id = 256
        self.eos_id = 257
        self.token_bytes = np.array([1] * 256 + [0, 0], np.int32)
        self.fingerprint = hashlib.sha256(b'bytes 0..255, BOS 256, EOS 257').hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors='replace')


class BpeTokenizer:
    """A byte-level BPE given as the text of a `tokenizers` JSON file, such as `train_bpe` makes."""

    def __init__(self, json_text: str) -> None:
        import tokenizers

        self._bpe = tokenizers.Tokenizer.from_str(json_text)
        # Without this, text that spells a special token would be encoded as that token. It isn't stored in the file.
        self._bpe.encode_special_tokens = True
        self.vocab_size = self._bpe.get_vocab_size()
        self.bos_id = self._special_id(_BOS)
        self.eos_id = self._special_id(_EOS)
        # The file spells a token with one character for each of its bytes.
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, index in self._bpe.get_vocab().items():
            self.token_bytes[index] = len(token)
        self.token_bytes[[self.bos_id, self.eos_id]] = 0
        # Of the file rather than of the parsed object, whose serialisation may change with the library's version.
        self.fingerprint = hashlib.sha256(json_text.encode()).hexdigest()

    def _special_id(self, token: str) -> int:
        index = self._bpe.token_to_id(token)
        if index is None:
            raise ValueError(f'tokenizer has no token {token!r}: BOS {_BOS!r} and EOS {_EOS!r} must be in the file')
        return index

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._bpe.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._bpe.decode([int(i) for i in ids], skip_special_tokens=True)


def train_bpe(documents: Iterable[str], vocab_size: int = BPE_VOCAB_SIZE) -> str:
    """JSON of a byte-level BPE of `vocab_size` ids, BOS and EOS among them, trained on `documents`. Deterministic."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer=trainer)
    return bpe.to_str()


def _shipped_bpe() -> BpeTokenizer:
    return BpeTokenizer((resources.files('fbt_jax.data') / BPE_FILE).read_text(encoding='utf-8'))


_BUILDERS: dict[str, Callable[[], Tokenizer]] = {'bytes': ByteTokenizer, 'bpe': _shipped_bpe}


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """The built-in tokenizer `name` (`data.tokenizer`), the same object on each call."""
    if name not in _BUILDERS:
        raise ValueError(f'data.tokenizer = {name!r}: must be one of {", ".join(_BUILDERS)}')
    return _BUILDERS[name]()
