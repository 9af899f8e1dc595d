"""The default run: a small feedback model on the embedded Jane Austen novels.

    make train        or        fbt train --config=configs/tiny.py --workdir=runs/tiny

Hardware: 2 CPU cores, about four minutes.
"""

from ml_collections import ConfigDict

from fbt_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.source = 'austen'
    config.data.tokenizer = 'bpe'
    config.data.seq_len = 256
    config.data.batch_size = 32

    config.model.width = 192
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 512
    config.model.window = 64
    config.model.full_attention_every = 2
    config.model.remat = 'dots'

    config.passes.phases = 'constant_75_25_0'

    config.optimizer.matrix_learning_rate = 1e-2
    config.optimizer.adam_learning_rate = 3e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.decay_fraction = 0.4

    config.training.steps = 60
    config.training.log_every = 10
    config.training.eval_every = 20
    config.training.eval_rows = 64
    config.training.checkpoint_every = 20
    return config
