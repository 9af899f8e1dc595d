"""The training loop: set up, compile, step, evaluate, save; again from the newest checkpoint when started again.

Everything that a step depends on is a function of (config, step) and the restored state, so a run that was killed and
resumed writes the same parameters and the same metrics rows as one that was not. To that end the rows up to a
checkpoint's step are on disk before the checkpoint is saved, and rows past it are dropped on resume. Metrics are read
one step late, so that the device never waits for the host. Every process runs this loop; what exists once (files, the
terminal) is the primary's.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fbt_jax.batch import Batch
from fbt_jax.config import Config, flat_keys
from fbt_jax.data import BestFitRows, Data, open_data, resolved, vocab_size
from fbt_jax.errors import UserError
from fbt_jax.evaluation.per_pass import PassResults, evaluate_passes, make_eval_step, together
from fbt_jax.sharding import local_rows, make_mesh, place, require_divisible
from fbt_jax.training import metrics, summary
from fbt_jax.training.checkpoint import Checkpoints, Loaded
from fbt_jax.training.compiler import OPTIONS, make_setup, use_compilation_cache
from fbt_jax.training.flops import peak_flops, train_flops
from fbt_jax.training.optimizer import decay_start
from fbt_jax.training.processes import agree, is_primary, on_primary
from fbt_jax.training.run_folder import (
    Tally,
    claim_folder,
    data_folder,
    enable_float64,
    has_checkpoint,
    locked,
    record_config,
    require_path,
    require_same_run,
    require_shared,
    tokenise_raw,
)
from fbt_jax.training.signals import Stopped, StopSignals
from fbt_jax.training.step import StepMetrics, TrainState
from fbt_jax.training.warm_start import load_source, warm_start

MAX_NONFINITE_IN_A_ROW = 10
FINAL_PASSES = (1, 2, 3, 5, 10, 30)
FINAL_LONG_ROWS = 64  # rows for the numbers of passes that training's own evaluations don't reach


class _Pending(NamedTuple):
    """A step whose metrics have not been read yet."""

    step: int
    metrics: StepMetrics


def say(text: str) -> None:
    """A line for the person who watches, above the progress bar."""
    if is_primary():
        tqdm.write(text)


def train(config: Config, workdir: str) -> None:
    """Trains to `training.steps`, from the newest checkpoint in `workdir` if there is one.

    Raises:
      UserError: a user's mistake, one line.
      Stopped: SIGTERM, SIGINT or SIGHUP came; a checkpoint was saved, and the person told.
      RuntimeError: a save failed, no checkpoint can be read, or ten steps in a row were not finite.
    """
    require_path(workdir)
    with StopSignals() as stop:
        enable_float64(config)
        config = resolve(config, workdir)
        agree(flat_keys(config) | {'--workdir': str(Path(workdir).absolute())})
        require_divisible(config, make_mesh(config.mesh))
        on_primary(lambda: require_same_run(workdir, config))  # all this before hours may go into tokenising
        tokenise_raw(config, workdir, poll=stop.poll)
        data = open_data(config, data_folder(workdir))
        agree({'data': data.fingerprint})
        use_compilation_cache(workdir)
        trainer = _Trainer(config, workdir, data, stop)  # all that a user may have got wrong is found before `locked`
        with locked(workdir):
            on_primary(lambda: claim_folder(workdir, config, data, say))
            require_shared(workdir)
            with Checkpoints(workdir, config.training.keep_checkpoints) as checkpoints:
                trainer.run(checkpoints)


def resolve(config: Config, workdir: str | None = None) -> Config:
    """`config` with what the tokenizer decides filled in: the vocabulary's size, the names of BOS and EOS."""
    config = dataclasses.replace(config, data=resolved(config.data, data_folder(workdir) if workdir else None))
    needed = vocab_size(config.data, data_folder(workdir) if workdir else None)
    size = config.model.vocab_size or needed
    if size < needed:
        which = f'data.tokenizer = {config.data.tokenizer}'
        raise UserError(f'model.vocab_size = {size}: the data need at least {needed} ({which})')
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def validation_batches(
    data: Data, name: str, mesh: jax.sharding.Mesh, size: int, *, max_rows: int = 0
) -> Iterator[Batch]:
    """A validation set as global batches of `size` rows on the mesh, of which each process reads its own."""
    rows = local_rows(mesh, size)
    for batch in data.validation_batches(name, size, max_rows=max_rows, rows=rows):
        yield place(batch, mesh, rows=rows, num_rows=size)


class _Trainer:
    """One attempt at a run. `run` reads top to bottom; the other methods are its steps."""

    def __init__(self, config: Config, workdir: str, data: Data, stop: StopSignals) -> None:
        self.config, self.workdir, self.data, self.stop = config, workdir, data, stop
        self.mesh = make_mesh(config.mesh)
        require_divisible(config, self.mesh)
        self.setup = make_setup(config, self.mesh)
        summary.require_split(self.setup)
        self.rows = local_rows(self.mesh, config.data.batch_size)
        self.iterator = data.train_iterator(self.rows)
        self.tally = Tally()
        self.pending: _Pending | None = None
        self.clock = time.perf_counter()
        self.validation: dict[str, Any] | None = None  # the newest row
        self.profiling = False
        self.compile_began: float | None = None
        self.eval_passes = config.passes.max_passes + 2 if config.model.fusion != 'none' else 1
        self.eval_step = self._make_eval_step(self.eval_passes)
        self.source: Loaded | None = None
        if config.init.from_ and not has_checkpoint(workdir):
            self.source = load_source(config, self.setup.state, data)

    def run(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.state = self._restore_or_init()
        with jax.set_mesh(self.mesh):
            self._run()

    def _run(self) -> None:
        first = int(self.state.step)
        # With init.data = continue the data are further on than the steps.
        self.ahead = int(self.iterator.get_state()['next_index']) - first
        self.steps = steps = self._last_step()
        if first > steps:
            raise UserError(f'training.steps = {steps}: the run in {self.workdir} has done {first} already')
        if first == steps and not self._evaluation_missed(first):
            say(f'{self.workdir} has done its {steps} steps already')
            return self._final_table()
        on_primary(lambda: record_config(self.workdir, self.config, self.data))
        for name, rows in self.data.members.items():
            if isinstance(rows, BestFitRows):
                say(f'{name}: best-fit packing drops no token, {rows.padding:.2%} of its positions are padding')
        with self._open_writer(first if self.resumed else None) as self.writer:
            try:
                if self.source is not None:
                    self.source = None  # its arrays are as large as the state
                    self._tell_first_loss()
                if self._evaluation_missed(first):
                    self._evaluate(first)
                if first < steps:
                    self._take_steps(first)
            except Stopped as stopped:
                self._save(int(self.state.step))
                self.checkpoints.wait()
                saved = f'checkpoint {int(self.state.step)} saved in {self.workdir}'
                with contextlib.suppress(OSError):  # of a terminal that has hung up
                    say(f'{stopped}: {saved}; the same command resumes')
                raise
            finally:
                self._stop_profile()
                self.iterator.close()
        self.checkpoints.wait()
        self._final_table()

    def _take_steps(self, first: int) -> None:
        steps = self.steps
        step_function = self._compile()
        with self._bar(first) as self.bar:
            for step in range(first + 1, steps + 1):
                self._start_profile(step)
                self.state, step_metrics = step_function(self.state, self._next_batch())
                self._read_pending()
                self.pending = _Pending(step, step_metrics)
                if self.profiling and step == self.config.training.profile_steps[1]:
                    self._read_pending()  # waits for the step, so that the trace has all of it
                    self._stop_profile()
                if self._evaluation_due(step):
                    self._evaluate(step)
                if step % self.config.training.checkpoint_every == 0 or step == steps:
                    self._save(step)
                self.checkpoints.check()
                self.stop.poll()

    def _next_batch(self) -> Batch:
        rows, total = self.rows, self.config.data.batch_size
        return place(next(self.iterator), self.mesh, rows=rows, num_rows=total)

    # Set-up

    def _last_step(self) -> int:
        """`training.steps`, or less where a source that must not be read twice comes to its end before."""
        steps = self.config.training.steps
        if self.config.data.exhausted == 'repeat':
            return steps
        whole, name = self.data.steps_in_one_epoch(steps + self.ahead)
        last = whole - self.ahead
        if last < 1:
            raise UserError(f'data.exhausted = end: {name} has no {len(self.rows)} rows (left) for a step')
        if last < steps:
            told = f'set training.steps = {last} for the schedule to end there too'
            say(f'the run ends after {last} of {steps} steps, where {name} ends (data.exhausted = end); {told}')
        return last

    def _open_writer(self, resume_step: int | None) -> metrics.MetricsWriter | metrics.NoWriter:
        return metrics.MetricsWriter(self.workdir, resume_step) if is_primary() else metrics.NoWriter()

    def _restore_or_init(self) -> TrainState:
        try:
            restored = self.checkpoints.restore_latest(self.setup.state, self.iterator, say=say)
            self.resumed = restored is not None
            self.evaluated = self._evaluated_steps() if self.resumed else set()
        except ValueError as error:  # a damaged file or a checkpoint that doesn't fit, told in one line
            raise RuntimeError(str(error)) from error
        if restored is not None:
            say(f'resuming {self.workdir} from step {restored.step}')
            self.tally = Tally(**restored.meta)
            return restored.state
        if self.source is None:
            return self.setup.init()
        if self.config.init.data == 'continue':
            self.iterator.set_state(self.source.data_position)
        theirs = Tally(**self.source.meta)
        going_on = theirs if self.config.init.schedule == 'continue' else Tally()
        self.tally = going_on._replace(feedback_before=theirs.trained_feedback)
        return warm_start(self.config, self.setup.init(), self.source, say)

    def _compile(self) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """Compiles the step ahead of its first call, and prints what it will cost."""
        show = summary.printer(say)
        show(summary.mesh_lines(self.mesh, OPTIONS[self.setup.platform]))
        show(summary.parameter_table(self.setup))
        begin = time.perf_counter()
        compiled = self.stop.wait_for(lambda: self.setup.compile(self.config))
        show(summary.cost_lines(self.config, self.setup.state, compiled))
        say(f'  compiled in {time.perf_counter() - begin:.1f} s')
        self.compile_began = begin
        self.clock = time.perf_counter()
        return compiled

    def _bar(self, first: int) -> tqdm:
        seconds = 0.2 if sys.stderr.isatty() else 10  # a log file is no place for a moving bar
        return tqdm(
            total=self.steps,
            initial=first,
            unit='step',
            dynamic_ncols=True,
            smoothing=0.1,
            mininterval=seconds,
            disable=not is_primary(),
        )

    # Metrics

    def _read_pending(self) -> None:
        """Reads the metrics of the step before, which has finished or is about to; writes its row."""
        if self.pending is None:
            return
        step, values = self.pending.step, jax.device_get(self.pending.metrics)
        self.pending = None
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        if self.compile_began is not None:
            say(f'  first step done {now - self.compile_began:.1f} s after compilation began')
            self.compile_began = None
        passes, tokens = int(values.passes), int(values.tokens)
        nonfinite = int(values.nonfinite_in_a_row)
        before = self.tally
        self.tally = before._replace(
            tokens=before.tokens + tokens,
            token_passes=before.token_passes + tokens * passes,
            nonfinite_steps=before.nonfinite_steps + (nonfinite > 0),
        )
        if step % self.config.training.log_every == 0 or step == self.steps:
            self.writer.write(self._train_row(step, values, seconds))
        self.bar.set_postfix_str(
            f'pass-1 loss {values.loss_K[0]:.3f}, passes {passes}, {tokens / seconds:,.0f} tokens/s', refresh=False
        )
        self.bar.update()
        if nonfinite:
            say(f'step {step}: loss or gradient is not finite; the step was left out ({nonfinite} in a row)')
        if nonfinite >= MAX_NONFINITE_IN_A_ROW:
            steps = self.checkpoints.steps()
            good = f'the last good checkpoint is step {steps[-1]}' if steps else 'there is no checkpoint yet'
            raise RuntimeError(f'{nonfinite} steps in a row were not finite; {good}')

    def _train_row(self, step: int, values: StepMetrics, seconds: float) -> metrics.Row:
        passes, tokens = int(values.passes), int(values.tokens)
        peak = peak_flops()
        positions = self.config.data.batch_size * self.config.data.seq_len
        flops = positions * train_flops(self.config.model, seq_len=self.config.data.seq_len, passes=passes)
        optimizer = self.config.optimizer
        z_loss_on = optimizer.z_loss > 0 and step > decay_start(optimizer, self.config.training.steps)
        return metrics.train_row(
            step=step,
            loss=values.loss,
            pass_losses=values.loss_K[:passes],
            z_loss=values.z_loss if z_loss_on else None,
            grad_norm=values.grad_norm,
            learning_rate=values.learning_rate,
            tokens=self.tally.tokens,
            token_passes=self.tally.token_passes,
            tokens_per_second=tokens / seconds,
            step_seconds=seconds,
            mfu=flops / seconds / peak if peak else None,
            read_so_far=self.data.read_so_far(step + self.ahead),
        )

    # Evaluation

    def _results(self, eval_step: Any, max_rows: int) -> dict[str, PassResults]:
        """Of each validation set."""
        return {name: self._results_of(name, eval_step, max_rows) for name in self.data.validation}

    def _results_of(self, name: str, eval_step: Any, max_rows: int) -> PassResults:
        size = self.config.data.batch_size // self.config.training.microbatches
        batches = validation_batches(self.data, name, self.mesh, size, max_rows=max_rows)
        return evaluate_passes(eval_step, self.state.params, batches, poll=self.stop.poll)

    def _make_eval_step(self, num_passes: int) -> Any:
        return make_eval_step(self.setup.model, num_passes=num_passes, token_bytes=self.data.token_bytes)

    def _evaluate(self, step: int) -> None:
        self._read_pending()
        results = self._results(self.eval_step, self.config.training.eval_rows)
        if len(results) > 1:
            for name, part in results.items():
                self.writer.write(self._validation_row(step, part, f'validation/{name}'))
        whole = together(results.values())
        self.validation = self._validation_row(step, whole, 'validation')
        self.writer.write(self.validation)
        losses = ', '.join(f'{loss:.4f}' for loss in whole.loss_K)
        say(f'step {step}: validation loss after 1..{self.eval_passes} passes: {losses} nats/token')
        self.clock = time.perf_counter()

    def _validation_row(self, step: int, results: PassResults, split: str) -> metrics.Row:
        return metrics.validation_row(
            step=step,
            split=split,
            pass_losses=results.loss_K,
            update_norms=results.update_norm_K[1:],
            bytes_per_token=results.bytes / results.tokens if results.bytes else None,
        )

    def _tell_first_loss(self) -> None:
        if not self.data.validation:
            return
        results = self._results(self._make_eval_step(1), self.config.training.eval_rows)
        loss = together(results.values()).loss_K[0]
        say(f'  validation loss after one pass, before the first step: {loss:.6f} nats/token')

    def _evaluation_due(self, step: int) -> bool:
        due = step % self.config.training.eval_every == 0 or step == self.steps
        return due and bool(self.data.validation)

    def _evaluation_missed(self, step: int) -> bool:
        """A signal in the middle of an evaluation saves the step without its row; the resumed run makes up for it."""
        return step > 0 and self._evaluation_due(step) and step not in self.evaluated

    def _evaluated_steps(self) -> set[int]:
        """Read by every process: all must agree on what is left to evaluate."""
        path = Path(self.workdir) / 'metrics.jsonl'
        rows = metrics.read_rows(path) if path.exists() else []
        return {row['step'] for row in rows if row['split'] == 'validation'}

    def _final_table(self) -> None:
        try:
            self._print_final_table()
        except Stopped as stopped:
            with contextlib.suppress(OSError):
                say(f'{stopped}: the run in {self.workdir} is complete; the same command prints its table')
            raise

    def _print_final_table(self) -> None:
        results = [self._print_table_of(name) for name in self.data.validation]
        if len(results) > 1:
            say('all validation rows together:')
            summary.printer(say)(summary.loss_table(together(results), range(1, self.eval_passes + 1)))
        if not results:
            say('no validation data (data.validation)')
        read = self.data.read_so_far(self.steps + self.ahead)
        told = ', '.join(f'{name} {value:.4g}' for name, value in read.items())
        if told:
            say(f'read: {told}')
        say(f'{self.tally.tokens:,} tokens, {self.tally.token_passes:,} token-passes; run folder: {self.workdir}')

    def _print_table_of(self, name: str) -> PassResults:
        show = summary.printer(say)
        total = self.data.validation[name].num_rows
        say(f'{name}, all {total} rows:')
        results = self._results_of(name, self.eval_step, 0)
        show(summary.loss_table(results, range(1, self.eval_passes + 1)))
        if self.data.token_bytes is None:
            say('accuracy by position:')
            show(summary.position_table(results.accuracy_KP, range(1, self.eval_passes + 1)))
        if self.eval_passes > 1:
            rows = min(FINAL_LONG_ROWS, total)
            say(f'{name}, {rows} rows, iterated past the passes it was trained with:')
            long = self._results_of(name, self._make_eval_step(FINAL_PASSES[-1]), rows)
            show(summary.loss_table(long, FINAL_PASSES))
        return results

    # Checkpoints, profile

    def _save(self, step: int) -> None:
        """Rows first, then the checkpoint: a restored step always has its rows."""
        self._read_pending()
        self.writer.flush()
        row = self.validation if self.validation is not None and self.validation['step'] == step else None
        self.checkpoints.save(step, self.state, data_iterator=self.iterator, meta=self.tally._asdict(), metrics=row)
        self.clock = time.perf_counter()

    def _start_profile(self, step: int) -> None:
        """At the first step of `profile_steps` that this attempt takes."""
        window = self.config.training.profile_steps
        if window and not self.profiling and window[0] <= step <= window[1]:
            self._read_pending()
            jax.profiler.start_trace(f'{self.workdir}/tensorboard')
            self.profiling = True
            self.clock = time.perf_counter()  # what the profiler takes is no step's time

    def _stop_profile(self) -> None:
        """After the last, or wherever the attempt ends before that: an open trace is never written."""
        if self.profiling:
            self.profiling = False
            jax.profiler.stop_trace()
            self.clock = time.perf_counter()
