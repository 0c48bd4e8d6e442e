"""Calls of the ops over rows: kernel, XLA, fewest bytes. Dims: R row, C column.

Arguments by letter: x and r floats [R, C], d and e gradients of results, y the softmax of x, m a
mask of every second column or so, s and b fp32 [C].
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.norm import fp8
from pallas_kernels.norm import hopper as norm
from pallas_kernels.norm.formulas import NormForm
from pallas_kernels.norm.reference import layer_norm_reference, rms_norm_reference
from pallas_kernels.norm.workloads import EPSILON, arrays
from pallas_kernels.rows.dispatch import RowWorkload
from pallas_kernels.softmax import hopper as softmax
from pallas_kernels.softmax.reference import (
    log_softmax_reference,
    softmax_gradient_reference,
    softmax_reference,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One direction of one form."""

    folder: str  # of pallas_kernels
    kernel: Callable  # takes config too
    xla: Callable
    letters: str  # arguments
    num_arrays: int  # [R, C] in the dtype of x: each input read once, each result written once
    other_bytes: int = 0  # an element of [R, C], of arrays of bytes
    compared: Callable = jax.tree.leaves  # of the results, what is held against the oracle's
    oracle: Callable | None = None  # of fp32 arguments; ``xla`` if none


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_inputs(workload: RowWorkload, dtype: str) -> dict[str, jax.Array]:
    """All arguments by letter."""
    made = arrays(workload, jax.random.key(0), dtype)
    x, keys = made["x"], jax.random.split(jax.random.key(7), 4)
    return {
        "x": x,
        "d": made["d_y"],
        "s": made["scale"],
        "y": softmax_reference(x),
        "r": jax.random.normal(keys[0], x.shape, x.dtype),
        "e": jax.random.normal(keys[1], x.shape, x.dtype),
        "m": jax.random.bernoulli(keys[2], 0.5, x.shape),
        "b": 0.1 * jax.random.normal(keys[3], x.shape[1:], jnp.float32),
    }


def _form(op: str, residual: bool, x: jax.Array) -> NormForm:
    layer = op == "layer_norm"
    return NormForm(
        columns=x.shape[1], epsilon=EPSILON, centered=layer, biased=layer, residual=residual,
        dtype=x.dtype,
    )  # fmt: skip


def _norms(op: str, *, residual: bool) -> tuple[Callable, Callable, Callable, Callable]:
    """Kernel and XLA, forward and gradient."""
    layer = op == "layer_norm"
    reference = layer_norm_reference if layer else rms_norm_reference
    num_inputs = 1 + residual
    form = functools.partial(_form, op, residual)

    def kernel(*args: jax.Array, config=None):
        return norm.norm(form(args[0]), args[:num_inputs], args[num_inputs:], config=config)

    def xla(*args: jax.Array):
        x = sum(args[1:num_inputs], args[0])
        y = reference(x, *args[num_inputs:], epsilon=EPSILON)
        return (y, x) if residual else (y,)

    def kernel_gradient(scale, *inputs: jax.Array, config=None):
        return norm.norm_gradient(form(inputs[0]), inputs, scale, config=config)

    def xla_gradient(scale, x, d_y, *d_x: jax.Array):
        vectors = (scale, jnp.zeros_like(scale)) if layer else (scale,)
        got, *rest = jax.vjp(functools.partial(reference, epsilon=EPSILON), x, *vectors)[1](d_y)
        return sum(d_x, got), *rest

    return kernel, xla, kernel_gradient, xla_gradient


def _norms_fp8(op: str, *, residual: bool) -> Op:
    """Rounded to e4m3: compared as fp32 and by their scales with the norm that is not rounded."""
    layer = op == "layer_norm"
    num_inputs = 1 + residual
    form = functools.partial(_form, op, residual)

    def kernel(*args: jax.Array, config=None):
        inputs, vectors = args[:num_inputs], args[num_inputs:]
        return fp8.hopper_norm_fp8(form(args[0]), inputs, vectors, config=config)

    def xla(*args: jax.Array):
        return fp8.plain_norm_fp8(form(args[0]), args[:num_inputs], args[num_inputs:])

    @jax.jit
    def compared(results):
        values, *sums, scale = results
        return values.astype(jnp.float32) * scale[:, None], *sums, scale

    def oracle(*args: jax.Array):
        x = sum(args[1:num_inputs], args[0])
        reference = layer_norm_reference if layer else rms_norm_reference
        y = reference(x, *args[num_inputs:], epsilon=EPSILON)
        return (y, x, fp8.to_fp8(y).scale) if residual else (y, fp8.to_fp8(y).scale)

    return Op(
        folder="norm", kernel=kernel, xla=xla, compared=compared, oracle=oracle,
        letters="xr"[:num_inputs] + ("sb" if layer else "s"), num_arrays=3 if residual else 1,
        other_bytes=1,
    )  # fmt: skip


def _log_gradient(x: jax.Array, d_y: jax.Array) -> jax.Array:
    return jax.vjp(log_softmax_reference, x)[1](d_y)[0]


def _all_norms() -> dict[str, Op]:
    ops = {}
    for residual in (False, True):
        for op, vectors in (("rms_norm", "s"), ("layer_norm", "sb")):
            kernel, xla, kernel_gradient, xla_gradient = _norms(op, residual=residual)
            name = op + "+residual" * residual
            ops[name] = Op(
                folder="norm", kernel=kernel, xla=xla, letters="xr"[: 1 + residual] + vectors,
                num_arrays=4 if residual else 2,
            )  # fmt: skip
            ops[name + "_fp8"] = _norms_fp8(op, residual=residual)
            ops[name + "_gradient"] = Op(
                folder="norm", kernel=kernel_gradient, xla=xla_gradient,
                letters="sxde"[: 3 + residual], num_arrays=4 if residual else 3,
            )  # fmt: skip
    return ops


OPS = {
    "softmax": Op(
        folder="softmax", kernel=softmax.softmax, xla=softmax_reference, letters="x", num_arrays=2
    ),
    "softmax_gradient": Op(
        folder="softmax", kernel=softmax.softmax_gradient, xla=softmax_gradient_reference,
        letters="yd", num_arrays=3,
    ),
    **_all_norms(),
    "log_softmax": Op(
        folder="softmax", kernel=functools.partial(softmax.softmax, log=True),
        xla=log_softmax_reference, letters="x", num_arrays=2,
    ),
    "log_softmax_gradient": Op(
        folder="softmax", kernel=softmax.log_softmax_gradient, xla=_log_gradient, letters="xd",
        num_arrays=3,
    ),
    "masked_softmax": Op(
        folder="softmax", kernel=softmax.softmax, xla=softmax_reference, letters="xm", num_arrays=2,
        other_bytes=1,
    ),
}  # fmt: skip
