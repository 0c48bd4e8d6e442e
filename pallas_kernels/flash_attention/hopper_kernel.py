"""What every attention kernel for Hopper knows of its call, and what follows for its tiles."""

import dataclasses

import jax.numpy as jnp

from .hopper_geometry import Geometry
from .spec import AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One call's kernel; methods of its subclasses are its phases, written once per trace."""

    g: Geometry
    spec: AttentionSpec
    dtype: jnp.dtype  # of operands and results
    q_tile: int  # queries of a tile
    kv_tile: int  # keys of a tile
    segmented: bool  # whether tokens have ids, and equal ids see each other
    interpretable: bool  # avoids what the interpreter lacks

    @property
    def num_q_tiles(self) -> int:
        """Query tiles of a head."""
        return -(-self.g.T // self.q_tile)

    @property
    def num_k_tiles(self) -> int:
        """Key tiles of a head."""
        return -(-self.g.S // self.kv_tile)

    @property
    def ragged(self) -> bool:
        """Whether the last key tile is partly empty; padded ids mask it where there are ids."""
        return self.g.S % self.kv_tile != 0 and not self.segmented

    @property
    def masked(self) -> bool:
        """Whether any tile may hold scores that nothing sees."""
        s = self.spec
        return self.segmented or s.left is not None or s.right is not None or self.ragged
