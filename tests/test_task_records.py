"""Records of answers: torn and damaged ones, and those made otherwise."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers_tasks import record

from fbt_jax.errors import UserError
from fbt_jax.interop.task_records import Records, require_settings


def test_a_torn_line_is_cut_off_and_a_wrong_one_told(tmp_path: Path) -> None:
    records = Records(tmp_path, 'made', 'soft', 0.3)
    assert records.read() == {}
    records.add([record('a', 0, 'wrong'), record('a', 1, 'wrong')])
    path = tmp_path / 'made-soft-t0.3.jsonl'
    whole = path.read_bytes()
    for torn in (b'{"item": "b"', b'{', b'\xff\xfe'):
        path.write_bytes(whole + torn)
        assert records.read().keys() == {('a', 0), ('a', 1)}
        assert path.read_bytes() == whole
    path.write_bytes(b'nonsense\n' + whole)
    with pytest.raises(UserError, match='line 1: is damaged'):
        records.read()


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    """From records, that is: where there are none, nothing depends on the settings."""
    require_settings(tmp_path, 'made', {'step': 0, 'shots': 5}, fused_passes=2)
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=None)
    Records(tmp_path, 'made', 'standard').write([])
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=3)
    Records(tmp_path, 'made', 'fused', 0.5).write([])
    require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=None)
    with pytest.raises(UserError, match=r'made otherwise: step was 1, now 2\. Use another --out'):
        require_settings(tmp_path, 'made', {'step': 2, 'shots': None}, fused_passes=3)
    with pytest.raises(UserError, match=r'made in mode fused made otherwise: fused_passes was 3, now 1\.'):
        require_settings(tmp_path, 'made', {'step': 1, 'shots': None}, fused_passes=1)


def test_records_of_a_task_with_a_longer_name_are_others(tmp_path: Path) -> None:
    require_settings(tmp_path, 'made', {'step': 1}, fused_passes=None)
    Records(tmp_path, 'made-up', 'standard').write([])
    require_settings(tmp_path, 'made', {'step': 2}, fused_passes=None)
    Records(tmp_path, 'made', 'soft', 0.7).write([])
    with pytest.raises(UserError, match='step was 2, now 3'):
        require_settings(tmp_path, 'made', {'step': 3}, fused_passes=None)


def test_records_are_json_whatever_the_scores(tmp_path: Path) -> None:
    Records(tmp_path, 'made', 'soft').write([{'scores': {'acc': math.nan}, 'more': (1.0, -math.inf)}])
    assert json.loads((tmp_path / 'made-soft.jsonl').read_text(), parse_constant=pytest.fail) == {
        'scores': {'acc': None},
        'more': [1.0, None],
    }


@pytest.mark.parametrize('content', ['[1]', '{"step": ', '', None])
def test_damaged_settings_are_told(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / 'made.json'
    path.mkdir() if content is None else path.write_text(content)
    Records(tmp_path, 'made', 'standard').write([])
    with pytest.raises(UserError, match=r'made\.json: is damaged'):
        require_settings(tmp_path, 'made', {'step': 1}, fused_passes=None)


def test_damaged_records_are_told(tmp_path: Path) -> None:
    records = Records(tmp_path, 'made', 'soft')
    path = tmp_path / 'made-soft.jsonl'
    whole = record('a', 0, 'wrong')
    for damaged in ([1], 3, *(whole | {'tokens': t} for t in ('x', None)), *(_without(whole, key) for key in whole)):
        path.write_text(f'{json.dumps(whole | {"sample": 1})}\n{json.dumps(damaged)}\n')
        with pytest.raises(UserError, match=r'made-soft\.jsonl, line 2: is damaged'):
            records.read()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match='is a folder'):
        records.read()


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != key}
