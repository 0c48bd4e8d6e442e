"""How matmuls compute, by the place in the model where they stand."""

import dataclasses
import enum

import jax.numpy as jnp


class Site(enum.StrEnum):
    """A kind of matmul that may have a recipe of its own."""

    PROJECTION = "projection"  # of attention and of dense feed-forward layers
    EXPERTS = "experts"  # of routed experts
    ROUTER = "router"  # scores by which tokens are sent to experts
    LOGITS = "logits"  # onto the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Formats of one matmul and of its gradients.

    Operands and the cotangent are cast to ``compute``, products are summed in ``accum``. A weight's
    gradient is rounded to ``gradient`` where that is given, before it is summed over devices.
    """

    compute: jnp.dtype
    accum: jnp.dtype
    gradient: jnp.dtype | None = None
