"""What an accelerator can do, as its maker states it: the figures behind MFU, `fbt plan`'s roofline and "does it fit".

A "device" is what jax counts as one. Bandwidths are bytes per second, one way. `link` is one direction of one
interconnect link of the torus (TPU) or of the whole NVLink port of a GPU; a ring over one torus axis uses two links.
`network` is a device's share of its host's data-centre network: what crosses slices (TPU) or hosts (GPU).
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """One device."""

    kinds: tuple[str, ...]  # jax's device_kind
    flops: float  # dense bfloat16, per second
    memory: float  # bytes of high-bandwidth memory
    memory_bandwidth: float
    link: float
    links_per_ring: int  # links that a collective over one mesh axis can use at once
    network: float


GB = 1e9
CHIPS = {
    'v4': Chip(('TPU v4',), 275e12, 32 * 2**30, 1228 * GB, 45 * GB, 2, 3.1 * GB),
    'v5e': Chip(('TPU v5 lite', 'TPU v5e'), 197e12, 16 * 2**30, 819 * GB, 45 * GB, 2, 3.1 * GB),
    'v5p': Chip(('TPU v5', 'TPU v5p'), 459e12, 95 * 2**30, 2765 * GB, 90 * GB, 2, 6.2 * GB),
    'v6e': Chip(('TPU v6 lite', 'TPU v6e'), 918e12, 32 * 2**30, 1640 * GB, 90 * GB, 2, 6.2 * GB),
    'tpu7x': Chip(('TPU7x',), 1153e12, 96 * 2**30, 3690 * GB, 90 * GB, 2, 6.2 * GB),  # half a chip
    'a100': Chip(('NVIDIA A100-SXM4-40GB', 'NVIDIA A100-SXM4-80GB'), 312e12, 80 * GB, 2039 * GB, 300 * GB, 1, 25 * GB),
    'h100': Chip(('NVIDIA H100 80GB HBM3', 'NVIDIA H100'), 989e12, 80 * GB, 3350 * GB, 450 * GB, 1, 50 * GB),
    'h200': Chip(('NVIDIA H200',), 989e12, 141 * GB, 4800 * GB, 450 * GB, 1, 50 * GB),
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of jax's `device_kind`; None where it isn't in the table (CPUs, for one)."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)
