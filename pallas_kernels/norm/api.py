"""The public function: validates, chooses who computes each direction.

Dims: R row, C column.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp

from pallas_kernels.common import rows
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import results_vary, vary_alike

from . import hopper
from .reference import rms_norm_reference

TUNED = pathlib.Path(__file__).parent / "tuned"


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale`` over the last dim (arXiv 1910.07467).

    Computed in fp32, in the dtype of ``x``. The gradient reads ``x`` and computes the root again.

    Args:
        x: [..., C], floats.
        scale: [C], floats; its gradient is summed in fp32.
        epsilon: added to the mean of squares, at least 0; static.
        implementation: "hopper" (Mosaic GPU, bf16, one pass over memory), "xla", or "reference",
            whose gradient is JAX's own; "auto" takes hopper in the directions and near the shapes
            where it was measured to be 1.15 times as fast as XLA (``tuned``), else xla.
        num_devices: that the compiler spreads the call over; "hopper" runs on one.

    Raises:
        InputError: shapes, dtypes or epsilon that make no norm, or an unknown implementation.
        UnsupportedError: the Hopper kernels are named and cannot compute this call.
    """
    rows.check_input("rms_norm", x)
    if scale.shape != x.shape[-1:] or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise InputError(
            f"scale is {scale.dtype}{list(scale.shape)}; x asks for floats [{x.shape[-1]}]"
        )
    if not 0.0 <= epsilon < float("inf"):
        raise InputError(f"epsilon={epsilon}; it must be finite and not negative")
    if implementation == "reference":
        return rms_norm_reference(x, scale, epsilon=epsilon)
    x_RC = rows.as_rows(x)

    def chosen(direction: str) -> str:
        case = rows.Case(
            op="rms_norm", direction=direction, rows=x_RC.shape[0], columns=x_RC.shape[1],
            dtype=x.dtype.name, num_inputs=1 if direction == "forward" else 2, num_vectors=1,
        )  # fmt: skip
        return rows.choose(implementation, case, tuned=TUNED, num_devices=num_devices)

    y_RC = _rms_norm(chosen("forward"), chosen("gradient"), epsilon, *vary_alike((x_RC, scale)))
    return y_RC.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rms_norm(
    forward: str, backward: str, epsilon: float, x_RC: jax.Array, scale_C: jax.Array
) -> jax.Array:
    del backward
    if forward == "hopper":
        return _hopper(epsilon)(x_RC, scale_C.astype(jnp.float32))
    return rms_norm_reference(x_RC, scale_C, epsilon=epsilon)


type _Inputs = tuple[jax.Array, jax.Array]


def _keep_inputs(
    forward: str, backward: str, epsilon: float, x_RC: jax.Array, scale_C: jax.Array
) -> tuple[jax.Array, _Inputs]:
    return _rms_norm(forward, backward, epsilon, x_RC, scale_C), (x_RC, scale_C)


def _from_inputs(
    forward: str, backward: str, epsilon: float, kept: _Inputs, d_y_RC: jax.Array
) -> _Inputs:
    del forward
    x_RC, scale_C = kept
    if backward == "hopper":
        d_x_RC, d_scale_C = _hopper_gradient(epsilon)(x_RC, scale_C.astype(jnp.float32), d_y_RC)
        return d_x_RC, d_scale_C.astype(scale_C.dtype)
    _, vjp = jax.vjp(functools.partial(rms_norm_reference, epsilon=epsilon), x_RC, scale_C)
    d_x_RC, d_scale_C = vjp(d_y_RC)
    return d_x_RC, d_scale_C


_rms_norm.defvjp(_keep_inputs, _from_inputs)


# vmap over a kernel is a loop: what is folded into the rows beforehand is faster.
def _hopper(epsilon: float):
    return jax.custom_batching.sequential_vmap(
        results_vary(lambda x_RC, scale_C: hopper.rms_norm(x_RC, scale_C, epsilon=epsilon))
    )


def _hopper_gradient(epsilon: float):
    return jax.custom_batching.sequential_vmap(
        results_vary(
            lambda x_RC, scale_C, d_y_RC: hopper.rms_norm_gradient(
                x_RC, scale_C, d_y_RC, epsilon=epsilon
            )
        )
    )
