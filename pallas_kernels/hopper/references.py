"""Buffers that kernels write into."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def references(arrays: Sequence[jax.Array]) -> list[Any]:
    """A reference to each array, of which nothing is copied where its caller donates it.

    Arrays of one value, such as pools of zeros, stay apart: where another operand is a slice of a
    larger array, XLA makes a fusion of the kernel's call and passes each value once, so that two
    references would be one buffer. So all of a call are made at once.
    """
    return [jax.new_ref(array) for array in lax.optimization_barrier(tuple(arrays))]
