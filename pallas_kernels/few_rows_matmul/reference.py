"""A validated call of ``few_rows_matmul``, and its formula.

Dims: M row, K contracted, N column of the weight, F column of the result.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32
from pallas_kernels.common.row_inputs import RmsNorm, swiglu_of_halves
from pallas_kernels.quantized_weight import QuantizedWeight

from .config import ProductShape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FewRowsCall:
    """The validated arguments of a ``few_rows_matmul`` call."""

    x: jax.Array  # [M, K], or [M, 2 K] with ``swiglu_input``
    weight: jax.Array | QuantizedWeight  # [K, N]
    norm: RmsNorm | None = None
    swiglu_input: bool = False
    swiglu: bool = False
    residual: jax.Array | None = None  # [M, F]

    @property
    def shape(self) -> ProductShape:
        """The sizes and formats of the call's product."""
        return ProductShape.of(self.x.shape[0], self.weight, swiglu=self.swiglu)

    @property
    def num_outputs(self) -> int:
        """Number of columns of the call's result."""
        return self.shape.N // 2 if self.swiglu else self.shape.N

    @property
    def fused(self) -> str:
        """Names of the call's other operations, as in tuning tables: ``norm+swiglu``."""
        parts = {
            "norm": self.norm is not None,
            "swiglu_input": self.swiglu_input,
            "swiglu": self.swiglu,
            "residual": self.residual is not None,
        }
        return "+".join(name for name, is_there in parts.items() if is_there)

    @property
    def is_plain(self) -> bool:
        """Whether the call is only the product, with or without SwiGLU of the result."""
        return self.fused in ("", "swiglu")

    def describe(self) -> str:
        """Describes the call in one line for logs and errors."""
        kind = self.weight.format.name if isinstance(self.weight, QuantizedWeight) else ""
        s = self.shape
        beside = f" with {self.fused}" if self.fused else ""
        return f"{self.x.dtype}[{s.M}, {s.K}] times {kind}[{s.K}, {s.N}]{beside}"


def multiplied(call: FewRowsCall) -> jax.Array:
    """Computes the input of the product, ``input(x)``: [M, K] in x's dtype."""
    if call.swiglu_input:
        return swiglu_of_halves(call.x)
    return call.x if call.norm is None else call.norm(call.x)


def product_reference(x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool) -> jax.Array:
    """Computes ``x w``, summed in fp32 and rounded once; silu(gate) * up with ``swiglu``."""
    product_MN = einsum_f32("mk,kn->mn", x_MK, w_KN)
    if swiglu:
        gate_MF, up_MF = jnp.split(product_MN, 2, axis=1)
        product_MN = jax.nn.silu(gate_MF) * up_MF
    return product_MN.astype(x_MK.dtype)
