r"""Texts to train a model on what `fbt diagnose --probes` asks of it: the three tasks with their answers.

    python launch/probing_texts.py --out=probing
    fbt train --config=configs/tiny.py --workdir=runs/probing \
        --config.data.source='jsonl:probing/train.jsonl#prompt_key=prompt' \
        --config.data.validation='jsonl:probing/held_out.jsonl#prompt_key=prompt' \
        --config.data.tokenizer=bytes --config.data.packing=best_fit --config.model.window=0 \
        --config.model.width=96 --config.model.mlp_width=256 --config.model.num_layers=3 \
        --config.training.steps=1200 --config.training.eval_every=300
    fbt diagnose --workdir=runs/probing --probes --plot=probes.png

Only answers count in the loss. Texts are drawn freely, not in the probes' groups and pairs, with up to 30
fillers after what is asked for; with `--fillers=256` (and `--config.data.seq_len=1024 --config.data.batch_size=8`) they
are as long as the paper's longest.
"""

import argparse
import json
import random
from pathlib import Path

from fbt_jax.evaluation.probe_tasks import LETTERS

MOST_WRITES = 16
FILLERS = (0, 1, 2, 4, 8, 8, 16, 32, 64, 128, 256)


def fillers(rng: random.Random, count: int) -> str:
    return ''.join(f'x{rng.randint(2, 9)};' for _ in range(count))


def name(rng: random.Random) -> str:
    return rng.choice(LETTERS) + rng.choice(LETTERS)


def example(rng: random.Random, most_fillers: int) -> dict[str, str]:
    """One of the three tasks, `prompt` up to the colon, `text` the answer, 0 or 1."""
    count = min(rng.choice([n for n in FILLERS if n < 2 * most_fillers]), most_fillers)
    task = rng.randrange(3)
    if task == 0:
        one = name(rng)
        other = one if rng.random() < 0.5 else name(rng)
        return {
            'prompt': f'required={one};completed={other};{fillers(rng, count)}done:',
            'text': str(int(one == other)),
        }
    if task == 1:
        state = rng.randint(0, 1)
        return {
            'prompt': f'{fillers(rng, rng.randint(0, 4))}state={state};{fillers(rng, count)}state:',
            'text': str(state),
        }
    registers = rng.choice([1, 2, 4, 8])
    writes = rng.choice([w for w in (1, 2, 4, 8, 16) if w * registers <= MOST_WRITES])
    order = [LETTERS[r] for r in range(registers) for _ in range(writes)]
    rng.shuffle(order)
    steps = [(register, rng.randint(0, 1)) for register in order]
    asked = LETTERS[rng.randrange(registers)]
    written = ''.join(f'{register}={value};' for register, value in steps)
    prompt = f'{written}{fillers(rng, rng.choice([0, 4, 8]))}{asked}:'
    return {'prompt': prompt, 'text': str(dict(steps)[asked])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='folder to write to')
    parser.add_argument('--fillers', type=int, default=30, help='at most, after what is asked for (%(default)s)')
    parser.add_argument('--seed', type=int, default=1)
    args = parser.parse_args()
    if args.fillers < 1:
        parser.error(f'--fillers={args.fillers}: must be at least 1')
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    for split, count in (('train', 60_000), ('held_out', 600)):
        lines = [json.dumps(example(rng, args.fillers)) + '\n' for _ in range(count)]
        (args.out / f'{split}.jsonl').write_text(''.join(lines))


if __name__ == '__main__':
    main()
