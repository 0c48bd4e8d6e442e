"""Gathers weights over the ``fsdp`` axis once, for both the forward and the backward pass.

The compiler would gather a projection's weight before its matmul, save only the device's shard for
the backward pass, and gather again there. Here the gathered weight is a named value, which a remat
policy keeps (``ops.multiply.GATHERED``). Between two GPUs of a process, weights and gradients are
sent by copies (``parallel.copies``).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.axes import Dims
from jaxinfra.ops.multiply import GatheredWeight
from jaxinfra.parallel.copies import copying_axis, gather_by_copies, scatter_sum_by_copies
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightAllGather:
    """All-gather of weights in the compute dtype; gradients are reduce-scattered in their dtype."""

    placement: Placement
    compute: jnp.dtype

    def __call__(self, weight: jax.Array, dims: Dims) -> GatheredWeight:
        """Gathers a weight over the axes that shard its storage but not its use in the layer."""
        share = self.placement.sharding(dims)
        whole = self.placement.sharding(dims, self.placement.rules.used)
        held = jax.lax.stop_gradient(weight).astype(self.compute)
        rounded = jax.lax.with_sharding_constraint(held, share)
        axis = copying_axis(self.placement)
        if axis is None or axis not in share.spec:
            return GatheredWeight(
                share=_gradient_as_stored(weight, share),
                value=jax.lax.with_sharding_constraint(rounded, whole),
            )
        copies = WeightCopies(placement=self.placement, axis=axis, dim=share.spec.index(axis))
        return GatheredWeight(
            share=_gradient_as_stored(weight, share),
            value=copies.gather(rounded),
            by_device=copies.of_each_device(weight),
        )

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Gathers a norm's scale or bias once; its gradient is all-reduced, then cut into shards.

        A second all-gather in the backward pass would be small, but it would queue behind the
        gradients' collectives and delay the layer.
        """
        whole = self.placement.sharding(dims, self.placement.rules.used)
        return jax.lax.with_sharding_constraint(vector, whole)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightCopies:
    """Gathering of a weight over the only mesh axis by copies, and the sum of its gradients."""

    placement: Placement
    axis: str
    dim: int  # of the weight, which the axis shards

    def gather(self, weight: jax.Array) -> jax.Array:
        """Gathers a weight; it has no gradient."""
        gather = functools.partial(gather_by_copies, axis=self.axis, dim=self.dim)
        return self.placement.on_each_device(
            gather, in_specs=(self._share,), out_specs=PartitionSpec(), check_vma=False
        )(weight)

    def of_each_device(self, weight: jax.Array) -> jax.Array:
        """Returns [N, ...] with a copy of the weight for each device, whose gradients are summed.

        Only its gradient is used: that of each device's own tokens, which the compiler would sum
        before anything else could.
        """
        count, around = self.placement.mesh.size, (None,) * weight.ndim

        @jax.custom_vjp
        def spread(weight: jax.Array) -> jax.Array:
            return jnp.broadcast_to(weight, (count, *weight.shape))

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            def total(of_device: jax.Array) -> jax.Array:
                return scatter_sum_by_copies(of_device[0], self.axis, dim=self.dim)

            summed = self.placement.on_each_device(
                total,
                in_specs=(PartitionSpec(self.axis, *around),),
                out_specs=self._share,
                check_vma=False,
            )(gradient)
            return (with_layout_constraint(summed, Layout(tuple(range(summed.ndim)))),)

        spread.defvjp(lambda weight: (spread(weight), None), backward)
        return spread(weight)

    @property
    def _share(self) -> PartitionSpec:
        return PartitionSpec(*(None,) * self.dim, self.axis)


def _gradient_as_stored(weight: jax.Array, share: NamedSharding) -> jax.Array:
    """The weight, whose gradient comes out as the weight is stored: sharded so, rows in order.

    A reduce-scatter wants the dim that it splits outermost. Were that left to the optimizer, it
    would transpose moments and weights to match, and copy them.
    """

    @jax.custom_vjp
    def same(weight: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(weight, share)

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        gradient = jax.lax.with_sharding_constraint(gradient, share)
        return (with_layout_constraint(gradient, Layout(tuple(range(gradient.ndim)))),)

    same.defvjp(lambda weight: (same(weight), None), backward)
    return same(weight)
