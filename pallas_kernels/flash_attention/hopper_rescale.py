"""The one step Pallas cannot say: a branch that each warp takes or skips on its own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf

ROW = plgpu.Layout.WGMMA.reduce(1)


def scale_rows_if_needed(x: jax.Array, factor: jax.Array) -> jax.Array:
    """``x * factor[:, None]``, skipped by a warp whose 16 rows all have factor 1."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, ROW),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def scale(ctx, x, factor):
        del ctx
        i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
        one = mgpu.c(1.0, factor.mlir_dtype)
        changed = mgpu.c(0, i1)
        for reg in (factor != mgpu.FragmentedArray.splat(one, factor.shape, factor.layout)).registers.flat:
            changed = arith.ori(changed, _scalar(reg))
        any_changed = nvvm.vote_sync(mgpu.c(0xFFFFFFFF, i32), changed, "any")
        branch = scf.IfOp(any_changed, [r.type for r in x.registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = x * factor.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(x.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return scale(x, factor)


def _scalar(reg):
    from jaxlib.mlir.dialects import vector

    if isinstance(reg.type, ir.VectorType):
        return vector.extract(
            reg, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
        )
    return reg
