"""Copies of rows that begin at any element, by TMA bulk copies of aligned 16-byte words.

A chunk is copied in whole words, from the word with its first element to the word with its last.
The shift of a row is the offset, in elements, of its first element in its word. Elements of
neighboring rows are copied with it; they are masked and not written back (``registers``). Tensor
maps do not help: on an H200 a coordinate that is no multiple of 16 bytes ends the kernel with an
illegal instruction.

Pallas's copies have a fixed size, and all threads arrive at their barrier. Here one thread issues
the copies and tells the barrier their bytes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith, mgpu, plgpu
from pallas_kernels.hopper.threads import (
    address,
    address_of,
    assembly,
    barrier_at,
    constant,
    one_thread,
    total,
)

from .config import BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """TMA copies of the chunks of rows, from arrays that all have one shape."""

    num_rows: int
    columns: int  # per row
    piece: int  # columns per chunk
    word: int  # elements per 16 bytes
    itemsizes: tuple[int, ...]  # bytes per element of each array
    width: int  # elements per row of results: ``columns``, or those of all chunks

    def whole(self, array: jax.Array) -> jax.Array:
        """Returns the kernel's results as rows [R, C]."""
        return array.reshape(-1, self.width)

    def begin(self, barriers: Any, count: int) -> None:
        """Initializes the barriers, int32 [2 count] in the shared memory of one warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def begin(_, ref):
            one = one_thread()
            for i in range(count):
                text = f"@$1 mbarrier.init.shared::cta.b64 [$0+{BARRIER_BYTES * i}], 1;"
                assembly(None, [address(ref), one], text, "r,b", pure=False)
            assembly(None, [], "fence.mbarrier_init.release.cluster;", "", pure=False)

        begin(barriers)
        plgpu.commit_smem()

    def wait(self, barrier: Any, phase: Any) -> None:
        """Waits until a barrier's copies have arrived; ``phase`` alternates between 0 and 1."""

        @plgpu.inline_mgpu(arg_types=kinds(1, 1))
        def wait(_, phase, ref):
            odd = arith.trunci(ir.IntegerType.get_signless(1), value(phase))
            barrier_at(ref, constant(0)).wait_parity(odd)

        wait(phase, barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any, column: Any,
        wanted: Any,
    ) -> None:  # fmt: skip
        """Starts the copy of one chunk from each array to its slot; the barrier counts the bytes.

        Args:
            arrays: the arrays to copy from, in global memory.
            slots: for each array, a buffer [elements] in shared memory.
            row: index of the row, int32.
            column: the chunk's first column, int32.
            wanted: whether to copy at all; if False, no thread may wait for the chunk.
        """
        count = len(arrays)

        @plgpu.inline_mgpu(arg_types=kinds(3, 1 + 2 * count))
        def load(_, row, column, wanted, barrier, *refs):
            row, column = value(row), value(column)
            one = both(one_thread(), value(wanted))
            shift, first, end = self.bounds(row, column)
            size = arith.andi(total(end, constant(self.word - 1)), constant(2**32 - self.word))
            size = arith.select(less(first, end), size, constant(0))
            asks = both(one, less(constant(0), size))
            expected = arith.muli(size, constant(sum(self.itemsizes)))
            barrier_at(barrier, constant(0)).arrive_expect_tx(expected, predicate=one)
            arrives = address(barrier)
            for x, slot, itemsize in zip(refs[:count], refs[count:], self.itemsizes, strict=True):
                source = self.place(x, row, arith.subi(column, shift), itemsize)
                text = (
                    "@$4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                    "[$0], [$1], $2, [$3];"
                )
                num_bytes = arith.muli(size, constant(itemsize))
                operands = [address(slot), source, num_bytes, arrives, asks]
                assembly(None, operands, text, "r,l,r,r,b", pure=False)

        load(row, column, wanted, barrier, *arrays, *slots)

    def bounds(self, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """Returns the row's shift, and the begin and end of its own elements in a chunk."""
        if self.columns % self.word:
            # The low bits are right however large the product.
            shift = arith.andi(arith.muli(row, constant(self.columns)), constant(self.word - 1))
            first = arith.maxsi(arith.subi(shift, column), constant(0))
        else:
            shift = first = constant(0)
        end = total(shift, arith.subi(constant(self.columns), column))
        end = arith.maxsi(arith.minsi(end, constant(self.piece)), constant(0))
        return shift, first, end

    def place(self, ref: Any, row: Any, offset: Any, itemsize: int) -> Any:
        """Returns the i64 address of the element ``offset`` elements from the start of a row."""
        i64 = ir.IntegerType.get_signless(64)
        begin = arith.muli(arith.extui(i64, row), mgpu.c(self.columns, i64))
        at = arith.addi(begin, arith.extsi(i64, offset))
        return arith.addi(address_of(ref).value, arith.muli(at, mgpu.c(itemsize, i64)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InterpretedCopies(Copies):
    """A version of ``Copies`` for the interpreter, which can run only Pallas's own copies.

    Arrays are flat and padded by ``width``. Each row of the result has its own ``width`` elements,
    to which whole chunks are written, with neighboring rows' elements.
    """

    def begin(self, barriers: Any, count: int) -> None:
        """Does nothing: Pallas makes its barriers."""

    def wait(self, barrier: Any, phase: Any) -> None:
        """Waits until the copies into one slot have arrived."""
        del phase
        plgpu.barrier_wait(barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any, column: Any,
        wanted: Any,
    ) -> None:  # fmt: skip
        """Starts copies of whole chunks from a 16-byte boundary on, with neighbors' elements."""

        @pl.when(wanted)
        def _():
            start = row * self.columns - lax.rem(row * self.columns, self.word) + column
            for x, slot in zip(arrays, slots, strict=True):
                plgpu.copy_gmem_to_smem(x.at[pl.ds(start, self.piece)], slot, barrier)

    def write(self, value: Any, array: Any, *, row: Any, column: Any) -> None:
        """Stores a chunk of a row from registers, [A, M], to a flat array of results.

        Args:
            column: the chunk's first column among the row's ``width`` elements.
        """
        array[pl.ds(row * self.width + column, self.piece)] = value.reshape(-1)

    def whole(self, array: jax.Array) -> jax.Array:
        """Returns the results as rows [R, C], without the padding."""
        rows = array.reshape(-1, self.width)
        begin = jnp.arange(len(rows)) * self.columns % self.word
        return jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, self.columns))(rows, begin)


def kinds(num_numbers: int, num_refs: int) -> tuple[Any, ...]:
    """Returns the argument types of inline code: int32 numbers, then memory references."""
    splat = plgpu.Layout.WG_SPLAT(())
    return (splat,) * num_numbers + (plgpu.RefType(),) * num_refs


def value(number: Any) -> Any:
    """Returns the MLIR register that holds a number."""
    return number.registers.flat[0]


def less(a: Any, b: Any) -> Any:
    """Returns whether a < b as signed integers, as an MLIR value."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def both(*conditions: Any) -> Any:
    """Returns whether all conditions hold, as an MLIR value."""
    return functools.reduce(arith.andi, conditions)
