"""What feedback does in one layer: running products in the symmetric group S5.

    make demo        or        fbt train --config=configs/word_problem.py --workdir=runs/word_problem

A row is 12 random generators (a transposition, a 5-cycle, the identity); the target at each position is their product
so far, one of 120 permutations, which never appears in the input.
"""

from ml_collections import ConfigDict

from fbt_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.source = 'word_problem'
    config.data.tokenizer = 'none'
    config.data.seq_len = 12
    config.data.batch_size = 64

    config.model.width = 64
    config.model.num_layers = 1
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_width = 256
    config.model.window = 0
    config.model.full_attention_every = 1
    config.model.remat = 'nothing'

    config.passes.phases = ((0, (0.0, 0.0, 0.0, 1.0)),)
    config.passes.prefix_mixin = False

    config.optimizer.matrix_learning_rate = 1e-2
    config.optimizer.matrix_weight_decay = 0.01
    config.optimizer.adam_learning_rate = 3e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_fraction = 0.5
    config.optimizer.z_loss = 0.0

    config.training.steps = 1500
    config.training.log_every = 100
    config.training.eval_every = 500
    config.training.eval_rows = 256
    config.training.checkpoint_every = 500
    return config
