"""How probabilities become an 8-bit matmul operand without leaving their thread.

Of every 16 columns a thread owns, in a 32-bit accumulator, columns 2t, 2t+1, 8+2t, 9+2t of its rows
(t = lane % 4), and must supply, as the left operand of an 8-bit matmul, columns 4t to 4t+3. A sum
over keys does not depend on their order: so the registers are taken as they are, and the values'
keys are numbered likewise (``fp8_operands.ordered``). FlashAttention-3 (Shah et al. 2024, section
3.3) permutes for the same reason.
"""

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.common.e4m3 import E4M3
from pallas_kernels.hopper.mosaic import mgpu, plgpu, vector
from pallas_kernels.hopper.tile import tile_layout


def as_operand(p: jax.Array, *, natural: bool) -> jax.Array:
    """Probabilities [64, keys] in fp32 as the left operand of a matmul with ``ordered`` values.

    Args:
        p: in the accumulator's layout.
        natural: keeps the keys' order and the layout: for storing, not for a matmul.
    """
    if natural:
        return p.astype(E4M3)

    @plgpu.inline_mgpu(
        arg_types=(tile_layout(),),
        return_type=plgpu.ShapeDtypeStruct(p.shape, E4M3, layout=plgpu.Layout.WGMMA_8BIT),
    )
    def relabel(ctx, p):
        del ctx
        small = p.astype(ir.Float8E4M3FNType.get(), is_signed=None)
        layout = plgpu.Layout.WGMMA_8BIT.to_mgpu()
        pairs = small.registers.reshape(-1, 2, 2)  # 16 columns, which 8 of them, which 8 rows
        registers = np.empty((len(pairs), 2), dtype=object)
        for i, rows in np.ndindex(registers.shape):
            low, high = pairs[i, :, rows]
            registers[i, rows] = vector.shuffle(low, high, [0, 1, 2, 3])
        shape = layout.registers_shape(p.shape)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(shape), _layout=layout, _is_signed=None
        )

    return relabel(p)
