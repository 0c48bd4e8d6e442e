"""Inputs that are made by the product that reads them, where a kernel can.

Dims: B batch, T position, D width.
"""

import dataclasses

import jax

from pallas_kernels.common.row_inputs import RmsNorm as RmsNorm
from pallas_kernels.common.row_inputs import swiglu_of_halves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """In the place of x: what is normalized first, or gates and ups of hidden values to be.

    One product reads it, so that nothing is computed twice.
    """

    x: jax.Array  # [B, T, D]; with gates [B, T, 2 D], gates first
    norm: RmsNorm | None = None  # None: gates and ups of SwiGLU

    def value(self) -> jax.Array:
        """[B, T, D] in x's dtype, computed in fp32."""
        if self.norm is not None:
            return self.norm(self.x)
        return swiglu_of_halves(self.x)
