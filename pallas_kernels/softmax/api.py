"""The public functions: they validate and choose who computes each direction.

Dims: R row, C column.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import results_vary, vary_alike
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.formula import MASK, Formula, RowCall

from . import hopper
from .reference import log_softmax_reference, softmax_gradient_reference, softmax_reference

TUNED = pathlib.Path(__file__).parent / "tuned"


def softmax(
    x: jax.Array,
    *,
    axis: int = -1,
    where: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array:
    """``exp(x - max) / sum`` over the last dim, computed in fp32, in the dtype of ``x``.

    The gradient is computed from the result, so that ``x`` need not be kept.

    Args:
        x: [..., C], floats.
        axis: the last one.
        where: bool, broadcast to x: the columns that count; others give 0.
        implementation: "hopper" (Mosaic GPU; bf16, fp16, fp32; one pass over memory), "xla", or
            "reference", whose gradient is JAX's own; "auto" takes hopper in the directions and
            dtypes and near the shapes where it was measured to be 1.03 times as fast as XLA
            (``tuned``), else xla.
        num_devices: that the compiler spreads the call over; "hopper" runs on one.

    Raises:
        InputError: not floats, another axis than the last, a mask that is not bool or does not
            broadcast, or an unknown implementation.
        UnsupportedError: the Hopper kernels are named and cannot compute this call.

    Examples:
        >>> pallas_kernels.softmax(jnp.array([[0.0, 0.0, 9.0]]), where=jnp.arange(3) < 2).tolist()
        [[0.5, 0.5, 0.0]]
    """
    dispatch.check_input("softmax", x, axis)
    if where is not None:
        where = _mask(where, x)
    if implementation == "reference":
        return softmax_reference(x, where)
    masked = where is not None
    chosen = _chosen(
        x, implementation, num_devices,
        forward=(
            "masked_softmax" if masked else "softmax", (x.dtype,) + (MASK,) * masked,
            hopper.forward(log=False, masked=masked),
        ),
        gradient=("softmax", (x.dtype,) * 2, hopper.gradient()),
    )  # fmt: skip
    masks = () if where is None else (dispatch.as_rows(where),)
    return _softmax(*chosen, *vary_alike((dispatch.as_rows(x), masks))).reshape(x.shape)


def log_softmax(
    x: jax.Array, *, axis: int = -1, implementation: str = "auto", num_devices: int = 1
) -> jax.Array:
    """``x - max - log(sum(exp(x - max)))`` over the last dim; all else as in ``softmax``.

    Its gradient is computed from ``x``: the result in 16 bits is too coarse to be exponentiated.

    Args:
        x: [..., C], floats.
        axis: the last one.
        implementation: as in ``softmax``.
        num_devices: that the compiler spreads the call over.

    Raises:
        InputError, UnsupportedError: as ``softmax``.

    Examples:
        >>> pallas_kernels.log_softmax(jnp.zeros((1, 2)))[0].tolist()
        [-0.693147..., -0.693147...]
    """
    dispatch.check_input("log_softmax", x, axis)
    if implementation == "reference":
        return log_softmax_reference(x)
    chosen = _chosen(
        x, implementation, num_devices,
        forward=("log_softmax", (x.dtype,), hopper.forward(log=True, masked=False)),
        gradient=("log_softmax", (x.dtype,) * 2, hopper.log_gradient()),
    )  # fmt: skip
    return _log_softmax(*chosen, dispatch.as_rows(x)).reshape(x.shape)


def _mask(where: jax.Array, x: jax.Array) -> jax.Array:
    if where.dtype != jnp.bool:
        raise InputError(f"where is {where.dtype}{list(where.shape)}; it must be bool")
    try:
        return jnp.broadcast_to(where, x.shape)
    except ValueError as error:
        raise InputError(
            f"where of {list(where.shape)} does not broadcast to x of {list(x.shape)}"
        ) from error


def _chosen(
    x: jax.Array,
    implementation: str,
    num_devices: int,
    *,
    forward: tuple[str, tuple[jnp.dtype, ...], Formula],
    gradient: tuple[str, tuple[jnp.dtype, ...], Formula],
) -> tuple[str, str]:
    """Who computes each direction, of a form in the table, dtypes of inputs and a formula."""
    x_RC = jax.eval_shape(dispatch.as_rows, x)

    def of(direction: str, form: str, dtypes: tuple[jnp.dtype, ...], formula: Formula) -> str:
        call = RowCall.of(formula, [x_RC.update(dtype=dtype) for dtype in dtypes])
        case = dispatch.Case(
            op="softmax", form=form, direction=direction, rows=x_RC.shape[0], call=call
        )
        return dispatch.choose(implementation, case, tuned=TUNED, num_devices=num_devices)

    return of("forward", *forward), of("gradient", *gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(
    forward: str, backward: str, x_RC: jax.Array, masks_RC: tuple[jax.Array, ...]
) -> jax.Array:
    del backward
    if forward == "hopper":
        return _hopper(x_RC, *masks_RC)
    return softmax_reference(x_RC, *masks_RC)


def _keep_result(forward: str, backward: str, x_RC: jax.Array, masks_RC: tuple[jax.Array, ...]):
    y_RC = _softmax(forward, backward, x_RC, masks_RC)
    return y_RC, (y_RC, len(masks_RC))


def _from_result(
    forward: str, backward: str, kept: tuple[jax.Array, int], d_y_RC: jax.Array
) -> tuple[Any, ...]:
    del forward
    y_RC, num_masks = kept
    gradient = _hopper_gradient if backward == "hopper" else softmax_gradient_reference
    return gradient(y_RC, d_y_RC), (None,) * num_masks


_softmax.defvjp(_keep_result, _from_result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _log_softmax(forward: str, backward: str, x_RC: jax.Array) -> jax.Array:
    del backward
    return _hopper_log(x_RC) if forward == "hopper" else log_softmax_reference(x_RC)


def _keep_input(forward: str, backward: str, x_RC: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _log_softmax(forward, backward, x_RC), x_RC


def _from_input(
    forward: str, backward: str, x_RC: jax.Array, d_y_RC: jax.Array
) -> tuple[jax.Array]:
    del forward
    if backward == "hopper":
        return (_hopper_log_gradient(x_RC, d_y_RC),)
    (d_x_RC,) = jax.vjp(log_softmax_reference, x_RC)[1](d_y_RC)
    return (d_x_RC,)


_log_softmax.defvjp(_keep_input, _from_input)


def _looped(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    # vmap over a kernel is a loop: what is folded into the rows beforehand is faster.
    return jax.custom_batching.sequential_vmap(results_vary(kernel))


_hopper = _looped(hopper.softmax)
_hopper_gradient = _looped(hopper.softmax_gradient)
_hopper_log = _looped(functools.partial(hopper.softmax, log=True))
_hopper_log_gradient = _looped(hopper.log_softmax_gradient)
