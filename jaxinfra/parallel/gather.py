"""Gathers weights over the ``fsdp`` axis once, for both the forward and the backward pass.

The compiler would gather a projection's weight before its matmul, save only the device's shard for
the backward pass, and gather again there. Here the gathered weight is a named value, which a remat
policy keeps (``ops.multiply.GATHERED``).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jaxinfra.axes import Dims
from jaxinfra.ops.multiply import GatheredWeight
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
        return GatheredWeight(
            share=_gradient_as_stored(weight, share),
            value=jax.lax.with_sharding_constraint(rounded, whole),
        )

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Gathers a norm's scale or bias once; its gradient is all-reduced, then cut into shards.

        A second all-gather in the backward pass would be small, but it would queue behind the
        gradients' collectives and delay the layer.
        """
        whole = self.placement.sharding(dims, self.placement.rules.used)
        return jax.lax.with_sharding_constraint(vector, whole)


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
