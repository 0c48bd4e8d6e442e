"""Products of exact numerics on a mesh, and the models and meshes that have no exact form.

Each device multiplies its own rows with whole weights, so that no sum is split over devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfra.axes import BATCH, MeshAxis
from jaxinfra.errors import UnsupportedError
from jaxinfra.ops.exact_product import ordered_einsum
from jaxinfra.ops.multiply import OrderedProduct
from jaxinfra.parallel.place import Placement

_FREE_AXES = (MeshAxis.REPLICA, MeshAxis.FSDP)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedProduct:
    """``ordered_einsum`` of activations that are sharded by rows of the batch, x's first dim."""

    placement: Placement

    def __call__(self, spec: str, x: jax.Array, weight: jax.Array, *, out: jnp.dtype) -> jax.Array:
        """Computes ``einsum(spec, x, weight)``, sharded as x; weights are gathered before."""
        place = self.placement
        x_dims, weight_dims = spec.split("->")[0].split(",")
        by_row = weight_dims[0] == x_dims[0]
        rows = place.spec((BATCH,))
        return place.on_each_device(
            functools.partial(ordered_einsum, spec, out=out),
            in_specs=(rows, rows if by_row else PartitionSpec()),
            out_specs=rows,
            check_vma=False,  # nothing is summed over any axis
        )(x, weight)


def ordered_product(placement: Placement | None) -> OrderedProduct:
    """Returns the product of exact numerics for one device or a mesh.

    Raises:
        UnsupportedError: a mesh with axes that split a sum.
    """
    if placement is None:
        return ordered_einsum
    sizes = placement.mesh.shape
    split = {axis: size for axis, size in sizes.items() if size > 1 and axis not in _FREE_AXES}
    if split:
        named = ", ".join(f"{axis}={size}" for axis, size in split.items())
        raise UnsupportedError(
            f"numerics=exact on a mesh with {named}: sums would be split over devices, in another "
            f"order than on one; give their devices to {' or '.join(_FREE_AXES)}, or set "
            "numerics=fast"
        )
    if placement.mesh.size == 1:
        return ordered_einsum
    if placement.mesh.devices.flat[0].platform == "gpu":
        raise UnsupportedError(
            f"numerics=exact on {placement.mesh.size} GPUs: its norms are kernels for one; train "
            "and sample on one GPU, or set numerics=fast"
        )
    return ShardedProduct(placement=placement)
