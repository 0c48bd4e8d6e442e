"""A branch that each warp takes or skips on its own, which Pallas cannot express."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from .mosaic import arith, mgpu, nvvm, plgpu, scf, vector
from .tile import row_layout, tile_layout

ALL_LANES = 0xFFFFFFFF


def scale_rows_if_needed(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Computes ``x * factor[:, None]``, which a warp skips whose 16 rows all have factor 1."""

    @plgpu.inline_mgpu(
        arg_types=(tile_layout(), row_layout()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=tile_layout()),
    )
    def scale(ctx, x, factor):
        del ctx
        branch = scf.IfOp(
            _any_lane_differs_from_one(factor), [r.type for r in x.registers.flat], has_else=True
        )
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.then_block):
            scaled = x * factor.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(x.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return scale(x, factor)


def _any_lane_differs_from_one(factor: Any) -> Any:
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    one = mgpu.FragmentedArray.splat(
        mgpu.c(1.0, factor.mlir_dtype), factor.shape, factor.layout, is_signed=None
    )
    differs: Any = mgpu.c(0, i1)
    for register in (factor != one).registers.flat:
        differs = arith.ori(differs, _first_element(register))
    lanes: Any = mgpu.c(ALL_LANES, i32)
    return nvvm.vote_sync(lanes, differs, "any")


def _first_element(register: Any) -> Any:
    if not isinstance(register.type, ir.VectorType):
        return register
    position = ir.DenseI64ArrayAttr.get([0])
    return vector.extract(register, dynamic_position=[], static_position=position)
