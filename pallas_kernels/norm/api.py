"""The public functions: they validate and choose who computes each direction.

Dims: R row, C column.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import results_vary, vary_alike
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.formula import RowCall

from . import formulas, hopper
from .formulas import NormForm, RowArrays
from .reference import layer_norm_reference, rms_norm_reference

TUNED = pathlib.Path(__file__).parent / "tuned"


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float,
    residual: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``x / sqrt(mean(x**2) + epsilon) * scale`` over the last dim (arXiv 1910.07467).

    Computed in fp32, in the dtype of ``x``. The gradient reads ``x`` and computes the root again.

    Args:
        x: [..., C], floats.
        scale: [C], floats; its gradient is summed in fp32.
        epsilon: added to the mean of squares, at least 0; static.
        residual: as x; added to it before, rounded to its dtype. The sum is returned too.
        implementation: "hopper" (Mosaic GPU; bf16, fp16, fp32; one pass over memory), "xla", or
            "reference", whose gradient is JAX's own; "auto" takes hopper in the directions and
            dtypes and near the shapes where it was measured to be 1.03 times as fast as XLA
            (``tuned``), else xla.
        num_devices: that the compiler spreads the call over; "hopper" runs on one.

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
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias`` over the last dim (1607.06450).

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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    norm, inputs = checked(op, x, vectors, epsilon, residual)
    if implementation == "reference":
        return _as_asked(norm, _plain(norm, inputs, vectors))
    x_RC = dispatch.as_rows(x)

    def chosen(direction: str) -> str:
        is_forward = direction == "forward"
        formula = formulas.forward(norm) if is_forward else formulas.backward(norm)
        call = RowCall.of(
            formula,
            (x_RC,) * (len(inputs) + (not is_forward)),
            vectors if is_forward else vectors[:1],
        )
        form = op + ("+residual" if norm.residual else "")
        case = dispatch.Case(
            op="norm", form=form, direction=direction, rows=x_RC.shape[0], call=call
        )
        return dispatch.choose(implementation, case, tuned=TUNED, num_devices=num_devices)

    inputs = tuple(dispatch.as_rows(a) for a in inputs)
    results = _norm(chosen("forward"), chosen("gradient"), norm, *vary_alike((inputs, vectors)))
    return _as_asked(norm, tuple(a.reshape(x.shape) for a in results))


def checked(
    op: str, x: jax.Array, vectors: RowArrays, epsilon: float, residual: jax.Array | None
) -> tuple[NormForm, RowArrays]:
    """The norm that is asked for, and its addends.

    Raises:
        InputError: shapes, dtypes or epsilon that make no norm.
    """
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
    inputs = (x,) if residual is None else (x, residual)
    norm = NormForm(
        columns=x.shape[-1], epsilon=epsilon, centered=op == "layer_norm",
        biased=len(vectors) == 2, residual=residual is not None, dtype=x.dtype,
    )  # fmt: skip
    return norm, inputs


def reference_of(norm: NormForm):
    """The plain form, of (x, scale, bias if there is one, epsilon)."""
    return layer_norm_reference if norm.centered else rms_norm_reference


def _as_asked(norm: NormForm, results: RowArrays) -> jax.Array | tuple[jax.Array, jax.Array]:
    return (results[0], results[1]) if norm.residual else results[0]


def _plain(norm: NormForm, inputs: RowArrays, vectors: RowArrays) -> RowArrays:
    x = sum(inputs[1:], inputs[0])
    y = reference_of(norm)(x, *vectors, epsilon=norm.epsilon)
    return (y, x) if norm.residual else (y,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _norm(
    forward: str, backward: str, norm: NormForm, inputs: RowArrays, vectors: RowArrays
) -> RowArrays:
    del backward
    if forward == "hopper":
        return _hopper(norm)(inputs, tuple(v.astype(jnp.float32) for v in vectors))
    return _plain(norm, inputs, vectors)


def _keep_inputs(
    forward: str, backward: str, norm: NormForm, inputs: RowArrays, vectors: RowArrays
) -> tuple[RowArrays, tuple[jax.Array, RowArrays]]:
    results = _norm(forward, backward, norm, inputs, vectors)
    return results, (results[1] if norm.residual else inputs[0], vectors)


def _from_inputs(
    forward: str,
    backward: str,
    norm: NormForm,
    kept: tuple[jax.Array, RowArrays],
    d_results: RowArrays,
) -> tuple[RowArrays, RowArrays]:
    del forward
    x_RC, vectors = kept
    if backward == "hopper":
        d_x_RC, *d_vectors = _hopper_gradient(norm)(
            (x_RC, *d_results), vectors[0].astype(jnp.float32)
        )
    else:
        of = functools.partial(reference_of(norm), epsilon=norm.epsilon)
        d_x_RC, *d_vectors = jax.vjp(of, x_RC, *vectors)[1](d_results[0])
        d_x_RC = sum(d_results[1:], d_x_RC)
    d_vectors = tuple(d.astype(v.dtype) for d, v in zip(d_vectors, vectors, strict=True))
    return (d_x_RC,) * (1 + norm.residual), d_vectors


_norm.defvjp(_keep_inputs, _from_inputs)


# vmap over a kernel is a loop: what is folded into the rows beforehand is faster.
def _hopper(norm: NormForm):
    return jax.custom_batching.sequential_vmap(
        results_vary(lambda inputs, vectors: hopper.norm(norm, inputs, vectors))
    )


def _hopper_gradient(norm: NormForm):
    return jax.custom_batching.sequential_vmap(
        results_vary(lambda inputs, scale_C: hopper.norm_gradient(norm, inputs, scale_C))
    )
