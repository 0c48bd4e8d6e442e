"""The kernels of ``sum_rows``: each GPU writes its rows into the others' memory and adds what came.

A mailbox has two slots, which calls use in turn. Words hold ``NOT_YET`` until a peer's numbers
arrive, so readers need no barrier: they load again what has not arrived, and then put ``NOT_YET``
back. A peer writes to a slot again two calls later, once it has this GPU's rows of the call in
between. This GPU sent those after it had put ``NOT_YET`` back.

Kernels find peers' mailboxes at addresses that ``open_mailbox`` stores in device memory when it
runs. So the calls after it are ordinary kernels without a barrier of the GPUs, and CUDA graphs may
replay them whatever addresses peers' arrays have.

Dims: D device, R row, N column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.common import device
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.arrivals import NOT_YET, await_words
from pallas_kernels.hopper.each_thread import each_thread, warp_and_lane
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.launch import launch, references
from pallas_kernels.hopper.machine import LANES, WARPGROUP
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import (
    Address,
    address,
    address_of,
    assembly,
    constant,
    from_lane_xor,
    global_place,
    i32,
    loaded,
    number,
    packed_pair,
    total,
    widened_pair,
)

from .reference import RowsCall

DTYPES = ("bfloat16", "float16")
SLOTS = 2
_VECTOR, _BYTES = 8, 16  # numbers that a thread loads at once, and their bytes
_MOST_THREADS, _MOST_VECTORS = 1024, 2  # of a block, and of a thread
_UNIT = WARPGROUP * _VECTOR  # columns that a warpgroup takes
_PLAIN_NAN = 0x7FFF7FFF  # two NaNs, sent in place of two whose bits are those of NOT_YET


def unsupported(width: int, dtype: jnp.dtype, axis: str) -> str | None:
    """Returns why the kernel cannot add rows over an axis; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs GPUs of compute capability 9.0 (Hopper), not {facts.kind}"
    if dtype.name not in DTYPES:
        return f"{dtype} is neither bfloat16 nor float16"
    if width % _UNIT or _vectors(width) > _MOST_VECTORS:
        most = _MOST_VECTORS * _MOST_THREADS * _VECTOR
        return f"rows of {width}: whole warpgroups take multiples of {_UNIT}, at most {most}"
    if jax.process_count() > 1:
        return "devices of several processes, which cannot write to one another's memory"
    size, devices = jax.sharding.get_abstract_mesh().size, lax.axis_size(axis)
    if size != devices:
        return f"a mesh of {size} devices, of which {axis} has {devices}: it needs all"
    return None


def _vectors(width: int) -> int:
    """Returns the fewest vectors per thread of a row whose threads are whole warpgroups."""
    groups = width // _UNIT
    fitting = (g for g in range(_MOST_THREADS // WARPGROUP, 0, -1) if groups % g == 0)
    return groups // next(fitting)


def open_hopper(rows: int, width: int, dtype: Any, axis: str) -> tuple[jax.Array, jax.Array]:
    """Makes a mailbox behind a barrier of the GPUs: its words, and the table of addresses.

    The table has the 64-bit addresses of the words on all devices, then this device's index.
    """
    devices = jax.lax.axis_size(axis)
    (words,) = references(
        [jnp.full((SLOTS, devices, rows, width * dtype.itemsize // 4), NOT_YET, jnp.int32)]
    )

    def run(gmem: Any, smem: Any) -> None:
        del smem
        everywhere = [
            plgpu.remote_ref(gmem.words, jnp.int32(peer), pl.DeviceIdType.LOGICAL)
            for peer in range(devices)
        ]

        def store(table, *rest):
            *refs, rank = rest
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                for i, ref in enumerate(refs):
                    both = [global_place(table, constant(2 * i), 4), address_of(ref).value]
                    assembly(None, both, "st.global.b64 [$0], $1;", "l,l", pure=False)
                both = [global_place(table, constant(2 * devices), 4), rank]
                assembly(None, both, "st.global.b32 [$0], $1;", "l,r", pure=False)

        each_thread(store, [gmem.table, *everywhere], [lax.axis_index(axis)])

    table = launch(
        run,
        name="open_mailbox",
        operands={"words": words},
        results={"table": jax.ShapeDtypeStruct((2 * devices + 2,), jnp.int32)},
        scratch={},
        num_threads=1,
        grid=(1,),
        grid_names=("block",),
    )["table"]
    return jax.freeze(words), table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SumKernel:
    """The kernel of one call: a block per row, whose threads each send and add some columns."""

    rows: int
    width: int
    devices: int
    slot: int
    dtype: jnp.dtype
    norm: RmsNorm | None

    @property
    def vectors(self) -> int:
        """Number of vectors per thread."""
        return _vectors(self.width)

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return self.width // (_VECTOR * self.vectors)

    def place(self, part: Any, row: Any, vector: Any) -> Any:
        """Returns the index, in a mailbox, of a vector of a device's row."""
        per_row = self.width // _VECTOR
        first = constant(self.slot * self.devices * self.rows * per_row)
        return total(first, (part, self.rows * per_row), (row, per_row), vector)

    def of_row(self, words, table, partial, residual, x, squares, *rest) -> None:
        """Sends, adds and normalizes a row: what one thread does for its vectors of it."""
        *normed, row = rest
        threads, per_row = mgpu_utils.thread_idx(), self.width // _VECTOR
        mine = [total(threads, constant(i * self.threads)) for i in range(self.vectors)]
        at = [total((row, per_row), vector) for vector in mine]
        rank = _rank(table, self.devices)
        peers = [_address(table, constant(peer)) for peer in range(self.devices)]
        own = _address(table, rank)
        moved = arith.cmpi(arith.CmpIPredicate.ne, own.value, address_of(words).value)
        with mgpu_utils.when(moved):  # XLA has copied the mailbox: peers write to another place
            assembly(None, [], "trap;", "", pure=False)
        for vector, i in zip(mine, at, strict=True):
            sent = [_sent(word) for word in _read(partial, i)]
            to = self.place(rank, row, vector)
            for peer in peers:
                _write(global_place(peer, to, _BYTES), sent)
        before = [self.numbers(_read(residual, i)) for i in at]
        scales = [self.scale(normed[0], vector) for vector in mine] if normed else []
        sums = [self.arrived(words, row, vector, x) for vector, x in zip(mine, before, strict=True)]
        rounded = [[packed_pair(n[i : i + 2], self.dtype) for i in range(0, 8, 2)] for n in sums]
        for i, each in zip(at, rounded, strict=True):
            _store(x, i, each)
        if normed:
            held = [self.numbers(each) for each in rounded]
            factor = self.factor(held, squares)
            for i, numbers, scale in zip(at, held, scales, strict=True):
                y = [
                    arith.mulf(arith.mulf(n, factor), s)
                    for n, s in zip(numbers, scale, strict=True)
                ]
                _store(
                    normed[1], i, [packed_pair(y[j : j + 2], self.dtype) for j in range(0, 8, 2)]
                )

    def numbers(self, words: list[Any]) -> list[Any]:
        """Converts packed words to fp32."""
        return [x for word in words for x in widened_pair(word, self.dtype)]

    def scale(self, scale: Any, vector: Any) -> list[Any]:
        """Loads the norm's factors of a vector."""
        assert self.norm is not None, "of_row"
        if self.norm.scale.dtype == jnp.float32:
            halves = [total((vector, 2)), total((vector, 2), constant(1))]
            words = [word for half in halves for word in _read(scale, half)]
            found = [arith.bitcast(ir.F32Type.get(), word) for word in words]
        else:
            kind = jnp.dtype(self.norm.scale.dtype)
            found = [x for word in _read(scale, vector) for x in widened_pair(word, kind)]
        offset = self.norm.offset
        return [arith.addf(x, number(offset)) for x in found] if offset else found

    def arrived(self, words: Any, row: Any, vector: Any, before: list[Any]) -> list[Any]:
        """Adds all devices' numbers of a vector, once they are here, to those of the residual."""
        places = [
            global_place(words, self.place(constant(part), row, vector), _BYTES)
            for part in range(self.devices)
        ]
        found = [loaded("ld.relaxed.sys.global.v4.b32", place, 4, kind="l") for place in places]
        parts = []
        for place, quad in zip(places, found, strict=True):
            parts.append(self.numbers(await_words(quad, place)))
            _write(place, [constant(NOT_YET)] * 4)
        sums = [functools.reduce(arith.addf, each) for each in zip(*parts, strict=True)]
        return [arith.addf(a, b) for a, b in zip(before, sums, strict=True)]

    def factor(self, rows: list[list[Any]], squares_smem: Any) -> Any:
        """Returns one over the root of the mean of the row's squares."""
        assert self.norm is not None, "of_row"
        square = number(0.0)
        for x in (x for numbers in rows for x in numbers):
            square = arith.addf(square, arith.mulf(x, x))
        for bit in (16, 8, 4, 2, 1):
            square = arith.addf(square, from_lane_xor(square, bit))
        warp, lane = warp_and_lane()
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            place = total(address(squares_smem), (warp, 4))
            assembly(None, [place, square], "st.shared.f32 [$0], $1;", "r,f", pure=False)
        meet_in_block(self.threads)
        found = [
            arith.bitcast(ir.F32Type.get(), word)
            for i in range(0, self.threads // LANES, 4)
            for word in loaded("ld.shared.v4.b32", address(squares_smem), 4, kind="r", offset=4 * i)
        ]
        mean = arith.mulf(functools.reduce(arith.addf, found), number(1.0 / self.width))
        mean = arith.addf(mean, number(self.norm.epsilon))
        return assembly(ir.F32Type.get(), [mean], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", pure=True)


def sum_rows_hopper(
    call: RowsCall, words: jax.Array, table: jax.Array, after: jax.Array, slot: int
) -> tuple[jax.Array, jax.Array]:
    """Computes a supported call.

    Args:
        after: result of the call before, so that calls run in order.
    """
    rows, width = call.partial.shape
    kernel = SumKernel(
        rows=rows, width=width, devices=call.devices, slot=slot, dtype=call.partial.dtype,
        norm=call.norm,
    )  # fmt: skip
    result = jax.ShapeDtypeStruct(call.partial.shape, call.partial.dtype)
    operands = {
        "words": words, "table": table, "partial": call.partial, "residual": call.residual,
        "after": after,
    }  # fmt: skip
    results = {"x": result}
    if call.norm is not None:
        operands["scale"] = call.norm.scale
        results["normed"] = result

    def run(gmem: Any, smem: Any) -> None:
        refs = [gmem.words, gmem.table, gmem.partial, gmem.residual, gmem.x, smem.squares]
        refs += [gmem.scale, gmem.normed] if call.norm is not None else []
        each_thread(kernel.of_row, refs, [lax.axis_index("row")])

    found = launch(
        run,
        name="sum_rows",
        operands=operands,
        results=results,
        scratch={"squares": plgpu.SMEM((_MOST_THREADS // LANES,), jnp.float32)},
        num_threads=kernel.threads // WARPGROUP,
        grid=(rows,),
        grid_names=("row",),
    )
    return found["x"], found.get("normed", found["x"])


def _rank(table: Any, devices: int) -> Any:
    """Loads this device's index from the table, which has it behind the addresses."""
    place = global_place(table, constant(2 * devices), 4)
    return assembly(i32(), [place], "ld.global.nc.b32 $0, [$1];", "=r,l", pure=False)


def _address(table: Any, which: Any) -> Address:
    """Loads an address from the table."""
    i64 = ir.IntegerType.get_signless(64)
    place = global_place(table, which, 8)
    return Address(assembly(i64, [place], "ld.global.nc.b64 $0, [$1];", "=l,l", pure=False))


def _read(ref: Any, vector: Any) -> list[Any]:
    """Loads 16 bytes from an array that no block writes."""
    return loaded("ld.global.nc.v4.b32", global_place(ref, vector, _BYTES), 4, kind="l")


def _store(ref: Any, vector: Any, words: list[Any]) -> None:
    """Stores 16 bytes of a result."""
    place = global_place(ref, vector, _BYTES)
    assembly(
        None, [place, *words], "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r", pure=False
    )


def _write(place: Any, words: list[Any]) -> None:
    """Writes 16 bytes to a mailbox of any GPU."""
    text = "st.relaxed.sys.global.v4.b32 [$0], {$1,$2,$3,$4};"
    assembly(None, [place, *words], text, "l,r,r,r,r,~{memory}", pure=False)


def _sent(word: Any) -> Any:
    """Returns two numbers as they are sent: never with the bits of ``NOT_YET``."""
    unlike = arith.cmpi(arith.CmpIPredicate.ne, word, constant(NOT_YET))
    return arith.select(unlike, word, constant(_PLAIN_NAN))
