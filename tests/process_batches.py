"""Gathers the first 5 global batches on any number of processes and prints their hashes; see test_e2e_processes.py.

The processes are told by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; without them it is one.
"""

import hashlib
import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from fbt_jax.config import Config, DataConfig, MeshConfig
from fbt_jax.data import open_data
from fbt_jax.sharding import local_rows, make_mesh, place
from fbt_jax.training.processes import join

CONFIG = Config(data=DataConfig(tokenizer='bytes', seq_len=96, batch_size=8), mesh=MeshConfig(fsdp=-1))


def main() -> None:
    join()
    mesh, size = make_mesh(CONFIG.mesh), CONFIG.data.batch_size
    rows = local_rows(mesh, size)
    iterator = open_data(CONFIG).train_iterator(rows)
    hashes = []
    for _ in range(5):
        batch = place(next(iterator), mesh, rows=rows, num_rows=size)
        whole = multihost_utils.process_allgather(batch, tiled=True)
        hashes.append(hashlib.sha256(b''.join(np.ascontiguousarray(x).tobytes() for x in whole)).hexdigest())
    iterator.close()
    print(json.dumps({'processes': jax.process_count(), 'rows': rows, 'hashes': hashes}))


if __name__ == '__main__':
    main()
