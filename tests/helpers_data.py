"""Sources and prepared folders that several test files make."""

import json
from pathlib import Path
from typing import Any

from fbt_jax.config import DataConfig
from fbt_jax.config_data import parse_source
from fbt_jax.data.prepare import prepare
from fbt_jax.data.tokenizer import open_tokenizer

BYTES = open_tokenizer(DataConfig(tokenizer='bytes'))


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text(''.join(json.dumps(r if isinstance(r, dict) else {'text': r}) + '\n' for r in records))
    return path


def make(source: str, out: Path, *, tokenizer: Any = BYTES, **options: Any) -> dict[str, Any]:
    return prepare(parse_source(source), tokenizer, out, progress_bar=False, **options)
