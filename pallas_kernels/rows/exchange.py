"""What warpgroups and blocks that share a row tell each other about it, on a Hopper GPU.

Dims: A part of a row in a warpgroup, P part of a row.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import mgpu_utils, plgpu

from .config import Flat, Twice, Wide, lane_layout
from .smem import TURNS


def send(
    c: Wide | Twice | Flat, smem, me, i, numbers: tuple[jax.Array, ...], team: int | jax.Array = 0
) -> None:
    """This warpgroup's numbers of its i-th exchange, [A] each, to all blocks of the row.

    Args:
        me: ``rank`` of the block in its cluster, ``wg`` of the warpgroup in its team.
        team: of the block's, each with a row of its own.
    """
    num_parts = smem.numbers.shape[-1]
    mine = pl.ds(me.rank * (num_parts // c.cluster) + me.wg * WARPS, WARPS)
    turn = team * TURNS + lax.rem(i, TURNS)
    for j, number_A in enumerate(numbers):
        smem.numbers[turn, j, mine] = number_A
    plgpu.commit_smem()
    if c.cluster > 1:
        for j in range(len(numbers)):
            _to_cluster(smem.numbers.at[turn, j, mine], c.cluster)
        _cluster_fence()
        if c.cluster > 4:
            # Thread 8 b arrives at block b: from the fifth on, not of the warp that has copied.
            plgpu.commit_smem()
    if num_parts > WARPS:
        plgpu.barrier_arrive(smem.exchanged.at[team * 2 + lax.rem(i, 2)])


def receive(
    c: Wide | Twice | Flat, smem, i, num_numbers: int, team: int | jax.Array = 0
) -> list[jax.Array]:
    """The numbers of all parts in the i-th exchange, [P] each."""
    num_parts = smem.numbers.shape[-1]
    if num_parts > WARPS:
        plgpu.barrier_wait(smem.exchanged.at[team * 2 + lax.rem(i, 2)])
    if c.cluster > 1:
        _cluster_fence()
    turn = team * TURNS + lax.rem(i, TURNS)
    return [
        plgpu.load(smem.numbers.at[turn, j], layout=lane_layout(num_parts), optimized=False)
        for j in range(num_numbers)
    ]


def _to_cluster(ref, num_blocks: int) -> None:
    """Copies four fp32 numbers of shared memory to the same place in all blocks of the cluster."""
    # A thread for each number and block; written before the warpgroup's last barrier.
    ptx = f"""{{
        .reg .pred active;
        .reg .u32 thread, offset, block, peer;
        .reg .f32 value;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.lt.u32 active, thread, {WARPS * num_blocks};
        and.b32 offset, thread, {WARPS - 1};
        shl.b32 offset, offset, 2;
        add.u32 offset, $0, offset;
        shr.u32 block, thread, 2;
        @active ld.shared.f32 value, [offset];
        @active mapa.shared::cluster.u32 peer, offset, block;
        @active st.shared::cluster.f32 [peer], value;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def copy(_, ref):
        mgpu_utils.inline_ptx(ptx, mgpu_utils.memref_ptr(ref), has_side_effects=True)

    copy(ref)


def _cluster_fence() -> None:
    """Orders shared memory accesses of one thread against those of the cluster's other blocks."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu_utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()
