"""A model of 0.12B parameters on text of your own, two sources mixed, more of the second while the rate decays.

    fbt data tokenizer --source='jsonl:web/*.jsonl.zst' --vocab-size=32768 --out=data/tokenizer.json
    fbt data prepare --source='jsonl:web/*.jsonl.zst#except_every=1000' --tokenizer=data/tokenizer.json --out=data/web
    fbt data prepare --source='text:code/**/*.py#except_every=1000' --tokenizer=data/tokenizer.json --out=data/code
    fbt data prepare --source='jsonl:web/*.jsonl.zst#every=1000' --tokenizer=data/tokenizer.json --out=data/web_held_out
    fbt data prepare --source='text:code/**/*.py#every=1000' --tokenizer=data/tokenizer.json --out=data/code_held_out
    fbt train --config=configs/small.py --workdir=runs/small

Hardware: one GPU. 10,000 steps of 128 x 2048 tokens are 2.6B tokens, 3.4B token-passes, 2.6e18 model FLOPs: 3.6 hours
at 2e14 a second. Not yet run at this size; a narrower model with these keys is (tests/test_e2e_data.py).
"""

from ml_collections import ConfigDict

from fbt_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.source = {'web': 'prepared:data/web', 'code': 'prepared:data/code'}
    config.data.weights = ((0, {'web': 0.85, 'code': 0.15}), (0.75, {'web': 0.6, 'code': 0.4}))
    config.data.validation = {'web': 'prepared:data/web_held_out', 'code': 'prepared:data/code_held_out'}
    config.data.tokenizer = 'data/tokenizer.json'
    config.data.seq_len = 2048
    config.data.batch_size = 128

    config.model.vocab_size = 32_768
    config.model.width = 768
    config.model.num_layers = 12
    config.model.num_heads = 12
    config.model.num_kv_heads = 4
    config.model.mlp_width = 2560
    config.model.window = 1024
    config.model.full_attention_every = 6
    config.model.remat = 'per_layer'

    config.passes.phases = 'progressive_75_22_3'

    config.training.steps = 10_000
    config.training.microbatches = 4
    config.training.eval_every = 500
    config.training.eval_rows = 256
    config.training.checkpoint_every = 500
    return config
