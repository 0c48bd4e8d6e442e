"""Placement of the parts of a matmul in 8 bits, and their communication.

A part is a function of arrays, such as "quantize these tokens". ``Devices.each`` runs it where the
arrays are: on one device; of arrays that the compiler spreads over a mesh; or, where kernels take
part, once on each device of a mesh, of that device's share of each array. In the last case a part
asks for data beyond its share: a whole weight, sums, other devices' rounding statistics.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax

from jaxinfra.axes import BATCH, SEQUENCE, STREAM_SEQUENCE, Dims
from pallas_kernels.common.scales import BLOCK as BLOCK
from pallas_kernels.common.scales import Quantized as Quantized

TOKENS: Dims = (BATCH, SEQUENCE)
STREAM_TOKENS: Dims = (BATCH, STREAM_SEQUENCE)
"""Token dims of the residual stream. With sequence parallelism, the devices of a product hold parts
of its sequence."""


class Hold(enum.Enum):
    """Ways in which a mesh holds an array."""

    USED = enum.auto()  # activations, and weights as products read them
    STORED = enum.auto()  # a weight from step to step
    SUMMED = enum.auto()  # a weight's gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The placement of an array: for each of its dims, the logical dims that are merged in it."""

    dims: tuple[Dims, ...]
    held: Hold = Hold.USED


WHOLE = Placed(())
"""An array that every device has all of."""


def unmerged(dims: Dims, held: Hold = Hold.USED) -> Placed:
    """Returns the placement of an array whose dims are these logical dims, none merged."""
    return Placed(tuple((dim,) for dim in dims), held)


def of_matrix(rows: Dims, columns: Dims, held: Hold = Hold.USED) -> Any:
    """Returns the ``Placed`` of a matrix's values and scales, in the structure of a
    ``Quantized``.
    """
    return Quantized._make((Placed((rows, columns), held), Placed((columns, rows), held)))


type Side = tuple[Dims, tuple[int, ...]]
"""Logical dims of a matmul that are merged into one, and their sizes."""

type GatherQuantized = Callable[[jax.Array, jax.Array, Dims], tuple[jax.Array, jax.Array]]
"""8-bit values and scales of a weight, and its dims, to those that all devices multiply with."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Devices:
    """Devices that share a matmul in 8 bits, as a trace sees them. Here parts see whole arrays: of
    one device, or of several that the compiler partitions them over.
    """

    num: int = 1  # devices
    gather: GatherQuantized | None = None  # as the compiler is told to

    @property
    def spread(self) -> int:
        """Number of devices that the compiler partitions arrays over; 1 where kernels run."""
        return self.num

    @property
    def together(self) -> "Devices":
        """Returns these devices with arrays partitioned by the compiler."""
        return self

    def unfit(self, sides: tuple[Side, ...]) -> str | None:
        """Returns why parts cannot run on shares of a weight with these dims; None if they can."""
        del sides
        return None

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """Returns a function of whole arrays that runs ``part`` where the arrays are.

        Args:
            takes: placements of its arguments, a tree of ``Placed``.
            gives: placements of its result, a tree of ``Placed``.
        """
        del takes, gives
        return part

    def share(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Returns the shape that a part sees of an array of this shape: one device's share."""
        del dims
        return shape

    def of_all(self, x: jax.Array, dims: Dims, held: Hold) -> jax.Array:
        """Gathers x from the n devices that hold different shares of these dims: [n, ...]."""
        del dims, held
        return x[None]

    def whole(self, weight: Quantized, placed: Any, shape: tuple[int, ...]) -> Quantized:
        """Gathers a stored weight, in 8 bits, as a whole matrix for a product.

        Args:
            placed: its placement, from ``of_matrix``.
            shape: shape of the whole weight, before dims are merged.
        """
        if self.gather is None:
            return weight
        dims = tuple(dim for merged in placed.values.dims for dim in merged)
        values, scale = self.gather(weight.values.reshape(shape), weight.scale, dims)
        return Quantized(values.reshape(weight.values.shape), scale)

    def joined(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """Gathers x's tokens from the devices that share a sequence.

        Args:
            tokens: logical dims of the tokens that x has now; the result has ``TOKENS``.
            dim: dim of x that holds the tokens (or blocks of them) of ``sequences`` sequences.
        """
        del tokens, dim, sequences
        return x

    def tokens_of_sum(self, over: Dims) -> Dims:
        """Logical dims of the tokens of ``total``'s result."""
        del over
        return TOKENS

    def total(self, y: jax.Array, over: Dims) -> jax.Array:
        """Sums the products of each share of the contracted dims ``over``: [B, T, ...]."""
        del over
        return y

    def total_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """Sums a weight's gradient over devices, and returns this device's share of the sum."""
        del dims
        return gradient


type FindDevices = Callable[[], Devices]
"""The devices, less the mesh axes that a ``shard_map`` around a trace has taken."""

_ONE_DEVICE = Devices()


def one_device() -> Devices:
    """Returns the devices of arrays on one device, as a ``FindDevices``."""
    return _ONE_DEVICE
