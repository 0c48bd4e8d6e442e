"""The public ``ordered_matmul``, which validates a call and chooses a kernel by the rows.

Dims: M row, K contracted, N column of the weight.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.few_rows_matmul.choice import unsplit_config
from pallas_kernels.few_rows_matmul.config import MOST_ROWS, ProductShape
from pallas_kernels.few_rows_matmul.hopper_skinny import skinny_matmul
from pallas_kernels.grouped_matmul.hopper import ordered_product, unsupported


def ordered_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Computes ``x @ weight``; a row's bits depend on that row and the weight alone.

    Args:
        x: [M, K], bfloat16 or float16.
        weight: [K, N] of x's dtype, or [N, K] if ``transposed``; K and N are multiples of 64 and at
            least 128.
        transposed: whether the weight's rows are the result's columns.
        out_dtype: dtype that fp32 sums are rounded to once; x's by default.

    Returns:
        [M, N]. It has no gradient.

    Raises:
        InputError: shapes or dtypes that disagree.
        UnsupportedError: another device than a Hopper GPU, or sizes that the kernels lack.

    Examples:
        >>> pallas_kernels.ordered_matmul(jnp.ones((2, 64)), jnp.ones((64, 128)))
        Traceback (most recent call last):
        ...
        pallas_kernels.common.errors.UnsupportedError: ordered_matmul: cpu is not a Hopper GPU ...
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    depth = weight.shape[1 if transposed else 0]
    if x.ndim != 2 or weight.ndim != 2 or weight.dtype != x.dtype or x.shape[1] != depth:
        raise InputError(
            f"x is {x.dtype}{list(x.shape)}, the weight {weight.dtype}{list(weight.shape)}; they "
            f"are [M, K] and {'[N, K]' if transposed else '[K, N]'} of one dtype"
        )
    w_GKN = jax.eval_shape(lambda w: (w.T if transposed else w)[None], weight)
    if reason := unsupported(x, w_GKN):
        raise UnsupportedError(f"ordered_matmul: {reason}")
    if not transposed and dtype == x.dtype and 1 <= x.shape[0] <= MOST_ROWS:
        config = unsplit_config(ProductShape.of(x.shape[0], weight))
        if config is not None:
            y = skinny_matmul(x, weight, swiglu=False, config=config)
            return without_gradient(y, "ordered_matmul has no gradient; multiply apart for it")
    y = ordered_product(x, weight, transposed=transposed, out_dtype=dtype)
    return without_gradient(y, "ordered_matmul has no gradient; multiply apart for it")
