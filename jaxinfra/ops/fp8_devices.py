"""Placement of the parts of a matmul in 8 bits, and their communication.

A part is a function of arrays, such as "quantize these tokens". ``Devices.each`` runs it in one of
three ways: on one device, on arrays that the compiler partitions over a mesh, or in a ``shard_map``
on each device's shards. The last way is for kernels. There, a part calls the other methods of
``Devices`` for data of other devices: a whole weight, sums, rounding statistics.
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


class ShardingUse(enum.Enum):
    """Ways in which an array is sharded over a mesh."""

    USED = enum.auto()  # activations, and weights as matmuls read them
    STORED = enum.auto()  # a weight between steps
    SUMMED = enum.auto()  # a weight's gradient


@dataclasses.dataclass(frozen=True, slots=True)
class PartPlacement:
    """Placement of an array: the logical dims merged in each of its dims, and its use."""

    dims: tuple[Dims, ...]
    use: ShardingUse = ShardingUse.USED


WHOLE = PartPlacement(())
"""An array that every device has all of."""


def unmerged(dims: Dims, use: ShardingUse = ShardingUse.USED) -> PartPlacement:
    """Returns the placement of an array whose dims are these logical dims, none merged."""
    return PartPlacement(tuple((dim,) for dim in dims), use)


def of_matrix(rows: Dims, columns: Dims, use: ShardingUse = ShardingUse.USED) -> Any:
    """Returns the ``PartPlacement`` of a matrix's values and scales, in the structure of a
    ``Quantized``.
    """
    return Quantized._make(
        (PartPlacement((rows, columns), use), PartPlacement((columns, rows), use))
    )


type Side = tuple[Dims, tuple[int, ...]]
"""Logical dims of a matmul that are merged into one, and their sizes."""

type GatherQuantized = Callable[[jax.Array, jax.Array, Dims], tuple[jax.Array, jax.Array]]
"""8-bit values and scales of a weight, and its dims, to those that all devices multiply with."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Devices:
    """Devices that compute a matmul in 8 bits, and the communication between its parts.

    In this class parts see whole arrays: on one device, or partitioned by the compiler. A subclass
    runs them in a ``shard_map``.
    """

    num: int = 1  # number of devices
    gather: GatherQuantized | None = None  # constrains the compiler to gather a quantized weight

    @property
    def num_partitions(self) -> int:
        """Number of devices that the compiler partitions arrays over; 1 where kernels run."""
        return self.num

    @property
    def compiler_partitioned(self) -> "Devices":
        """Returns ``Devices`` on which the compiler partitions arrays, instead of ``shard_map``."""
        return self

    def why_unfit(self, sides: tuple[Side, ...]) -> str | None:
        """Returns why parts cannot run on shards of operands with these dims; None if they can."""
        del sides
        return None

    def each(self, part: Callable, *, takes: Any, gives: Any) -> Callable:
        """Returns a function of whole arrays that runs ``part`` on these devices.

        Args:
            takes: placements of its arguments, a tree of ``PartPlacement``.
            gives: placements of its result, a tree of ``PartPlacement``.
        """
        del takes, gives
        return part

    def shard_shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Returns the shape of the shard that a part sees of an array of this shape."""
        del dims
        return shape

    def stack_shards(self, x: jax.Array, dims: Dims, use: ShardingUse) -> jax.Array:
        """Stacks x of the n devices that have different shards of these dims: [n, ...]."""
        del dims, use
        return x[None]

    def gather_weight(self, weight: Quantized, placed: Any, shape: tuple[int, ...]) -> Quantized:
        """Gathers a stored weight in 8 bits, as one matrix for a matmul.

        Args:
            placed: placement of the stored weight, from ``of_matrix``.
            shape: shape of the whole weight, before dims are merged.
        """
        if self.gather is None:
            return weight
        dims = tuple(dim for merged in placed.values.dims for dim in merged)
        values, scale = self.gather(weight.values.reshape(shape), weight.scale, dims)
        return Quantized(values.reshape(weight.values.shape), scale)

    def gather_tokens(self, x: jax.Array, tokens: Dims, *, dim: int, sequences: int) -> jax.Array:
        """Gathers x's tokens from the devices that shard a sequence.

        Args:
            tokens: logical dims of x's tokens before the gather; after it they are ``TOKENS``.
            dim: dim of x with the tokens (or blocks of tokens).
            sequences: number of sequences in that dim.
        """
        del tokens, dim, sequences
        return x

    def token_dims_of_sum(self, over: Dims) -> Dims:
        """Returns the logical dims of the tokens in the result of ``sum_products(y, over)``."""
        del over
        return TOKENS

    def sum_products(self, y: jax.Array, over: Dims) -> jax.Array:
        """Sums products y [B, T, ...] over the devices that shard the contracted dims ``over``."""
        del over
        return y

    def sum_gradient(self, gradient: jax.Array, dims: Dims) -> jax.Array:
        """Sums a weight's gradient over devices, and returns this device's shard of the sum."""
        del dims
        return gradient


type FindDevices = Callable[[], Devices]
"""The devices, less the mesh axes that a ``shard_map`` around a trace has taken."""

_ONE_DEVICE = Devices()


def one_device() -> Devices:
    """Returns the ``Devices`` of a program on one device; a ``FindDevices`` function."""
    return _ONE_DEVICE
