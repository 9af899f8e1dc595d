"""What import and export share: new folders, and the process that asks transformers. Needs neither of its packages."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fbt_jax.errors import UserError
from fbt_jax.interop import hf_compare
from fbt_jax.interop.hf_compare import new_folder, run_script


def test_no_room_is_not_the_model_s_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'hf').mkdir()
    monkeypatch.setattr(hf_compare.shutil, 'disk_usage', lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RuntimeError, match=rf'no space left in {tmp_path}; TMPDIR names another place'):
        run_script('hf_open.py', 'no question', scratch=tmp_path / 'scratch')
    monkeypatch.undo()
    monkeypatch.setattr(hf_compare.subprocess, 'run', lambda *_, **__: SimpleNamespace(returncode=-9, stderr=''))
    with pytest.raises(RuntimeError, match='transformers was ended by SIGKILL: too little memory'):
        run_script('hf_open.py', scratch=tmp_path)


def test_a_folder_that_cannot_be_made_or_was_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'must be a new folder; this one exists and is not empty'):  # noqa: SIM117
        with new_folder(str(tmp_path / 'run'), '--workdir') as temporary:
            (temporary / 'a').touch()
            (tmp_path / 'run').mkdir()
            (tmp_path / 'run' / 'b').touch()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*')] == ['run', 'run/b']

    def read_only(**_: Any) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), '/random/name')

    monkeypatch.setattr(hf_compare.tempfile, 'mkdtemp', read_only)
    with pytest.raises(UserError, match=r'^--out=\S+/x: cannot be written \(Read-only file system\)$'):  # noqa: SIM117
        with new_folder(str(tmp_path / 'x'), '--out'):
            pass
