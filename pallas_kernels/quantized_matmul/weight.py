"""A weight in 4 or 8 bits: one representation for every format that a checkpoint may come in.

As a matrix [K, N] it multiplies rows of K from the left:

    weight[k, n] = (code[k, n] - zero[g, n]) * scale[g, c],    g = k // group_rows

``group_rows`` rows of one column share a scale and a zero point, or of ``group_columns`` columns; 0
means all. Codes of 4 bits are packed two in a byte, each group by itself: of a group's G rows, byte
row r has code r in its low bits and code r + G / 2 in its high ones. So a group's halves are whole
tiles for a kernel, which never has to interleave rows in registers, and a weight may be cut between
groups.

Dims: K row, the contracted dim, N column, G group, C block of columns.
"""

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError

from .scales import DoubleQuantizedScales


class WeightCode(enum.StrEnum):
    """What an element's bits mean."""

    INT4 = "int4"  # 0 to 15, less a zero point, which is 8 where there are none
    INT8 = "int8"  # -128 to 127
    E4M3 = "e4m3"
    NF4 = "nf4"  # one of 16 quantiles of a normal distribution (Dettmers et al. 2023)

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if self in (WeightCode.INT4, WeightCode.NF4) else 8

    @property
    def storage(self) -> jnp.dtype:
        """Of the packed elements."""
        return jnp.dtype({"int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}.get(self.value, jnp.uint8))


class Activations(enum.StrEnum):
    """What a product rounds its input to, each row by its own largest element."""

    INT8 = "int8"
    E4M3 = "e4m3"


class Arrangement(enum.StrEnum):
    """Where the codes of a matrix lie; what is stored, converted and sharded lies in rows."""

    ROWS = "rows"  # [*, K, N] of 8 bits; two halves of a group share bytes of 4
    FRAGMENTS = "fragments"  # int32 [*, K / 32, N / 16, W], as the Hopper kernel's threads do


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """What the elements of a quantized weight mean, and which of them share a scale."""

    code: WeightCode
    group_rows: int = 0  # rows that share a scale; 0: all
    group_columns: int = 1  # columns that share a scale; 0: all
    activations: Activations | None = None  # None: inputs are multiplied as they are

    def __post_init__(self) -> None:
        if self.group_rows < 0 or self.group_columns < 0:
            raise InputError(
                f"group_rows={self.group_rows} and group_columns={self.group_columns} are numbers "
                "of rows and columns; 0 means all"
            )
        if self.code.bits == 4 and (self.group_rows % 2 or not self.group_rows):
            raise InputError(
                f"group_rows={self.group_rows} with {self.code}: two halves of a group share "
                "bytes; take an even number of rows, such as 128"
            )
        if self.activations is not None and self.activations.value != self.code.value:
            raise InputError(
                f"activations in {self.activations} and a weight in {self.code}: both sides of an "
                "8-bit product have one format; quantize the weight to the activations' format"
            )

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the scales of a [rows, columns] matrix."""
        return (
            -(-rows // (self.group_rows or rows)),
            -(-columns // (self.group_columns or columns)),
        )

    def check_rows(self, rows: int) -> None:
        """Raises InputError where 4-bit groups do not divide so many rows."""
        if self.code.bits == 4 and rows % self.group_rows:
            raise InputError(
                f"{rows} rows do not divide into groups of {self.group_rows}; take a group that "
                "divides them"
            )

    @property
    def name(self) -> str:
        """As in messages and tables: ``int4 in groups of 128``."""
        match self.group_rows, self.group_columns:
            case 0, 0:
                by = "per tensor"
            case 0, 1:
                by = "per channel"
            case rows, 1:
                by = f"in groups of {rows}"
            case rows, columns:
                by = f"in blocks of {rows or 'all'} x {columns or 'all'}"
        both = "" if self.activations is None else ", inputs too"
        return f"{self.code} {by}{both}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight in few bits, in the place of an array in a tree of parameters.

    Dims in front of the matrix (layers, experts) lead every part, so that a tree of weights may be
    scanned over, sliced and stacked by its arrays. What the weight's own dims are is static: the
    first of ``inputs`` and ``outputs`` vary slowest in rows and columns.

    Raises:
        InputError: from ``check``, for parts that do not fit each other.

    Examples:
        >>> from pallas_kernels.quantized_matmul import WeightCode, WeightFormat, round_weight
        >>> form = WeightFormat(code=WeightCode.INT4, group_rows=32)
        >>> weight = round_weight(jnp.ones((64, 32)), form)
        >>> weight.shape, weight.data.dtype, weight.data.shape  # two elements in a byte
        ((64, 32), dtype('uint8'), (32, 32))
    """

    data: jax.Array  # [*, K, N] of 8 bits; uint8 [*, K / 2, N] of 4; or as ``arrangement`` says
    scales: Any  # floating [*, G, C]: an array, or ``DoubleQuantizedScales``
    zeros: jax.Array | None = None  # integers [*, G, N]; None: symmetric
    order: jax.Array | None = None  # int32 [*, K]: row k of the data is the weight's row order[k]
    format: WeightFormat = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    arrangement: Arrangement = dataclasses.field(
        default=Arrangement.ROWS, metadata={"static": True}
    )

    @property
    def leading(self) -> tuple[int, ...]:
        """Dims in front of the matrix."""
        return tuple(self.data.shape[: -3 if self.arrangement is Arrangement.FRAGMENTS else -2])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return math.prod(self.inputs), math.prod(self.outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that this stands for."""
        return (*self.leading, *self.inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        """Dims of the weight that this stands for."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the weight that this stands for."""
        return math.prod(self.shape)

    @property
    def parts(self) -> dict[str, Any]:
        """The arrays, by name; absent ones left out."""
        named = {name: getattr(self, name) for name in ("data", "scales", "zeros", "order")}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        leaves = jax.tree.leaves(self.parts)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    @property
    def plain(self) -> "QuantizedWeight":
        """The same weight, with scales that are numbers."""
        if not isinstance(self.scales, DoubleQuantizedScales):
            return self
        return dataclasses.replace(self, scales=self.scales.values())

    def check(self) -> "QuantizedWeight":
        """This weight; raises InputError where its parts disagree."""
        rows, columns = self.matrix_shape
        leading = self.leading
        bits, codes = self.format.code.bits, self.format.code.storage
        data = (rows * bits // 8, columns)
        if self.arrangement is Arrangement.FRAGMENTS:
            data, codes = (rows // 32, columns // 16, 16 * bits), jnp.dtype(jnp.int32)
        want = {
            "data": (*leading, *data),
            "scales": (*leading, *self.format.scales_shape(rows, columns)),
            "zeros": (*leading, self.format.scales_shape(rows, columns)[0], columns),
            "order": (*leading, rows),
        }
        self.format.check_rows(rows)
        for name, array in self.parts.items():
            if array.shape != want[name]:
                raise InputError(
                    f"{name} of a weight of {rows} x {columns} in {self.format.name} is "
                    f"{list(array.shape)}; its shape is {list(want[name])}"
                )
        if self.data.dtype != codes:
            raise InputError(
                f"data of a weight in {self.format.code}, in {self.arrangement}, is "
                f"{self.data.dtype}; it is {codes}"
            )
        return self

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """The weight that this stands for: computed in fp32, rounded once."""
        from .reference import dequantized_rows

        return dequantized_rows(self, dtype).reshape(self.shape)
