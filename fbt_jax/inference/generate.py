"""From prompts to texts: what `fbt_jax.generate` and `fbt generate` do around the two compiled programs of decode.py.

Prompts and samples become rows; rows, prompt lengths and the room for new tokens are rounded up to powers of two, so
that requests of any size run the same few programs. Between runs of a few steps the host looks at the texts: for stop
strings, and for whoever streams them.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbt_jax.errors import UserError, require
from fbt_jax.inference.decode import MODES, Decoding, advance, begin, cast, read_prompts, spread
from fbt_jax.inference.sampling import Sampling
from fbt_jax.model.transformer import compute_dtype
from fbt_jax.sharding import RULES, axis_size

LEAST = 128  # what prompts, caches and new tokens are rounded up to: kernels want as much, and few programs serve all
MAX_TOKENS = 128  # where none are asked for and the context leaves as many
STEPS_AT_A_TIME = 16  # between two looks at the texts
MOST_SAMPLES = 2**10  # a row's number is that of its prompt times this, and of its sample
MOST_PROMPTS = 2**31 // MOST_SAMPLES  # so that it is an int32


class Generations(NamedTuple):
    """Of each prompt in turn, each of its samples in turn."""

    texts: list[str]  # what each adds to its prompt's; cut before a stop string or stop id
    tokens: list[list[int]]  # that were chosen, up to EOS or a stop id, or to the one that brought a stop text
    log_probs: list[list[float]]  # of each token by the model itself, natural logarithms
    finished: list[str]  # 'eos' (or another of the stop ids), 'stop' (a stop string) or 'length'


class Piece(NamedTuple):
    """What one row's text has grown by."""

    row: int
    text: str


def generate(run: Any, prompts: Sequence[str | Sequence[int]], **options: Any) -> Generations:
    """Continues `prompts`; `options` are those of `stream`."""
    streaming = stream(run, prompts, **options)
    while True:
        try:
            next(streaming)
        except StopIteration as done:
            return done.value


def stream(
    run: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    mode: str = 'soft',
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    fused_passes: int = 1,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    numbers: Sequence[int] | None = None,
) -> Generator[Piece, None, Generations]:
    """Yields text as it comes; returns `Generations`.

    Args:
      run: of `load_run`. Within `jax.set_mesh` its parameters lie on the mesh, which must not split positions.
      prompts: texts, to which BOS is added, or lists of ids that are taken as they are.
      mode: 'standard', 'soft' or 'fused' (method.md section 5).
      max_tokens: new ones, at most; None: MAX_TOKENS, or what the longest prompt leaves of the trained context.
      temperature: 0 is greedy. top_k, top_p: see sampling.py; they have no meaning for greedy.
      num_samples: continuations of each prompt, from one reading of it.
      seed: rows draw by (seed, prompt's number, sample's number, step), whatever is decoded beside them.
      fused_passes: f >= 1 passes over the prompt after the plain one, for mode 'fused'.
      stop: texts that end a row; EOS always does.
      stop_ids: ids that end a row as EOS does.
      numbers: of the prompts, in 0..2**21 - 1, by which they draw (default: 0, 1, ...).

    Raises:
      UserError: an argument is out of range, a prompt and its continuation are longer than the trained context, or the
        model was not trained with feedback and the mode needs it.
    """
    stop = (stop,) if isinstance(stop, str) else stop
    given = {'prompts': prompts, 'stop': stop, 'stop_ids': stop_ids, 'numbers': () if numbers is None else numbers}
    for name, value in given.items():
        require(_is_list(value), name, value, 'must be a list')
    check(
        run,
        mode=mode,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_samples=num_samples,
        seed=seed,
        fused_passes=fused_passes,
        stop=tuple(stop),
        stop_ids=tuple(stop_ids),
    )
    num_samples, fused_passes = int(num_samples), int(fused_passes)  # numpy's have no bit_length
    ids = [encoded(run, prompt) for prompt in prompts]
    require(len(ids) > 0, 'prompts', prompts, 'there is none')
    numbers = range(len(ids)) if numbers is None else numbers
    fit = len(numbers) == len(ids) and all(_is_whole(n) and 0 <= n < MOST_PROMPTS for n in numbers)
    require(fit, 'numbers', numbers, f'must be one of 0..{MOST_PROMPTS - 1} for each prompt')
    context = run.config.data.seq_len
    longest = max(map(len, ids))
    if max_tokens is None:
        max_tokens = max(1, min(MAX_TOKENS, context - longest))
    max_tokens = int(max_tokens)
    if longest + max_tokens > context:
        raise UserError(
            f'a prompt of {longest} tokens and max_tokens = {max_tokens} are more than the trained context of {context}'
        )
    capacity = rounded(max(longest + max_tokens, LEAST), context)
    tokens_BP = np.zeros((padded_rows(len(ids)), rounded(max(longest, LEAST), context)), np.int32)
    lengths_B = np.ones(len(tokens_BP), np.int32)
    for row, prompt in enumerate(ids):
        tokens_BP[row, : len(prompt)] = prompt
        lengths_B[row] = len(prompt)
    passes = 1 + fused_passes if mode == 'fused' else 1
    dtype = compute_dtype(run.model.config)
    params = run.params if run.params['embedding'].dtype == dtype else cast(run.params, dtype=dtype)
    read = read_prompts(run.model, params, tokens_BP, lengths_B, num_passes=passes, capacity=capacity)

    count = len(ids) * num_samples
    rows_B = np.arange(padded_rows(count))
    real_B = rows_B < count
    prompt_B = np.where(real_B, rows_B // num_samples, 0)
    ends = (getattr(run.tokenizer, 'eos_id', -1), *map(int, stop_ids))
    common: dict[str, Any] = {
        'stop_ids': jnp.array(ends),
        # The number of a row's noise must not change with that of the others' samples.
        'rows_B': jnp.asarray(np.asarray(numbers)[prompt_B] * MOST_SAMPLES + rows_B % num_samples, jnp.int32),
        'key': jax.random.key(seed),
        'sampling': Sampling(jnp.float32(temperature or 1), jnp.int32(top_k), jnp.float32(top_p)),
        'kind': 'greedy' if temperature == 0 else 'restricted' if top_k or top_p < 1 else 'free',
    }
    room = rounded(max(max_tokens, LEAST), context)
    if num_samples > 1:
        read = spread(read, jnp.asarray(prompt_B))
    state = begin(run.model, params, read, jnp.asarray(~real_B), max_tokens=room, **common)
    del read  # its cache is the state's
    texts = _Texts(run.tokenizer, [ids[n] for n in prompt_B[:count]], ends, tuple(stop))
    while True:
        steps = int(state.steps)
        yield from texts.look(state, last=steps >= max_tokens)
        if steps >= max_tokens or texts.all_done:
            return texts.result()
        state = state._replace(done_B=state.done_B | jnp.asarray(texts.done_for(len(rows_B))))
        until = jnp.int32(min(steps + STEPS_AT_A_TIME, max_tokens))
        state = advance(run.model, params, state, until=until, feedback=mode != 'standard', **common)


def check(
    run: Any,
    *,
    mode: str,
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    seed: int,
    fused_passes: int,
    stop: tuple[str, ...],
    stop_ids: tuple[int, ...],
) -> None:
    """UserError for what can be known before anything is read."""
    require(mode in MODES, 'mode', mode, f'must be one of {", ".join(MODES)}')
    if mode != 'standard' and not run.trained_feedback:
        raise UserError(f'mode = {mode!r}: this model was not trained with feedback; only standard is possible')
    whole = {'top_k': top_k, 'num_samples': num_samples, 'fused_passes': fused_passes, 'seed': seed}
    for name, value in whole.items() if max_tokens is None else (whole | {'max_tokens': max_tokens}).items():
        require(_is_whole(value) and value < 2**31, name, value, 'must be a whole number below 2**31')
    for name, number in (('temperature', temperature), ('top_p', top_p)):
        real = isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)
        require(real, name, number, 'must be a number')
    require(all(isinstance(text, str) for text in stop), 'stop', stop, 'must be texts')
    fit = all(_is_whole(id_) and 0 <= id_ < run.config.model.vocab_size for id_ in stop_ids)
    require(fit, 'stop_ids', stop_ids, f'must be ids of the model, 0..{run.config.model.vocab_size - 1}')
    require(max_tokens is None or max_tokens >= 1, 'max_tokens', max_tokens, 'must be at least 1')
    require(temperature == 0 or 1e-4 <= temperature <= 1e4, 'temperature', temperature, 'must be 0 or lie in 1e-4..1e4')
    require(top_k >= 0, 'top_k', top_k, 'must not be negative')
    require(0 < top_p <= 1, 'top_p', top_p, 'must lie in (0, 1]')
    require(temperature > 0 or (top_k == 0 and top_p == 1), 'temperature', temperature, 'is greedy: no top_k or top_p')
    require(1 <= num_samples <= MOST_SAMPLES, 'num_samples', num_samples, f'must lie in 1..{MOST_SAMPLES}')
    require(fused_passes >= 1, 'fused_passes', fused_passes, 'must be at least 1')
    require(seed >= 0, 'seed', seed, 'must not be negative')
    require(all(stop), 'stop', stop, 'must not be empty texts')
    require(not stop or run.tokenizer is not None, 'stop', stop, 'this model has no text')


def encoded(run: Any, prompt: str | Sequence[int]) -> list[int]:
    """The ids of a prompt, BOS before a text; UserError where the model can't read it."""
    if isinstance(prompt, str):
        if run.tokenizer is None:
            raise UserError('this model reads no text: give its prompts as lists of ids')
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f'prompt = {prompt!r}: is not UTF-8') from None
        return [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
    ids_alone = _is_list(prompt) and all(map(_is_whole, prompt))
    require(ids_alone, 'prompt', prompt, 'must be a text or a list of ids')
    ids = list(prompt)
    require(len(ids) > 0, 'prompt', prompt, 'is empty')
    require(min(ids) >= 0 and max(ids) < run.config.model.vocab_size, 'prompt', prompt, 'has ids that the model lacks')
    return ids


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def rounded(number: int, most: int) -> int:
    """The next power of two, but not more than `most`."""
    return min(1 << (number - 1).bit_length(), most)


def padded_rows(number: int) -> int:
    """The next power of two, then the next number that the devices share evenly."""
    shards = axis_size(*RULES['batch'])
    return -(-(1 << (number - 1).bit_length()) // shards) * shards


class _Texts:
    """The rows' texts as they grow: what is final of them, and whether a stop string has come."""

    def __init__(self, tokenizer: Any, prompts: list[list[int]], ends: tuple[int, ...], stop: tuple[str, ...]) -> None:
        self._tokenizer, self._prompts, self._ends, self._stop = tokenizer, prompts, ends, stop
        count = len(prompts)
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._log_probs: list[list[float]] = [[] for _ in range(count)]
        self._texts = [''] * count
        self._told = [0] * count  # characters of the text that have been handed out
        self._finished = [''] * count

    @property
    def all_done(self) -> bool:
        return all(self._finished)

    def done_for(self, rows: int) -> np.ndarray:
        return np.array([bool(f) for f in self._finished] + [True] * (rows - len(self._finished)))

    def look(self, state: Decoding, *, last: bool) -> Iterator[Piece]:
        """Takes up what has been chosen since the last look; `last`: no row goes on."""
        steps = int(state.steps)
        tokens_BN, log_probs_BN = np.asarray(state.tokens_BN), np.asarray(state.log_probs_BN)
        for row in range(len(self._tokens)):
            if self._finished[row]:
                continue
            own = self._tokens[row]
            new = tokens_BN[row, len(own) : steps].tolist()
            if last:
                self._finished[row] = 'length'
            end = next((n for n, id_ in enumerate(new) if id_ in self._ends), None)
            if end is not None:
                new = new[: end + 1]
                self._finished[row] = 'eos'
            self._log_probs[row] += log_probs_BN[row, len(own) : len(own) + len(new)].tolist()
            own += new
            yield from self._grow(row)

    def _grow(self, row: int) -> Iterator[Piece]:
        if self._tokenizer is None:
            return
        own = self._tokens[row]
        shown = own[:-1] if self._finished[row] == 'eos' else own
        text, place = self._read(row, shown, final=bool(self._finished[row]))
        if place is not None:
            # The first token that brings a stop text is the last that counts; more may come after it.
            for end in range(1, len(shown) + 1):
                text, place = self._read(row, shown[:end], final=end == len(shown))
                if place is not None:
                    break
            self._finished[row] = 'stop'
            del own[end:], self._log_probs[row][end:]
            text = text[:place]
        self._texts[row] = text
        ready = len(text)
        if not self._finished[row]:
            # A character whose bytes have not all come, or the beginning of a stop string, may yet change.
            ready = len(text.rstrip('\ufffd')) - max(map(len, self._stop), default=1) + 1
        if ready > self._told[row]:
            piece, self._told[row] = text[self._told[row] : ready], ready
            yield Piece(row, piece)

    def _read(self, row: int, tokens: list[int], *, final: bool) -> tuple[str, int | None]:
        """The text, and where in it a stop text begins, in what can't change any more."""
        text = self._tokenizer.decode(tokens, after=self._prompts[row])
        decided = text if final else text.rstrip('\ufffd')  # a character whose bytes have not all come
        places = [place for place in map(decided.find, self._stop) if place >= 0]
        return text, min(places) if places else None

    def result(self) -> Generations:
        return Generations(self._texts, self._tokens, self._log_probs, self._finished)
