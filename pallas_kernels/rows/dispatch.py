"""The choice between the Hopper kernel, XLA and the reference for norms and softmaxes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import chosen, device
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.varying import results_vary

from .choice import config_for
from .formula import RowCall

NAMES = ("hopper", "xla", "reference")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""Dtypes of the kernels' inputs and results."""

SHORTEST_FORWARD, SHORTEST_MASKED = 1024, 32_768
"""Fewest columns for which "auto" takes the forward kernel, without and with a mask."""


def choose(
    implementation: str, form: str, direction: str, rows: int, call: RowCall, *, num_devices: int
) -> str:
    """Chooses the implementation of a call's forward or gradient pass.

    Args:
        form: name of the op, such as "rms_norm" or "layer_norm+residual".
        direction: "forward" or "gradient".

    Raises:
        InputError: the implementation is unknown.
        UnsupportedError: "hopper" is named but cannot compute the call.
    """
    why_not = functools.partial(why_not_hopper, rows, call, num_devices=num_devices)
    name = chosen.choose(f"{direction} of {form}", implementation, NAMES, why_not)
    if implementation == "auto":
        reason = why_not()
        name = "hopper" if reason is None and _is_faster(direction, call) else "xla"
        told = f"{direction} of {rows}x{call.columns} {call.dtype}"
        because = None if reason is None else f"not hopper: {reason}"
        chosen.announce(form, name, told, because=because)
    return name


def why_not_hopper(rows: int, call: RowCall, *, num_devices: int = 1) -> str | None:
    """Returns why the row kernel cannot compute a call; None if it can."""
    if reason := device.why_not_one_hopper(num_devices):
        return reason
    if call.dtype not in DTYPES:
        return f"x is {call.dtype}; the kernels take bfloat16, float16 and float32"
    try:
        config_for(rows, call)
    except UnsupportedError as error:
        return str(error)
    return None


def _is_faster(direction: str, call: RowCall) -> bool:
    """Whether the kernel beats XLA, as measured on an H200 (``memory-{bound,random}-h200.json``).

    XLA is as fast at 128 columns forward. Pallas reads no bool, and XLA's copy of a mask to bytes
    takes what is won below 32,768 columns.
    """
    if call.num_masks:
        return call.columns >= SHORTEST_MASKED
    return direction == "gradient" or call.columns >= SHORTEST_FORWARD


def looped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that ``vmap`` loops over the batch, with one launch per element."""
    return jax.custom_batching.sequential_vmap(results_vary(kernel))


def check_input(op: str, x: jax.Array, axis: int = -1) -> None:
    """Raises InputError unless x has rows of floats and ``axis`` is the last.

    Raises:
        InputError: a scalar, an integer array, or another axis than the last.
    """
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"x is {x.dtype}{list(x.shape)}; {op} takes floats of one dim or more")
    if axis not in (-1, x.ndim - 1):
        raise InputError(
            f"axis={axis} of shape {x.shape}; {op} is over the last dim alone: move it there"
        )


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes x from [..., C] to rows [R, C]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
