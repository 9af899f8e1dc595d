"""Items of the generated tasks, made up, and records of their answers."""

from pathlib import Path
from typing import Any

from helpers_data import write_jsonl

HATS = [
    {
        'question': f'Ann has {n} hats and buys {n + 1}. How many now?',
        'answer': f'{n}+{n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1}\n#### {2 * n + 1}',
    }
    for n in range(3, 12)
]
SUMS = [
    {
        'problem': f'What is half of ${n}$?',
        'solution': rf'It is $\boxed{{\frac{{{n}}}{{2}}}}$.',
        'answer': f'{n}/2',
        'unique_id': f'made/{n}',
    }
    for n in range(3, 9)
]
PROGRAMS = [
    {
        'task_id': f'Made/{n}',
        'prompt': f'def add{n}(x):\n    """x and {n}."""\n',
        'entry_point': f'add{n}',
        'canonical_solution': f'    return x + {n}\n',
        'test': f'def check(candidate):\n    assert candidate(1) == {n + 1}\n',
    }
    for n in range(3)
]
BASICS = [
    {
        'task_id': n,
        'text': f'Write a function to multiply by {n}. ',
        'code': f'def times{n}(x):\r\n    return {n} * x',
        'test_list': [f'assert TWO == {2 * n}'],
        'test_setup_code': f'import math\nTWO = times{n}(2)',
    }
    for n in range(2, 8)
]
MADE_UP = {'gsm8k': HATS, 'math500': SUMS, 'humaneval': PROGRAMS, 'mbpp': BASICS}


def write_made_up(folder: Path) -> str:
    """MADE_UP as `--task-files` has it."""
    for name, rows in MADE_UP.items():
        (folder / name).mkdir()
        write_jsonl(folder / name / 'test.jsonl', rows)
    return str(folder)


def record(item: str, sample: int, verdict: str, tokens: int = 4, finished: str = 'stop') -> dict[str, Any]:
    return {'item': item, 'sample': sample, 'verdict': verdict, 'tokens': tokens, 'finished': finished}
