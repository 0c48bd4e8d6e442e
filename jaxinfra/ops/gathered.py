"""Weights gathered from the shares of several devices, with gradients for the shares."""

import dataclasses
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jaxinfra.axes import Dims

GATHERED = "gathered_weight"
"""Name of what was brought together once for both passes: kept whatever is recomputed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredWeight:
    """A weight gathered from all devices, with this device's shard, which takes the gradient.

    So gradients are summed over devices in the shard's dtype, not in the compute dtype of the
    gathered weight.
    """

    share: Float[Array, "..."]  # the shard that the device holds; takes the gradient
    value: Float[Array, "..."]  # whole, in the compute dtype; takes none


class Gather(Protocol):
    """A function that gathers a weight from devices' shares, and reduces its gradient to shares."""

    def __call__(self, weight: jax.Array, dims: Dims) -> GatheredWeight:
        """Gathers the weight in the compute dtype."""
        ...

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Gathers a norm's scale or bias in its own dtype."""
        ...
