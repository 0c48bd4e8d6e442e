"""Where the parts of a matmul in 8 bits run, and what devices tell each other there.

A part is a function of arrays, such as "quantize these tokens". ``Devices.each`` runs it where the
arrays are: on one device; of arrays that the compiler spreads over a mesh; or, where kernels take
part, once on each device of a mesh, of that device's share of each array. In the last case a part
asks for what its share does not say: a whole weight, sums, what others have lost.
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
"""Of the residual stream: with sequence parallelism the devices of a product have parts of them."""


class Hold(enum.Enum):
    """How a mesh holds an array."""

    USED = enum.auto()  # activations, and weights as products read them
    STORED = enum.auto()  # a weight from step to step
    SUMMED = enum.auto()  # a weight's gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Where an array lies: for each of its dims, the logical dims that are merged in it."""

    dims: tuple[Dims, ...]
    held: Hold = Hold.USED


WHOLE = Placed(())
"""An array that every device has all of."""


def unmerged(dims: Dims, held: Hold = Hold.USED) -> Placed:
    """Of an array with these logical dims, one in each of its own."""
    return Placed(tuple((dim,) for dim in dims), held)


class PlacedMatrix(NamedTuple):
    """Where a ``Quantized`` lies."""

    values: Placed
    scale: Placed


def of_matrix(form: Scaling, rows: Dims, columns: Dims, held: Hold = Hold.USED) -> PlacedMatrix:
    """Where values and scales of this form lie."""
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
        """Devices that the compiler spreads a part's arrays over: kernels take part on 1."""
        ...

    @property
    def together(self) -> "Together":
        """The same devices, spread over by the compiler."""
        ...

    def unfit(self, sides: tuple[Side, ...]) -> str | None:
        """Why parts cannot run on shares of such sides; None if they can."""
        ...

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """``part``, of whole arrays.

        Args:
            takes: a tree of ``Placed``, as its arguments.
            gives: likewise, of its result.
        """
        ...

    def share(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Sizes within a part of an array of this shape."""
        ...

    def of_all(self, x: jax.Array, dims: Dims, held: Hold) -> jax.Array:
        """[n, ...]: the x of each that has another share of these dims."""
        ...

    def whole(self, weight: Quantized, placed: PlacedMatrix, shape: tuple[int, ...]) -> Quantized:
        """A stored weight, as a matrix, brought together in 8 bits for a product.

        Args:
            placed: where it lies, ``of_matrix``.
            shape: of the weight with all of its dims, wherever it is.
        """
        ...

    def joined(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """x with all of ``TOKENS`` of which this device has those of ``tokens``.

        Args:
            dim: of x, with the tokens, or blocks of them, of this many sequences.
        """
        ...

    def tokens_of_sum(self, over: Dims) -> Dims:
        """Logical dims of the tokens of ``total``'s result."""
        ...

    def total(self, y: jax.Array, over: Dims) -> jax.Array:
        """[B, T, ...]: the sum of the products of each share of the contracted dims ``over``."""
        ...

    def total_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """A weight's gradient, summed over all tokens, in the share that is ``Hold.SUMMED``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Arrays are whole: on one device, or on several that the compiler spreads them over."""

    num: int = 1
    gather: GatherQuantized | None = None  # as the compiler is told to

    @property
    def spread(self) -> int:
        """All of them."""
        return self.num

    @property
    def together(self) -> "Together":
        """Itself."""
        return self

    def unfit(self, sides: tuple[Side, ...]) -> None:
        """Whole arrays have no shares that a block could straddle."""
        del sides

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """The part itself."""
        del takes, gives
        return part

    def share(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """All of it."""
        del dims
        return shape

    def of_all(self, x: jax.Array, dims: Dims, held: Hold) -> jax.Array:
        """x alone."""
        del dims, held
        return x[None]

    def whole(self, weight: Quantized, placed: PlacedMatrix, shape: tuple[int, ...]) -> Quantized:
        """The compiler is told where its values should be."""
        if self.gather is None:
            return weight
        dims = tuple(dim for merged in placed.values.dims for dim in merged)
        values, scale = self.gather(weight.values.reshape(shape), weight.scale, dims)
        return Quantized(values.reshape(weight.values.shape), scale)

    def joined(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """x itself."""
        del tokens, dim, sequences
        return x

    def tokens_of_sum(self, over: Dims) -> Dims:
        """The compiler says where they are."""
        del over
        return TOKENS

    def total(self, y: jax.Array, over: Dims) -> jax.Array:
        """y itself."""
        del over
        return y

    def total_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """The gradient itself."""
        del dims
        return gradient


type FindDevices = Callable[[], Devices]
"""The devices, less the mesh axes that a ``shard_map`` around a trace has taken."""

ONE_DEVICE = Together()


def one_device() -> Devices:
    """``FindDevices`` where arrays are on one device."""
    return ONE_DEVICE
