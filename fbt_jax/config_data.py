"""The `data.*` keys: which documents, in what shares, encoded and packed how. Imports nothing heavy.

A source is written FORMAT:PATH#OPTION=VALUE,...; a mixture is a dict of names and such sources, with `data.weights`:

    data.source = 'austen'
    data.source = 'word_problem:A5'
    data.source = 'jsonl:/data/web-*.jsonl.zst#key=content'
    data.source = {'web': 'prepared:/data/web', 'code': 'prepared:/data/code'}
    data.weights = ((0, {'web': 0.9, 'code': 0.1}), (0.75, {'web': 0.5, 'code': 0.5}))

Each phase of the weights is (start, share of the rows for each name); start is a fraction of the run's steps if a float
below 1, a step if an int.
"""

import dataclasses
import difflib
from typing import Any, NamedTuple

from fbt_jax.config_phases import first_steps, is_start
from fbt_jax.errors import UserError, require

BUILT_IN = ('austen', 'word_problem')
WORD_GROUPS = ('Z2', 'S3', 'Z60', 'S4', 'A5', 'S5')
# Options of each format; `every` and `except_every` of all but `prepared` and the built-in ones.
FORMATS: dict[str, tuple[str, ...]] = {
    'text': ('unit',),
    'jsonl': ('key', 'prompt_key'),
    'parquet': ('key', 'prompt_key'),
    'arrayrecord': (),
    'tfds': ('split', 'key', 'prompt_key'),
    'hf': ('key', 'prompt_key'),
    'prepared': (),
}
SPLIT_OPTIONS = ('every', 'except_every')
UNITS = ('file', 'line')
SINGLE = 'train'  # the name of a source that is no mixture
PACKINGS = ('carry_over', 'best_fit')
EXHAUSTED = ('repeat', 'end')

Weights = tuple[tuple[float | int, tuple[tuple[str, float], ...]], ...]
Sources = tuple[tuple[str, str], ...]


class Source(NamedTuple):
    """A parsed source. `path` is '' for the embedded text, the group for the word problem."""

    format: str
    path: str
    options: dict[str, str]

    def option(self, name: str, default: str) -> str:
        return self.options.get(name, default)


def parse_source(text: str, key: str = 'source') -> Source:
    """FORMAT:PATH#OPTION=VALUE,... taken apart; UserError that names `key` where it is wrong."""
    kind, colon, rest = text.partition(':')
    if kind == 'word_problem':
        require(not colon or rest in WORD_GROUPS, key, text, f'must be word_problem:GROUP, of {", ".join(WORD_GROUPS)}')
        return Source(kind, rest or 'S5', {})
    if kind in BUILT_IN:
        require(not colon, key, text, f'{kind} is built in and takes no path')
        return Source(kind, '', {})
    if kind not in FORMATS:
        near = difflib.get_close_matches(kind, [*BUILT_IN, *FORMATS], n=1)
        hint = f'did you mean {near[0]}? ' if near else ''
        raise UserError(f'{key} = {text!r}: {hint}must be {", ".join(BUILT_IN)} or FORMAT:PATH, FORMAT one of {_NAMES}')
    path, hash_, listed = rest.partition('#')
    require(path != '', key, text, f'no path; must be {kind}:PATH')
    allowed = FORMATS[kind] + (() if kind == 'prepared' else SPLIT_OPTIONS)
    options = {}
    for part in listed.split(',') if hash_ else ():
        name, equals, value = part.partition('=')
        known = ', '.join(f'{o}=' for o in allowed) or 'none'
        require(name in allowed and bool(equals and value), key, text, f'option {part!r}; {kind} takes {known}')
        require(name not in options, key, text, f'{name}= is given twice')
        options[name] = value
    unit = options.get('unit', 'file')
    require(unit in UNITS, key, text, f'unit={unit}; a document is a {" or a ".join(UNITS)}')
    for name in SPLIT_OPTIONS:
        number = options.get(name, '2')
        fine = number.isascii() and number.isdigit() and len(number) < 10 and int(number) >= 2
        require(fine, key, text, f'{name} must lie in 2..999999999')
    require(len(options.keys() & set(SPLIT_OPTIONS)) < 2, key, text, 'only one of every= and except_every=')
    return Source(kind, path, options)


_NAMES = ', '.join(FORMATS)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where rows come from. `batch_size` counts rows per optimizer step over all hosts and micro-batches.

    `source`, `validation`: one source or a dict of several; `validation` '' = none, but for the built-in sources their
    own. `tokenizer`: `bytes`, `bpe`, `none`, or a file: tokenizer.json (Hugging Face), *.model (SentencePiece) or
    *.tiktoken (ranks; `tokenizer_pattern` is then the regular expression that cuts text into words). `bos` and `eos`
    name the tokens around each document, '' = those that the file itself declares. `exhausted`: what happens when a
    source has been read once: `repeat` it in a new order, or `end` the run. `workers`: threads that read ahead.
    """

    source: str | Sources = 'austen'
    weights: Weights = ()
    exhausted: str = 'repeat'
    validation: str | Sources = ''
    tokenizer: str = 'bpe'
    tokenizer_pattern: str = ''
    bos: str = ''
    eos: str = ''
    packing: str = 'carry_over'
    seq_len: int = 8192
    batch_size: int = 36
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ('source', 'validation'):
            object.__setattr__(self, name, _check_sources(getattr(self, name), f'data.{name}'))
        require(self.source != '', 'data.source', self.source, f'must be {", ".join(BUILT_IN)} or FORMAT:PATH')
        object.__setattr__(self, 'weights', _check_weights(self.weights, self.source))
        formats = {parse_source(spec, 'data.source').format for _, spec in self.sources}
        held_out = {parse_source(spec, 'data.validation').format for _, spec in self.validation_sources}
        for kind in BUILT_IN:
            alone = isinstance(self.source, str)
            require(kind not in formats or alone, 'data.source', self.source, f'{kind} is no part of a mixture')
            require(kind not in held_out, 'data.validation', self.validation, f'{kind} validates itself only')
        if formats & set(BUILT_IN):
            require(not held_out, 'data.validation', self.validation, f'{self.source} has validation rows of its own')
        require(
            (self.tokenizer == 'none') == ('word_problem' in formats),
            'data.tokenizer',
            self.tokenizer,
            f"must be 'none' for rows that are not text, and only there (data.source = {self.source!r})",
        )
        require(
            self.tokenizer in ('bytes', 'bpe', 'none') or self.tokenizer.endswith(('.json', '.model', '.tiktoken')),
            'data.tokenizer',
            self.tokenizer,
            'must be bytes, bpe, none or a file that ends in .json, .model or .tiktoken',
        )
        require(
            (self.tokenizer_pattern != '') == self.tokenizer.endswith('.tiktoken'),
            'data.tokenizer_pattern',
            self.tokenizer_pattern,
            'is what a .tiktoken file needs, and only that',
        )
        for name in ('bos', 'eos'):
            value, from_file = getattr(self, name), self.tokenizer not in ('bytes', 'bpe', 'none')
            require(value == '' or from_file, f'data.{name}', value, f'has no effect with tokenizer {self.tokenizer}')
        require(self.packing in PACKINGS, 'data.packing', self.packing, f'must be one of {", ".join(PACKINGS)}')
        require(self.exhausted in EXHAUSTED, 'data.exhausted', self.exhausted, f'must be {" or ".join(EXHAUSTED)}')
        if 'word_problem' in formats:
            for name in ('packing', 'exhausted'):
                value = getattr(self, name)
                default = type(self).__dataclass_fields__[name].default
                require(value == default, f'data.{name}', value, 'has no effect on endless rows that are not text')
        require(2 <= self.seq_len <= 2**20, 'data.seq_len', self.seq_len, 'must lie in 2..2**20')
        require(self.batch_size >= 1, 'data.batch_size', self.batch_size, 'must be at least 1')
        require(0 <= self.workers <= 64, 'data.workers', self.workers, 'must lie in 0..64')

    @property
    def sources(self) -> Sources:
        """((name, source), ...) of what is trained on, a single source too."""
        return ((SINGLE, self.source),) if isinstance(self.source, str) else self.source

    @property
    def validation_sources(self) -> Sources:
        """((name, source), ...) of what is held out."""
        if isinstance(self.validation, str):
            return (('validation', self.validation),) if self.validation else ()
        return self.validation

    def weight_phases(self, total_steps: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """((first step, 0-based; share of each source), ...) for a run of `total_steps`; starts go up."""
        if not self.weights:
            return ((0, (1.0,)),)
        steps = first_steps(self.weights, total_steps, 'data.weights')
        shares = [tuple(w for _, w in shares) for _, shares in self.weights]
        return tuple(zip(steps, shares, strict=True))


def _check_sources(value: Any, key: str) -> str | Sources:
    """One source as its text, several as ((name, text), ...) in the order of their names."""
    if isinstance(value, str):
        if value:
            parse_source(value, key)
        return value
    try:
        pairs = sorted(dict(value).items())
    except (TypeError, ValueError):
        raise UserError(f'{key} = {value!r}: must be a source or a dict of names and sources') from None
    require(len(pairs) > 0, key, value, 'names no source')
    for name, text in pairs:
        fine = isinstance(name, str) and name.isascii() and name.replace('_', 'a').replace('-', 'a').isalnum()
        require(fine, key, name, 'names of sources are letters, digits, - and _')
        require(isinstance(text, str), f'{key}.{name}', text, 'must be FORMAT:PATH')
        parse_source(text, f'{key}.{name}')
    return tuple(pairs)


def _check_weights(value: Any, source: str | Sources) -> Weights:
    """Phases of shares in the order of the sources' names, each summing to 1."""
    form = 'must be ((start, {name: share, ...}), ...), start a fraction below 1 (float) or a step (int)'
    names = [] if isinstance(source, str) else [name for name, _ in source]
    if not names:
        require(value == (), 'data.weights', value, 'has no effect on a single source')
        return ()
    require(isinstance(value, tuple | list) and len(value) > 0, 'data.weights', value, f'a mixture needs them: {form}')
    phases = []
    for phase in value:
        require(isinstance(phase, tuple | list) and len(phase) == 2, 'data.weights', phase, form)
        start, shares = phase
        try:
            shares = dict(shares)
        except (TypeError, ValueError):
            raise UserError(f'data.weights = {phase!r}: {form}') from None
        for name in shares:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0)
            require(name in names, 'data.weights', name, f'is no source; did you mean {near[0] if near else names[0]}?')
        missing = [name for name in names if name not in shares]
        require(not missing, 'data.weights', phase, f'no share for {", ".join(missing)} (0 leaves a source out)')
        fine = all(isinstance(w, int | float) and not isinstance(w, bool) and 0 <= w <= 1 for w in shares.values())
        require(fine, 'data.weights', phase, 'shares must lie in 0..1')
        total = sum(shares.values())
        require(abs(total - 1) < 1e-6, 'data.weights', phase, f'shares sum to {total:.6g}, must sum to 1')
        require(is_start(start), 'data.weights', phase, form)
        phases.append((start, tuple((name, float(shares[name])) for name in names)))
    require(phases[0][0] == 0, 'data.weights', value, 'the first phase must start at 0')
    unread = [n for i, n in enumerate(names) if all(shares[i][1] == 0 for _, shares in phases)]
    require(not unread, 'data.weights', value, f'{", ".join(unread)} would never be read: leave it out of data.source')
    return tuple(phases)
