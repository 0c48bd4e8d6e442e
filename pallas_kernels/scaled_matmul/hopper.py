"""Scaled matmul on a Hopper GPU: what the kernel can compute, and its call.

Dims: M row of a and of the result, N row of b and column of the result, K contracted.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.scales import Scaling
from pallas_kernels.hopper.machine import SMEM_BYTES

from .config import DEPTH, STRIPE_BYTES, ScaledConfig, scaled_config, shared_memory_bytes
from .hopper_kernel import ScaledKernel
from .spec import ScaledSpec

ROW_MULTIPLE = 8  # a tile of the copy engine
VECTORS = (Scaling.ROW, Scaling.BLOCK_OF_ROW)  # one scale a row of the operand


def unsupported(
    a: jax.Array, b: jax.Array, *, spec: ScaledSpec, num_devices: int = 1
) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"{facts.kind} is not a Hopper GPU (compute capability 9.0)"
    if num_devices > 1:
        return f"the call is spread over {num_devices} devices and the kernel runs on one"
    for dim, size, multiple in (
        ("M", a.shape[0], ROW_MULTIPLE),
        ("N", b.shape[0], STRIPE_BYTES // spec.out_dtype.itemsize),
        ("K", a.shape[1], DEPTH),
    ):
        if size % multiple:
            return f"{dim}={size} is not a multiple of {multiple}: pad the operands"
    return None


def scaled_matmul_hopper(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    accumulate: jax.Array | None,
    *,
    spec: ScaledSpec,
    config: ScaledConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """[M, N] in the spec's dtype; an interpretable kernel multiplies as Pallas does."""
    (M, K), N = a_MK.shape, b_NK.shape[0]
    columns_scaled = spec.b is Scaling.BLOCK_OF_ROW
    config = config or scaled_config(M, N, K, columns_scaled=columns_scaled)
    taken = shared_memory_bytes(config, columns_scaled=columns_scaled)
    if taken > SMEM_BYTES:
        raise UnsupportedError(
            f"Hopper scaled matmul: {config} takes {taken} bytes of shared memory and a block has "
            f"{SMEM_BYTES}; use fewer stages or slots"
        )
    # Pallas takes no reference that differs between the devices of a ``shard_map``.
    adds = (
        accumulate is not None
        and config.splits == 1
        and not jax.typeof(accumulate).manual_axis_type.varying
    )
    kernel = ScaledKernel(
        c=config, spec=spec, M=M, N=N, K=K, dtypes=(a_MK.dtype, b_NK.dtype), adds=adds,
        interpretable=interpretable,
    )  # fmt: skip
    if spec.a in VECTORS:
        padding = (0, -M % (config.tile_m * config.cluster))
        a_scale = jnp.pad(a_scale, ((0, 0), padding) if spec.by_blocks else padding)
    if spec.b is Scaling.ROW:
        b_scale = jnp.pad(b_scale, (0, -N % config.tile_n))
    operands = {"a": a_MK, "b": b_NK, "a_scale": a_scale, "b_scale": b_scale}
    if adds:
        out = jax.new_ref(accumulate)
        kernel.add_to(out, operands)
        return jax.freeze(out)
    if config.splits > 1:
        shape = jax.ShapeDtypeStruct((config.splits, M, N), jnp.float32)
        product = jnp.sum(kernel.result(operands, shape), axis=0)
    else:
        product = kernel.result(operands, jax.ShapeDtypeStruct((M, N), spec.out_dtype))
    return (product if accumulate is None else accumulate + product).astype(spec.out_dtype)
