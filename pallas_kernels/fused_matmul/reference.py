"""The formula, and what a call is.

Dims: M row, K contracted, N column of the weight, F column of the result.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm, swiglu_of_halves
from pallas_kernels.quantized_matmul import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedCall:
    """A validated call."""

    x: jax.Array  # [M, K], or [M, 2 K] with ``swiglu_input``
    weight: jax.Array | QuantizedWeight  # [K, N]
    norm: RmsNorm | None = None
    swiglu_input: bool = False
    swiglu: bool = False
    residual: jax.Array | None = None  # [M, F]

    @property
    def M(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @property
    def K(self) -> int:
        """Rows of the weight."""
        return self._matrix[0]

    @property
    def N(self) -> int:
        """Columns of the weight."""
        return self._matrix[1]

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.N // 2 if self.swiglu else self.N

    @property
    def _matrix(self) -> tuple[int, int]:
        if isinstance(self.weight, QuantizedWeight):
            return self.weight.matrix_shape
        return self.weight.shape[0], self.weight.shape[1]

    def describe(self) -> str:
        """One line for logs and errors."""
        kind = self.weight.format.name if isinstance(self.weight, QuantizedWeight) else ""
        parts = {
            "a norm": self.norm is not None,
            "SwiGLU before": self.swiglu_input,
            "SwiGLU after": self.swiglu,
            "a residual": self.residual is not None,
        }
        named = ", ".join(name for name, is_there in parts.items() if is_there) or "nothing"
        return f"{self.x.dtype}[{self.M}, {self.K}] times {kind}[{self.K}, {self.N}] with {named}"


def multiplied(call: FusedCall) -> jax.Array:
    """What the weight is multiplied with, [M, K] in x's dtype."""
    if call.swiglu_input:
        return swiglu_of_halves(call.x)
    return call.x if call.norm is None else call.norm(call.x)


def fused_matmul_reference(call: FusedCall) -> jax.Array:
    """``residual + act(input(x) w)``, summed in fp32, rounded once after ``input``: [M, F]."""
    w_KN = call.weight
    if isinstance(w_KN, QuantizedWeight):
        w_KN = w_KN.dequantize(call.x.dtype)
    product = jax.lax.dot_general(
        multiplied(call), w_KN, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    if call.swiglu:
        gate_MF, up_MF = jnp.split(product, 2, axis=1)
        product = jax.nn.silu(gate_MF) * up_MF
    if call.residual is not None:
        product = product + call.residual.astype(jnp.float32)
    return product.astype(call.x.dtype)
