"""A trained run on its validation documents: sums by pass and by document, and the difference from another run's.

    difference_k = sum over documents of (nll_k of this run - nll_k of the other) / tokens

Paired: both runs read the same documents. Of different tokenizers bits per byte are compared; a run that was trained
without feedback is compared by its first pass. Shapes: K passes, U documents.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fbt_jax.data import Data, open_data
from fbt_jax.errors import UserError, require
from fbt_jax.evaluation.causality import require_causal
from fbt_jax.evaluation.intervals import ends_of, ratios
from fbt_jax.evaluation.per_pass import PassResults, evaluate_passes, make_eval_step, places, together
from fbt_jax.sharding import batch_shards
from fbt_jax.training.loop import validation_batches
from fbt_jax.training.run_folder import Run, data_folder, held_out, load_run, require_data, require_finite, spread

CHECKED_PASSES = 3  # for causality: in the third, feedback reaches what attention and one state back don't


class Scored(NamedTuple):
    workdir: str
    run: Run
    data: Data
    passes: list[int]
    by_set: dict[str, PassResults]
    causal_passes: int  # how many passes were checked
    soft: bool  # whether the exact recurrence follows as the last entry


def score(
    workdir: str,
    step: int | None,
    passes: list[int] | None,
    *,
    rows: int = 0,
    soft: bool = False,
    or_one: bool = False,
) -> Scored:
    """The run in `workdir` after each of `passes` passes (default: one to two more than trained with).

    Where no step has trained feedback the default is 1, for later passes say nothing about it.

    rows: of each validation set, evenly spread (0: all). soft: the exact recurrence too, token by token. or_one: a run
    that was trained without feedback makes one pass instead of either.

    Raises:
      UserError: no such run or step, other data, no validation data, passes that it cannot make.
      RuntimeError: a loss depends on what comes after it.
    """
    trained = require_finite(load_run(workdir, step))
    config = trained.config
    if or_one and not trained.trained_feedback:
        passes, soft = [1], False
    if soft and not trained.trained_feedback:
        raise UserError(f'--soft: {workdir} was trained without feedback')
    most = config.data.seq_len  # after as many passes as positions all states are final
    usual = min(config.passes.max_passes + 2, most) if trained.trained_feedback else 1
    passes = passes or list(range(1, usual + 1))
    if max(passes) > 1 and config.model.fusion == 'none':
        told = f'--passes={",".join(map(str, passes))}'
        raise UserError(f'{told}: {workdir} was trained without feedback; only 1 is possible')
    require(max(passes) <= most, '--passes', max(passes), f'must be at most {most}, the rows of {workdir}')
    data = open_data(config, data_folder(workdir), held_out_only=True)
    require_data(workdir, data)
    if not data.validation:
        raise UserError(f'{workdir} was trained without validation data (data.validation)')
    trained, mesh = spread(trained, split_rows=not soft)
    shards = batch_shards(mesh)
    eval_step = make_eval_step(
        trained.model, num_passes=max(passes), token_bytes=data.token_bytes, by_segment=True, soft=soft
    )
    checked = min(max(passes), CHECKED_PASSES)
    by_set = {}
    with jax.set_mesh(mesh):
        for name, source in data.validation.items():
            size = -(-min(config.data.batch_size, source.num_rows) // shards) * shards
            first = next(validation_batches(data, name, mesh, size, max_rows=min(size, source.num_rows)))
            require_causal(trained.model, trained.params, first, num_passes=checked)
            batches = validation_batches(data, name, mesh, size, max_rows=rows)
            documents = data.validation_documents(name, size, max_rows=rows)
            by_set[name] = evaluate_passes(eval_step, trained.params, batches, documents=documents)
    return Scored(workdir, trained, data, passes, by_set, checked, soft)


def require_same_sets(one: str, other: str) -> None:
    """UserError where config.json of the two runs tells of other validation sets: before anything takes long."""
    ours, theirs = ({name: entry.get('documents') for name, entry in held_out(x).items()} for x in (one, other))
    told = f'{other} cannot be compared with {one}'
    if ours.keys() != theirs.keys():
        raise UserError(f'{told}: validation sets {", ".join(theirs)} instead of {", ".join(ours)}')
    for name, count in ours.items():
        if theirs[name] != count:
            raise UserError(f'{told}: its {name} documents are others, {theirs[name]} instead of {count}')


def require_comparable(one: Scored, other: Scored) -> None:
    """UserError unless both have read the same documents: by fingerprint, or by bytes where tokenizers differ."""
    told = f'{other.workdir} cannot be compared with {one.workdir}'
    if one.data.tokenizer is None and one.run.config.seed != other.run.config.seed:
        raise UserError(f'{told}: its rows are drawn with another seed')
    same = same_tokenizer(one, other)
    for name in one.by_set:
        label = name if name == 'validation' else f'validation-{name}'
        a, b = (x.by_set[name].documents for x in (one, other))
        assert a is not None and b is not None
        counts_a, counts_b = (a.tokens_U, b.tokens_U) if same else (a.bytes_U, b.bytes_U)
        equal = counts_a is not None and counts_b is not None and np.array_equal(counts_a, counts_b)
        if not equal or (same and one.data.record[label]['fingerprint'] != other.data.record[label]['fingerprint']):
            hint = '' if one.data.seq_len == other.data.seq_len else ' (rows of another length: compare all, no --rows)'
            raise UserError(f'{told}: its {name} documents are others{hint}')


def same_tokenizer(one: Scored, other: Scored) -> bool:
    fingerprints = [None if x.data.tokenizer is None else x.data.tokenizer.fingerprint for x in (one, other)]
    return fingerprints[0] == fingerprints[1]


def run_difference(one: Scored, other: Scored) -> dict[str, Any]:
    """This run less the other by number of passes, with intervals; nats per token or, across tokenizers, bits per byte.

    Raises UserError, see `require_comparable`.
    """
    require_comparable(one, other)
    a, b = (together(x.by_set.values()).documents for x in (one, other))
    assert a is not None and b is not None
    nats = same_tokenizer(one, other)
    counts_U = a.tokens_U if nats else a.bytes_U
    assert counts_U is not None
    entries = places(one.passes, one.soft)
    # One without feedback has made a single pass (`or_one`), which stands against all.
    others = {name: 0 if len(b.nll_KU) == 1 else i for name, i in entries.items()}
    differences_CU = a.nll_KU[[*entries.values()]] - b.nll_KU[[*others.values()]]
    found = ratios(differences_CU if nats else differences_CU / math.log(2), counts_U)
    return {
        'workdir': other.workdir,
        'step': other.run.step,
        'unit': 'nats per token' if nats else 'bits per byte',
        'passes': {
            name: {
                'other_passes': 'soft' if j < 0 else j + 1,
                'difference': float(value),
                'interval': ends_of(low, high),
            }
            for (name, j), value, low, high in zip(others.items(), *found, strict=True)
        },
    }
