"""How the command ends when a signal comes, whatever becomes of its exception, and when nobody reads what it prints."""

import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from helpers_e2e import python

from fbt_jax import cli


def python_compare(work: str, call: str = 'sys.exit(cli.main())') -> subprocess.CompletedProcess[str]:
    """`call` in a process of its own, where `fbt compare` does `work` instead, the body of a function."""
    code = f"""
import gc, os, signal, sys, time
from fbt_jax import cli
from fbt_jax.cli import compare
def send(name):
    os.kill(os.getpid(), getattr(signal, name))
def work(args, rest):
{textwrap.indent(textwrap.dedent(work), '    ')}
compare.run = work
sys.argv = ['fbt', 'compare', 'a', 'b']
{textwrap.dedent(call)}
"""
    return python(code)


def test_a_signal_sent_twice_at_once_lets_the_clean_up_end() -> None:
    result = python_compare("""
        try:
            send('SIGTERM')
        finally:
            send('SIGTERM')
            send('SIGHUP')
            time.sleep(0.4)
            print('cleaned up')
    """)
    assert (result.returncode, result.stdout) == (143, 'cleaned up\n')
    assert result.stderr == 'fbt compare: ended by SIGTERM\n'


@pytest.mark.parametrize(('name', 'status'), [('SIGTERM', 143), ('SIGINT', 130), ('SIGHUP', 129)])
def test_a_signal_whose_exception_is_lost_ends_the_command(name: str, status: int) -> None:
    """As JAX's own callback of the garbage collector loses it, whatever is being done."""
    result = python_compare(f"""
        def collected(phase, info):
            if phase == 'start':
                send('{name}')
        gc.callbacks.append(collected)
        gc.collect()
        gc.callbacks.clear()
        print('lost', flush=True)
        try:
            time.sleep(20)
        finally:
            print('cleaned up')
    """)
    assert (result.returncode, result.stdout) == (status, 'lost\ncleaned up\n')
    assert result.stderr == f'fbt compare: ended by {name}\n'


@pytest.mark.parametrize('end', ['return 0', "raise RuntimeError('made of it')", "raise ImportError('too')"])
def test_what_swallows_a_signal_does_not_change_the_status(end: str) -> None:
    result = python_compare(f"""
        try:
            send('SIGTERM')
        except BaseException:
            pass
        {end}
    """)
    assert (result.returncode, result.stderr) == (143, 'fbt compare: ended by SIGTERM\n')


def test_a_signal_waits_for_imports(tmp_path: Path) -> None:
    """An exception within the start of an extension, as jaxlib's, ends the process as a fault of memory."""
    (tmp_path / 'slow.py').write_text("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(0.3)\nprint('whole')")
    result = python_compare(f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import slow
        time.sleep(20)
    """)
    assert (result.returncode, result.stdout) == (143, 'whole\n')
    assert result.stderr == 'fbt compare: ended by SIGTERM\n'


def test_a_caller_s_alarm_is_left_to_it() -> None:
    call = """
        signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
        signal.setitimer(signal.ITIMER_REAL, 2)
        print(cli.main(['compare', 'a', 'b']))
        time.sleep(3)
    """
    assert python_compare("send('SIGTERM')", call).stdout == '143\nalarm\n'
    assert python_compare('time.sleep(3); return 0', call).stdout == 'alarm\n0\n'


def test_a_call_of_a_module_that_is_imported_ends_too(tmp_path: Path) -> None:
    """As of a script's body that `python -c 'import script'` runs."""
    (tmp_path / 'script.py').write_text("from fbt_jax import cli\nprint(cli.main(['compare', 'a', 'b']))")
    call = f'sys.path.insert(0, {str(tmp_path)!r}); import script'
    result = python_compare("send('SIGTERM'); time.sleep(20)", call)
    assert (result.stdout, result.stderr) == ('143\n', 'fbt compare: ended by SIGTERM\n')


def test_another_pipe_that_breaks_is_told() -> None:
    result = python_compare("""
        read, write = os.pipe()
        os.close(read)
        print('a line')
        os.write(write, b'x')
    """)
    assert (result.returncode, result.stdout) == (1, 'a line\n')
    assert result.stderr == 'fbt compare: [Errno 32] Broken pipe\n'


@pytest.mark.parametrize('lines', [1, 100_000])
def test_output_that_nobody_reads_ends_the_command_silently(lines: int) -> None:
    result = python_compare(f"""
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(read)
        for _ in range({lines}):
            print('a line')
        return 0
    """)
    assert (result.returncode, result.stderr) == (141, '')


def test_a_call_within_another_leaves_its_signals_to_it() -> None:
    result = python_compare("""
        if args.workdirs == ['inner']:
            gc.callbacks.append(lambda phase, info: phase == 'start' and send('SIGTERM'))
            gc.collect()
            gc.callbacks.clear()
            time.sleep(20)
        try:
            cli.main(['compare', 'inner'])
        finally:
            print('cleaned up')
    """)
    assert (result.returncode, result.stdout) == (143, 'cleaned up\n')
    assert result.stderr == 'fbt compare: ended by SIGTERM\n'


def test_signals_are_as_before_after_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    assert cli.main(['compare', 'nowhere', 'nor-here']) == 2
    assert [signal.getsignal(number) for number in numbers] == before
    assert 'fbt compare: ' in capsys.readouterr().err
