"""Weights gathered over the ``fsdp`` axis once for both passes.

Left to the compiler, a projection's weight is gathered where it is multiplied with, and what the
backward pass needs of it is the share that a device holds: it gathers again. Here the gathered
weight is a value of its own, which recomputation keeps (``ops.gathered.GATHERED``).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jaxinfra.axes import Dims
from jaxinfra.ops.gathered import Gather, GatheredWeight
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeptWeights:
    """Gathers in the compute dtype; gradients are reduce-scattered in the weight's."""

    placement: Placement
    compute: jnp.dtype

    def __call__(self, weight: jax.Array, dims: Dims) -> GatheredWeight:
        """Returns the weight as layers use it: whole where only its place in memory is split."""
        share = self.placement.sharding(dims)
        whole = self.placement.sharding(dims, self.placement.rules.used)
        held = jax.lax.stop_gradient(weight).astype(self.compute)
        rounded = jax.lax.with_sharding_constraint(held, share)
        return GatheredWeight(
            share=_gradient_as_stored(weight, share),
            value=jax.lax.with_sharding_constraint(rounded, whole),
        )

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Returns the vector as layers use it; its gradient is summed before it is shared out.

        Gathered again for the backward pass, these few bytes would wait for the gradients that are
        on their way, and the layer for them.
        """
        whole = self.placement.sharding(dims, self.placement.rules.used)
        return jax.lax.with_sharding_constraint(vector, whole)


def _gradient_as_stored(weight: jax.Array, share: NamedSharding) -> jax.Array:
    """The weight, whose gradient comes out as the weight is stored: sharded so, rows in order.

    A reduce-scatter wants the dim that it splits outermost. Were that left to the optimizer, it
    would turn moments and weights to match, and copy what it turned.
    """

    @jax.custom_vjp
    def same(weight: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(weight, share)

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        gradient = jax.lax.with_sharding_constraint(gradient, share)
        return (with_layout_constraint(gradient, Layout(tuple(range(gradient.ndim)))),)

    same.defvjp(lambda weight: (same(weight), None), backward)
    return same(weight)


def gather_on(placement: Placement | None, *, keep: bool, compute: jnp.dtype) -> Gather | None:
    """``KeptWeights``, where the config asks for them."""
    return KeptWeights(placement=placement, compute=compute) if keep and placement else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeights:
    """Brings together what devices have quantized of their shares: a byte for each element."""

    placement: Placement

    def __call__(
        self, values: jax.Array, scale: jax.Array, dims: Dims
    ) -> tuple[jax.Array, jax.Array]:
        """Returns 8-bit values of a weight as projections multiply with them, and scales whole.

        Were scales left in shares, the compiler would share out their product with the values, and
        bring that together again in fp32.
        """
        share = self.placement.sharding(dims)
        whole = self.placement.sharding(dims, self.placement.rules.used)
        # As integers: XLA's CPU backend would send 8-bit floats as 16-bit ones.
        bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
        bits = jax.lax.with_sharding_constraint(bits, share)
        bits = jax.lax.with_sharding_constraint(bits, whole)
        everywhere = self.placement.sharding((None,) * scale.ndim)
        scale = jax.lax.with_sharding_constraint(scale, everywhere)
        return jax.lax.bitcast_convert_type(bits, values.dtype), scale
