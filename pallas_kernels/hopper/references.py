"""Mutable references to arrays that kernels update in place."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def references(arrays: Sequence[jax.Array]) -> list[Any]:
    """Makes a mutable reference to each array, without a copy where the caller donates the array.

    All references of a call are made at once, so that arrays of one value, such as pools of zeros,
    stay apart. Where another operand is a slice of a larger array, XLA makes a fusion of the
    kernel's call and passes each value once: two references would be one buffer.
    """
    return [jax.new_ref(array) for array in lax.optimization_barrier(tuple(arrays))]
