"""The formula, and what a call is.

Dims: D width of the stream, A width of all heads, F hidden width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TailCall:
    """A validated call: what follows attention in a layer."""

    x: jax.Array  # [M, D]: the stream before attention
    attended: jax.Array  # [M, A]
    out: jax.Array  # [A, D]
    norm: RmsNorm
    gate_up: jax.Array  # [D, 2 F], gates first
    down: jax.Array  # [F, D]

    def describe(self) -> str:
        """One line for logs and errors."""
        (M, D), A, F = self.x.shape, self.attended.shape[1], self.down.shape[0]
        return f"{M} rows {self.x.dtype} of {D}, heads {A}, hidden {F}"


def layer_tail_reference(call: TailCall) -> jax.Array:
    """``x1 + (silu(g) * u) down``, ``x1 = x + attended out``, g and u of ``norm(x1) gate_up``.

    All in fp32, rounded once: [M, D] in x's dtype.
    """
    x, attended, out, gate_up, down = (
        each.astype(jnp.float32)
        for each in (call.x, call.attended, call.out, call.gate_up, call.down)
    )

    def times(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

    x = x + times(attended, out)
    gate, up = jnp.split(times(call.norm(x), gate_up), 2, axis=1)
    return (x + times(jax.nn.silu(gate) * up, down)).astype(call.x.dtype)
