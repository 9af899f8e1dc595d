"""Local files in place of what lm-evaluation-harness would download: its prompts, choices, targets and examples."""

from pathlib import Path

import pytest
from helpers_harness import ROWS, TaskManager, datasets, questions, write

from fbt_jax.errors import UserError
from fbt_jax.interop.harness_tasks import load_task, local_files, scored_file


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'datasets'))


@pytest.fixture(scope='module')
def manager() -> TaskManager:
    return TaskManager()


@pytest.mark.parametrize('leaf', ROWS)
def test_local_rows_take_the_place_of_a_download(leaf: str, tmp_path: Path, manager: TaskManager) -> None:
    split, row, prompt, choices, target = ROWS[leaf]
    write(tmp_path, leaf, **{split: [row]})
    files = local_files(leaf, str(tmp_path))
    assert files == ('json', {split: str(tmp_path / leaf / f'{split}.jsonl')})
    task = load_task(manager, leaf, files)
    (doc,) = task.eval_docs
    told = task.doc_to_text(doc)
    assert told.endswith(prompt) if isinstance(prompt, str) else told == prompt
    assert choices is None or list(task.doc_to_choice(doc)) == choices
    assert task.doc_to_target(doc) == target


def test_files_may_be_of_other_kinds(tmp_path: Path, manager: TaskManager) -> None:
    rows = [ROWS['piqa'][1] | {'goal': f'Open jar {n}'} for n in range(3)]
    (tmp_path / 'a' / 'piqa').mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / 'a' / 'piqa' / 'validation.parquet'))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / 'b' / 'piqa' / 'validation'))
    for name, kind in (('a', 'parquet'), ('b', 'arrow')):
        files = local_files('piqa', str(tmp_path / name))
        assert files is not None
        assert files.kind == kind
        assert [doc['goal'] for doc in load_task(manager, 'piqa', files).eval_docs] == [r['goal'] for r in rows]
    write(tmp_path / 'b', 'piqa', train=rows)
    with pytest.raises(UserError, match='has files of several kinds'):
        local_files('piqa', str(tmp_path / 'b'))


@pytest.mark.parametrize('leaf', ['mmlu_anatomy', 'lambada_openai', 'arc_easy'])
def test_a_validation_split_alone_is_scored(leaf: str, tmp_path: Path, manager: TaskManager) -> None:
    """Also of a task that knows none."""
    row = ROWS[leaf][1]
    files = local_files(leaf, str(write(tmp_path / 'a', leaf, train=[row] * 3, validation=[row])))
    assert files is not None
    task = load_task(manager, leaf, files)
    assert len(task.eval_docs) == 1
    assert scored_file(task, files) == str(tmp_path / 'a' / leaf / 'validation.jsonl')
    files = local_files(leaf, str(write(tmp_path / 'b', leaf, train=[row])))
    with pytest.raises(UserError, match=f'^{leaf}: needs a test or validation split; its files are train$'):
        load_task(manager, leaf, files)


@pytest.mark.parametrize('name', ['piqa', 'arc_easy', 'gsm8k_cot'])
def test_examples_are_those_of_the_harness_itself(name: str, tmp_path: Path, manager: TaskManager) -> None:
    """With a split of examples, or examples in the task: nothing but the place of the data is ours."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = {
        'piqa': [ROWS['piqa'][1] | {'goal': f'Open {n}'} for n in range(20)],
        'arc_easy': questions('ABC' * 6),
        'gsm8k_cot': [{'question': f'{n} and 1?', 'answer': f'#### {n + 1}'} for n in range(20)],
    }[name]
    scored = 'validation' if name == 'piqa' else 'test'
    folder = write(tmp_path, name, **{scored: rows[:10], 'train': rows[10:]})
    files = local_files(name, str(folder))
    assert files is not None
    config = load_yaml(manager.task_index[name].yaml_path)
    theirs = ConfigurableTask(
        config=config | {'dataset_path': 'json', 'dataset_name': None, 'dataset_kwargs': {'data_files': files.files}}
    )
    prompts = []
    for task in (load_task(manager, name, files), theirs):
        task.set_fewshot_seed(1234)
        prompts.append([task.fewshot_context(doc, 3) for doc in task.eval_docs])
    assert prompts[0] == prompts[1]
    if name == 'gsm8k_cot':
        assert prompts[0][0].count(' and 1?') == 1  # none of the rows is an example
