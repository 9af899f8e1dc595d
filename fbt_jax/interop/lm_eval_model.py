"""A run as a model of lm-evaluation-harness, named `fbt` there:

    python -m fbt_jax.interop.lm_eval_model --model fbt --model_args workdir=DIR,mode=fused,fused_passes=1 --tasks ...

All other flags are those of `lm_eval`, which looks for models in its own package only; hence this command. `lm_eval`
itself finds the model where a task's file names a function of this module (README). In Python:
`lm_eval.simple_evaluate(model=FbtLM(load_run(DIR), mode='soft'), tasks=...)`.

Several processes (training/processes.py) make all requests together on one mesh, and the first one writes the results:
the harness's own way for models that are split over processes, LOCAL_RANK.

What a score is made of is said in lm_eval_scores.py. Shapes: B rows, T inputs, N tokens of a continuation.
"""

import collections
import hashlib
import itertools
import logging
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fbt_jax.errors import UserError, require
from fbt_jax.inference.decode import MODES
from fbt_jax.inference.generate import LEAST, MOST_PROMPTS, generate, padded_rows, rounded
from fbt_jax.interop.lm_eval_scores import score_passes, score_soft
from fbt_jax.losses import TokenLosses
from fbt_jax.training import processes
from fbt_jax.training.run_folder import Run, load_run, require_finite, spread

try:
    from lm_eval import utils
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError as error:
    told = f"{error}; lm-evaluation-harness is an extra: pip install 'fbt-jax[lm-eval]'"
    if __name__ == '__main__':
        print(f'fbt: {told}', file=sys.stderr)
        sys.exit(2)
    raise ImportError(told) from None

LOG = logging.getLogger('lm_eval.fbt')  # below the logger that the harness sets up
MAX_GEN_TOKS = 256  # the harness's own default
LEAST_CONTINUATION = 16  # what continuations are padded to at least, so that few programs serve all of them
GENERATION_KEYS = {'until', 'max_gen_toks', 'do_sample', 'temperature', 'top_p', 'top_k'}


class Pair(NamedTuple):
    """Ids to be scored, and what stands before them: at least one id, BOS where nothing was cut."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    log_prob: float  # of the continuation, natural logarithm
    greedy: bool  # each of its tokens is the likeliest


@register_model('fbt')
class FbtLM(LM):
    """Scores and continues texts by a trained model.

    Args:
      run: of `load_run`; the harness gives `workdir` and `step` instead.
      mode: 'standard', 'soft' or 'fused'.
      fused_passes: f >= 1 passes after the plain one, for mode 'fused' only (default 1).
      batch_size: rows at a time; no result depends on it. Among the model's arguments it beats `--batch_size`. 'auto':
        as many as hold what a microbatch of the training held, half of that whenever the memory does not suffice.
      max_batch_size: of 'auto' (default: no limit).
      max_length: inputs of a row at most (default: the trained context). Longer ones lose their left end.
      seed: of texts that are sampled.
      device: not read: JAX takes all devices there are (JAX_PLATFORMS says of which kind).

    Raises:
      UserError: an argument is out of range, the run is no text, or the mode needs feedback that was not trained.
    """

    def __init__(
        self,
        run: Run,
        *,
        mode: str = 'standard',
        fused_passes: int | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        known = 'workdir, step, mode, fused_passes, batch_size, max_batch_size, max_length, seed'
        for name, value in unknown.items():
            raise UserError(f'{name} = {value!r}: no argument of the model; those are {known}')
        require(mode in MODES, 'mode', mode, f'must be one of {", ".join(MODES)}')
        require(fused_passes is None or mode == 'fused', 'fused_passes', fused_passes, f'has no effect in mode {mode}')
        require(_is_int(fused_passes, 1) or fused_passes is None, 'fused_passes', fused_passes, 'must be at least 1')
        auto = re.fullmatch(r'auto(:\d+)?', str(batch_size)) is not None  # N times, in the harness: here always
        sized = auto or (str(batch_size).isdigit() and int(batch_size) > 0)
        require(sized, 'batch_size', batch_size, "must be a number above 0, or 'auto'")
        require(
            auto or max_batch_size is None, 'max_batch_size', max_batch_size, 'has no effect: is of batch_size=auto'
        )
        capped = max_batch_size is None or _is_int(max_batch_size, 1)
        require(capped, 'max_batch_size', max_batch_size, 'must be at least 1')
        require(_is_int(seed, 0) and seed < 2**31, 'seed', seed, 'must lie in 0..2**31 - 1')
        del device  # the harness names one whether anybody asked for it or not
        context = run.config.data.seq_len
        if max_length is not None:
            fits = _is_int(max_length, 1) and max_length <= context
            require(fits, 'max_length', max_length, f'must lie in 1..{context}, the trained context')
        if run.tokenizer is None:
            raise UserError('this run has no tokenizer: what it was trained on is no text')
        if mode != 'standard' and not run.trained_feedback:
            raise UserError(f'mode = {mode!r}: this model was not trained with feedback; only standard is possible')
        self._run, self._mesh = spread(run, split_rows=False)
        self._tokenizer: Any = run.tokenizer
        self._mode, self._passes = mode, 1 + (fused_passes or 1) if mode == 'fused' else 1
        training = run.config.data.batch_size // run.config.training.microbatches * context
        self._positions = training if auto else None  # of a batch, in all its rows
        self._most_rows = (max_batch_size or sys.maxsize) if auto else int(batch_size)
        self._context, self._seed, self._calls = context, seed, itertools.count()
        self.max_length = max_length or context
        self.cut_contexts: set[str] = set()  # those that lost their left ends

    # What the harness asks for

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> 'FbtLM':
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> 'FbtLM':
        """`additional_config`: what the harness has flags of its own for; `arg_dict` goes first."""
        flags = {key: value for key, value in (additional_config or {}).items() if value is not None}
        arguments = flags | arg_dict
        workdir, step = arguments.pop('workdir', None), arguments.pop('step', None)
        require(workdir is not None, 'workdir', workdir, "must be a run's folder: --model_args workdir=DIR")
        require(_is_int(step, 0) or step is None, 'step', step, 'must be the number of a checkpoint')
        return cls(require_finite(load_run(str(workdir), step)), **arguments)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        parameters = sum(x.size for x in jax.tree.leaves(self._run.params))
        return {'model_num_parameters': parameters, 'model_step': self._run.step, 'model_passes': self._passes}

    @property
    def tokenizer_name(self) -> str:
        """By which the harness tells its stored requests apart."""
        return self._tokenizer.fingerprint

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        raise UserError('this model has no chat template, and is asked without one: leave --apply_chat_template out')

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        texts = [request.args for request in requests]
        pairs = encode_pairs(self._tokenizer, texts)
        self._meet(texts)
        long = zip(texts, (sum(map(len, pair)) - 1 > self.max_length for pair in pairs), strict=True)
        self._note_cut([context for (context, _), cut in long if cut], len(texts))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for i, score in self._scores(pairs, 'loglikelihood', disable_tqdm):
            results[i] = (score.log_prob, score.greedy)
            self.cache_hook.add_partial('loglikelihood', texts[i], results[i])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole documents, each token once, in windows as long as a row may be."""
        documents = [request.args for request in requests]
        encoded = self._tokenizer.encode_batch([text for (text,) in documents]) if documents else []
        windows_of = [
            [
                Pair(*utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    token_list=ids.tolist(),
                    prefix_token=self._tokenizer.bos_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for ids in encoded
        ]
        windows = list(itertools.chain(*windows_of))
        self._meet(documents)
        parts = [0.0] * len(windows)
        for i, score in self._scores(windows, 'loglikelihood_rolling', disable_tqdm):
            parts[i] = score.log_prob
        totals, rest = [], iter(parts)
        for document, own in zip(documents, windows_of, strict=True):
            totals.append(sum(itertools.islice(rest, len(own)), 0.0))
            self.cache_hook.add_partial('loglikelihood_rolling', document, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of `until`, EOS or `max_gen_toks` tokens."""
        arguments = [request.args for request in requests]
        encoded = self._tokenizer.encode_batch([context for context, _ in arguments]) if arguments else []
        prompts = [[self._tokenizer.bos_id, *ids.tolist()] for ids in encoded]
        options = [self._options(given) for _, given in arguments]
        self._meet(arguments)
        too_many, cut = 0, []
        for i, chosen in enumerate(options):
            if chosen['max_tokens'] >= self.max_length:
                too_many += 1
                chosen['max_tokens'] = max(self.max_length // 2, 1)
            room = max(self.max_length - chosen['max_tokens'], 1)
            if len(prompts[i]) > room:
                cut.append(arguments[i][0])
                prompts[i] = prompts[i][-room:]
        if too_many:
            told = '%d of %d requests: max_gen_toks leaves no room for prompts in max_length = %d: half of it is taken'
            self._warn(told, too_many, len(prompts), self.max_length)
        self._note_cut(cut, len(prompts))
        numbers_of = _noise_numbers(prompts)
        results = [''] * len(prompts)
        bar = self._bar(len(prompts), 'generate_until', disable_tqdm)
        with jax.set_mesh(self._mesh):
            for chosen, waiting in self._groups(prompts, options):
                while waiting:
                    longest = len(prompts[waiting[0]]) + chosen['max_tokens']
                    numbers = waiting[: self._rows(longest)]
                    try:
                        texts = generate(
                            self._run,
                            [prompts[i] for i in numbers],
                            mode=self._mode,
                            seed=self._seed,
                            fused_passes=max(self._passes - 1, 1),
                            numbers=[numbers_of[i] for i in numbers],
                            **chosen,
                        ).texts
                    except jax.errors.JaxRuntimeError as error:
                        self._take_less(error, longest)
                        continue
                    del waiting[: len(numbers)]
                    for i, text in zip(numbers, texts, strict=True):
                        results[i] = text
                        self.cache_hook.add_partial('generate_until', arguments[i], text)
                    bar.update(len(numbers))
        bar.close()
        return results

    # How it is done

    def _scores(self, pairs: list[Pair], name: str, disable_tqdm: bool) -> Iterator[tuple[int, Score]]:
        """(number, score) of each pair, the longest first."""
        most = max((len(pair.continuation) for pair in pairs), default=0)
        require(most <= self.max_length, 'max_length', self.max_length, f'a continuation has {most} tokens')
        whole = [sum(map(len, pair)) for pair in pairs]
        # The last token is no input, hence the 1.
        pairs = [Pair(p.context[-(self.max_length + 1 - len(p.continuation)) :], p.continuation) for p in pairs]
        waiting = sorted(range(len(pairs)), key=lambda i: -min(whole[i], self.max_length + 1))
        bar = self._bar(len(pairs), name, disable_tqdm)
        while waiting:
            longest = sum(map(len, pairs[waiting[0]]))
            size = min(self._rows(longest), len(pairs))
            numbers = waiting[:size]
            try:
                with jax.set_mesh(self._mesh):
                    scores = self._score([pairs[i] for i in numbers], padded_rows(size))
            except jax.errors.JaxRuntimeError as error:
                self._take_less(error, longest)
                continue
            waiting = waiting[size:]
            yield from zip(numbers, scores, strict=True)
            bar.update(len(numbers))
        bar.close()

    def _rows(self, longest: int) -> int:
        """How many rows a batch may have whose longest comes to so many positions."""
        if self._positions is None:
            return self._most_rows
        rows = max(self._positions // rounded(max(longest, LEAST), self._context), 1)
        return min(1 << (rows.bit_length() - 1), self._most_rows)  # they are rounded up to powers of two

    def _take_less(self, error: Exception, longest: int) -> None:
        """Halves what a batch may hold where the memory did not suffice; raises `error` where that is no cure."""
        rows = self._rows(longest)
        if self._positions is None or rows == 1 or 'RESOURCE_EXHAUSTED' not in str(error):
            raise error
        self._positions = rows // 2 * rounded(max(longest, LEAST), self._context)
        LOG.info('batch_size = auto: %d rows do not fit, %d are tried', rows, rows // 2)

    def _meet(self, requests: list[Any]) -> None:
        """Several processes begin a batch of work together, and must be asked the same."""
        processes.meet(f'lm_eval {next(self._calls)}')
        processes.agree({'requests': hashlib.sha256(repr(requests).encode()).hexdigest()})

    def _bar(self, total: int, name: str, disable_tqdm: bool) -> Any:
        return tqdm(total=total, desc=name, disable=disable_tqdm or not processes.is_primary())

    def _warn(self, *told: Any) -> None:
        if processes.is_primary():
            LOG.warning(*told)

    def _note_cut(self, contexts: list[str], count: int) -> None:
        self.cut_contexts.update(contexts)
        if contexts:
            told = '%d of %d requests: contexts lose their left ends, for max_length = %d'
            self._warn(told, len(contexts), count, self.max_length)

    def _score(self, pairs: list[Pair], rows: int) -> list[Score]:
        """Of at most `rows` pairs, in one program whose sizes are rounded up; rows without a pair count for nothing."""
        soft = self._mode == 'soft'
        inputs = [p.context if soft else (p.context + p.continuation)[:-1] for p in pairs]
        tokens_BT = np.zeros((rows, rounded(max(LEAST, *map(len, inputs)), self._context)), np.int32)
        longest = max(LEAST_CONTINUATION, *(len(p.continuation) for p in pairs))
        continuation_BN = np.zeros((rows, rounded(longest, self._context)), np.int32)
        lengths_B, context_B = np.ones(rows, np.int32), np.ones(rows, np.int32)
        for row, pair in enumerate(pairs):
            tokens_BT[row, : len(inputs[row])] = inputs[row]
            continuation_BN[row, : len(pair.continuation)] = pair.continuation
            lengths_B[row], context_B[row] = max(len(inputs[row]), 1), len(pair.context)
        score: Callable[..., TokenLosses]
        if soft:
            whole = (len(p.context) + len(p.continuation) for p in pairs)
            score = partial(score_soft, capacity=rounded(max(LEAST, *whole), self._context))
        else:
            score = partial(score_passes, context_B=context_B, num_passes=self._passes)
        losses = score(self._run.model, self._run.params, tokens_BT, lengths_B, continuation_BN=continuation_BN)
        nll_BN, correct_BN = np.asarray(losses.nll_BT, np.float64), np.asarray(losses.correct_BT)
        lengths = [len(pair.continuation) for pair in pairs]
        return [Score(float(-nll_BN[b, :n].sum()), bool(correct_BN[b, :n].all())) for b, n in enumerate(lengths)]

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of `generate` for a request's `gen_kwargs`."""
        chosen: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        if chosen.get('num_beams') == 1:  # what it is here
            del chosen['num_beams']
        for name in sorted(chosen.keys() - GENERATION_KEYS):
            known = ', '.join(sorted(GENERATION_KEYS))
            raise UserError(f'gen_kwargs: {name} = {chosen[name]!r}: would have no effect; known are {known}')
        # As in Hugging Face's `generate`: sampling without a temperature has temperature 1.
        temperature = float(chosen.get('temperature', 1.0)) if chosen['do_sample'] else 0.0
        options = {
            'max_tokens': chosen['max_gen_toks'],
            'stop': tuple(text for text in chosen['until'] if text),
            'temperature': temperature,
        }
        if temperature > 0:
            top_p, top_k = chosen.get('top_p'), chosen.get('top_k')
            options |= {'top_p': 1.0 if top_p is None else float(top_p), 'top_k': int(top_k or 0)}
        return options

    def _groups(
        self, prompts: list[list[int]], options: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Numbers of the prompts that have the same options, the longest first."""
        together = collections.defaultdict(list)
        for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
            together[tuple(options[i].items())].append(i)
        for chosen, numbers in together.items():
            yield dict(chosen), numbers


def _noise_numbers(prompts: list[list[int]]) -> list[int]:
    """By which prompts draw: of the prompt and how often it came before, so that no other request changes a text."""
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    numbers = []
    for prompt in map(tuple, prompts):
        numbers.append(zlib.crc32(repr((prompt, seen[prompt])).encode()) % MOST_PROMPTS)
        seen[prompt] += 1
    return numbers


def encode_pairs(tokenizer: Any, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """(context, continuation) as ids, BOS first and once.

    As in the harness's own models: spaces at the context's end go over to the continuation, both are encoded together,
    and what follows the context's ids is the continuation. Where a merge over the boundary has changed those ids, the
    continuation begins at the first that differs: no part of its text is left out, and it is never empty.
    """
    if not texts:
        return []
    kept = [context.rstrip() for context, _ in texts]
    contexts = tokenizer.encode_batch(kept)
    wholes = tokenizer.encode_batch([context + continuation for context, continuation in texts])
    pairs = []
    for context_C, whole_W in zip(contexts, wholes, strict=True):
        shared = min(len(context_C), len(whole_W))
        differs = np.flatnonzero(context_C[:shared] != whole_W[:shared])
        start = int(differs[0]) if len(differs) else shared
        pairs.append(Pair([tokenizer.bos_id, *whole_W[:start].tolist()], whole_W[start:].tolist()))
    return pairs


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def main() -> int:
    """`lm_eval` with `fbt` among its models."""
    from lm_eval.__main__ import cli_evaluate

    try:
        processes.join()
        if processes.count() > 1:
            # By this the harness tells processes that all make the same requests: the one of 0 writes.
            os.environ['LOCAL_RANK'] = str(jax.process_index())
        cli_evaluate()
    except UserError as error:
        print(f'fbt: {processes.prefix()}{error}', file=sys.stderr)
        if processes.count() > 1:
            processes.exit_now(2)
        return 2
    except Exception:
        if processes.count() > 1:
            traceback.print_exc()
            processes.exit_now(1)  # exit handlers would wait for the others
        raise
    processes.leave(0)
    return 0


if __name__ == '__main__':
    sys.exit(main())
