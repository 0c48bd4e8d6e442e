"""The GPUs of one mesh axis that share each layer's heads and hidden columns.

Each GPU multiplies its own rows of the output and down weights. It writes every partial sum to all
GPUs, over NVLink to the others, so that all of them add the same numbers in the same order. A sum
has a place of its own for each layer, which holds ``NOT_YET`` until it arrives. So readers need no
barrier: they load again what has not arrived.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.arrivals import NOT_YET, await_words
from pallas_kernels.hopper.each_thread import each_thread
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import (
    Address,
    address,
    assembly,
    constant,
    global_place,
    i32,
    total,
)

from .config import THREADS, WIDTH, WorkSplit
from .per_thread import thread_anew


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedSums:
    """The partial sums that the GPUs of an axis write to one another."""

    axis: str
    devices: int
    splits: dict[str, WorkSplit]  # of the shared products, by the names of their partial sums

    def sums(self, num_layers: int) -> dict[str, jax.Array]:
        """Returns arrays [L, devices parts, N] for the sums: what a layer's readers wait for."""
        return {
            name: jnp.full((num_layers, split.sums, split.N), NOT_YET, jnp.int32)
            for name, split in self.splits.items()
        }

    def scratch(self) -> dict[str, Any]:
        """Returns the shared-memory buffer of addresses: 8 bytes per array and GPU."""
        return {"peers": plgpu.SMEM((2 * self.devices * len(self.splits),), jnp.int32)}

    def begin(self, gmem, smem) -> None:
        """Stores the addresses of this GPU's rows of sums on all GPUs; a block barrier must
        follow.
        """
        everywhere = [
            plgpu.remote_ref(getattr(gmem, name), jnp.int32(device), pl.DeviceIdType.LOGICAL)
            for name in self.splits
            for device in range(self.devices)
        ]

        def store(table, *rest):
            *refs, rank = rest
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                for name, split in self.splits.items():
                    start = total((rank, split.parts * split.N))
                    for at in self.offsets(name):
                        both = [address(table), global_place(refs[at // 8], start, 4)]
                        assembly(None, both, f"st.shared.b64 [$0+{at}], $1;", "r,l", pure=False)

        each_thread(store, [smem.peers, *everywhere], [lax.axis_index(self.axis)])

    def offsets(self, name: str) -> list[int]:
        """Returns the offsets in bytes, in the buffer of addresses, of those of ``name``."""
        first = [*self.splits].index(name) * self.devices
        return [8 * (first + device) for device in range(self.devices)]

    def places(self, table: Any, name: str) -> list[Address]:
        """Loads the addresses, on all GPUs, of this GPU's rows of sums."""
        i64 = ir.IntegerType.get_signless(64)
        found = []
        for at in self.offsets(name):
            text = f"ld.shared.b64 $0, [$1+{at}];"
            found.append(assembly(i64, [address(table)], text, "=l,r", pure=False))
        return list(map(Address, found))


def wait_for_units(parts: Any, split: WorkSplit) -> None:
    """Waits until some of each unit's sums have arrived; the block's threads share the units.

    Then nearly all sums are there: threads load theirs at once, and see to the others with
    ``arrived``.
    """
    units, places = split.units * split.devices, []
    for first in range(0, units, THREADS):
        unit = arith.minui(total(thread_anew(), constant(first)), constant(units - 1))
        row, column = (f(unit, constant(split.across)) for f in (arith.divui, arith.remui))
        places.append(global_place(parts, total((row, split.N), (column, WIDTH)), 4))
    load = "ld.relaxed.sys.global.b32 $0, [$1];"
    found = [assembly(i32(), [place], load, "=r,l", pure=False) for place in places]
    for word, place in zip(found, places, strict=True):
        await_words([word], place)
    meet_in_block(THREADS)


def arrived(quad: list[Any], place: Any) -> list[Any]:
    """Returns four sums, loaded again from ``place`` until all of them have arrived.

    The launch fails if one does not arrive within about 20 s.

    Args:
        quad: four fp32 numbers that were loaded from there.
    """
    found = await_words([arith.bitcast(i32(), x) for x in quad], place)
    return [arith.bitcast(ir.F32Type.get(), word) for word in found]
