"""Reading a config file: a Python file with `get_config()`, and `--config.section.key=value` on top of it.

What a user's file does wrong is one line that names it. Imports no jax.
"""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from fbt_jax.config import Config, from_dict, key_types, no_section, unknown_key
from fbt_jax.errors import UserError


def load_config_file(path: str, overrides: dict[str, str]) -> Config:
    """The config that `path`'s `get_config()` returns, with `overrides` {dotted key: text} applied, validated.

    Raises UserError for a missing or broken file, an unknown key or a bad value.
    """
    values = _run_config_file(path)
    types_by_key = key_types()
    for key, text in overrides.items():
        if key not in types_by_key:
            raise UserError(unknown_key(key))
        *sections, leaf = key.split('.')
        target = values
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(no_section(section, target))
        target[leaf] = text if types_by_key[key] is str else parse_value(text)
    return from_dict(values)


def _run_config_file(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise UserError(f'--config={path}: no such file')
    try:
        names = runpy.run_path(path)
        config = names['get_config']() if 'get_config' in names else None
    except (Exception, SystemExit) as error:  # whatever a user's file does
        misspelt = re.search(r'Key "(\w+)" does not exist', str(error))  # ml_collections adds pages of other keys
        what = unknown_key(misspelt[1]) if misspelt else f'{type(error).__name__}: {error}'
        raise UserError(f'--config={path}: {" ".join(what.split())}') from error
    if 'get_config' not in names:
        raise UserError(f'--config={path}: defines no get_config()')
    if not isinstance(config, config_dict.ConfigDict):
        raise UserError(f'--config={path}: get_config() returns a {type(config).__name__}, must be a ConfigDict')
    return config.to_dict()


def parse_value(text: str) -> Any:
    """A Python literal (numbers, tuples, True, None), or else the text itself; `true` and `false` are booleans too."""
    try:
        return {'true': True, 'false': False}.get(text) if text in ('true', 'false') else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that literal_eval may raise
        return text
