"""How an array gets from registers to memory as it lies there, without the copy engine."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

STORES_ARE_CHECKED = jax.__version_info__ >= (0, 12)


def write_registers(ref, array: jax.Array) -> None:
    """Stores each thread's numbers where they belong, however few or many lie side by side.

    JAX 0.12 lowers ``ref[...] = array`` only where every thread stores 4 to 16 bytes, warps fill
    whole sectors of 32 bytes, and no banks of shared memory conflict. One number a row fills no
    sector, and the 32 bytes of eight fp32 columns a thread arrive in L2 as whole ones all the same.
    JAX 0.11 has no such rule, and no such function; its programs are as ``ref[...]`` makes them.
    """
    if STORES_ARE_CHECKED:
        plgpu.store(ref, array, optimized=False)  # pyrefly: ignore[missing-attribute]
    else:
        ref[...] = array
