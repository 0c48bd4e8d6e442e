"""The representation of a weight in 4 or 8 bits, the same for all checkpoint formats.

As a matrix [K, N], the right operand of ``x w``, its elements are

    weight[k, n] = (code[k, n] - zero[g, n]) * scale[g, c],    g = k // group_rows

A group is ``group_rows`` rows, which share a scale and a zero point; ``group_columns`` columns
share scales; 0 means all. In rows order, 4-bit codes are packed two per byte, within each group: of
a group's G rows, byte row r has code r in its low bits and code r + G / 2 in its high bits. So each
half of a group is a whole tile for a kernel, and a weight may be sharded between groups.

Fragments order is that in which a Hopper kernel's threads load codes. Blocks of 32 rows by 16
columns follow one another along the columns. In a block, the words of lane ``4 g + t`` of a warp
are contiguous, those of rows 0 to 15 first. For each 16 rows they hold the lane's elements of the
left operand of ``mma.m16n8k16``, the transposed weight: rows ``2 t + e + 8 h`` of columns
``g + 8 r``, with e, h, r 0 or 1.

Dims: K row (the contracted dim), N column, G group, C block of columns; S blocks of scales; of
fragments B block of 32 rows, C block of 16 columns, W word.
"""

import dataclasses
import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.rounding import keep_rounded

ROWS, COLUMNS = 32, 16
"""Rows and columns of a block of fragments."""
MIDDLE = 8
"""Zero point of int4 weights without zero points of their own."""
_SCALES_PER_CONSTANT = 256  # scales that share a constant
_LARGEST_E4M3 = 448.0  # of e4m3
_LEAST_DEVIATION = 2.0**-100  # of a block's largest deviation: no constant is 0
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Numbers of NF4's codes (Dettmers et al. 2023, QLoRA, appendix E)."""


class WeightCode(enum.StrEnum):
    """Meaning of the bits of a quantized weight's element, such as int4 or e4m3."""

    INT4 = "int4"  # 0 to 15, minus a zero point (8 if the weight has none)
    INT8 = "int8"  # -128 to 127
    E4M3 = "e4m3"
    NF4 = "nf4"  # one of 16 quantiles of a normal distribution (Dettmers et al. 2023)

    @property
    def bits(self) -> int:
        """Number of bits in one element."""
        return 4 if self in (WeightCode.INT4, WeightCode.NF4) else 8

    @property
    def largest(self) -> float:
        """Magnitude of the code to which a group's largest element is quantized."""
        return {"int4": 7.0, "int8": 127.0, "e4m3": 448.0}.get(self.value, 1.0)

    @property
    def storage(self) -> jnp.dtype:
        """Dtype in which the packed elements are stored."""
        return jnp.dtype({"int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}.get(self.value, jnp.uint8))


class Activations(enum.StrEnum):
    """The 8-bit format to which a product rounds its input, with one scale per row."""

    INT8 = "int8"
    E4M3 = "e4m3"


class Arrangement(enum.StrEnum):
    """Order of a weight's codes; only weights in rows order are stored, converted and sharded."""

    ROWS = "rows"  # [*, K, N] of 8 bits; 4-bit codes of a group's two halves share bytes
    FRAGMENTS = "fragments"  # int32 [*, K / 32, N / 16, W]: the Hopper kernel's order
    TRANSPOSED = "transposed"  # [*, N, K] of 8 bits: as Hopper's tensor cores take 8-bit operands


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """The code of a quantized weight's elements, and the groups that share a scale."""

    code: WeightCode
    group_rows: int = 0  # rows that share a scale; 0: all
    group_columns: int = 1  # columns that share a scale; 0: all
    activations: Activations | None = None  # None: inputs are not rounded

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
        """Returns the shape of the scales of a [rows, columns] matrix."""
        return (
            -(-rows // (self.group_rows or rows)),
            -(-columns // (self.group_columns or columns)),
        )

    def check_rows(self, rows: int) -> None:
        """Raises InputError where ``rows`` do not divide into 4-bit groups."""
        if self.code.bits == 4 and rows % self.group_rows:
            raise InputError(
                f"{rows} rows do not divide into groups of {self.group_rows}; take a group that "
                "divides them"
            )

    @property
    def name(self) -> str:
        """Name of the format in messages and tables: ``int4 in groups of 128``."""
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
class DoubleQuantizedScales:
    """Scales minus their mean, quantized to 8-bit floats; blocks of 256 share a constant.

    With groups of 64 rows, scales cost 8 / 64 + 32 / (64 * 256) = 0.127 bits per element of the
    weight, instead of 0.5 in fp32.
    """

    codes: jax.Array  # e4m3 [*, G, C]
    constants: jax.Array  # fp32 [*, S]
    mean: jax.Array  # fp32 [*]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized scales."""
        return tuple(self.codes.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dequantized scales."""
        return jnp.dtype(jnp.float32)

    def values(self) -> jax.Array:
        """The dequantized scales, fp32 [*, G, C]."""
        *lead, groups, columns = self.codes.shape
        each = jnp.repeat(self.constants, _SCALES_PER_CONSTANT, axis=-1)[..., : groups * columns]
        scaled = self.codes.astype(jnp.float32) * each.reshape(*lead, groups, columns)
        return scaled + self.mean[..., None, None]


def double_quantized(scales: jax.Array) -> DoubleQuantizedScales:
    """Quantizes scales [*, G, C] in blocks of 256, each by its largest deviation from the mean."""
    *lead, groups, columns = scales.shape
    flat = scales.astype(jnp.float32).reshape(*lead, groups * columns)
    mean = jnp.mean(flat, axis=-1)
    apart = flat - mean[..., None]
    padded = jnp.pad(apart, [(0, 0)] * len(lead) + [(0, -apart.shape[-1] % _SCALES_PER_CONSTANT)])
    largest = jnp.max(jnp.abs(padded.reshape(*lead, -1, _SCALES_PER_CONSTANT)), axis=-1)
    # The factor is spelled out: compilers differ in whether they divide by a constant.
    constants = jnp.maximum(largest, _LEAST_DEVIATION) * jnp.float32(1.0 / _LARGEST_E4M3)
    scaled = apart / jnp.repeat(constants, _SCALES_PER_CONSTANT, axis=-1)[..., : apart.shape[-1]]
    codes = keep_rounded(jnp.clip(scaled, -_LARGEST_E4M3, _LARGEST_E4M3).astype(jnp.float8_e4m3fn))
    return DoubleQuantizedScales(
        codes=codes.reshape(*lead, groups, columns), constants=constants, mean=mean
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A quantized weight, a pytree that takes the place of an array among parameters.

    Leading dims (layers, experts) come first in every array, so that weights can be scanned over,
    sliced and stacked like arrays. The dims of the weight itself are static: ``inputs`` are
    flattened to rows and ``outputs`` to columns, the first dim varying slowest.

    Raises:
        InputError: from ``check``, for parts that do not fit each other.

    Examples:
        >>> from pallas_kernels.quantized_weight import WeightCode, WeightFormat, round_weight
        >>> form = WeightFormat(code=WeightCode.INT4, group_rows=32)
        >>> weight = round_weight(jnp.ones((64, 32)), form)
        >>> weight.shape, weight.data.dtype, weight.data.shape  # two elements in a byte
        ((64, 32), dtype('uint8'), (32, 32))
    """

    data: jax.Array  # [*, K, N] of 8 bits, uint8 [*, K / 2, N] of 4 bits, or another arrangement
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
        """Dims before those of the matrix, such as layers or experts."""
        return tuple(self.data.shape[: -3 if self.arrangement is Arrangement.FRAGMENTS else -2])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the weight as a matrix."""
        return math.prod(self.inputs), math.prod(self.outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized weight."""
        return (*self.leading, *self.inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        """Number of dims of the dequantized weight."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the dequantized weight."""
        return math.prod(self.shape)

    @property
    def parts(self) -> dict[str, Any]:
        """The weight's arrays (codes, scales, and zeros and order if any), by name."""
        named = {name: getattr(self, name) for name in ("data", "scales", "zeros", "order")}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """Number of bytes of all the weight's arrays."""
        leaves = jax.tree.leaves(self.parts)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    @property
    def plain(self) -> "QuantizedWeight":
        """This weight with plain scales, which are dequantized if they were quantized."""
        if not isinstance(self.scales, DoubleQuantizedScales):
            return self
        return dataclasses.replace(self, scales=self.scales.values())

    def check(self) -> "QuantizedWeight":
        """Returns this weight; raises InputError where its parts disagree."""
        rows, columns = self.matrix_shape
        leading = self.leading
        bits, codes = self.format.code.bits, self.format.code.storage
        data = (rows * bits // 8, columns)
        if self.arrangement is Arrangement.FRAGMENTS:
            data, codes = (rows // 32, columns // 16, 16 * bits), jnp.dtype(jnp.int32)
        elif self.arrangement is Arrangement.TRANSPOSED:
            data = data[::-1]
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
        """Returns the dequantized weight: computed in fp32, rounded once to ``dtype``."""
        return dequantized_rows(self, dtype).reshape(self.shape)


def weight_values(weight: QuantizedWeight) -> jax.Array:
    """Returns ``code - zero`` as float32 [*, K, N], in the data's order of rows."""
    form, (rows, _) = weight.format, weight.matrix_shape
    codes = weight_codes(weight)
    if form.code is WeightCode.NF4:
        return jnp.asarray(NF4_VALUES, jnp.float32)[codes]
    values = codes.astype(jnp.float32)
    if weight.zeros is not None:
        return values - spread_rows(weight.zeros.astype(jnp.float32), form.group_rows, rows)
    return values - float(MIDDLE) if form.code is WeightCode.INT4 else values


def spread_rows(of_groups: jax.Array, group: int, num_rows: int) -> jax.Array:
    """Repeats each group's entry for all rows of the group, unless one group has all rows."""
    if of_groups.shape[-2] == 1:
        return of_groups
    return jnp.repeat(of_groups, group, axis=-2)[..., :num_rows, :]


def weight_scales(weight: QuantizedWeight) -> jax.Array:
    """Returns the scales, float32, in a shape that broadcasts over the weight's matrix."""
    form, (rows, columns) = weight.format, weight.matrix_shape
    scales = spread_rows(weight.scales.astype(jnp.float32), form.group_rows, rows)
    if scales.shape[-1] == 1 or form.group_columns == 1:
        return scales
    return jnp.repeat(scales, form.group_columns, axis=-1)[..., :columns]


def dequantized_rows(weight: QuantizedWeight, dtype: jnp.dtype) -> jax.Array:
    """Dequantizes the weight to a matrix [*, K, N]: in fp32, rounded once to ``dtype``."""
    weight = weight.plain
    rows = (weight_values(weight) * weight_scales(weight)).astype(dtype)
    if weight.order is None:
        return rows
    back = jnp.argsort(weight.order, axis=-1)
    return jnp.take_along_axis(rows, back[..., None], axis=-2)


def packed_pairs(codes: jax.Array, group: int) -> jax.Array:
    """Packs 4-bit codes [*, K, N] two per byte, within groups: uint8 [*, K / 2, N]."""
    *lead, rows, columns = codes.shape
    grouped = codes.astype(jnp.uint8).reshape(*lead, rows // group, 2, group // 2, columns)
    low, high = grouped[..., 0, :, :], grouped[..., 1, :, :]
    return (low | (high << 4)).reshape(*lead, rows // 2, columns)


def unpacked_pairs(packed: jax.Array, group: int) -> jax.Array:
    """Unpacks the codes that ``packed_pairs`` packed: uint8 [*, K, N]."""
    *lead, pairs, columns = packed.shape
    grouped = packed.reshape(*lead, 2 * pairs // group, group // 2, columns)
    halves = jnp.stack([grouped & 15, grouped >> 4], axis=-3)
    return halves.reshape(*lead, 2 * pairs, columns)


def weight_codes(weight: QuantizedWeight) -> jax.Array:
    """Returns the unpacked codes [*, K, N]: uint8 for 4 bits, the stored dtype for 8 bits."""
    form = weight.format
    if weight.arrangement is Arrangement.FRAGMENTS:
        codes = functools.partial(fragment_codes, form=form)
        for _ in weight.leading:
            codes = jax.vmap(codes)
        return codes(weight.data)
    if weight.arrangement is Arrangement.TRANSPOSED:
        return jnp.swapaxes(weight.data, -1, -2)
    return unpacked_pairs(weight.data, form.group_rows) if form.code.bits == 4 else weight.data


def in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the weight with its codes in rows order (``Arrangement.ROWS``)."""
    if weight.arrangement is Arrangement.ROWS:
        return weight
    data = weight_codes(weight)
    if weight.format.code.bits == 4:
        data = packed_pairs(data, weight.format.group_rows)
    return dataclasses.replace(weight, data=data, arrangement=Arrangement.ROWS)


def fragment_words(data: jax.Array, *, form: WeightFormat) -> jax.Array:
    """Reorders codes from rows order to fragments order, as 32-bit words [B, C, W]."""
    is_4_bit = form.code.bits == 4
    codes = unpacked_pairs(data, form.group_rows) if is_4_bit else data
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    rows, columns = codes.shape
    # Rows: block, step of 16, h, t, e. Columns: block, r, g.
    x = codes.reshape(rows // ROWS, 2, 2, 4, 2, columns // COLUMNS, 2, 8)
    if is_4_bit:
        x = x.transpose(0, 5, 7, 3, 1, 4, 2, 6)  # block block g t step, e h r of a word's nibbles
        x = x.reshape(*x.shape[:2], 64, 4, 2)
        x = x[..., 0] | (x[..., 1] << 4)
    elif form.code is WeightCode.INT8:
        x = x.transpose(0, 5, 7, 3, 1, 2, 6, 4)  # block block g t step h, r e of a word's bytes
    else:
        # The high bytes of a word's halves are of column g, the low ones of g + 8.
        x = x[..., ::-1, :].transpose(0, 5, 7, 3, 1, 2, 4, 6)  # block block g t step h, e r
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:2], -1, 4), jnp.int32)


def fragment_codes(words: jax.Array, *, form: WeightFormat) -> jax.Array:
    """Reorders fragment words to codes in rows order: the inverse of ``fragment_words``."""
    blocks, across, _ = words.shape
    bits = form.code.bits
    places = jnp.arange(32 // bits, dtype=jnp.uint32) * bits
    x = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None]
    x = jnp.right_shift(*jnp.broadcast_arrays(x, places))
    x = (x & (2**bits - 1)).astype(jnp.uint8).reshape(blocks, across, 8, 4, 2, 2, 2, 2)
    if bits == 4:
        x = x.transpose(0, 4, 6, 3, 5, 1, 7, 2)
    elif form.code is WeightCode.INT8:
        x = x.transpose(0, 4, 5, 3, 7, 1, 6, 2)
    else:
        x = x[..., ::-1].transpose(0, 4, 5, 3, 6, 1, 7, 2)
    x = x.reshape(blocks * ROWS, across * COLUMNS)
    return x if bits == 4 else jax.lax.bitcast_convert_type(x, form.code.storage)
