"""Projections into and out of a stream whose positions the tensor axis shards.

The gather of the stream, and the scatter of sums into it, are part of the products
(``pallas_kernels.collective_matmul``). Without this class the compiler puts collectives beside
them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfra.axes import BATCH, SEQUENCE, STREAM, STREAM_SEQUENCE, Dims, MeshAxis
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.collective_product import (
    CollectiveImplementation,
    gathered_products,
    is_measured,
    scattered_product,
)
from jaxinfra.ops.multiply import StreamFactor, weight_gradient
from jaxinfra.ops.quantized import contracted_dims
from jaxinfra.parallel.place import Placement

_SCATTERED, _WHOLE = (BATCH, STREAM_SEQUENCE, STREAM), (BATCH, SEQUENCE, STREAM)
_AXES = frozenset({MeshAxis.REPLICA, MeshAxis.FSDP, MeshAxis.TENSOR})
"""Axes that may have more than one device."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StreamProducts:
    """Products with weights that the tensor axis shards, of which the stream is an operand.

    Each device sends (N - 1) / N of the stream for all products that read it together, and as much
    for a product that is added to it. The backward pass sends the same, and the stream once more
    for the gradients of the weights that read it.
    """

    placement: Placement
    implementation: CollectiveImplementation = "auto"

    def gathers(self, spec: str, dims: Dims) -> bool:
        """Whether a product takes the stream to columns that the tensor axis shards."""
        rank = contracted_dims(spec)
        if rank != 1 or self._axes(dims[0]):
            return False
        return self._shards(dims[1:])

    def scatters(self, spec: str, dims: Dims) -> bool:
        """Whether a product takes rows that the tensor axis shards back to the stream."""
        rank = contracted_dims(spec)
        if rank is None or rank != len(dims) - 1 or self._axes(dims[-1]):
            return False
        return self._shards(dims[:-1])

    def whole(self, x_BTD: jax.Array) -> jax.Array:
        """Gathers the stream apart, for products that cannot."""
        return jax.lax.with_sharding_constraint(x_BTD, self.placement.sharding(_WHOLE))

    def gather(
        self, x_BTD: jax.Array, products: Sequence[StreamFactor], *, recipe: Recipe
    ) -> tuple[jax.Array, ...]:
        """Computes several products of the stream, each in the compute dtype."""
        specs, shares, values, dims = zip(*products, strict=True)
        place, compute = self.placement, recipe.compute
        weight_specs, out_specs = self._weights(dims), tuple(map(self._columns, specs, dims))
        stream = place.spec(_SCATTERED)

        @jax.custom_vjp
        def multiplied(x: jax.Array, shares: Any, values: Any) -> Any:
            del shares
            run = self._on_devices(
                lambda x, ws: gathered_products(specs, x, ws, **self._options)[0],
                (stream, weight_specs), out_specs,
            )  # fmt: skip
            return run(x.astype(compute), _in(values, compute))

        def forward(x: jax.Array, shares: Any, values: Any):
            return multiplied(x, shares, values), (x, values)

        def backward(kept: Any, d_ys: Any):
            x, values = kept
            run = self._on_devices(
                lambda ds, ws: scattered_product(specs, ds, ws, backward=True, **self._options),
                (out_specs, weight_specs), stream,
            )  # fmt: skip
            dx = run(_in(d_ys, compute), _in(values, compute)).astype(x.dtype)
            rows = self.whole(x.astype(compute))
            each = zip(specs, shares, d_ys, strict=True)
            d_shares = tuple(weight_gradient(s, rows, d, share, recipe) for s, share, d in each)
            return dx, d_shares, (None,) * len(specs)

        multiplied.defvjp(forward, backward)
        return multiplied(x_BTD, shares, values)

    def scatter(self, x: jax.Array, product: StreamFactor, *, recipe: Recipe) -> jax.Array:
        """Computes a product into the stream, [B, T, D] in the compute dtype."""
        spec, share, value, dims = product
        place, compute = self.placement, recipe.compute
        weight_specs, stream = self._weights((dims,)), place.spec(_SCATTERED)
        inward = place.spec((BATCH, SEQUENCE, *dims[:-1]))

        @jax.custom_vjp
        def multiplied(x: jax.Array, share: jax.Array, value: jax.Array) -> jax.Array:
            del share
            run = self._on_devices(
                lambda x, ws: scattered_product((spec,), (x,), ws, **self._options),
                (inward, weight_specs), stream,
            )  # fmt: skip
            return run(x.astype(compute), _in((value,), compute))

        def forward(x: jax.Array, share: jax.Array, value: jax.Array):
            return multiplied(x, share, value), (x, value)

        def backward(kept: Any, d_y: jax.Array):
            x, value = kept
            run = self._on_devices(
                lambda d, ws: gathered_products((spec,), d, ws, backward=True, **self._options),
                (stream, weight_specs), ((inward,), place.spec(_WHOLE)),
            )  # fmt: skip
            (dx,), rows = run(d_y.astype(compute), _in((value,), compute))
            return dx.astype(x.dtype), weight_gradient(spec, x, rows, share, recipe), None

        multiplied.defvjp(forward, backward)
        return multiplied(x, share, value)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(axis=MeshAxis.TENSOR.value, implementation=self.implementation)

    def _axes(self, dim: str | None) -> tuple[str, ...]:
        return self.placement.axes(dim, self.placement.rules.used)

    def _shards(self, dims: Dims) -> bool:
        """Whether the tensor axis shards the first of these dims, and nothing the others.

        Inside another ``shard_map`` it does not: kernels address devices of the whole mesh.
        """
        first, *rest = map(self._axes, dims)
        is_free = not jax.sharding.get_abstract_mesh().manual_axes
        return is_free and first == (MeshAxis.TENSOR,) and not any(rest)

    def _weights(self, dims: tuple[Dims, ...]) -> Any:
        return tuple(self.placement.spec(each, self.placement.rules.used) for each in dims)

    def _columns(self, spec: str, dims: Dims) -> Any:
        return self.placement.spec((BATCH, SEQUENCE, *dims[contracted_dims(spec) or 0 :]))

    def _on_devices(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return self.placement.on_each_device(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # gathered rows are the same on all devices of the axis
        )


def stream_products(placement: Placement | None) -> StreamProducts | None:
    """Returns the products for a mesh on which they were measured to be faster; None elsewhere."""
    if placement is None or not isinstance(placement.mesh, Mesh):
        return None
    if placement.axes(STREAM_SEQUENCE) != (MeshAxis.TENSOR,):
        return None
    sizes = placement.mesh.shape
    if any(size > 1 and axis not in _AXES for axis, size in sizes.items()):
        return None
    ids = [device.id for device in placement.mesh.devices.flat]
    if ids != [*range(len(ids))]:
        return None  # Mosaic GPU counts peers from the first device
    if not is_measured(sizes[MeshAxis.TENSOR], of=len(ids)):
        return None
    return StreamProducts(placement=placement)


def _in(arrays: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda array: array.astype(dtype), arrays)
