"""A weight brought together from its shares, beside the share that its gradient goes to."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredWeight:
    """What a projection multiplies with, and what its gradient is of.

    Were the gathered weight itself differentiated, its gradient would come in its own dtype, which
    is the compute dtype. So that sums stay in the share's, the two are told apart.
    """

    share: Float[Array, "..."]  # as the device holds it; takes the gradient
    value: Float[Array, "..."]  # whole, in the compute dtype; takes none
