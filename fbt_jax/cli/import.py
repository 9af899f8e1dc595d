"""examples:
  fbt import --from=SmolLM2-135M --workdir=runs/smollm2
  fbt import --from=model.Q4_1.gguf --workdir=runs/smollm2 --seq-len=8192
  fbt train --config=runs/smollm2/config.py --workdir=runs/smollm2-fbt --config.data.source='text:corpus/*.txt'

Writes a run of no steps that generates, evaluates and exports as any other, without feedback, and config.py, with which
`fbt train` goes on from it with feedback. Takes Llama, Qwen2 and Qwen3: a folder with config.json, safetensors and a
tokenizer, or a GGUF file. Compares its logits with those of transformers, and leaves nothing behind where they differ.
Needs pip install 'fbt-jax[hf]'.
"""

import argparse
import shlex
from pathlib import Path

from fbt_jax.cli import no_more_arguments

HELP = 'a run from an ordinary Hugging Face checkpoint (Llama, Qwen2, Qwen3)'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--from', required=True, metavar='FOLDER', dest='source', help="the model's folder, or a .gguf file"
    )
    parser.add_argument('--workdir', required=True, metavar='DIR', help="the run's folder: a new one")
    parser.add_argument('--seq-len', type=int, metavar='T', help="its context (default: the model's, 2048 at most)")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more_arguments(rest)
    from fbt_jax.interop.hf_import import import_hf

    told = import_hf(args.source, args.workdir, seq_len=args.seq_len)
    m = told.config.model
    print(f'{args.workdir}: {told.parameters:,} parameters, {m.num_layers} layers of width {m.width}')
    exact = '' if told.in_float64 is None else f' in float32, {told.in_float64:.1e} in float64'
    print(f'logits on {told.positions:,} tokens of the embedded novels: {told.difference:.1e} apart at most{exact}')
    for key, value in told.assumed.items():
        print(f"its config.json doesn't say {key}: taken as {value}, as transformers does")
    if told.ends:
        flags = ' '.join(f'--stop-id={id_}' for id_ in told.ends)
        print(f'its own texts also end at other ids than EOS: fbt generate {flags}')
    if told.has_chat_template:
        print('its chat template is left out: the run continues plain text')
    config = shlex.quote(str(Path(args.workdir) / 'config.py'))
    print(f'to go on with feedback: fbt train --config={config} --workdir=NEW --config.data.source=...')
    return 0
