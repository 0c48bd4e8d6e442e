"""A weight brought together from its shares, beside the share that its gradient goes to."""

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
    """A whole weight that a projection multiplies with, beside the share that takes the gradient.

    Were the gathered weight itself differentiated, its gradient would come in its own dtype, which
    is the compute dtype. So that sums stay in the share's, the two are told apart.
    """

    share: Float[Array, "..."]  # as the device holds it; takes the gradient
    value: Float[Array, "..."]  # whole, in the compute dtype; takes none


class Gather(Protocol):
    """A weight brought together of which a device holds a part; its gradient goes back to parts."""

    def __call__(self, weight: jax.Array, dims: Dims) -> GatheredWeight:
        """Returns the weight as projections multiply with it, in the compute dtype."""
        ...

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Returns a norm's scale or bias, in its own dtype."""
        ...
