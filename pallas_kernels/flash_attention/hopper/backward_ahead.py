"""Flash attention backward over columns with its products a tile apart: dQ late, scores early.

Dims: H head width of query and key, Hv head width of value.

``backward_by_columns`` waits for every product of a tile before the next. Here the dQ of the tile
before and the first product of the next run while P and dS of a tile are computed:

    dQ(i - 1), S(i + 1) | P(i) | dV(i) | dS(i) | dK(i)

Only dK of a tile is waited for with nothing else to do. That takes a third query tile in flight,
room for which is found by writing dS over P: dV takes P from registers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionSpec, BackwardOperands
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import column_layout, swizzle_bytes, tile_layout, tiled

from .backward_by_columns import KEYS, QUERIES, ByColumns, gradients_by
from .tiles import TileRange


def backward(
    operands: BackwardOperands, *, spec: AttentionSpec, interpretable: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``backward_by_columns.backward``, for heads of 192/128."""
    return gradients_by(ByColumnsAhead, operands, spec, interpretable)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ByColumnsAhead(ByColumns):
    """The kernel of one call, of heads whose halves leave registers for three products."""

    @property
    def num_stages(self) -> int:
        """Query tiles in flight: one whose dK runs, one whose scores do, one that loads."""
        return 3

    @property
    def chunk(self) -> int:
        """All columns of a warpgroup's dQ: it is one product."""
        return self.half

    @property
    def dq_columns(self) -> int:
        """They leave together."""
        return self.half

    def scratch(self) -> dict:
        """As of the plain order, with two tiles that hold P and then dS."""
        buffers = ByColumns.scratch(self)
        tile = tiled(swizzle_bytes(self.half, self.half_values))
        two = plgpu.SMEM((2, KEYS, QUERIES), self.dtype, transforms=tile)
        del buffers["p"]
        buffers["ds"] = two
        if self.interpretable:  # whose dV takes P from shared memory
            buffers["p"] = two
        return buffers

    def accumulate(
        self, gmem, smem, wg: int, b, kv_head, k_tile, queries: TileRange, dk_acc, dv_acc
    ):
        """The loop over heads of the group and query tiles, from the last."""
        per_head = queries.hi - queries.lo
        count = per_head * self.g.group
        left, right = ((smem.k, smem.q), (smem.v, smem.do))[wg]
        first = plgpu.ACC((KEYS, QUERIES), jnp.float32)
        if wg == 1:  # the first tile adds the dQ of one before it, which is zero
            zeros = jnp.zeros((KEYS, QUERIES), self.dtype)
            smem.ds[1] = plgpu.layout_cast(zeros, tile_layout())
            plgpu.commit_smem()
        plgpu.barrier_arrive(smem.done)
        plgpu.barrier_wait(smem.done)

        send = functools.partial(
            self.add_to_dq, gmem, smem, wg, b=b, k_tile=k_tile, column=wg * self.half
        )

        def first_product(acc, slot):
            plgpu.wgmma(acc, left, right.at[slot].transpose((1, 0)))

        def late_dq(acc, buffer):
            k = smem.k.at[:, self.mine(wg)]
            plgpu.wgmma(acc, smem.ds.at[buffer].transpose((1, 0)), k)

        def step(visited, x, head):
            it, i = head * per_head + visited, queries.hi - 1 - visited
            slot, next_slot = lax.rem(it, self.num_stages), lax.rem(it + 1, self.num_stages)
            buffer = lax.rem(it, 2)
            ds_smem = smem.ds.at[buffer]
            p_smem = smem.p.at[buffer] if self.interpretable else ds_smem
            q_smem = smem.q.at[slot, :, self.mine(wg)]
            do_smem = smem.do.at[slot, :, self.my_values(wg)]
            # The tile before, perhaps of another head: made anew rather than kept in registers.
            first_of_head = visited == 0
            n = kv_head * self.g.group + jnp.where(first_of_head, jnp.maximum(head - 1, 0), head)
            send_here = functools.partial(send, n=n, i=jnp.where(first_of_head, queries.lo, i + 1))
            # Before the accumulators exist: their zeros then cost no instruction.
            plgpu.barrier_wait(smem.full.at[next_slot])

            def with_scores(dq_acc):
                """Warpgroup 0: P under dQ, then its next scores under dS."""
                late_dq(dq_acc, 1 - buffer)
                lse = plgpu.load(smem.rows.at[0, slot], layout=column_layout())
                p = self.write_p(smem, p_smem, slot, x, lse, i, k_tile, queries)

                def rest(x_acc):
                    plgpu.wgmma(dv_acc, p_smem if self.interpretable else p, do_smem)
                    first_product(x_acc, next_slot)
                    send_here(plgpu.wgmma_accumulator_load(dq_acc, wait_n=2))
                    plgpu.barrier_wait(smem.ds_ready)
                    plgpu.wgmma(dk_acc, ds_smem, q_smem)
                    return plgpu.wgmma_accumulator_load(x_acc, wait_n=0)

                return pl.run_scoped(rest, first)

            def with_values(dq_acc, x_acc):
                """Warpgroup 1: its dQ leaves while P is computed, then dS."""
                late_dq(dq_acc, 1 - buffer)
                first_product(x_acc, next_slot)
                # Before dS is: warpgroup 0 may then write P where this product read dS.
                send_here(plgpu.wgmma_accumulator_load(dq_acc, wait_n=1))
                plgpu.barrier_wait(smem.p_ready)
                p = plgpu.load(p_smem, layout=tile_layout())
                plgpu.wgmma(dv_acc, p_smem if self.interpretable else p, do_smem)
                delta = plgpu.load(smem.rows.at[1, slot], layout=column_layout())
                ds = self.score_gradient(smem, slot, p, x, delta).astype(self.dtype)
                ds_smem[...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(smem.ds_ready)
                plgpu.wgmma(dk_acc, ds_smem if self.interpretable else ds, q_smem)
                return plgpu.wgmma_accumulator_load(x_acc, wait_n=0)

            dq_shape = plgpu.ACC((QUERIES, self.half), jnp.float32)
            if wg == 0:
                x = pl.run_scoped(with_scores, dq_shape)
            else:
                x = pl.run_scoped(with_values, dq_shape, first)
            plgpu.barrier_arrive(smem.empty.at[slot])
            return x

        def one_head(head, x):
            return lax.fori_loop(0, per_head, functools.partial(step, head=head), x)

        plgpu.barrier_wait(smem.full.at[0])
        x = _product((KEYS, QUERIES), functools.partial(first_product, slot=0))
        lax.fori_loop(0, self.g.group, one_head, x)
        plgpu.barrier_arrive(smem.empty.at[lax.rem(count, self.num_stages)])
        last = functools.partial(late_dq, buffer=lax.rem(count + 1, 2))
        dq = _product((QUERIES, self.half), last)
        send(dq, n=(kv_head + 1) * self.g.group - 1, i=queries.lo)
        return (
            plgpu.wgmma_accumulator_load(dk_acc, wait_n=0),
            plgpu.wgmma_accumulator_load(dv_acc, wait_n=0),
        )


def _product(shape: tuple[int, int], issue) -> jax.Array:
    """What ``issue`` leaves in an accumulator, waited for."""

    def body(acc):
        issue(acc)
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
