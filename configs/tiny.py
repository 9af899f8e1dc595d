"""The default run: a feedback model of 1.09M parameters on the embedded Jane Austen novels, byte-level BPE of 2048.

    make train        or        fbt train --config=configs/tiny.py --workdir=runs/tiny

Hardware: 2 CPU cores, about five minutes. Expected: see the README, three seeds.
"""

from ml_collections import ConfigDict

from fbt_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.source = 'austen'
    config.data.tokenizer = 'bpe'
    config.data.seq_len = 128
    config.data.batch_size = 16

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 384
    config.model.window = 64
    config.model.full_attention_every = 2
    config.model.remat = 'dots'

    # Feedback takes many steps to learn, so it starts early; the steps of three passes keep the iterated map flat.
    config.passes.phases = ((0, (1.0,)), (0.05, (0.0, 1.0)), (0.9, (0.0, 0.5, 0.5)))

    config.optimizer.matrix_learning_rate = 0.04
    config.optimizer.adam_learning_rate = 5e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.decay_fraction = 0.6

    config.training.steps = 570
    config.training.log_every = 10
    config.training.eval_every = 95
    config.training.eval_rows = 64
    config.training.checkpoint_every = 190
    return config
