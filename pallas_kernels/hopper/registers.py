"""How an array gets from registers to memory as it lies there, without the copy engine."""

import jax

from .mosaic import plgpu

STORES_ARE_CHECKED = jax.__version_info__ >= (0, 12)


def write_registers(array: jax.Array, ref) -> None:
    """Stores each thread's numbers where they belong, however few or many lie side by side.

    JAX 0.12 lowers ``ref[...] = array`` only where each thread stores 4 to 16 bytes, a warp fills
    whole sectors of 32, and no banks of shared memory conflict. A number of each row fills no
    sector, and fp32 sums of eight columns a thread are two stores of 16 bytes, which L2 joins.
    JAX 0.11 has neither the rule nor ``plgpu.store``; both write with the same instructions.
    """
    if STORES_ARE_CHECKED:
        plgpu.store(ref, array, optimized=False)  # pyrefly: ignore[missing-attribute]
    else:
        ref[...] = array
