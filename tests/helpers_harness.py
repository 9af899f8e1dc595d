"""Rows made up in the public layouts of the harness's tasks; importing it skips without lm-evaluation-harness."""

import os
from pathlib import Path
from typing import Any

os.environ['HF_HUB_OFFLINE'] = '1'  # read when the harness's libraries are imported

import pytest
from helpers_data import write_jsonl

pytest.importorskip('lm_eval')
import datasets
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

__all__ = ['LM', 'ROWS', 'TaskManager', 'datasets', 'questions', 'write']

COLOURS = {'text': ['red', 'blue', 'yellowish'], 'label': ['A', 'B', 'C']}
# Of each task: the split that it scores, a row in the public layout; then by hand its prompt, choices and target.
ROWS: dict[str, tuple[str, dict[str, Any], str, Any, Any]] = {
    'arc_easy': (
        'test',
        {'id': 'x', 'question': 'Which is like the sky?', 'choices': COLOURS, 'answerKey': 'B'},
        'Question: Which is like the sky?\nAnswer:',
        ['red', 'blue', 'yellowish'],
        1,
    ),
    'piqa': (
        'validation',
        {'goal': 'Open a jar', 'sol1': 'Twist the lid', 'sol2': 'Sing to it', 'label': 0},
        'Question: Open a jar\nAnswer:',
        ['Twist the lid', 'Sing to it'],
        0,
    ),
    'hellaswag': (
        'validation',
        {
            'ind': 1,
            'activity_label': 'Baking',
            'ctx_a': 'She mixes flour.',
            'ctx_b': 'then she',
            'ctx': 'She mixes flour. then she',
            'endings': ['bakes it.', 'flies.', 'sings.', 'sleeps for a week.'],
            'label': '0',
        },
        'Baking: She mixes flour. Then she',
        ['bakes it.', 'flies.', 'sings.', 'sleeps for a week.'],
        0,
    ),
    'winogrande': (
        'validation',
        {
            'sentence': 'The cup missed the bag because _ was small.',
            'option1': 'the cup',
            'option2': 'the bag',
            'answer': '2',
        },
        1,
        ['The cup missed the bag because the cup', 'The cup missed the bag because the bag'],
        'was small.',
    ),
    'boolq': (
        'validation',
        {'question': 'is grass green', 'passage': 'Grass is green.', 'idx': 0, 'label': 1},
        'Grass is green.\nQuestion: is grass green?\nAnswer:',
        ['no', 'yes'],
        1,
    ),
    'openbookqa': (
        'test',
        {'id': 'x', 'question_stem': 'The sky is', 'choices': COLOURS, 'answerKey': 'B'},
        'The sky is',
        ['red', 'blue', 'yellowish'],
        1,
    ),
    'copa': (
        'validation',
        {
            'premise': 'It rained.',
            'choice1': 'We sang.',
            'choice2': 'We got wet.',
            'question': 'effect',
            'idx': 0,
            'label': 1,
        },
        'It rained therefore',
        [' we sang.', ' we got wet.'],
        ' we got wet.',
    ),
    'rte': (
        'validation',
        {'sentence1': 'Ann ate an apple.', 'sentence2': 'Ann ate fruit.', 'label': 0, 'idx': 0},
        'Ann ate an apple.\nQuestion: Ann ate fruit. True or False?\nAnswer:',
        ['True', 'False'],
        0,
    ),
    'truthfulqa_mc2': (
        'validation',
        {
            'question': 'Can pigs fly?',
            'mc1_targets': {'choices': ['No', 'Yes'], 'labels': [1, 0]},
            'mc2_targets': {'choices': ['No', 'Not at all', 'Yes'], 'labels': [1, 1, 0]},
        },
        'Q: Can pigs fly?\nA:',
        ['No', 'Not at all', 'Yes'],
        0,
    ),
    'mmlu_anatomy': (
        'test',
        {'question': 'How many thumbs? ', 'subject': 'anatomy', 'choices': ['1', '2', '3', '4'], 'answer': 1},
        'How many thumbs?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:',
        ['A', 'B', 'C', 'D'],
        1,
    ),
    'lambada_openai': ('test', {'text': 'She opened the old door'}, 'She opened the old', None, ' door'),
}


def write(folder: Path, leaf: str, **splits: list[dict[str, Any]]) -> Path:
    (folder / leaf).mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        write_jsonl(folder / leaf / f'{split}.jsonl', rows)
    return folder


def questions(keys: str, number: int = 0) -> list[dict[str, Any]]:
    row = ROWS['arc_easy'][1]
    return [row | {'question': f'{number} {n}?', 'answerKey': key} for n, key in enumerate(keys)]
