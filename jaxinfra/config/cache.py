"""What a mixer caches of every token."""

import dataclasses
import math

from jaxinfra.core.axes import Dims


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CachedArray:
    """One array of a layer's cache: what a token leaves in it."""

    name: str
    shape: tuple[int, ...]  # of one token
    dims: Dims  # logical dims, one for each entry of the shape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """What a mixer caches of every token."""

    arrays: tuple[CachedArray, ...]
    window: int | None = None  # tokens that are still read; None: all

    @property
    def elements(self) -> int:
        """Numbers per token and layer."""
        return sum(math.prod(array.shape) for array in self.arrays)
