"""What `fbt report` shows of a run, gathered into the sections of evaluation/report_page.py.

Headline, curves, losses by passes, the map, samples, tokens, another run beside it, the config. What a run lacks is
said where it would stand; only what was asked for by name (a prompt, another run, a step) is an error if it can't be.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fbt_jax.data import Data, open_data
from fbt_jax.errors import UserError
from fbt_jax.evaluation import report_figures as draw
from fbt_jax.evaluation.intervals import pass_intervals
from fbt_jax.evaluation.per_pass import together
from fbt_jax.evaluation.report_page import Block, Figure, Sample, Samples, Section, Text, page
from fbt_jax.evaluation.token_changes import (
    change_blocks,
    continuation_columns,
    make_token_losses,
    measure,
    token_names,
)
from fbt_jax.inference.generate import encoded, generate
from fbt_jax.sharding import batch_shards
from fbt_jax.training import diagnosis
from fbt_jax.training.loop import validation_batches
from fbt_jax.training.metrics import Row, read_rows
from fbt_jax.training.report_tables import (
    comparison_blocks,
    config_blocks,
    difference_blocks,
    evaluation_table,
    headline,
    origin_table,
    sentence,
)
from fbt_jax.training.run_folder import (
    Run,
    data_folder,
    has_checkpoint,
    load_run,
    read_config,
    read_record,
    require_data,
    require_finite,
    spread,
)
from fbt_jax.training.scoring import Scored, require_same_sets, run_difference, same_tokenizer, score

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 24, 80
TEMPERATURE = 0.8
ROWS = 64  # of each validation set, for the tokens
WAYS = ('standard', 'soft', 'fused')


class Asked(NamedTuple):
    """What the command was given."""

    workdir: str
    against: str | None = None
    step: int | None = None
    prompts: Sequence[str] = ()
    passes: int = 30  # of the iterated map
    rows: int = 0  # of each validation set, for the losses by passes; 0: all


def report(asked: Asked) -> str:
    """The page, as HTML. All processes call it.

    Raises:
      UserError: no run in a folder, or the step, the prompts or the other run can't be had.
    """
    workdir = asked.workdir
    record, config, rows = read_record(workdir), read_config(workdir), _rows(workdir)
    compared, notes = comparison_blocks(asked.against, workdir) if asked.against else ([], [])
    trained = load_run(workdir, asked.step) if asked.step is not None or has_checkpoint(workdir) else None
    samples = _samples(asked, trained) if asked.prompts else _or_why(lambda: _samples(asked, trained), workdir)

    scored, why = _scored(asked, trained)
    figures, map_blocks = _map(asked, trained)
    tokens = _or_why(lambda: _tokens(workdir, trained), workdir)
    if asked.against and scored is not None:
        compared += _or_why(lambda: difference_from(asked, scored), workdir, asked.against)

    bands = draw.phase_bands(config.passes, config.training.steps)
    curves: list[Block] = [*draw.training_figures(rows, bands)]
    if trained is not None and rows and trained.step < rows[-1]['step']:
        curves = _marked(curves, trained.step, rows[-1]['step'])
    curves = [*draw.broken_rows(rows), *curves] or [Text('metrics.jsonl has no rows yet.', 'missing')]
    summary = headline(config, rows, trained, scored, figures, scored_rows=asked.rows)
    sections = [
        Section('summary', 'Summary', [summary, origin_table(workdir, record, trained)]),
        Section('training', 'Training', curves),
        Section('evaluation', 'Loss by passes', evaluation_blocks(scored) if scored else why),
        Section('map', 'The feedback map, iterated', map_blocks),
        Section('samples', 'Samples', samples),
        Section('tokens', 'Token by token', tokens),
        *([Section('comparison', f'Beside {asked.against}', [*compared, *notes])] if asked.against else []),
        Section('config', 'Configuration', config_blocks(config, asked.against)),
    ]
    at = 'no checkpoint yet' if trained is None else f'step {trained.step:,} of {config.training.steps:,}'
    name = Path(workdir).resolve().name
    return page(title=f'{name}: a report', subtitle=f'{workdir}, {at}', sections=sections)


def _or_why(make: Callable[[], list[Block]], *names: str) -> list[Block]:
    """What `make` gives, or why it can't; `names`: of the folders that the reason may begin with."""
    try:
        return make()
    except UserError as error:
        return [Text(sentence(str(error), *names), 'missing')]


def _marked(curves: Sequence[Block], step: int, last: int) -> list[Block]:
    """With a line where the checkpoint lies."""
    told = Text(f'The dashed line: step {step:,}, the checkpoint of this page. Training went on to step {last:,}.')
    return [told, *(x._replace(x_line=step) if isinstance(x, Figure) else x for x in curves)]


def _rows(workdir: str) -> list[Row]:
    try:
        return read_rows(Path(workdir) / 'metrics.jsonl')
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(str(error)) from None


def _require_sound(trained: Run | None) -> Run:
    if trained is None:
        raise UserError('The run has saved no checkpoint yet')
    return require_finite(trained)


def _require_feedback(trained: Run) -> None:
    if not trained.trained_feedback:
        raise UserError('The run was trained without feedback (one pass only)')


def _scored(asked: Asked, trained: Run | None) -> tuple[Scored | None, list[Block]]:
    scored: list[Scored] = []

    def make() -> list[Block]:
        _require_sound(trained)
        scored.append(score(asked.workdir, asked.step, None, rows=asked.rows))
        return []

    why = _or_why(make, asked.workdir)
    return (scored[0] if scored else None), why


def evaluation_blocks(scored: Scored) -> list[Block]:
    results = together(scored.by_set.values())
    assert results.documents is not None
    intervals = pass_intervals(results.documents, scored.passes)
    checked = 'pass 1' if scored.causal_passes == 1 else f'passes 1 to {scored.causal_passes}'
    causal = f'Causal: in {checked} no loss depends on what comes after its target.'
    blocks: list[Block] = [evaluation_table(results, scored.passes, intervals), Text(causal)]
    if len(scored.passes) > 1:
        blocks.append(draw.pass_figure(intervals, results.loss_K))
    if scored.data.tokenizer is None:
        blocks.append(draw.position_figure(results.accuracy_KP, scored.passes))
    return blocks


def _map(asked: Asked, trained: Run | None) -> tuple[dict[str, Any] | None, list[Block]]:
    found: list[dict[str, Any]] = []

    def make() -> list[Block]:
        _require_feedback(_require_sound(trained))
        try:
            found.append(diagnosis.contraction_figures(asked.workdir, passes=asked.passes, step=asked.step))
        except RuntimeError as error:  # a pass leaves the numbers
            raise UserError(str(error)) from None
        figures = found[0]
        read = (
            f'{figures["positions"]:,} positions of {figures["rows"]} validation rows, each more than '
            f'{figures["passes"]} tokens into its document, where a pass can still change something.'
        )
        verdict = [Text(f'Verdict: {figures["verdict"]}.', 'verdict'), Text(read)]
        return [*verdict, *(Text(sentence(line)) for line in figures['evidence']), *draw.contraction_figures(figures)]

    blocks = _or_why(make, asked.workdir)
    return (found[0] if found else None), blocks


def _open(workdir: str, trained: Run) -> Data:
    data = open_data(trained.config, data_folder(workdir), held_out_only=True)
    require_data(workdir, data)
    if not data.validation:
        raise UserError(f'{workdir} was trained without validation data (data.validation)')
    return data


def _samples(asked: Asked, trained: Run | None) -> list[Block]:
    trained = _require_sound(trained)
    context = trained.config.data.seq_len
    if trained.tokenizer is None:
        raise UserError(f'{asked.workdir}: its rows are not text, so there is nothing to read')
    prompts: Sequence[Sequence[int]] = [encoded(trained, text) for text in asked.prompts]
    if not prompts:
        pieces = [piece for piece in diagnosis.pieces_of(_open(asked.workdir, trained)) if len(piece) > PROMPT_TOKENS]
        chosen = [pieces[i * len(pieces) // PROMPTS] for i in range(min(PROMPTS, len(pieces)))]
        prompts = [piece[: min(PROMPT_TOKENS, context // 2)].tolist() for piece in chosen]
    if not prompts:
        raise UserError('No validation piece is long enough for a prompt')
    room = min(NEW_TOKENS, context - max(map(len, prompts)))
    if room < 1:
        longest = max(map(len, prompts))
        raise UserError(f'--prompt: {longest} tokens fill the trained context of {context}; give fewer')
    return _continued(trained, prompts, room)


def _continued(trained: Run, prompts: Sequence[Sequence[int]], room: int) -> list[Block]:
    """Each prompt's continuations, greedy and drawn, in each mode that the run can decode in."""
    fused_passes = max(1, trained.config.passes.max_passes - 1)
    modes = WAYS if trained.trained_feedback else WAYS[:1]
    told = {'fused': f'fused ({fused_passes + 1} passes over the prompt)'}
    trained, mesh = spread(trained, split_rows=False)
    with jax.set_mesh(mesh):
        drawn = {
            temperature: [
                (
                    told.get(mode, mode),
                    generate(
                        trained,
                        prompts,
                        mode=mode,
                        max_tokens=room,
                        temperature=temperature,
                        **({'fused_passes': fused_passes} if mode == 'fused' else {}),
                    ),
                )
                for mode in modes
            ]
            for temperature in (0.0, TEMPERATURE)
        }
    intro = (
        'Of the modes, standard feeds nothing back; soft feeds each new token with the state before it; fused reads '
        'the prompt in that way too. What standard gives is not the baseline, which is a run trained without feedback.'
    )
    if len(modes) == 1:
        intro = 'The run was trained without feedback, so standard is the only mode.'
    blocks: list[Block] = [
        Text(f'{intro} {room} new tokens at most, one seed. Nats per token: the text under the model itself.')
    ]
    tokenizer = trained.tokenizer
    assert tokenizer is not None
    name_of, bos = token_names(tokenizer), tokenizer.bos_id
    for number, prompt in enumerate(prompts):
        text = ''.join(name_of(i) for i in prompt[:1] if i == bos) + tokenizer.decode([i for i in prompt if i != bos])
        rows = [
            (
                'greedy' if temperature == 0 else f'drawn at temperature {temperature:g}',
                [Sample(*column) for column in continuation_columns(found, number)],
            )
            for temperature, found in drawn.items()
        ]
        blocks.append(Samples(f'Prompt {number + 1} ({len(prompt)} tokens)', text, rows))
    return blocks


def _tokens(workdir: str, trained: Run | None) -> list[Block]:
    trained = _require_sound(trained)
    _require_feedback(trained)
    if trained.tokenizer is None:
        raise UserError(f'{workdir}: its rows are not text; see the accuracy by position')
    data = _open(workdir, trained)
    # In the last pass that training has made.
    losses_of = make_token_losses(trained.model, num_passes=max(2, trained.config.passes.max_passes))
    trained, mesh = spread(trained)
    size = -(-trained.config.data.batch_size // batch_shards(mesh)) * batch_shards(mesh)
    with jax.set_mesh(mesh):
        batches: Iterable[Any] = (
            batch for name in data.validation for batch in validation_batches(data, name, mesh, size, max_rows=ROWS)
        )
        losses = measure(losses_of, trained.params, batches)
    return change_blocks(losses, token_names(trained.tokenizer))


def difference_from(asked: Asked, scored: Scored) -> list[Block]:
    """From the other run, on the same documents."""
    assert asked.against is not None
    require_same_sets(asked.workdir, asked.against)
    other = score(asked.against, None, scored.passes, rows=asked.rows, or_one=True)
    try:
        difference = run_difference(scored, other)
    except UserError as error:
        if not asked.rows or same_tokenizer(scored, other):
            raise
        told = f'--rows={asked.rows} is the likely reason, for rows of another tokenizer hold other text: leave it out'
        raise UserError(f'{error}; {told}') from None
    return difference_blocks(difference, scored, other)
