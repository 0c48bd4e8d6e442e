"""The public norms, which validate inputs and choose an implementation for forward and gradient.

The model uses XLA's norms, since XLA fuses them with the residual before and the cast after.

Dims: R row, C column.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.formula import Formula, RowCall

from .formulas import NormForm, RowArrays, backward, forward, hopper, hopper_gradient
from .reference import layer_norm_reference, rms_norm_reference


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float,
    residual: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes RMSNorm, ``x / sqrt(mean(x**2) + epsilon) * scale``, over the last dim (1910.07467).

    The norm is computed in fp32 and has the dtype of ``x``. The gradient recomputes it from ``x``.

    Args:
        x: [..., C], floats.
        scale: [C], floats; its gradient is summed in fp32.
        epsilon: added to the mean of squares, at least 0; static.
        residual: shaped as x; added to x first, rounded to x's dtype. The sum is returned too.
        implementation: "hopper" (Mosaic GPU; bf16, fp16, fp32; one pass over memory), "xla", or
            "reference", whose gradient is JAX's own; "auto" takes hopper where the kernel was
            measured to be faster than XLA (``rows.dispatch``), else xla.
        num_devices: number of devices that the call is partitioned over; "hopper" needs 1.

    Returns:
        The norm, or with a residual (norm of the sum, sum).

    Raises:
        InputError: shapes, dtypes or epsilon that make no norm, or an unknown implementation.
        UnsupportedError: the Hopper kernels are named and cannot compute this call.

    Examples:
        >>> x = jnp.array([[3.0, -3.0, 3.0, -3.0]])
        >>> pallas_kernels.rms_norm(x, jnp.ones(4), epsilon=0.0).tolist()
        [[1.0, -1.0, 1.0, -1.0]]
    """
    return _checked("rms_norm", x, (scale,), epsilon, residual, implementation, num_devices)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: float,
    residual: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes LayerNorm over the last dim (arXiv 1607.06450): ``(x - mean) / sqrt(variance +
    epsilon) * scale + bias``.

    Args:
        bias: [C], floats, or none.
        x, scale, epsilon, residual, implementation, num_devices: as in ``rms_norm``.

    Returns:
        As ``rms_norm``.

    Raises:
        InputError, UnsupportedError: as ``rms_norm``.

    Examples:
        >>> x = jnp.array([[5.0, 1.0, 5.0, 1.0]])
        >>> pallas_kernels.layer_norm(x, jnp.ones(4), epsilon=0.0).tolist()
        [[1.0, -1.0, 1.0, -1.0]]
    """
    vectors = (scale,) if bias is None else (scale, bias)
    return _checked("layer_norm", x, vectors, epsilon, residual, implementation, num_devices)


def _checked(
    op: str,
    x: jax.Array,
    vectors: RowArrays,
    epsilon: float,
    residual: jax.Array | None,
    implementation: str,
    num_devices: int,
) -> Any:
    dispatch.check_input(op, x)
    for name, vector in zip(("scale", "bias"), vectors, strict=False):
        if vector.shape != x.shape[-1:] or not jnp.issubdtype(vector.dtype, jnp.floating):
            raise InputError(
                f"{name} is {vector.dtype}{list(vector.shape)}; x asks for floats [{x.shape[-1]}]"
            )
    if not 0.0 <= epsilon < float("inf"):
        raise InputError(f"epsilon={epsilon}; it must be finite and not negative")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise InputError(
            f"residual is {residual.dtype}{list(residual.shape)}; it is added to x, "
            f"{x.dtype}{list(x.shape)}, and must be like it"
        )
    norm = NormForm(
        columns=x.shape[-1], epsilon=epsilon, centered=op == "layer_norm",
        biased=len(vectors) == 2, residual=residual is not None, dtype=x.dtype,
    )  # fmt: skip
    inputs = (x,) if residual is None else (x, residual)
    if implementation == "reference":
        results = _plain(norm, inputs, vectors)
        return results if norm.residual else results[0]
    inputs = tuple(map(dispatch.as_rows, inputs))
    form = op + "+residual" * norm.residual

    def chosen(direction: str, formula: Formula, num_inputs: int, num_vectors: int) -> str:
        call = RowCall.of(formula, inputs[:1] * num_inputs, vectors[:num_vectors])
        rows = inputs[0].shape[0]
        return dispatch.choose(implementation, form, direction, rows, call, num_devices=num_devices)

    ways = (
        chosen("forward", forward(norm), len(inputs), len(vectors)),
        chosen("gradient", backward(norm), len(inputs) + 1, 1),
    )
    results = tuple(a.reshape(x.shape) for a in _norm(*ways, norm, *vary_alike((inputs, vectors))))
    return results if norm.residual else results[0]


def _plain(norm: NormForm, inputs: RowArrays, vectors: RowArrays) -> RowArrays:
    x = sum(inputs[1:], inputs[0])
    y = _reference(norm)(x, *vectors)
    return (y, x) if norm.residual else (y,)


def _reference(norm: NormForm) -> Callable[..., jax.Array]:
    reference = layer_norm_reference if norm.centered else rms_norm_reference
    return functools.partial(reference, epsilon=norm.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _norm(
    ahead: str, back: str, norm: NormForm, inputs: RowArrays, vectors: RowArrays
) -> RowArrays:
    del back
    if ahead == "hopper":
        kernel = dispatch.looped(functools.partial(hopper, norm))
        return kernel(inputs, tuple(v.astype(jnp.float32) for v in vectors))
    return _plain(norm, inputs, vectors)


def _keep_inputs(
    ahead: str, back: str, norm: NormForm, inputs: RowArrays, vectors: RowArrays
) -> tuple[RowArrays, tuple[jax.Array, RowArrays]]:
    results = _norm(ahead, back, norm, inputs, vectors)
    return results, (results[1] if norm.residual else inputs[0], vectors)


def _from_inputs(
    ahead: str, back: str, norm: NormForm, kept: tuple[jax.Array, RowArrays], d_results: RowArrays
) -> tuple[RowArrays, RowArrays]:
    del ahead
    x_RC, vectors = kept
    if back == "hopper":
        kernel = dispatch.looped(functools.partial(hopper_gradient, norm))
        d_x_RC, *d_vectors = kernel((x_RC, *d_results), vectors[0].astype(jnp.float32))
    else:
        d_x_RC, *d_vectors = jax.vjp(_reference(norm), x_RC, *vectors)[1](d_results[0])
        d_x_RC = sum(d_results[1:], d_x_RC)
    d_vectors = tuple(d.astype(v.dtype) for d, v in zip(d_vectors, vectors, strict=True))
    return (d_x_RC,) * (1 + norm.residual), d_vectors


_norm.defvjp(_keep_inputs, _from_inputs)
