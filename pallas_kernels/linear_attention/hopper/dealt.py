"""Heads of all chunks, dealt in turn to the blocks of a launch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.machine import NUM_PROCESSORS


@dataclasses.dataclass(frozen=True, slots=True)
class DealtHeads:
    """The heads of chunks that each block computes; a chunk's heads follow one another."""

    batch: int
    num_chunks: int
    num_heads: int

    @property
    def items(self) -> int:
        """Number of heads of all chunks."""
        return self.batch * self.num_chunks * self.num_heads

    @property
    def grid(self) -> tuple[int]:
        """Number of blocks."""
        return (min(self.items, NUM_PROCESSORS),)

    @property
    def count(self) -> jax.Array:
        """Number of this block's heads of chunks."""
        left = self.items - lax.axis_index("block")
        return lax.div(left + NUM_PROCESSORS - 1, jnp.int32(NUM_PROCESSORS))

    def place(self, item) -> tuple[Any, Any, Any]:
        """Row, chunk and head of one of this block's items."""
        index = item * NUM_PROCESSORS + lax.axis_index("block")
        head, rest = lax.rem(index, self.num_heads), lax.div(index, self.num_heads)
        return lax.div(rest, self.num_chunks), lax.rem(rest, self.num_chunks), head
