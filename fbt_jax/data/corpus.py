"""The embedded corpus: six Jane Austen novels as 269 documents, one a chapter, split into training and validation.

A document begins at its chapter's heading. What stands before a novel's or volume's first chapter (title page, preface,
volume heading) belongs to that chapter, what follows a last chapter (FINIS, a note) to the one before it, so the
documents joined together are the text, character for character. No chapter is in both splits.
Where the text comes from: `austen.md`.
"""

import functools
import itertools
import lzma
import re
from importlib import resources
from typing import NamedTuple

# One chapter in 20, from the middle of each 20: 13 chapters, 4.5 % of the text, one to three from each novel.
VALIDATION_EVERY = 20
VALIDATION_FIRST = 10

# A chapter's heading, alone on its line; with it all that lies between a title or volume heading and that line.
_DOCUMENT_START = re.compile(
    r'^(?:(?:EMMA|MANSFIELD PARK|NORTHANGER ABBEY|Persuasion|PRIDE AND PREJUDICE|SENSE AND SENSIBILITY|VOLUME [IVX]+)\n'
    r'(?s:.*?)^)?(?:CHAPTER|Chapter) (?:[IVXL]+|[0-9]+)$',
    re.MULTILINE,
)


class Split(NamedTuple):
    """Documents, each whole, in the corpus's order."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def text() -> str:
    """All six novels, in one string."""
    return lzma.decompress((resources.files('fbt_jax.data') / 'austen.txt.xz').read_bytes()).decode()


def chapters(text: str) -> tuple[str, ...]:
    """`text` cut where chapters start, nothing left out: what precedes the first heading joins the first chapter."""
    starts = [match.start() for match in _DOCUMENT_START.finditer(text)]
    bounds = [0, *starts[1:], len(text)]
    return tuple(text[a:b] for a, b in itertools.pairwise(bounds))


@functools.cache
def split() -> Split:
    """The corpus's training and validation documents; the same on every call and machine."""
    documents = chapters(text())
    held_out = range(VALIDATION_FIRST, len(documents), VALIDATION_EVERY)
    return Split(
        train=tuple(document for i, document in enumerate(documents) if i not in held_out),
        validation=tuple(documents[i] for i in held_out),
    )
