"""Runs side by side: validation loss by tokens, token-passes and FLOPs, and the data-efficiency factor.

factor(k) = what the baseline needs for the loss that a run ends with after pass k, over what the run has used
(tokens, token-passes, FLOPs). The baseline is read after pass k too, or after its first where no step has trained
feedback: then the passes after it say nothing. Runs of one config that differ in the seed alone are one group; its
curve is the mean. Read from metrics.jsonl and config.json alone.
Shapes: S seeds, A axes (AXES), K passes, N evaluations, D bootstrap draws; draw 0 is every seed once.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fbt_jax.config import Config, flat_keys
from fbt_jax.errors import UserError
from fbt_jax.training.flops import train_flops
from fbt_jax.training.metrics import Row, read_rows
from fbt_jax.training.run_folder import FREE_KEYS, PATH_KEYS, data_fingerprint, held_out, read_config

AXES = ('tokens', 'token_passes', 'flops')
NATS, BITS = 'nats per token', 'bits per byte'
_FIELDS = {NATS: 'loss_pass', BITS: 'bits_per_byte_pass'}
DRAWS = 2000
COVERAGE = 0.95


class Curve(NamedTuple):
    """One run's evaluations. The loss is NaN where it was not finite."""

    workdir: str
    config: Config
    steps_N: np.ndarray
    axes_AN: np.ndarray
    loss_KN: np.ndarray
    fed_N: np.ndarray  # whether a step had trained feedback by then
    notes: tuple[str, ...]


class Group(NamedTuple):
    """Runs that differ in their seed alone, at the steps that all of them evaluated; sorted by seed."""

    name: str
    trained_passes: int  # the most that a step made; evaluations make more
    workdirs: tuple[str, ...]
    seeds: tuple[int, ...]
    steps_N: np.ndarray
    axes_SAN: np.ndarray
    loss_SKN: np.ndarray  # of one pass where not every run has trained feedback
    fed_SN: np.ndarray


class Bound(NamedTuple):
    """A number, or what is known of it: `sign` is '', '<' or '>'."""

    value: float
    sign: str = ''

    def __str__(self) -> str:
        return f'{self.sign} {self.value:.3g}'.strip()


class Factor(NamedTuple):
    """Of one axis. low, high: the ends of the 95 % interval; None without replicates on both sides."""

    value: Bound
    low: Bound | None
    high: Bound | None

    def __str__(self) -> str:
        return str(self.value) if self.low is None else f'{self.value} ({self.low} to {self.high})'


class PassFactors(NamedTuple):
    """After `passes` passes of the run: its loss at the end, and the factors by tokens, token-passes and FLOPs."""

    passes: int
    baseline_passes: int
    loss: float
    factor_A: tuple[Factor, ...]


class Comparison(NamedTuple):
    """groups[0] is the baseline; `factors` has each other group's."""

    unit: str
    groups: list[Group]
    factors: list[list[PassFactors]]
    notes: list[str]


def compare(workdirs: Sequence[str]) -> Comparison:
    """The runs in `workdirs`; the group of the first one is the baseline.

    Raises:
      UserError: fewer than two runs, no run in a folder, no evaluations, or not the same validation text.
    """
    if len(workdirs) < 2:
        raise UserError('needs two runs or more: fbt compare BASELINE_DIR DIR ...')
    unit, notes = _common_unit(workdirs)
    curves = [read_curve(workdir, unit) for workdir in workdirs]
    groups = _grouped(curves)
    of_curves: dict[str, list[str]] = {}  # what is said of several, once
    for curve in curves:
        for note in curve.notes:
            of_curves.setdefault(note.removeprefix(curve.workdir), []).append(curve.workdir)
    notes += [', '.join(names) + text for text, names in of_curves.items()]
    notes += [_interval_note(groups[0], group) for group in groups[1:]]
    if len(groups) == 1:
        notes.append('no factor: all runs are the baseline, with another seed')
    found = [factors(group, groups[0]) for group in groups[1:]]
    read = [not factor.value.sign for of_passes in found for entry in of_passes for factor in entry.factor_A]
    if any(read) and curves[0].config.optimizer.decay_fraction > 0:
        notes.append(
            "before its end the baseline's learning rate has not decayed: a baseline trained for just as long as its "
            'curve takes to reach the loss would be better, so a factor read there may be too large'
        )
    for group, of_passes in zip(groups[1:], found, strict=True):
        missing = set(range(1, group.loss_SKN.shape[1] + 1)) - {entry.passes for entry in of_passes}
        if missing:
            told = "the last loss was not finite, or the baseline's curve has no such pass"
            notes.append(f'{group.name}: no factor after pass {", ".join(map(str, sorted(missing)))}: {told}')
    return Comparison(unit, groups, found, notes)


def read_curve(workdir: str, unit: str) -> Curve:
    """The evaluations of the run in `workdir`, placed on the axes.

    `tokens` and `token_passes` of the train rows are cumulative whatever `training.log_every`. An evaluation at a step
    that has no train row lies between its neighbours, as if passes were drawn evenly there; `notes` says how many.
    """
    config = read_config(workdir)
    try:
        rows = read_rows(Path(workdir) / 'metrics.jsonl')
    except OSError as error:
        raise UserError(f'{workdir}: no metrics of a run here (metrics.jsonl: {error.strerror})') from None
    except ValueError as error:
        raise UserError(str(error)) from None
    train = [row for row in rows if row['split'] == 'train']
    shown = [row for row in rows if row['split'] == 'validation']
    if not shown or not train:
        raise UserError(f'{workdir}: no {"validation" if train else "train"} rows in metrics.jsonl yet')
    continued = config.init.from_ and config.init.schedule == 'continue'
    counts_3N = np.array([[row['step'], row['tokens'], row['token_passes']] for row in train], np.float64).T
    if not continued:
        counts_3N = np.insert(counts_3N, 0, 0.0, axis=1)
    logged = counts_3N[0]
    within = [row for row in shown if logged[0] <= row['step'] <= logged[-1]]
    if not within:
        raise UserError(f'{workdir}: no validation row between two train rows in metrics.jsonl')
    steps_N = np.array([row['step'] for row in within])
    tokens_N, token_passes_N = (np.interp(steps_N, logged, counts) for counts in counts_3N[1:])
    flops_N = cumulative_flops(config, tokens_N, token_passes_N)
    between = len(set(steps_N) - set(logged))
    notes = []
    if between:
        notes.append(f'{workdir}: {between} of {len(within)} evaluations lie between two train rows, interpolated')
    if steps_N[-1] < config.training.steps:
        notes.append(
            f'{workdir} has not ended: its last evaluation is at step {steps_N[-1]} of {config.training.steps}'
        )
    if len(within) < len(shown):
        notes.append(f'{workdir}: {len(shown) - len(within)} evaluations outside the train rows left out')
    if config.init.from_:
        told = 'count, as steps of this model' if continued else 'do not count'
        notes.append(f'{workdir} began from {config.init.from_}, whose tokens, token-passes and FLOPs {told}')
    loss_KN = _losses(workdir, within, unit)
    fed_N = (token_passes_N > tokens_N) | fed_before(config)
    if len(loss_KN) > 1 and not fed_N[-1]:
        notes.append(f'{workdir} is compared by its first pass: no step has trained those after it')
    axes_AN = np.stack([tokens_N, token_passes_N, flops_N])
    return Curve(workdir, config, steps_N, axes_AN, loss_KN, fed_N, tuple(notes))


def cumulative_flops(config: Config, tokens: np.ndarray, token_passes: np.ndarray) -> np.ndarray:
    """FLOPs of training up to these counts. Exact: `train_flops` is affine in the number of passes."""
    one, two = (train_flops(config.model, seq_len=config.data.seq_len, passes=k) for k in (1, 2))
    return one * tokens + (two - one) * (token_passes - tokens)


def factors(run: Group, baseline: Group) -> list[PassFactors]:
    """Of each pass of `run` that the baseline has too, or of all if the baseline has but one.

    A later pass of the baseline counts from where feedback had been trained on.
    """
    weights_DS, base_weights_DS = _weights(run, baseline)
    replicated = len(run.seeds) > 1 and len(baseline.seeds) > 1
    found = []
    for k in range(run.loss_SKN.shape[1]):
        base_k = 0 if baseline.loss_SKN.shape[1] == 1 else k
        if base_k >= baseline.loss_SKN.shape[1]:
            break
        finite_N = np.isfinite(run.loss_SKN[:, k]).all(axis=0)
        base_finite_N = np.isfinite(baseline.loss_SKN[:, base_k]).all(axis=0)
        if base_k:
            base_finite_N &= baseline.fed_SN.all(axis=0)
        if not finite_N[-1] or not base_finite_N.any():
            continue
        loss_D = weights_DS @ run.loss_SKN[:, k, -1]
        base_loss_DN = base_weights_DS @ baseline.loss_SKN[:, base_k][:, base_finite_N]
        by_axis = []
        for a in range(len(AXES)):
            used_D = weights_DS @ run.axes_SAN[:, a, -1]
            base_DN = base_weights_DS @ baseline.axes_SAN[:, a][:, base_finite_N]
            ratio_D = first_reach(base_DN, base_loss_DN, loss_D) / used_D
            by_axis.append(_factor(ratio_D, base_DN[0, [0, -1]] / used_D[0], replicated))
        found.append(PassFactors(k + 1, base_k + 1, float(loss_D[0]), tuple(by_axis)))
    return found


def first_reach(x_DN: np.ndarray, loss_DN: np.ndarray, target_D: np.ndarray) -> np.ndarray:
    """Where a curve first comes down to `target`: (D,). The cumulative minimum, linear in log x between evaluations.

    0 where the first evaluation is below the target already, infinity where none is: nothing is extrapolated.
    """
    best_DN = np.minimum.accumulate(loss_DN, axis=1)
    reached_DN = best_DN <= target_D[:, None]
    after_D = reached_DN.argmax(axis=1)
    rows, before_D = np.arange(len(target_D)), np.maximum(after_D - 1, 0)
    high_D, low_D = best_DN[rows, before_D], best_DN[rows, after_D]
    share_D = (high_D - target_D) / np.where(high_D > low_D, high_D - low_D, 1.0)
    log_DN = np.log(x_DN)
    at_D = np.exp(log_DN[rows, before_D] * (1 - share_D) + log_DN[rows, after_D] * share_D)
    at_D = np.where(after_D == 0, 0.0, at_D)
    return np.where(reached_DN.any(axis=1), at_D, np.inf)


def _factor(ratio_D: np.ndarray, ends: np.ndarray, replicated: bool) -> Factor:
    def bound(ratio: float) -> Bound:
        if ratio == 0:
            return Bound(float(ends[0]), '<')
        return Bound(float(ends[1]), '>') if np.isinf(ratio) else Bound(float(ratio))

    if not replicated:
        return Factor(bound(ratio_D[0]), None, None)
    tail = (1 - COVERAGE) / 2
    # Draws as they are, nothing between two of them, for some may be 0 or infinite.
    low, high = np.quantile(ratio_D[1:], [tail, 1 - tail], method='inverted_cdf')
    return Factor(bound(ratio_D[0]), bound(low), bound(high))


def _weights(run: Group, baseline: Group) -> tuple[np.ndarray, np.ndarray]:
    """How much each seed counts in each draw. The same seeds on both sides, which read the same rows, go as pairs."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)
        return np.concatenate([np.ones((1, count)), drawn]) / count

    weights_DS = draw(len(run.seeds))
    return weights_DS, weights_DS if run.seeds == baseline.seeds else draw(len(baseline.seeds))


def _interval_note(baseline: Group, run: Group) -> str:
    single = [group.name for group in (baseline, run) if len(group.seeds) == 1]
    if single:
        return f'{run.name}: no interval, for there is but one seed of {" and of ".join(single)}'
    how = 'pairs of the same seed' if run.seeds == baseline.seeds else 'seeds'
    counts = f'{len(baseline.seeds)} of the baseline, {len(run.seeds)} of the run'
    return f'{run.name}: {COVERAGE:.0%} intervals, bootstrap over {how} ({counts}); too narrow where they are few'


def _losses(workdir: str, rows: Sequence[Row], unit: str) -> np.ndarray:
    """(K, N); null, which stands for what was not finite, becomes NaN."""
    passes, field = min(row['passes'] for row in rows), _FIELDS[unit]
    if any(f'{field}_1' not in row for row in rows):
        raise UserError(f'{workdir}: no {unit} in the validation rows, which runs of different tokenizers need')
    return np.array([[row[f'{field}_{k}'] for row in rows] for k in range(1, passes + 1)], np.float64)


def fed_before(config: Config) -> bool:
    """Whether what the run began from has trained feedback since or then; False where its folder is gone."""
    origin = config.init.from_
    if not origin:
        return False
    try:
        rows = read_rows(Path(origin) / 'metrics.jsonl')
        fed = any(row['token_passes'] > row['tokens'] for row in rows if row['split'] == 'train')
        return fed or fed_before(read_config(origin))
    except (OSError, ValueError):
        return False


def _grouped(curves: Sequence[Curve]) -> list[Group]:
    members: dict[str, list[Curve]] = {}
    for curve in curves:
        key = json.dumps(_identity(curve.workdir, curve.config), sort_keys=True)
        for other in members.setdefault(key, []):
            if other.config.seed == curve.config.seed:
                told = f'are the same run twice: one config, seed {curve.config.seed}'
                raise UserError(f'{other.workdir} and {curve.workdir} {told}')
        members[key].append(curve)
    return [_group(runs) for runs in members.values()]


def _identity(workdir: str, config: Config) -> list[Any]:
    """All that runs have in common which differ in their seed alone, and what they began from likewise."""
    skipped = ('seed', 'init.from', *FREE_KEYS, *PATH_KEYS)
    same = {k: v for k, v in flat_keys(config).items() if k not in skipped and not k.startswith('mesh.')}
    origin: Any = config.init.from_
    if origin and (Path(origin) / 'config.json').is_file():
        origin = _identity(origin, read_config(origin))
    return [data_fingerprint(workdir), same, origin]


def _group(runs: Sequence[Curve]) -> Group:
    name = runs[0].workdir
    runs = sorted(runs, key=lambda run: run.config.seed)
    steps = sorted(set.intersection(*(set(run.steps_N.tolist()) for run in runs)))
    if not steps:
        raise UserError(
            f'{", ".join(run.workdir for run in runs)}: differ in their seed alone, but share no evaluation'
        )
    chosen = [np.isin(run.steps_N, steps) for run in runs]
    fed_SN = np.stack([run.fed_N[at] for run, at in zip(runs, chosen, strict=True)])
    passes = min(len(run.loss_KN) for run in runs) if fed_SN[:, -1].all() else 1
    return Group(
        name,
        runs[0].config.passes.max_passes,
        tuple(run.workdir for run in runs),
        tuple(run.config.seed for run in runs),
        np.array(steps),
        np.stack([run.axes_AN[:, at] for run, at in zip(runs, chosen, strict=True)]),
        np.stack([run.loss_KN[:passes, at] for run, at in zip(runs, chosen, strict=True)]),
        fed_SN,
    )


def _common_unit(workdirs: Sequence[str]) -> tuple[str, list[str]]:
    """Nats per token where all runs held out the same tokens, bits per byte where it is the same text; and notes."""
    first, unit, notes = workdirs[0], NATS, []
    config, ours = read_config(first), held_out(first)
    for workdir in workdirs[1:]:
        other, theirs = read_config(workdir), held_out(workdir)
        if other.training.eval_rows != config.training.eval_rows:
            rows = f'training.eval_rows = {config.training.eval_rows} and {other.training.eval_rows}'
            raise UserError(f'{first} and {workdir} were evaluated on different validation rows: {rows}')
        same_tokens = _fingerprints(theirs) == _fingerprints(ours)
        if not same_tokens:
            if {n: _text(e) for n, e in theirs.items()} != {n: _text(e) for n, e in ours.items()}:
                raise UserError(f'{first} and {workdir} have different validation data (config.json, data)')
            unit = BITS
            notes.append(f'{workdir} has another tokenizer than {first}: losses in bits per byte, tokens are its own')
        same_rows = same_tokens and other.data.seq_len == config.data.seq_len
        if config.training.eval_rows and not same_rows:
            notes.append(
                f'{workdir} read {config.training.eval_rows} other rows than {first} of the same held-out text'
            )
    return unit, notes


def _fingerprints(held_out: dict[str, Any]) -> dict[str, str]:
    return {name: entry['fingerprint'] for name, entry in held_out.items()}


def _text(entry: dict[str, Any]) -> Any:
    """What text this is, whatever the tokenizer: files by name and size; the embedded corpus has none of these."""
    if 'source' not in entry:
        return entry.get('documents', entry['fingerprint'])
    return entry['documents'], entry['bytes'], entry['source']
