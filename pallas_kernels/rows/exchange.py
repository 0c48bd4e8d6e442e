"""The exchange of numbers among warpgroups and blocks that share a row, on a Hopper GPU.

Blocks store their numbers into each other's shared memory asynchronously, where a barrier counts
the bytes that arrived. A plain store would need a fence before the arrival. The fence would wait
for all earlier writes of the thread, such as the previous row's results to global memory.

Dims: A part of a row in a warpgroup, P part of a row.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.grid import meet_in_cluster
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.mosaic import vector as vectors
from pallas_kernels.hopper.threads import address, assembly, constant, thread, total, wait_for

from .config import BARRIER_BYTES, TURNS, RowConfig, lane_layout, tile_layout

_NUMBER = 4  # bytes


def begin(c: RowConfig, smem) -> None:
    """Initializes the barriers of the blocks that share a row, before their first exchange."""
    if c.cluster == 1:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def make(_, ref):
        one = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.BLOCK)
        for i in range(TURNS):
            text = f"@$1 mbarrier.init.shared::cta.b64 [$0+{BARRIER_BYTES * i}], {c.group};"
            assembly(None, [address(ref), one], text, "r,b", pure=False)
        assembly(None, [], "fence.mbarrier_init.release.cluster;", "", pure=False)

    make(smem.exchanged)
    meet_in_cluster(ordered=False)


def send(c: RowConfig, smem, me, i, numbers: tuple[jax.Array, ...]) -> None:
    """Sends this warpgroup's numbers of exchange i, [A] each, to all blocks that share the row.

    Args:
        me: this warpgroup: ``rank`` of its block in the cluster, its index ``wg`` in the block.
    """
    first = (me.rank * c.group + me.wg) * WARPS
    turn = lax.rem(i, TURNS)
    if c.cluster > 1:
        _to_cluster(c, smem, turn, first, numbers)
        return
    for j, number_A in enumerate(numbers):
        smem.numbers[turn, j, pl.ds(first, WARPS)] = number_A
    plgpu.commit_smem()
    if c.group > 1:
        plgpu.barrier_arrive(smem.exchanged.at[lax.rem(i, 2)])


def receive(c: RowConfig, smem, i, num_numbers: int) -> list[jax.Array]:
    """Waits for exchange i, and returns its numbers, each as [P] over all parts of the row."""
    turn = lax.rem(i, TURNS)
    if c.cluster > 1:
        _wait(smem.exchanged, turn, lax.rem(lax.div(i, TURNS), 2))
    elif c.group > 1:
        plgpu.barrier_wait(smem.exchanged.at[lax.rem(i, 2)])
    layout = lane_layout(c.num_parts)
    return [
        plgpu.load(smem.numbers.at[turn, j], layout=layout, optimized=False)
        for j in range(num_numbers)
    ]


def _to_cluster(
    c: RowConfig, smem, turn: jax.Array, first: jax.Array, numbers: tuple[jax.Array, ...]
) -> None:
    """Sends a number of each warp to the same place in all blocks of the cluster, itself included.

    A round's barrier is used again four exchanges later. No block sends that often before this one
    has sent twice more, after it has read the round's numbers.
    """
    layout, splat = tile_layout(c.vector).reduce(1), plgpu.Layout.WG_SPLAT(())
    kinds = (splat, splat, plgpu.RefType(), plgpu.RefType(), *[layout] * len(numbers))
    _, most_numbers, num_parts = smem.numbers.shape

    @plgpu.inline_mgpu(arg_types=kinds)
    def send(_, turn, first, ref, barriers, *numbers):
        turn, first = (x.registers.flat[0] for x in (turn, first))
        lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
        barrier = total(address(barriers), (turn, BARRIER_BYTES))
        one = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)
        # Of what all blocks send, each warpgroup of this one expects an equal part.
        text = "@$2 mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [$0], $1;"
        expected = constant(c.cluster * WARPS * len(numbers) * _NUMBER)
        assembly(None, [barrier, expected, one], text, "r,r,b", pure=False)
        part = total(first, warp)
        text = f"""{{
            .reg .pred active;
            .reg .b32 place, barrier;
            setp.lt.u32 active, $3, {c.cluster};
            @active mapa.shared::cluster.u32 place, $0, $3;
            @active mapa.shared::cluster.u32 barrier, $1, $3;
            @active st.async.shared::cluster.mbarrier::complete_tx::bytes.f32
                [place], $2, [barrier];
        }}"""
        for j, x in enumerate(numbers):
            at = total((turn, most_numbers * num_parts), constant(j * num_parts), part)
            place = total(address(ref), (at, _NUMBER))
            (register,) = x.registers.flat
            number = vectors.extract(register, dynamic_position=[], static_position=[0])
            assembly(None, [place, barrier, number, lane], text, "r,r,f,r", pure=False)

    each = [plgpu.layout_cast(x, layout) for x in numbers]
    send(turn, first, smem.numbers, smem.exchanged, *each)


def _wait(barriers, turn: jax.Array, parity: jax.Array) -> None:
    """Waits until all numbers of a turn have come."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat, splat, plgpu.RefType()))
    def wait(_, turn, parity, ref):
        turn, parity = (x.registers.flat[0] for x in (turn, parity))
        place = total(address(ref), (turn, BARRIER_BYTES))
        wait_for(place, parity, order=".acquire.cluster")

    wait(turn, parity, barriers)
