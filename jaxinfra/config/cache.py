"""What a mixer caches of every token."""

import dataclasses
import math
from collections.abc import Callable

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

    def repeated(self, copies: Callable[[str | None, int], int]) -> "CacheSpec":
        """What devices cache, where each has a copy of its own of elements that are too few.

        Args:
            copies: of each element of a dim of a size.
        """
        arrays = (
            dataclasses.replace(
                array,
                shape=tuple(
                    size * copies(dim, size)
                    for dim, size in zip(array.dims, array.shape, strict=True)
                ),
            )
            for array in self.arrays
        )
        return dataclasses.replace(self, arrays=tuple(arrays))

    @property
    def elements(self) -> int:
        """Numbers per token and layer."""
        return sum(math.prod(array.shape) for array in self.arrays)
