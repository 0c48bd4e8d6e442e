"""The forward's running sum P V: on the tensor cores, there and in fp32 for FP8, or interpreted.

``prepare`` and ``issue`` start the product with one value tile, ``rescale`` waits for it and
multiplies the sum by what a grown row maximum asks for, ``last`` gives the whole sum; each ends a
use of the tile's slot. What ``start`` returns is carried through the loop.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.rescale import scale_rows_if_needed
from pallas_kernels.hopper.tile import row_layout, tile_layout


class ValueSum:
    """The sum in an accumulator that lives as long as the query tile."""

    accumulators = ()

    def __init__(self, smem, acc):
        self.smem, self.acc = smem, acc

    def start(self):
        """What the loop carries before the first product."""
        return ()

    def prepare(self, slot):
        """What comes before the scores that the product runs beside."""

    def issue(self, p, slot, clean=None):
        """Starts ``p @ v`` with the values of a slot, once they are clean."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])
        if clean is not None:
            clean()
        plgpu.wgmma(self.acc, p, self.smem.v.at[slot])

    def collect(self):
        """What a product leaves outside of the accumulator."""
        return ()

    def rescale(self, carried, part, slot, alpha):
        """Waits for the product, frees its slot, and multiplies the rows of the sum by alpha."""
        del part
        self.rescale_accumulator(slot, alpha)
        return carried

    def rescale_accumulator(self, slot, alpha):
        """Does it, and returns alpha as it is after the wait."""
        o, alpha = lax.optimization_barrier((self.finish(slot), alpha))
        self.acc[...] = scale_rows_if_needed(o, alpha)
        return alpha

    def loop(self, first, last, step, carry):
        """The steps first .. last."""
        return lax.fori_loop(first, last, step, carry)

    def last(self, carried, p, slot, clean=None):
        """The last product, and the whole sum."""
        del carried
        self.issue(p, slot, clean)
        return self.finish(slot)

    def finish(self, slot):
        """Waits for the product, frees its slot, and returns the accumulator."""
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o


class Fp8ValueSum(ValueSum):
    """The same, and from time to time in fp32.

    8-bit matmuls add with about 14 bits and round down, so that an error grows with every step.
    The accumulator is therefore emptied into a sum in shared memory, of which every thread owns
    what it owns of the accumulator. Carried is what that sum is behind by: the growth of each row's
    maximum.
    """

    def __init__(self, smem, acc, promote_every: int):
        super().__init__(smem, acc)
        self.promote_every = promote_every

    def start(self):
        """An empty sum."""
        total = self.smem.sum.at[lax.axis_index("wg")]
        total[...] = _zeros(total.shape)
        return _ones()

    def prepare(self, slot):
        """Waits for the values."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])

    def issue(self, p, slot, clean=None):
        """Starts ``p @ v``: the values lie transposed."""
        assert clean is None
        plgpu.wgmma(self.acc, p, self.smem.v.at[slot].transpose((1, 0)))

    def rescale(self, carried, part, slot, alpha):
        """As above; the sum in shared memory falls behind."""
        del part
        return carried * self.rescale_accumulator(slot, alpha)

    def loop(self, first, last, step, carry):
        """The steps first .. last, with the accumulator emptied after every few."""
        every = self.promote_every
        if not every:
            return super().loop(first, last, step, carry)

        def some(j, carry):
            start = first + j * every
            *rest, behind = lax.fori_loop(start, jnp.minimum(start + every, last), step, carry)
            return (*rest, self.promote(behind))

        return lax.fori_loop(0, lax.div(last - first + (every - 1), every), some, carry)

    def promote(self, behind):
        """Empties the accumulator, with no product in flight, into the sum in shared memory."""
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        total = self.smem.sum.at[lax.axis_index("wg")]
        total[...] = self._sum(behind) + o
        self.acc[...] = o * 0.0
        return _ones()

    def last(self, carried, p, slot, clean=None):
        """The last product, and the whole sum."""
        return super().last(carried, p, slot, clean) + self._sum(carried)

    def _sum(self, behind):
        total = plgpu.load(self.smem.sum.at[lax.axis_index("wg")], layout=tile_layout())
        return total * lax.broadcast_in_dim(behind, total.shape, [0])


class StagedValueSum:
    """For the interpreter: the sum in registers, a product at a time, P in shared memory."""

    def __init__(self, smem, value_dim: int, *, transposed: bool):
        self.smem, self.value_dim, self.transposed = smem, value_dim, transposed
        self.accumulators = (plgpu.ACC((64, value_dim), jnp.float32),)

    def start(self):
        """The empty sum."""
        return _zeros((64, self.value_dim))

    def prepare(self, slot):
        """Waits for the values."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])

    def issue(self, p, slot, clean, acc):
        """Starts the product with the values of a slot, once they are clean."""
        if clean is not None:
            clean()
        p_smem = self.smem.p.at[lax.axis_index("wg")]
        p_smem[...] = p
        plgpu.commit_smem()
        v = self.smem.v.at[slot]
        plgpu.wgmma(acc, p_smem, v.transpose((1, 0)) if self.transposed else v)

    def collect(self, acc):
        """Waits for the product."""
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    def rescale(self, o, part, slot, alpha):
        """Adds the product, frees its slot, and multiplies the rows of the sum by alpha."""
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return (o + part) * lax.broadcast_in_dim(alpha, o.shape, [0])

    def loop(self, first, last, step, carry):
        """The steps first .. last."""
        return lax.fori_loop(first, last, step, carry)

    def last(self, o, p, slot, clean=None):
        """The last product, and the whole sum."""

        def product(acc):
            self.issue(p, slot, clean, acc)
            return self.collect(acc)

        part = pl.run_scoped(product, *self.accumulators)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o + part


def _zeros(shape: tuple[int, int]):
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout()).astype(jnp.float32) * 0.0
    )


def _ones():
    return plgpu.layout_cast(jnp.full((64,), 1.0, jnp.float32), row_layout())
