"""How the train step is compiled: shardings, donation, the compiler's options; for training, `fbt plan`, `fbt bench`.

The options hide communication behind computation. They are set here and nowhere else, told at the start, and given to
the compiler with the program, so that no environment variable has to be right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fbt_jax.batch import Batch
from fbt_jax.config import Config
from fbt_jax.model.transformer import Transformer, for_platform, init_params, param_specs
from fbt_jax.passes import PURPOSE_INIT, step_key
from fbt_jax.sharding import batch_sharding, named, state_specs
from fbt_jax.training.optimizer import make_optimizer
from fbt_jax.training.step import TrainState, make_train_step

OPTIONS: dict[str, dict[str, Any]] = {
    'cpu': {},
    'gpu': {'xla_gpu_enable_latency_hiding_scheduler': True},
    'tpu': {
        'xla_tpu_enable_latency_hiding_scheduler': True,
        'xla_enable_async_all_gather': True,
        'xla_enable_async_collective_permute': True,
        'xla_tpu_enable_async_collective_fusion': True,
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
        'xla_tpu_overlap_compute_collective_tc': True,
    },
}


class Setup(NamedTuple):
    """A run's functions and where its arrays lie. `state` and `batch` are jax.ShapeDtypeStructs with shardings."""

    mesh: Mesh
    model: Transformer
    optimizer: Any
    init: Callable[[], TrainState]  # jitted; call it outside `jax.set_mesh`
    state: TrainState
    batch: Batch
    platform: str

    def lower(self, config: Config) -> Any:
        """The train step of `config`, lowered; the state is donated."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        step = jax.jit(
            make_train_step(config, self.model, self.optimizer),
            donate_argnums=0,
            out_shardings=(shardings_of(self.state), whole),
        )
        with jax.set_mesh(self.mesh):
            return step.lower(self.state, self.batch)

    def compile(self, config: Config) -> Any:
        return self.lower(config).compile(compiler_options=OPTIONS[self.platform])


def make_setup(config: Config, mesh: Mesh) -> Setup:
    """`config` has its vocabulary filled in, see `resolve`; `mesh` may be of devices that aren't there."""
    platform = mesh.devices.flat[0].platform
    model = Transformer(for_platform(config.model, platform))
    specs = param_specs(model)
    optimizer = make_optimizer(config.optimizer, config.training.steps, specs)
    init = make_init(config, model, optimizer)
    shapes = jax.eval_shape(init)
    shardings = named(mesh, state_specs(shapes, shapes.params, specs))
    return Setup(
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        init=jax.jit(init, out_shardings=shardings),
        state=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        batch=batch_shapes(config, batch_sharding(mesh)),
        platform=platform,
    )


def make_init(config: Config, model: Transformer, optimizer: Any) -> Callable[[], TrainState]:
    def init() -> TrainState:
        key = jax.random.fold_in(step_key(config.seed, jnp.int32(0)), PURPOSE_INIT)
        params = init_params(model, key)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    return init


def batch_shapes(config: Config, sharding: Any = None) -> Batch:
    shape = (config.data.batch_size, config.data.seq_len)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return Batch(integers, integers, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding), integers, integers)


def shardings_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def use_compilation_cache(workdir: str) -> None:
    """Keeps compiled programs in DIR/compilation_cache, unless JAX_COMPILATION_CACHE_DIR names another folder."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update('jax_compilation_cache_dir', str(Path(workdir).absolute() / 'compilation_cache'))
