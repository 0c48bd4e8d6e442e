"""Placement of the parts of a matmul in 8 bits, and their communication.

A part is a function of arrays, such as "quantize these tokens". ``Devices.each`` runs it where the
arrays are: on one device; of arrays that the compiler spreads over a mesh; or, where kernels take
part, once on each device of a mesh, of that device's share of each array. In the last case a part
asks for data beyond its share: a whole weight, sums, other devices' rounding statistics.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from jaxinfra.axes import BATCH, SEQUENCE, STREAM_SEQUENCE, Dims
from pallas_kernels.common.scales import BLOCK as BLOCK
from pallas_kernels.common.scales import Quantized as Quantized
from pallas_kernels.common.scales import Scaling

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


class PlacedMatrix(NamedTuple):
    """The placement of a ``Quantized`` matrix: of its values and its scales."""

    values: Placed
    scale: Placed


def of_matrix(form: Scaling, rows: Dims, columns: Dims, held: Hold = Hold.USED) -> PlacedMatrix:
    """Returns the placement of values and scales of this form."""
    return PlacedMatrix(Placed((rows, columns), held), Placed((columns, rows), held))


type Side = tuple[Dims, tuple[int, ...]]
"""Logical dims of a matmul that are merged into one, and their sizes."""

type GatherQuantized = Callable[[jax.Array, jax.Array, Dims], tuple[jax.Array, jax.Array]]
"""8-bit values and scales of a weight, and its dims, to those that all devices multiply with."""


class Devices(Protocol):
    """Devices that share a matmul in 8 bits, as a trace sees them."""

    @property
    def num(self) -> int:
        """Number of devices."""
        ...

    @property
    def spread(self) -> int:
        """Number of devices that the compiler partitions arrays over; 1 where kernels run."""
        ...

    @property
    def together(self) -> "Together":
        """Returns these devices with arrays partitioned by the compiler."""
        ...

    def unfit(self, sides: tuple[Side, ...]) -> str | None:
        """Returns why parts cannot run on shares of a weight with these dims; None if they can."""
        ...

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """Returns a function of whole arrays that runs ``part`` where the arrays are.

        Args:
            takes: placements of its arguments, a tree of ``Placed``.
            gives: placements of its result, a tree of ``Placed``.
        """
        ...

    def share(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Returns the shape that a part sees of an array of this shape: one device's share."""
        ...

    def of_all(self, x: jax.Array, dims: Dims, held: Hold) -> jax.Array:
        """Gathers x from the n devices that hold different shares of these dims: [n, ...]."""
        ...

    def whole(self, weight: Quantized, placed: PlacedMatrix, shape: tuple[int, ...]) -> Quantized:
        """Gathers a stored weight, in 8 bits, as a whole matrix for a product.

        Args:
            placed: its placement, from ``of_matrix``.
            shape: shape of the whole weight, before dims are merged.
        """
        ...

    def joined(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """Gathers x's tokens from the devices that share a sequence.

        Args:
            tokens: logical dims of the tokens that x has now; the result has ``TOKENS``.
            dim: dim of x that holds the tokens (or blocks of them) of ``sequences`` sequences.
        """
        ...

    def tokens_of_sum(self, over: Dims) -> Dims:
        """Logical dims of the tokens of ``total``'s result."""
        ...

    def total(self, y: jax.Array, over: Dims) -> jax.Array:
        """Sums the products of each share of the contracted dims ``over``: [B, T, ...]."""
        ...

    def total_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """Sums a weight's gradient over devices, and returns this device's share of the sum."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Devices whose parts see whole arrays: one device, or several that the compiler partitions."""

    num: int = 1
    gather: GatherQuantized | None = None  # as the compiler is told to

    @property
    def spread(self) -> int:
        """Number of devices that the compiler partitions arrays over: all."""
        return self.num

    @property
    def together(self) -> "Together":
        """Returns these devices, whose arrays the compiler partitions already."""
        return self

    def unfit(self, sides: tuple[Side, ...]) -> None:
        """Returns None, since whole arrays have no shares that a block could straddle."""
        del sides

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """Returns the part itself."""
        del takes, gives
        return part

    def share(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Returns the shape itself."""
        del dims
        return shape

    def of_all(self, x: jax.Array, dims: Dims, held: Hold) -> jax.Array:
        """Returns x with a leading dim of 1, since no device has another share."""
        del dims, held
        return x[None]

    def whole(self, weight: Quantized, placed: PlacedMatrix, shape: tuple[int, ...]) -> Quantized:
        """Returns the weight, with a constraint on the placement of its values."""
        if self.gather is None:
            return weight
        dims = tuple(dim for merged in placed.values.dims for dim in merged)
        values, scale = self.gather(weight.values.reshape(shape), weight.scale, dims)
        return Quantized(values.reshape(weight.values.shape), scale)

    def joined(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """Returns x itself."""
        del tokens, dim, sequences
        return x

    def tokens_of_sum(self, over: Dims) -> Dims:
        """Logical dims of the tokens, which the compiler places."""
        del over
        return TOKENS

    def total(self, y: jax.Array, over: Dims) -> jax.Array:
        """Returns y itself."""
        del over
        return y

    def total_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """Returns the gradient itself."""
        del dims
        return gradient


type FindDevices = Callable[[], Devices]
"""The devices, less the mesh axes that a ``shard_map`` around a trace has taken."""

ONE_DEVICE = Together()


def one_device() -> Devices:
    """Returns the devices of arrays on one device, as a ``FindDevices``."""
    return ONE_DEVICE
