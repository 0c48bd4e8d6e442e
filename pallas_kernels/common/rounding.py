"""Guard against XLA's removal of a cast to a shorter float."""

import jax
from jax import lax


def keep_rounded(values: jax.Array) -> jax.Array:
    """Returns values cast to a shorter float so that XLA cannot remove their rounding.

    XLA for GPUs removes a cast to a shorter float and the cast back, also with a transpose or an
    update in place between the two (``xla_allow_excess_precision``). Then
    later operations would get the dropped digits, but only in programs that do both.
    """
    return lax.optimization_barrier(values)
