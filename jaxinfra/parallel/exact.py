"""Products of exact numerics on a mesh, and the models and meshes that have no exact form.

Each device multiplies its own rows with whole weights, or with its parts of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxinfra.axes import BATCH, Dims, MeshAxis
from jaxinfra.errors import UnsupportedError
from jaxinfra.ops.exact_product import MOST_PARTS, SPLIT_DIMS, ordered_einsum
from jaxinfra.ops.multiply import OrderedProduct
from jaxinfra.parallel.place import Placement

_FREE_AXES = (MeshAxis.REPLICA, MeshAxis.FSDP, MeshAxis.PIPE, MeshAxis.TENSOR)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedProduct:
    """``ordered_einsum`` of activations that are sharded by rows of the batch, x's first dim.

    A tensor axis shards the dims that are cut into parts. Where they are summed over, devices send
    one another their branches of the tree of sums, and each adds them in the same order.
    """

    placement: Placement

    def __call__(
        self,
        spec: str,
        x: jax.Array,
        weight: jax.Array,
        *,
        out: jnp.dtype,
        dims: Dims | None = None,
    ) -> jax.Array:
        """Computes ``einsum(spec, x, weight)``; of weights, other shards are gathered before."""
        place = self.placement
        operands, out_dims = spec.split("->")
        x_dims, weight_dims = operands.split(",")
        named = dict(zip(weight_dims, dims or (None,) * weight.ndim, strict=True))
        split = {letter: dim for letter, dim in named.items() if dim in SPLIT_DIMS}
        rows = {x_dims[0]: BATCH}
        in_specs = tuple(
            place.spec(tuple((split | rows).get(letter) for letter in letters))
            for letters in (x_dims, weight_dims, out_dims)
        )
        gather, shards = None, place.mesh.shape.get(MeshAxis.TENSOR, 1)
        if shards > 1 and any(letter not in out_dims for letter in split):
            gather = functools.partial(jax.lax.all_gather, axis_name=MeshAxis.TENSOR)
        return place.on_each_device(
            functools.partial(
                ordered_einsum, spec, out=out, dims=dims, shards=shards, gather=gather
            ),
            in_specs=in_specs[:2],
            out_specs=in_specs[2],
            check_vma=False,  # what is gathered is the same on all devices
        )(x, weight)


def ordered_product(placement: Placement | None) -> OrderedProduct:
    """Returns the product of exact numerics for one device or a mesh.

    Raises:
        UnsupportedError: a mesh with axes that split a sum in another way than by its parts.
    """
    if placement is None:
        return ordered_einsum
    sizes = placement.mesh.shape
    split = {axis: size for axis, size in sizes.items() if size > 1 and axis not in _FREE_AXES}
    tensor = sizes.get(MeshAxis.TENSOR, 1)
    if MOST_PARTS % tensor:
        split[MeshAxis.TENSOR] = tensor
    if split:
        named = ", ".join(f"{axis}={size}" for axis, size in split.items())
        raise UnsupportedError(
            f"numerics=exact on a mesh with {named}: sums would be split over devices, in another "
            f"order than on one; give their devices to {', '.join(_FREE_AXES)} (tensor=2 or "
            f"{MOST_PARTS}), or set numerics=fast"
        )
    if placement.mesh.size == 1:
        return ordered_einsum
    if placement.mesh.devices.flat[0].platform == "gpu":
        raise UnsupportedError(
            f"numerics=exact on {placement.mesh.size} GPUs: its norms are kernels for one; train "
            "and sample on one GPU, or set numerics=fast"
        )
    return ShardedProduct(placement=placement)
