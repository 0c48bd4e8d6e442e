"""Guard against XLA's removal of a cast to a shorter float."""

import jax
from jax import lax


def keep_rounded(values: jax.Array) -> jax.Array:
    """Returns values cast to a shorter float so that XLA cannot remove their rounding.

    XLA for GPUs removes a cast to a shorter float that is followed by a cast back
    (``xla_allow_excess_precision``), even with a transpose or an in-place update between them.
    Later operations then see unrounded values, but only in programs that contain both casts.
    """
    return lax.optimization_barrier(values)
