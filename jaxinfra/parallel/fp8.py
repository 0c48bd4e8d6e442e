"""Matmuls in 8 bits on a mesh: each device multiplies its shard of the tokens with its shard of a
weight, by the kernels of one device.

Devices communicate:

    weights    gathered over ``fsdp`` in 8 bits, with their scales
    x, g       if the residual stream is sharded by sequence, gathered over ``tensor`` in 8 bits;
               gathered twice if rows and columns are quantized separately
    y, dx      if ``tensor`` shards the contracted dim, summed in the result's dtype by an
               all-reduce; for a residual stream sharded by sequence, by a reduce-scatter
    dw         summed over the axes that shard tokens, in the dtype of gradients; reduce-scattered
               over the axes that shard the gradient
    counts     of elements lost by rounding: three numbers
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfra.axes import SEQUENCE, STREAM_SEQUENCE, Dims
from jaxinfra.ops.fp8_devices import (
    BLOCK,
    STREAM_TOKENS,
    TOKENS,
    Devices,
    FindDevices,
    PartPlacement,
    Quantized,
    ShardingUse,
    Side,
    one_device,
)
from jaxinfra.parallel.collectives import all_gather, all_reduce, reduce_scatter
from jaxinfra.parallel.place import Placement

_SEQUENCES = (SEQUENCE, STREAM_SEQUENCE)

type _Axes = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PerDeviceKernels(Devices):
    """Devices of a mesh that each compute their shard of an 8-bit matmul by kernels."""

    placement: Placement
    axes: Mapping[ShardingUse, _Axes]  # of dims that are sharded

    @property
    def num_partitions(self) -> int:
        """Returns 1: kernels run on each device."""
        return 1

    @property
    def compiler_partitioned(self) -> Devices:
        """Returns ``Devices`` on which the compiler partitions arrays, instead of ``shard_map``."""
        return Devices(num=self.num, gather=self.gather)

    def why_unfit(self, sides: tuple[Side, ...]) -> str | None:
        """Returns why kernels cannot run on shards of these operands; None if they can.

        A shard must consist of whole blocks of scales, and be contiguous.
        """
        for dims, sizes in sides:
            if dims in (TOKENS, STREAM_TOKENS):
                if len(sizes) != len(TOKENS):
                    return f"tokens have {len(sizes)} dims and devices share out batch and sequence"
                sizes, dims = sizes[1:], dims[1:]  # blocks are of one sequence
            inner = [dim for dim in dims[1:] if self._shards((dim,), ShardingUse.STORED) > 1]
            if inner:
                return f"{inner[0]} is sharded and not the first of {dims}"
            size = math.prod(sizes)
            shards = self._shards(dims, ShardingUse.STORED)
            whole_blocks = size % (shards * BLOCK) == 0 or (
                shards == 1 and dims[0] not in _SEQUENCES
            )
            if not whole_blocks:
                return (
                    f"{size} of {dims[0]} over {shards} devices are not whole blocks of {BLOCK} on "
                    "each"
                )
        return None

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """Returns ``part`` wrapped to run on each device with its shards of the arrays."""
        specs = [jax.tree.map(self._spec, tree) for tree in (takes, gives)]
        # A kernel does not say over which axes its results vary; parts sum what there is to sum.
        return self.placement.on_each_device(
            part, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )

    def shard_shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Returns the shape of one device's shard of an array of this shape."""
        each = zip(shape, dims, strict=True)
        return tuple(size // self._shards((dim,), ShardingUse.USED) for size, dim in each)

    def stack_shards(self, x: jax.Array, dims: Dims, use: ShardingUse) -> jax.Array:
        """Gathers the devices' shards of x along a new first dim."""
        over = self._over(dims, use)
        return all_gather(x[None], over) if over else x[None]

    def gather_weight(self, weight: Quantized, placed: Any, shape: tuple[int, ...]) -> Quantized:
        """Gathers a weight over the axes that shard its storage but not its use (``fsdp``)."""
        del shape
        # As integers: XLA's CPU backend would send 8-bit floats as 16-bit ones.
        values = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)
        values, scale = (
            self._gathered(array, where)
            for array, where in ((values, placed.values), (weight.scale, placed.scale))
        )
        return Quantized(jax.lax.bitcast_convert_type(values, weight.values.dtype), scale)

    def gather_tokens(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """Gathers x's tokens over the devices that shard a sequence. Sends D (N-1) bytes per device
        for shards of D bytes.
        """
        used = self.axes[ShardingUse.USED]
        by_all = used.get(SEQUENCE, ())
        axes = tuple(
            axis for axis in self._over(tokens[1:], ShardingUse.USED) if axis not in by_all
        )
        if not axes:
            return x
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
        apart = bits.reshape(*x.shape[:dim], sequences, -1, *x.shape[dim + 1 :])
        whole = all_gather(apart, axes, dim=dim + 1)
        whole = whole.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        return jax.lax.bitcast_convert_type(whole, x.dtype)

    def token_dims_of_sum(self, over: Dims) -> Dims:
        """Returns the token dims of the sum of products, sharded if it is reduce-scattered."""
        return STREAM_TOKENS if self._scatters(over) else TOKENS

    def sum_products(self, y: jax.Array, over: Dims) -> jax.Array:
        """Sums y over devices in its dtype: all-reduce, 2 D (N-1)/N bytes, or reduce-scatter."""
        axes = self._over(over, ShardingUse.USED)
        if not axes:
            return y
        return reduce_scatter(y, axes, dim=1) if self._scatters(over) else all_reduce(y, axes)

    def sum_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """Sums a weight's gradient over devices in its dtype. Each sends D (N-1)/N bytes over axes
        that shard it (reduce-scatter), 2 D (N-1)/N over others (all-reduce).
        """
        rest = list(self._over(TOKENS, ShardingUse.USED))
        for at, dim in enumerate(dims):
            for axis in self._only(dim, ShardingUse.SUMMED):
                gradient = reduce_scatter(gradient, axis, dim=at)
                rest.remove(axis)
        return all_reduce(gradient, tuple(rest)) if rest else gradient

    def _scatters(self, over: Dims) -> bool:
        used = self.axes[ShardingUse.USED]
        split = used.get(STREAM_SEQUENCE, ())
        summed = self._over(over, ShardingUse.USED)
        return bool(summed) and split == used.get(SEQUENCE, ()) + summed

    def _gathered(self, x: jax.Array, placed: PartPlacement) -> jax.Array:
        for at, merged in enumerate(placed.dims):
            axes = tuple(axis for dim in merged for axis in self._only(dim, ShardingUse.STORED))
            if axes:
                x = all_gather(x, axes, dim=at)
        return x

    def _only(self, dim: str | None, use: ShardingUse) -> tuple[str, ...]:
        """The axes of a dim that it is not sharded over where it is used."""
        used = self.axes[ShardingUse.USED].get(dim or "", ())
        return tuple(axis for axis in self.axes[use].get(dim or "", ()) if axis not in used)

    def _over(self, dims: Dims, use: ShardingUse) -> tuple[str, ...]:
        return tuple(axis for dim in dims for axis in self.axes[use].get(dim or "", ()))

    def _shards(self, dims: Dims, use: ShardingUse) -> int:
        return math.prod(self.placement.mesh.shape[axis] for axis in self._over(dims, use))

    def _spec(self, placed: PartPlacement) -> PartitionSpec:
        return PartitionSpec(*(self._over(merged, placed.use) or None for merged in placed.dims))


def fp8_devices_on(placement: Placement | None) -> FindDevices:
    """Returns a function that returns the ``Devices`` for 8-bit matmuls on this mesh."""
    if placement is None or placement.mesh.size == 1:
        return one_device
    rules = placement.rules
    tables = {
        ShardingUse.USED: rules.used,
        ShardingUse.STORED: rules.parameters,
        ShardingUse.SUMMED: rules.gradients,
    }

    def gather(values: jax.Array, scale: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
        # As integers: XLA's CPU backend would send 8-bit floats as 16-bit ones.
        bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
        for table in (rules.parameters, rules.used):
            bits = jax.lax.with_sharding_constraint(bits, placement.sharding(dims, table))
        # Were scales left in shares, the compiler would share out their product with the values,
        # and bring that together again in fp32.
        everywhere = placement.sharding((None,) * scale.ndim)
        scale = jax.lax.with_sharding_constraint(scale, everywhere)
        return jax.lax.bitcast_convert_type(bits, values.dtype), scale

    def here() -> PerDeviceKernels:
        axes = {
            use: {dim: placement.axes(dim, table) for dim in table} for use, table in tables.items()
        }
        return PerDeviceKernels(
            num=placement.mesh.size, gather=gather, placement=placement, axes=axes
        )

    return here
