"""Products of activations and weights whose rows have the same bits however many there are.

Libraries choose an order of the sum by the shape of the whole product. Here every row is part of a
tile of a fixed number of rows, and all tiles are products of one shape.

Dims: M row, R row of a tile, K width in, N width out.
"""

import functools
import math

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.exact import by_tiles, rounded
from pallas_kernels.common import device
from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum


def can_pack() -> bool:
    """Tells whether columns of a product have the same bits beside other columns."""
    return device.target().is_gpu


def ordered_einsum(spec: str, x: jax.Array, weight: jax.Array, *, out: jnp.dtype) -> jax.Array:
    """Computes ``einsum(spec, x, weight)`` of operands of one dtype, with sums in fp32.

    An element depends on its row of x and its column of the weight alone. It has no gradient.

    Args:
        spec: indices that x and the weight share, and the result lacks, are x's last and the
            weight's in any places; those that all three share are x's and the result's first.
        out: dtype of the result.
    """
    operands, out_dims = spec.split("->")
    x_dims, weight_dims = operands.split(",")
    if x_dims[0] in weight_dims and x_dims[0] in out_dims:  # a weight for each
        at = weight_dims.index(x_dims[0])
        one = f"{x_dims[1:]},{weight_dims[:at]}{weight_dims[at + 1 :]}->{out_dims[1:]}"

        def each(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            return ordered_einsum(one, *pair, out=out)

        return jax.lax.map(each, (x, jnp.moveaxis(weight, at, 0)))
    inner = [dim for dim in x_dims if dim not in out_dims]
    rows = [dim for dim in x_dims if dim in out_dims]
    columns = [dim for dim in weight_dims if dim in out_dims]
    assert [*x_dims] == rows + inner, spec
    assert [*out_dims] == rows + columns, spec
    sizes = dict(zip(weight_dims, weight.shape, strict=True))
    row_shape = x.shape[: len(rows)]
    shape = (*row_shape, *(sizes[dim] for dim in columns))
    x_MK = x.reshape(math.prod(row_shape), -1)
    if device.target().is_gpu:
        is_transposed = [*weight_dims] == columns + inner
        assert is_transposed or [*weight_dims] == inner + columns, spec
        width = math.prod(sizes[dim] for dim in columns)
        matrix = weight.reshape(width, -1) if is_transposed else weight.reshape(-1, width)
        try:
            y_MN = pallas_kernels.ordered_matmul(
                x_MK, matrix, transposed=is_transposed, out_dtype=out
            )
        except pallas_kernels.UnsupportedError as error:
            raise UnsupportedError(f"numerics=exact: {error}; set numerics=fast") from error
        return y_MN.reshape(shape)
    weight_KN = jnp.einsum(f"{weight_dims}->{''.join(inner + columns)}", weight)
    weight_KN = weight_KN.reshape(x_MK.shape[1], -1)
    product = functools.partial(pinned_einsum, "RK,KN->RN", result=ACCUMULATOR)
    y_MN = by_tiles(lambda x_RK: product(x_RK, jax.lax.optimization_barrier(weight_KN)), x_MK)
    return rounded(y_MN, out).reshape(shape)
