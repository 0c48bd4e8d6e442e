"""Inputs whose norm or gating is left to the product that reads them, where a kernel can.

Dims: B batch, T position, D width.
"""

import dataclasses

import jax

from pallas_kernels.common.row_inputs import RmsNorm as RmsNorm
from pallas_kernels.common.row_inputs import swiglu_of_halves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """Input of one product, which the product itself first normalizes or gates (SwiGLU).

    Only one product may read it, so that nothing is computed twice.
    """

    x: jax.Array  # [B, T, D]; with gates [B, T, 2 D], gates first
    norm: RmsNorm | None = None  # None: gates and ups of SwiGLU

    def value(self) -> jax.Array:
        """Computes the normalized or gated input [B, T, D] in x's dtype, with fp32 inside."""
        if self.norm is not None:
            return self.norm(self.x)
        return swiglu_of_halves(self.x)
