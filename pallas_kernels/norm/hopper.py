"""Norms and their gradients on a Hopper GPU, one pass over memory each. Dims: R row, C column."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.rows.apply import apply_rows
from pallas_kernels.rows.config import RowConfig

from . import formulas
from .formulas import NormForm


def norm(
    form: NormForm,
    inputs_RC: Sequence[jax.Array],
    vectors_C: Sequence[jax.Array],
    *,
    config: RowConfig | None = None,
) -> tuple[jax.Array, ...]:
    """``formulas.forward``: y, and x if it is a sum, in the inputs' dtype; vectors are fp32."""
    return apply_rows(formulas.forward(form), inputs_RC, vectors_C=vectors_C, config=config)[0]


def norm_gradient(
    form: NormForm,
    inputs_RC: Sequence[jax.Array],
    scale_C: jax.Array,
    *,
    config: RowConfig | None = None,
) -> tuple[jax.Array, ...]:
    """``formulas.backward``: d_x in the inputs' dtype, d_scale and d_bias in fp32."""
    results, sums = apply_rows(
        formulas.backward(form), inputs_RC, vectors_C=[scale_C], config=config
    )
    return *results, *(jnp.sum(partials_NC, axis=0) for partials_NC in sums)


def rms_norm(
    x_RC: jax.Array, scale_C: jax.Array, *, epsilon: float, config: RowConfig | None = None
) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale``, in the dtype of ``x``; scale is fp32."""
    form = NormForm(columns=x_RC.shape[1], epsilon=epsilon, dtype=x_RC.dtype)
    return norm(form, [x_RC], [scale_C], config=config)[0]


def rms_norm_gradient(
    x_RC: jax.Array,
    scale_C: jax.Array,
    d_y_RC: jax.Array,
    *,
    epsilon: float,
    config: RowConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, in its dtype, and of the scale, fp32."""
    form = NormForm(columns=x_RC.shape[1], epsilon=epsilon, dtype=x_RC.dtype)
    d_x, d_scale = norm_gradient(form, [x_RC, d_y_RC], scale_C, config=config)
    return d_x, d_scale
