"""The paper's 1B model and recipe (method.md section 6), on the embedded corpus until a larger source is configured.

    fbt train --config=configs/fbt_1b.py --workdir=runs/fbt_1b

Hardware: accelerators; 1.065B parameters in float32 with momentum need about 9 GB for parameters and optimizer
state. 762,940 steps of 32 x 8192 tokens are 200B tokens; `progressive_75_22_3` makes them 256B token-passes. Not yet
run; shapes and parameter counts are tested, and it was compiled for TPUs (`fbt plan`). The fastest that fits of what
`fbt plan --sweep` and single plans compiled; three-pass step, roofline:

    slice               rows  mesh                       remat      peak GiB   s, communication hidden to exposed
    v5e:8x8               32  fsdp=32 tensor=2           per_layer      5.65   0.62 to 0.85
    v5p:4x4x4             32  fsdp=32 tensor=2           dots          26.42   0.20 to 0.30
    v5e:16x16            128  data=2 fsdp=64 tensor=2    per_layer      5.77   0.61 to 0.87
    v6e:16x16            128  data=2 fsdp=64 tensor=2    dots          25.55   0.10 to 0.20
    v5e:8x8, two slices  128  data=2 fsdp=32             per_layer      7.43   1.22 to 1.48

With `dots` the v5e meshes need 20 GiB and more for temporaries alone.
"""

from ml_collections import ConfigDict

from fbt_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.seq_len = 8192
    config.data.batch_size = 32  # 262,144 tokens

    config.model.vocab_size = 100_352
    config.model.width = 1536
    config.model.num_layers = 24
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.mlp_width = 6656
    config.model.window = 2048
    config.model.full_attention_every = 6
    config.model.remat = 'per_layer'

    config.passes.phases = 'progressive_75_22_3'

    config.optimizer.matrix_learning_rate = 1e-2
    config.optimizer.matrix_weight_decay = 0.01
    config.optimizer.adam_learning_rate = 5e-4
    config.optimizer.warmup_steps = 200
    config.optimizer.decay_fraction = 0.25
    config.optimizer.z_loss = 1e-5

    config.training.steps = 762_940
    config.training.log_every = 10
    config.training.eval_every = 2000
    config.training.checkpoint_every = 2000
    return config
