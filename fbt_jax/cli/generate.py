"""examples:
  fbt generate --workdir=runs/tiny --prompt='It is a truth' --mode=soft --max-tokens=60
  fbt generate --workdir=runs/tiny --prompt-file=prompts.txt --mode=fused --temperature=0.7 --num-samples=4 --json
  fbt generate --workdir=runs/tiny --mode=soft --interactive

Modes: standard (plain embeddings), soft (each step fed with the state of the one before), fused (the prompt read in
1 + --fused-passes passes, then as soft). One prompt's only sample streams; several are printed when they are done.
"""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from fbt_jax.cli import no_more_arguments, processes
from fbt_jax.errors import UserError
from fbt_jax.files import to_json

HELP = 'continue texts, with latent feedback or without'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument('--prompt', metavar='TEXT')
    prompts.add_argument('--prompt-file', metavar='FILE', help='a prompt a line')
    prompts.add_argument('--interactive', action='store_true', help='asks for a prompt again and again; ends with EOF')
    parser.add_argument('--mode', required=True, choices=('standard', 'soft', 'fused'))
    parser.add_argument(
        '--max-tokens', type=int, metavar='N', help='new tokens at most (default: 128, or what the context leaves)'
    )
    parser.add_argument('--temperature', type=float, default=0.0, metavar='X', help='0, the default, is greedy')
    parser.add_argument('--top-k', type=int, default=0, metavar='K', help='only the K likeliest tokens (0: all)')
    parser.add_argument('--top-p', type=float, default=1.0, metavar='P', help='only the likeliest that make up P')
    parser.add_argument('--num-samples', type=int, default=1, metavar='N', help='continuations of each prompt')
    parser.add_argument('--seed', type=int, default=0, metavar='N')
    parser.add_argument('--fused-passes', type=int, metavar='F', help='for --mode=fused (default: 1)')
    parser.add_argument(
        '--stop-id', action='append', default=[], type=int, metavar='ID', help='a token that ends a text as EOS does'
    )
    parser.add_argument('--stop', action='append', default=[], metavar='TEXT', help='ends a text; may be given again')
    parser.add_argument('--step', type=int, metavar='N', help='checkpoint (default: the newest)')
    parser.add_argument('--json', action='store_true', help='a JSON object a continuation, a line each')


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    if args.fused_passes is not None and args.mode != 'fused':
        raise UserError(f'--fused-passes={args.fused_passes}: has no effect with --mode={args.mode}')
    prompts = None if args.interactive else [args.prompt] if args.prompt is not None else _read(args.prompt_file)
    with processes():
        _generate(args, prompts)
    return 0


def _read(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').removesuffix('\n').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--prompt-file={path}: {getattr(error, "strerror", None) or error}') from None
    if lines == ['']:
        raise UserError(f'--prompt-file={path}: is empty')
    return lines


def _generate(args: argparse.Namespace, prompts: list[str] | None) -> None:
    import jax

    from fbt_jax.inference.decode import cast
    from fbt_jax.inference.generate import check
    from fbt_jax.model.transformer import compute_dtype
    from fbt_jax.training.processes import is_primary
    from fbt_jax.training.run_folder import load_run, require_finite, spread

    trained, mesh = spread(require_finite(load_run(args.workdir, args.step)), split_rows=False)
    with jax.set_mesh(mesh):
        trained = trained._replace(params=cast(trained.params, dtype=compute_dtype(trained.model.config)))
        if prompts is not None:
            _answer(args, trained, prompts, is_primary())
            return
        check(trained, **_options(args))
        if trained.tokenizer is None:
            raise UserError(f'{args.workdir}: this model reads no text')
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors='surrogateescape')  # one line that is not UTF-8 takes no other along
        while True:
            try:
                prompt = input('> ')
            except EOFError:
                return
            try:
                _answer(args, trained, [prompt], True)
            except UserError as error:  # a prompt that is too long ends no conversation
                print(error, file=sys.stderr)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        'mode': args.mode,
        'max_tokens': args.max_tokens,
        'temperature': args.temperature,
        'top_k': args.top_k,
        'top_p': args.top_p,
        'num_samples': args.num_samples,
        'seed': args.seed,
        'fused_passes': 1 if args.fused_passes is None else args.fused_passes,
        'stop': tuple(args.stop),
        'stop_ids': tuple(args.stop_id),
    }


def _answer(args: argparse.Namespace, trained: Any, prompts: list[str], tell: bool) -> None:
    from fbt_jax.inference.generate import stream

    streaming = stream(trained, prompts, **_options(args))
    alone = tell and len(prompts) * args.num_samples == 1 and not args.json
    while True:
        try:
            piece = next(streaming)
        except StopIteration as done:
            result = done.value
            break
        if alone:
            print(piece.text, end='', flush=True)
    if alone:
        print()
    elif tell:
        for row, text in enumerate(result.texts):
            prompt = prompts[row // args.num_samples]
            if args.json:
                told = {'prompt': prompt, 'text': text, 'tokens': result.tokens[row]}
                told |= {'log_probs': result.log_probs[row], 'finished': result.finished[row], 'mode': args.mode}
                print(to_json(told))
            else:
                print(f'--- {prompt!r}, sample {row % args.num_samples + 1}\n{text}')
