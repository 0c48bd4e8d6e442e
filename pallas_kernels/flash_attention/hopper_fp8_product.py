"""The FP8 forward's running sum P V: on the tensor cores and in fp32, or for the interpreter.

``start`` gives what the loop carries, ``issue`` starts the product with one value tile, ``rescale``
ends it and multiplies the sum by what a grown row maximum asks for, ``last`` gives the sum.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_rescale import scale_rows_if_needed

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)


class Sum:
    """The sum P V in an accumulator that lives as long as the tile, and from time to time in fp32.

    8-bit matmuls add with about 14 bits and round down, so that an error grows with every step.
    The accumulator is therefore emptied into a sum in shared memory, of which every thread owns
    what it owns of the accumulator.
    """

    accumulators = ()

    def __init__(self, smem, acc):
        self.smem, self.acc = smem, acc

    def start(self):
        """What the sum in shared memory is behind by: the growth of each row's maximum."""
        total = self.smem.sum.at[lax.axis_index("wg")]
        zeros = plgpu.broadcasted_iota(jnp.int32, total.shape, 0, layout=WGMMA)
        total[...] = zeros.astype(jnp.float32) * 0.0
        return plgpu.layout_cast(jnp.full((64,), 1.0, jnp.float32), ROW)

    def issue(self, p, slot):
        """Starts the product with the values of a slot."""
        plgpu.wgmma(self.acc, p, self.smem.v.at[slot].transpose((1, 0)))

    def collect(self):
        """What a product leaves outside of the accumulator."""
        return ()

    def rescale(self, behind, part, slot, alpha):
        """Waits for the product, frees its slot, and multiplies the rows of the sum by alpha."""
        del part
        o, alpha = lax.optimization_barrier((self._finish(slot), alpha))
        self.acc[...] = scale_rows_if_needed(o, alpha)
        return behind * alpha

    def promote(self, behind):
        """Empties the accumulator, with no product in flight, into the sum in shared memory."""
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        total = self.smem.sum.at[lax.axis_index("wg")]
        total[...] = self._sum(behind) + o
        self.acc[...] = o * 0.0
        return plgpu.layout_cast(jnp.full((64,), 1.0, jnp.float32), ROW)

    def last(self, behind, p, slot):
        """The last product, and the whole sum."""
        self.issue(p, slot)
        return self._finish(slot) + self._sum(behind)

    def _sum(self, behind):
        total = plgpu.load(self.smem.sum.at[lax.axis_index("wg")], layout=WGMMA)
        return total * lax.broadcast_in_dim(behind, total.shape, [0])

    def _finish(self, slot):
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o


class StagedSum:
    """For the interpreter: the sum in registers, a product at a time, P in shared memory."""

    def __init__(self, smem, value_dim: int):
        self.smem, self.value_dim = smem, value_dim
        self.accumulators = (plgpu.ACC((64, value_dim), jnp.float32),)

    def start(self):
        """The empty sum."""
        zeros = plgpu.broadcasted_iota(jnp.int32, (64, self.value_dim), 0, layout=WGMMA)
        return zeros.astype(jnp.float32) * 0.0

    def issue(self, p, slot, acc):
        """Starts the product with the values of a slot."""
        p_smem = self.smem.p.at[lax.axis_index("wg")]
        p_smem[...] = p
        plgpu.commit_smem()
        plgpu.wgmma(acc, p_smem, self.smem.v.at[slot].transpose((1, 0)))

    def collect(self, acc):
        """Waits for the product."""
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    def rescale(self, o, part, slot, alpha):
        """Adds the product, frees its slot, and multiplies the rows of the sum by alpha."""
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return (o + part) * lax.broadcast_in_dim(alpha, o.shape, [0])

    def last(self, o, p, slot):
        """The last product, and the whole sum."""

        def product(acc):
            self.issue(p, slot, acc)
            return self.collect(acc)

        part = pl.run_scoped(product, *self.accumulators)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o + part
