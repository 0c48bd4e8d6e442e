"""Sizes of the collective kernels, and choices that change no bit of their results."""

import dataclasses

from pallas_kernels.hopper.machine import NUM_PROCESSORS

COLUMNS = 256  # of a tile
UNIT_ROWS = 256
"""Rows that are pushed together, with one counter of arrivals; positions are a multiple of them."""
SECONDS = 20
"""Time after which a wait for a peer ends the launch with an error."""
UNTOLD = 6
"""Number of pushed chunks that a block has in flight before it tells of the first."""
DONE = 1  # a fact: no tile is left


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConfig:
    """Order and division of work."""

    num_pushers: int = 16  # blocks that push rows before they multiply
    lead: int = 2 * NUM_PROCESSORS  # peers' tiles before the first own tile
