"""Shapes and buffers of the fused backward kernel.

Dims: T query position, S key position, H head width of query and key, Hv head width of value.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_backward_launch import FusedKernel
from .hopper_config import BACKWARD_KEYS as KEYS
from .hopper_config import BACKWARD_QUERIES as QUERIES
from .hopper_config import NUM_DS, BackwardConfig
from .hopper_geometry import swizzle_bytes, tiled

NUM_WARPGROUPS = KEYS // 64
"""That compute: each has 64 keys of the tile."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardPlan(FusedKernel):
    """What one call of the kernel is made for."""

    c: BackwardConfig

    @property
    def num_threads(self) -> int:
        """Warpgroups of a block: those that compute, one that loads, one for dQ."""
        return NUM_WARPGROUPS + (2 if self.c.dq_warpgroup else 1)

    @property
    def dq_shape(self) -> tuple[int, int]:
        """What leaves for dQ at a time: a warpgroup's half of the columns, or all of them."""
        if self.c.dq_warpgroup:
            return (QUERIES, self.g.H)
        return (QUERIES, self.g.H // NUM_WARPGROUPS)

    def scratch(self) -> dict:
        """Shared memory and barriers of a block, by name."""
        g, c = self.g, self.c
        # A warpgroup's columns of dQ must be whole swizzle atoms of K.
        tile = tiled(swizzle_bytes(self.dq_shape[1], g.Hv, QUERIES))
        rows = (c.num_stages, QUERIES)
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        with_ids = 3 if self.segmented else 2
        buffers = {
            "q": plgpu.SMEM((*rows, g.H), self.dtype, transforms=tile),
            "do": plgpu.SMEM((*rows, g.Hv), self.dtype, transforms=tile),
            "lse": plgpu.SMEM(rows, jnp.float32),
            "delta": plgpu.SMEM(rows, jnp.float32),
            "k": plgpu.SMEM((KEYS, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((KEYS, g.Hv), self.dtype, transforms=tile),
            "ds": plgpu.SMEM((NUM_DS, KEYS, QUERIES), self.dtype, transforms=tile),
            "kv_full": plgpu.Barrier(num_arrivals=with_ids),
            "q_full": ring(num_arrivals=with_ids),
            "do_full": ring(num_arrivals=2),
            "q_empty": ring(num_arrivals=NUM_WARPGROUPS),
            "do_empty": ring(num_arrivals=NUM_WARPGROUPS),
            "ds_ready": plgpu.Barrier(num_arrivals=NUM_WARPGROUPS, num_barriers=NUM_DS),
            "ds_empty": plgpu.Barrier(
                num_arrivals=1 if c.dq_warpgroup else NUM_WARPGROUPS, num_barriers=NUM_DS
            ),
            "done": plgpu.Barrier(num_arrivals=NUM_WARPGROUPS),
        }
        f32_tile = tiled(swizzle_bytes(self.dq_shape[1], itemsize=4), itemsize=4)
        shape = (NUM_WARPGROUPS, *self.dq_shape)
        buffers["dq"] = plgpu.SMEM(shape, jnp.float32, transforms=f32_tile)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM(rows, jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((KEYS,), jnp.int32)
        if self.interpretable:
            buffers["p"] = plgpu.SMEM((KEYS, QUERIES), self.dtype, transforms=tile)
        return buffers
