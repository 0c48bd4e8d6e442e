"""Norms whose result is e4m3 with one scale a row: the public functions. For inference.

Dims: R row, C column.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.varying import results_vary, vary_alike
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.apply import apply_rows
from pallas_kernels.rows.formula import RowCall

from . import api, fp8_formula
from .formulas import NormForm, RowArrays
from .fp8_formula import Fp8Rows, to_fp8


def rms_norm_fp8(
    x: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float,
    residual: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> Fp8Rows | tuple[Fp8Rows, jax.Array]:
    """``rms_norm`` in fp32, rounded to e4m3 with one fp32 scale a row; it has no gradient.

    Args:
        x, scale, epsilon, residual, implementation, num_devices: as in ``rms_norm``.

    Returns:
        The norm, or with a residual (norm of the sum, sum in the dtype of ``x``).

    Raises:
        InputError: as ``rms_norm``.
        UnsupportedError: as ``rms_norm``, or a gradient is taken.

    Examples:
        >>> rows = pallas_kernels.rms_norm_fp8(jnp.ones((2, 4)), jnp.ones(4), epsilon=0.0)
        >>> rows.values.dtype, rows.scale.shape, rows.dequantized()[0, 0].item()
        (dtype(float8_e4m3fn), (2,), 1.0)
    """
    vectors = (scale,)
    return _checked("rms_norm", x, vectors, epsilon, residual, implementation, num_devices)


def layer_norm_fp8(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: float,
    residual: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> Fp8Rows | tuple[Fp8Rows, jax.Array]:
    """``layer_norm`` in fp32, rounded to e4m3 with one fp32 scale a row; it has no gradient.

    Args:
        bias: [C], floats, or none.
        x, scale, epsilon, residual, implementation, num_devices: as in ``rms_norm``.

    Returns:
        As ``rms_norm_fp8``.

    Raises:
        InputError, UnsupportedError: as ``rms_norm_fp8``.

    Examples:
        >>> rows = pallas_kernels.layer_norm_fp8(jnp.ones((2, 4)), jnp.ones(4), epsilon=1e-5)
        >>> rows.dequantized().shape
        (2, 4)
    """
    vectors = (scale,) if bias is None else (scale, bias)
    return _checked("layer_norm", x, vectors, epsilon, residual, implementation, num_devices)


def hopper_norm_fp8(
    norm: NormForm, inputs_RC: RowArrays, vectors_C: RowArrays, *, config=None
) -> tuple[jax.Array, ...]:
    """Values e4m3, the sum if there is a residual, and scales fp32 [R]; vectors are fp32."""
    formula = fp8_formula.forward(norm)
    return apply_rows(formula, inputs_RC, vectors_C=vectors_C, config=config)[0]


def plain_norm_fp8(norm: NormForm, inputs: RowArrays, vectors: RowArrays) -> tuple[jax.Array, ...]:
    """The same in plain jnp, of any leading dims."""
    x = sum(inputs[1:], inputs[0])
    y = to_fp8(api.reference_of(norm)(x.astype(jnp.float32), *vectors, epsilon=norm.epsilon))
    return (y.values, x, y.scale) if norm.residual else (y.values, y.scale)


def _checked(
    op: str,
    x: jax.Array,
    vectors: RowArrays,
    epsilon: float,
    residual: jax.Array | None,
    implementation: str,
    num_devices: int,
) -> Fp8Rows | tuple[Fp8Rows, jax.Array]:
    norm, inputs = api.checked(op, x, vectors, epsilon, residual)
    inputs = tuple(dispatch.as_rows(a) for a in inputs)
    call = RowCall.of(fp8_formula.forward(norm), inputs, vectors)
    case = dispatch.Case(
        op="norm", form=op + "+residual" * norm.residual + "_fp8", direction="forward",
        rows=inputs[0].shape[0], call=call,
    )  # fmt: skip
    chosen = dispatch.choose(implementation, case, tuned=api.TUNED, num_devices=num_devices)
    results = _norm(chosen, norm, *vary_alike((inputs, vectors)))
    y = Fp8Rows(values=results[0].reshape(x.shape), scale=results[-1].reshape(x.shape[:-1]))
    return (y, results[1].reshape(x.shape)) if norm.residual else y


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _norm(
    chosen: str, norm: NormForm, inputs: RowArrays, vectors: RowArrays
) -> tuple[jax.Array, ...]:
    if chosen != "hopper":
        return plain_norm_fp8(norm, inputs, vectors)
    # vmap over a kernel is a loop: what is folded into the rows beforehand is faster.
    kernel = jax.custom_batching.sequential_vmap(
        results_vary(functools.partial(hopper_norm_fp8, norm))
    )
    return kernel(inputs, tuple(v.astype(jnp.float32) for v in vectors))


@_norm.defjvp
def _refuse(chosen: str, norm: NormForm, primals, tangents):
    del chosen, primals, tangents
    op = "layer_norm" if norm.centered else "rms_norm"
    raise UnsupportedError(f"{op}_fp8 is for inference and has no gradient: train with {op}")
