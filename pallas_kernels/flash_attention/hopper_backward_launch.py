"""The call of a fused backward kernel, and the passes around it.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import abc
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_kernel import Kernel


class FusedKernel(Kernel, abc.ABC):
    """A kernel whose blocks own key tiles and add to dQ in global memory."""

    @property
    @abc.abstractmethod
    def num_threads(self) -> int:
        """Warpgroups of a block."""

    @abc.abstractmethod
    def scratch(self) -> dict:
        """Shared memory and barriers of a block, by name."""

    @abc.abstractmethod
    def run(self, gmem, smem) -> None:
        """One block."""


def gradients(
    kernel: FusedKernel, operands: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ, dK and dV in the operands' dtype.

    An interpretable kernel cannot add to global memory: it writes a dQ for each key tile.
    """
    g, q, k, v = kernel.g, operands["q"], operands["k"], operands["v"]
    copies = (kernel.num_k_tiles,) if kernel.interpretable else ()
    # Zeros that wait for this call's operands: XLA would fill those of all unrolled layers in one
    # fusion before the first, 2 GiB at once in a step of 16 layers.
    zero, _ = jax.lax.optimization_barrier((jnp.float32(0.0), operands["do"]))
    operands = {**operands, "dq": jax.new_ref(jnp.full((*copies, *q.shape), zero, jnp.float32))}
    names = tuple(operands)

    def body(*refs):
        gmem = dict(zip((*names, "dk", "dv"), refs, strict=True))
        pl.run_scoped(
            lambda **scratch: kernel.run(
                types.SimpleNamespace(**gmem), types.SimpleNamespace(**scratch)
            ),
            **kernel.scratch(),
            collective_axes="wg",
        )

    call: Any = pl.kernel(
        body,
        out_type=(jax.typeof(k), jax.typeof(v)),  # as they vary inside shard_map, too
        mesh=plgpu.Mesh(
            grid=(kernel.num_k_tiles * g.B * g.K,),
            grid_names=("tile",),
            num_threads=kernel.num_threads,
            thread_name="wg",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    dk, dv = call(*operands.values())
    dq = operands["dq"][...]
    dq = dq.sum(axis=0) if kernel.interpretable else dq
    return (dq[:, : g.T] * kernel.spec.scale).astype(q.dtype), dk[:, : g.S], dv[:, : g.S]
