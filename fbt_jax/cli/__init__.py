"""The `fbt` command: one verb a module, each with `HELP`, `add_arguments(parser)` and `run(args, rest) -> exit status`.

Exit status: 0 the work is done, 1 it failed, 2 the user's mistake (one line on stderr), 143, 130 or 129 ended by a
signal after saving or cleaning up, 141 nobody reads what it prints. Verbs import what they need when they run, so that
`fbt --help` comes back at once.
"""

import argparse
import importlib
import io
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fbt_jax.errors import REPEAT_SECONDS, SIGNALLED, Ended, UserError

LOST_SECONDS = 0.1  # before an exception that nobody got is raised again
VERBS = ('train', 'generate', 'evaluate', 'diagnose', 'plan', 'bench', 'data', 'export', 'import', 'compare', 'report')


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {message}\n')


def main(argv: list[str] | None = None) -> int:
    parser = _Parser(prog='fbt', description='Pretrain Full-bandwidth Transformers.', allow_abbrev=False)
    verbs = parser.add_subparsers(dest='verb', required=True, metavar='VERB', parser_class=_Parser)
    modules = {name: importlib.import_module(f'fbt_jax.cli.{name}') for name in VERBS}
    for name, module in modules.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
    args, rest = parser.parse_known_args(argv)
    alone = argv is None  # a process of its own, not somebody's call
    if alone and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == 'strict':
        sys.stdout.reconfigure(errors='replace')  # what a terminal has no letter for ends no work
    came: list[int] = []
    status, what, unread = 0, '', False  # unread: whoever read the output is gone, as `| head` is
    try:
        with _signals_as_exceptions(came):
            status = modules[args.verb].run(args, rest)
            sys.stdout.flush()
    except UserError as error:
        status, what = 2, str(error)
    except PermissionError as error:
        status, what = 2, f'{error.filename}: {error.strerror}'
    except (RuntimeError, OSError) as error:
        unread = isinstance(error, BrokenPipeError) and _nobody_reads(1)
        status, what = (SIGNALLED + signal.SIGPIPE, '') if unread else (1, str(error))
    except BaseException:
        if not came:  # a fault of ours, or a signal to a call around this one
            raise
    if came:  # also where the exception was lost, or another made of it
        ended = Ended(came[0])
        status, what = ended.status, str(ended)
    if what:
        with suppress(OSError):  # of a terminal that has hung up
            print(f'fbt {args.verb}: {what}', file=sys.stderr)
    if (came or unread) and alone:
        # A thread in which XLA works would crash the process as the interpreter unloads.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)
    return status


def _nobody_reads(handle: int) -> bool:
    """Whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def _signals_as_exceptions(came: list[int]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP raise `Ended`; their numbers are added to `came`. What is ignored stays so.

    An exception of a signal is lost where nobody above can get it: of 26 sent to `fbt import`, JAX's callback of the
    garbage collector took two and Orbax one. So it is raised again, until it is on its way up. It is not raised while a
    module is imported: jaxlib's crash of it, four times of five. A second signal ends at once, see REPEAT_SECONDS.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = 0.0
    timer = (0.0, 0.0)

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal first, timer
        now = time.monotonic()
        if not came:
            first = now
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, raise_unless_raised)
            timer = signal.setitimer(signal.ITIMER_REAL, LOST_SECONDS, LOST_SECONDS)
        elif now - first > REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.append(number)
        raise_unless_raised(number, frame)

    def raise_unless_raised(_: int, frame: FrameType | None) -> None:
        handled = sys.exc_info()[1]
        while handled is not None:
            if isinstance(handled, Ended):
                return
            handled = handled.__context__
        while frame is not None and frame.f_code is not main.__code__:
            if frame.f_code.co_filename.startswith('<frozen importlib'):
                return
            frame = frame.f_back
        raise Ended(came[0])

    usual = (signal.SIG_DFL, signal.default_int_handler)
    taken = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) in usual]
    before: dict[int, Any] = {}
    before |= {number: signal.signal(number, end) for number in taken}
    hook = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, Ended) else hook(lost)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            signal.signal(number, before[number])
        if came:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, before[signal.SIGALRM])


@contextmanager
def processes() -> Iterator[None]:
    """Around the work of a verb that may run as one of several processes: joins them, leaves with them.

    A process that fails ends here and at once, for all that its exit handlers do is wait for the others.
    """
    from fbt_jax.training import processes as peers
    from fbt_jax.training.signals import Stopped

    status = 0
    try:
        peers.join()
        yield
    except Stopped as stopped:
        # Not by returning: a thread in which XLA is still compiling would hold the process, or crash it as it unloads.
        peers.leave(stopped.status)
        peers.exit_now(stopped.status)
    except BaseException as error:
        status = error.status if isinstance(error, Ended) else 2 if isinstance(error, UserError) else 1
        if peers.count() > 1:
            print(f'fbt: {peers.prefix()}{type(error).__name__}: {error}', file=sys.stderr)
            peers.exit_now(status)
        raise
    peers.leave(0)


def config_overrides(rest: list[str]) -> dict[str, str]:
    """{dotted key: text} from `--config.KEY=VALUE` and `--config.KEY VALUE`.

    Raises:
      UserError: another argument, or a key without a value.
    """
    overrides: dict[str, str] = {}
    arguments = iter(rest)
    for argument in arguments:
        if not argument.startswith('--config.'):
            raise UserError(f'unknown argument {argument}; see --help')
        key, equals, value = argument.removeprefix('--config.').partition('=')
        if not equals:
            value = next(arguments, '')
            if not value or value.startswith('--'):
                raise UserError(f'--config.{key} needs a value: --config.{key}=VALUE')
        overrides[key] = value
    return overrides


def require_outputs(args: argparse.Namespace) -> None:
    """UserError unless `--json`, and `--plot` where the verb has it, can be written."""
    for flag, suffixes in (('json', ()), ('plot', ('.png',))):
        path = getattr(args, flag, None)
        if path is not None:
            require_output(f'--{flag}={path}', path, *suffixes)


def require_output(told: str, path: str | Path, *suffixes: str) -> None:
    """UserError, which begins with `told`, unless a file can be written at `path` without harm to a run."""
    where = Path(path).absolute()
    if not str(path) or where.is_dir() or not where.parent.is_dir():
        raise UserError(f'{told}: must be a file in a folder that exists')
    if suffixes and where.suffix not in suffixes:
        raise UserError(f'{told}: must end in {suffixes[0]}')
    if _of_a_run(where.resolve()):
        raise UserError(f'{told}: is a file of the run itself; give it another name')
    try:  # by making a file: permissions don't say all, of a file system that is read-only, or to root
        tempfile.TemporaryFile(dir=where.parent).close()
    except OSError as error:
        raise UserError(f'{told}: cannot be written ({error.strerror}); name another place') from None


def _of_a_run(path: Path) -> bool:
    """Whether training wrote the file at `path`, or might."""
    own = {'config.json', 'config.py', 'metrics.jsonl', 'checkpoints', 'data', 'tensorboard'}
    runs = (folder for folder in path.parents if (folder / 'config.json').is_file())
    return any(path.relative_to(folder).parts[0] in own for folder in runs)


def no_more_arguments(rest: list[str]) -> None:
    if rest:
        raise UserError(f'unknown argument {rest[0]}; see --help')
