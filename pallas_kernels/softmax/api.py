"""The public softmaxes: they validate inputs and choose implementations of forward and gradient.

The model uses XLA's softmaxes, which XLA fuses into sampling, routing and the loss.

Dims: R row, C column.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.formula import MASK, Formula, RowCall
from pallas_kernels.rows.kernel import apply_rows

from .formulas import forward, gradient, log_gradient
from .formulas import logsumexp as logsumexp_formula
from .reference import (
    log_softmax_reference,
    logsumexp_reference,
    softmax_gradient_reference,
    softmax_reference,
)


def softmax(
    x: jax.Array,
    *,
    axis: int = -1,
    where: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array:
    """Computes ``exp(x - max) / sum`` over the last dim in fp32; the result has the dtype of ``x``.

    The gradient is computed from the result, so that ``x`` need not be kept.

    Args:
        x: [..., C], floats.
        axis: must be the last dim.
        where: bool, broadcast to x: False excludes a column from the sum and sets its result to 0.
        implementation: "hopper" (Mosaic GPU; bf16, fp16, fp32; one pass over memory), "xla", or
            "reference", whose gradient is JAX's own; "auto" takes hopper where the kernel was
            measured to be faster than XLA (``rows.dispatch``), else xla.
        num_devices: number of devices that the call is partitioned over; "hopper" needs 1.

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
        if where.dtype != jnp.bool:
            raise InputError(f"where is {where.dtype}{list(where.shape)}; it must be bool")
        try:
            where = jnp.broadcast_to(where, x.shape)
        except ValueError as error:
            raise InputError(
                f"where of {list(where.shape)} does not broadcast to x of {list(x.shape)}"
            ) from error
    if implementation == "reference":
        return softmax_reference(x, where)
    return _dispatched(x, where, implementation, num_devices, log=False)


def log_softmax(
    x: jax.Array, *, axis: int = -1, implementation: str = "auto", num_devices: int = 1
) -> jax.Array:
    """Computes ``x - max - log(sum(exp(x - max)))`` over the last dim.

    Its gradient is computed from ``x``: the result in 16 bits is too coarse to be exponentiated.

    Args:
        x: [..., C], floats.
        axis: must be the last dim.
        implementation: as in ``softmax``.
        num_devices: as in ``softmax``.

    Raises:
        InputError, UnsupportedError: as ``softmax``.

    Examples:
        >>> pallas_kernels.log_softmax(jnp.zeros((1, 2)))[0].tolist()
        [-0.693147..., -0.693147...]
    """
    dispatch.check_input("log_softmax", x, axis)
    if implementation == "reference":
        return log_softmax_reference(x)
    return _dispatched(x, None, implementation, num_devices, log=True)


def logsumexp(
    x: jax.Array, *, axis: int = -1, implementation: str = "auto", num_devices: int = 1
) -> jax.Array:
    """Computes ``log(sum(exp(x)))`` over the last dim, in fp32.

    Args:
        x: [..., C], floats.
        axis: must be the last dim.
        implementation: as in ``softmax``; the gradient is XLA's.
        num_devices: as in ``softmax``.

    Raises:
        InputError, UnsupportedError: as ``softmax``.

    Examples:
        >>> pallas_kernels.logsumexp(jnp.zeros((1, 2))).tolist()
        [0.693147...]
    """
    dispatch.check_input("logsumexp", x, axis)
    if implementation == "reference":
        return logsumexp_reference(x)
    x_RC = dispatch.as_rows(x)
    call, rows = RowCall.of(logsumexp_formula(), [x_RC]), x_RC.shape[0]
    way = dispatch.choose(
        implementation, "logsumexp", "forward", rows, call, num_devices=num_devices
    )
    return _logsumexp(way, x_RC).reshape(x.shape[:-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logsumexp(way: str, x_RC: jax.Array) -> jax.Array:
    if way == "hopper":
        return dispatch.looped(functools.partial(_hopper, logsumexp_formula()))(x_RC)
    return logsumexp_reference(x_RC)


def _keep_logsumexp(way: str, x_RC: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    total_R = _logsumexp(way, x_RC)
    return total_R, (x_RC, total_R)


def _logsumexp_gradient(
    way: str, kept: tuple[jax.Array, jax.Array], d_total_R: jax.Array
) -> tuple[jax.Array]:
    del way
    x_RC, total_R = kept
    power_RC = jnp.exp(x_RC.astype(jnp.float32) - total_R[:, None])
    return ((d_total_R[:, None] * power_RC).astype(x_RC.dtype),)


_logsumexp.defvjp(_keep_logsumexp, _logsumexp_gradient)


def _dispatched(
    x: jax.Array, where: jax.Array | None, implementation: str, num_devices: int, *, log: bool
) -> jax.Array:
    x_RC = dispatch.as_rows(x)
    masks_RC = () if where is None else (dispatch.as_rows(where),)
    name = "log_softmax" if log else "softmax"

    def chosen(direction: str, form: str, formula: Formula, *dtypes: jnp.dtype) -> str:
        of = jax.eval_shape(lambda x: [x.astype(d) for d in dtypes], x_RC)
        call, rows = RowCall.of(formula, of), x_RC.shape[0]
        return dispatch.choose(implementation, form, direction, rows, call, num_devices=num_devices)

    formula, masks = forward(log=log, masked=where is not None), [MASK] * len(masks_RC)
    ways = (
        chosen("forward", "masked_" * len(masks) + name, formula, x.dtype, *masks),
        chosen("gradient", name, log_gradient() if log else gradient(), x.dtype, x.dtype),
    )
    return _softmax(*ways, log, *vary_alike((x_RC, masks_RC))).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _softmax(
    ahead: str, back: str, log: bool, x_RC: jax.Array, masks_RC: tuple[jax.Array, ...]
) -> jax.Array:
    del back
    if ahead == "hopper":
        kernel = functools.partial(_hopper, forward(log=log, masked=len(masks_RC) > 0))
        # The kernel reads bytes: XLA copies a mask.
        return dispatch.looped(kernel)(x_RC, *(mask.astype(MASK) for mask in masks_RC))
    return log_softmax_reference(x_RC) if log else softmax_reference(x_RC, *masks_RC)


def _keep(
    ahead: str, back: str, log: bool, x_RC: jax.Array, masks_RC: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    """Keeps the result, or for the logarithm x."""
    y_RC = _softmax(ahead, back, log, x_RC, masks_RC)
    return y_RC, (x_RC if log else y_RC, len(masks_RC))


def _from_kept(
    ahead: str, back: str, log: bool, kept: tuple[jax.Array, int], d_y_RC: jax.Array
) -> tuple[jax.Array, tuple[None, ...]]:
    del ahead
    kept_RC, num_masks = kept
    if back == "hopper":
        kernel = functools.partial(_hopper, log_gradient() if log else gradient())
        d_x_RC = dispatch.looped(kernel)(kept_RC, d_y_RC)
    elif log:
        (d_x_RC,) = jax.vjp(log_softmax_reference, kept_RC)[1](d_y_RC)
    else:
        d_x_RC = softmax_gradient_reference(kept_RC, d_y_RC)
    return d_x_RC, (None,) * num_masks


_softmax.defvjp(_keep, _from_kept)


def _hopper(formula: Formula, *inputs_RC: jax.Array) -> jax.Array:
    return apply_rows(formula, inputs_RC)[0][0]
