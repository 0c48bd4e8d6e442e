"""The forward's running sum P V: two ways to keep it, with the same four steps.

``issue`` starts the product with one value tile, ``rescale`` waits for it and multiplies the sum by
what a grown row maximum asks for, ``finish`` waits and returns the sum; each ends a use of the
tile's slot. What ``start`` returns is carried through the loop.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_rescale import scale_rows_if_needed

WGMMA = plgpu.Layout.WGMMA


class Product:
    """The value product in an accumulator that lives as long as the tile."""

    def __init__(self, smem, acc):
        self.smem, self.acc = smem, acc

    def start(self):
        """What the loop carries before the first product."""
        return ()

    def issue(self, o, p, slot):
        """Starts ``p @ v`` with the values of a slot."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])
        plgpu.wgmma(self.acc, p, self.smem.v.at[slot])
        return o

    def finish(self, o, slot):
        """Waits for the product, frees its slot, and returns the sum."""
        del o
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o

    def rescale(self, o, slot, alpha, lazy: bool):
        """Waits for the product, frees its slot, and multiplies the rows of the sum by alpha."""
        o, alpha = lax.optimization_barrier((self.finish(o, slot), alpha))
        if lazy:
            self.acc[...] = scale_rows_if_needed(o, alpha)
        else:
            self.acc[...] = o * lax.broadcast_in_dim(alpha, o.shape, [0])
        return ()


class StagedProduct:
    """The same with the sum in registers and P in shared memory, for the interpreter."""

    def __init__(self, smem, value_dim: int):
        self.smem, self.value_dim = smem, value_dim

    def start(self):
        """What the loop carries before the first product."""
        zeros = plgpu.broadcasted_iota(jnp.int32, (64, self.value_dim), 0, layout=WGMMA)
        return zeros.astype(jnp.float32) * 0.0

    def issue(self, o, p, slot):
        """Starts ``p @ v`` with the values of a slot."""
        p_smem = self.smem.p.at[lax.axis_index("wg")]
        plgpu.barrier_wait(self.smem.v_full.at[slot])
        p_smem[...] = p
        plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, p_smem, self.smem.v.at[slot])
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        return o + pl.run_scoped(product, plgpu.ACC((64, self.value_dim), jnp.float32))

    def finish(self, o, slot):
        """Waits for the product, frees its slot, and returns the sum."""
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o

    def rescale(self, o, slot, alpha, lazy: bool):
        """Waits for the product, frees its slot, and multiplies the rows of the sum by alpha."""
        del lazy
        return self.finish(o, slot) * lax.broadcast_in_dim(alpha, o.shape, [0])
