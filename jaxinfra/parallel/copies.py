"""Gathers weights and sums gradients by copies between the memories of a process's two GPUs.

NCCL's kernels occupy SMs that a matmul beside them would use. A copy from one GPU's memory to
another's is made by DMA engines, and occupies none. XLA sends a collective-permute by such a copy
under ``PEER_COPIES``. So an all-gather is written here as permutes, a reduce-scatter as permutes
and sums. They send as many bytes as NCCL's.
"""

import jax
from jax.sharding import Mesh

from jaxinfra.axes import MeshAxis
from jaxinfra.parallel.collectives import num_devices, rank
from jaxinfra.parallel.place import Placement

MEASURED = "NVIDIA H200"
"""GPUs on which a step by copies was timed, and was faster."""


def copying_axis(placement: Placement) -> str | None:
    """Returns the mesh axis over which a step sends by copies, if there is one.

    It is ``fsdp``, on a mesh of two GPUs of one process, of the kind that was measured.
    """
    mesh, axis = placement.mesh, MeshAxis.FSDP
    if not isinstance(mesh, Mesh) or mesh.size != 2 or mesh.shape[axis] != 2:
        return None
    return axis if _are_measured(mesh) else None


def _are_measured(mesh: Mesh) -> bool:
    """Whether both devices are such GPUs of one process; they may be absent, to compile for."""
    first, second = mesh.devices.flat
    return first.device_kind == MEASURED and first.process_index == second.process_index


@jax.named_scope("gather_by_copies")
def gather_by_copies(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Gathers all devices' blocks side by side along ``dim``, inside ``shard_map``.

    Each of N devices sends D (N-1) bytes.

    Args:
        x: this device's block, of any shape and dtype, of D bytes.
    """
    count, me, size = num_devices(axis), rank(axis), x.shape[dim]
    whole = jax.lax.empty((*x.shape[:dim], count * size, *x.shape[dim + 1 :]), x.dtype)
    for step in range(count):
        block = _shifted(x, axis, step)
        start = (me - step) % count * size
        whole = jax.lax.dynamic_update_slice_in_dim(whole, block, start, dim)
    return whole


@jax.named_scope("scatter_sum_by_copies")
def scatter_sum_by_copies(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Sums over devices; device i gets the i-th of N parts along ``dim``, inside ``shard_map``.

    Each device sends D (N-1)/N bytes, and sums in the order of the ring, from its own part on.

    Args:
        x: this device's summand, of any shape and dtype, of D bytes.
    """
    count, me, size = num_devices(axis), rank(axis), x.shape[dim] // num_devices(axis)

    def part(step: int) -> jax.Array:
        start = (me + step) % count * size
        return _shifted(jax.lax.dynamic_slice_in_dim(x, start, size, dim), axis, step)

    total = part(0)
    for step in range(1, count):
        total += part(step)
    return total


def _shifted(x: jax.Array, axis: str, step: int) -> jax.Array:
    """Returns the array of the device ``step`` places before this one in the ring."""
    count = num_devices(axis)
    pairs = [(source, (source + step) % count) for source in range(count)]
    return x if step == 0 else jax.lax.ppermute(x, axis, pairs)
