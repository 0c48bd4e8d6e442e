"""The arrays that a mixer keeps of past tokens: entries per token, and a state per sequence."""

import dataclasses
import enum
import math
from collections.abc import Callable

from jaxinfra.axes import Dims
from jaxinfra.config.record import record
from jaxinfra.errors import UnsupportedError

SCALE = "_scale"
"""Behind a cached array's name: that of its scales."""


class CacheFormat(enum.StrEnum):
    """Formats of a KV cache's elements. In the 8-bit and 4-bit formats, the elements of one head of
    a token share a scale.
    """

    PLAIN = "plain"  # the compute dtype, without scales
    FP8 = "fp8"  # e4m3
    INT8 = "int8"
    INT4 = "int4"
    BF16_STATES = "bf16-states"  # entries as plain; layers' states in bf16, where they are fp32

    @property
    def bits(self) -> int | None:
        """Bits per element of a token; None where these have the compute dtype."""
        return {"fp8": 8, "int8": 8, "int4": 4}.get(self.value)

    @property
    def of_entries(self) -> "CacheFormat":
        """The format of entries per token."""
        return CacheFormat.PLAIN if self.bits is None else self


@record
class CachedArray:
    """One array of a layer's KV cache: name, shape and logical dims per token."""

    name: str
    shape: tuple[int, ...]  # of one token
    dims: Dims  # logical dims, one for each entry of the shape


@record
class StateArray:
    """One array of a layer's state, whose size does not grow with the sequence."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    dims: Dims  # logical dims, one for each entry of the shape
    is_sum: bool = True  # it sums over tokens, in the accum dtype; else in the compute dtype


@record
class CacheSpec:
    """The arrays that a mixer keeps of past tokens, in two kinds."""

    arrays: tuple[CachedArray, ...]  # of each token
    window: int | None = None  # number of newest tokens that attention reads; None: all
    state: tuple[StateArray, ...] = ()  # of each sequence

    def repeated(self, copies: Callable[[str | None, int], int]) -> "CacheSpec":
        """Returns the cache with elements repeated along dims that are too small to shard, such as
        2 key/value heads on 4 devices.

        Args:
            copies: function from a dim's name and size to the number of copies of each element.
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

    def stored_as(self, form: CacheFormat) -> "CacheSpec":
        """Returns the cache's arrays in a storage format: packed elements and their scales.

        Raises:
            UnsupportedError: a 4-bit format and an odd number of elements.
        """
        if form.bits is None:
            return self
        arrays = []
        for array in self.arrays:
            *lead, width = array.shape
            if form is CacheFormat.INT4 and width % 2:
                raise UnsupportedError(
                    f"an int4 cache of {array.name} with {width} elements of a head: two share a "
                    "byte; choose int8 or fp8"
                )
            packed = width // 2 if form is CacheFormat.INT4 else width
            arrays.append(dataclasses.replace(array, shape=(*lead, packed)))
            arrays.append(
                CachedArray(name=array.name + SCALE, shape=tuple(lead), dims=array.dims[:-1])
            )
        return dataclasses.replace(self, arrays=tuple(arrays))

    @property
    def scales(self) -> int:
        """Number of scales per token and layer, in a format that has scales."""
        return sum(math.prod(array.shape[:-1]) for array in self.arrays)

    @property
    def elements(self) -> int:
        """Number of elements per token and layer."""
        return sum(math.prod(array.shape) for array in self.arrays)
