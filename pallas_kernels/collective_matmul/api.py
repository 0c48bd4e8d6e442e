"""The public collective matmuls: validation, choice of an implementation, and gradients.

Dims: B row of the batch, M position on a device, K contraction, N column, D devices of the axis.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.chosen import choose
from pallas_kernels.common.dot import pinned_einsum
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import vary_alike

from . import dispatch, hopper, reference

type CollectiveImplementation = Literal["auto", "hopper", "xla"]

NAMES = ("hopper", "xla")
_MODULES = {"hopper": hopper, "xla": reference}


def all_gather_matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    axis: str,
    transposed: bool = False,
    implementation: CollectiveImplementation = "auto",
) -> tuple[jax.Array, ...]:
    """Computes ``all_gather(x) @ weight`` for each weight, for use inside ``shard_map``.

    Args:
        x: [B, M, K], bfloat16, float16 or float32: this device's positions of each row.
        weights: [K, N] each, or [N, K] if ``transposed``, of any float dtype; rounded to x's before
            the product. N may differ.
        axis: mesh axis whose devices have the other positions. All devices must call alike.
        implementation: "xla" gathers, then multiplies. "hopper" sends x over NVLink while it
            multiplies by the widest weight, on meshes of two devices. "auto" takes "hopper" where a
            measured table says that it is faster; an H200's is shipped.

    Returns:
        [B, D M, N] of each weight, in x's dtype, summed in fp32. The gradient of x is
        ``matmul_reduce_scatter``'s; that of a weight is summed in fp32 and rounded to its dtype.

    Raises:
        InputError: shapes or dtypes that disagree.
        UnsupportedError: "hopper" is named and cannot compute the call.

    Example, on a mesh of one device:
        >>> mesh = jax.make_mesh((1,), ("tensor",))
        >>> x, w = jnp.ones((1, 4, 8)), jnp.ones((8, 2))
        >>> def on_device(x, w):
        ...     return pallas_kernels.all_gather_matmul(x, (w,), axis="tensor")[0]
        >>> specs = dict(in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        >>> jax.shard_map(on_device, mesh=mesh, **specs)(x, w).shape
        (1, 4, 2)
    """
    weights = tuple(weights)
    chosen = _gathers_by(implementation, x, weights, axis=axis, transposed=transposed)
    x, weights = vary_alike((x, weights))
    return _gather(chosen, axis, transposed, x, weights)


def matmul_reduce_scatter(
    factors: tuple[tuple[jax.Array, jax.Array], ...],
    *,
    axis: str,
    transposed: bool = False,
    implementation: CollectiveImplementation = "auto",
) -> jax.Array:
    """Computes ``reduce_scatter(sum(x @ weight))``, for use inside ``shard_map``.

    The sum is over factors and over the devices of the axis, each of which keeps its positions.

    Args:
        factors: (x [B, D M, K], weight [K, N], or [N, K] if ``transposed``); K may differ. Dtypes
            are as in ``all_gather_matmul``.
        axis: mesh axis whose devices have other parts of K. All devices must call alike.
        implementation: "xla" multiplies, then scatters sums. "hopper" sends tiles over NVLink
            while it multiplies others. "auto" is as in ``all_gather_matmul``.

    Returns:
        [B, M, N] in x's dtype. Each device's sum is fp32 and sent in x's dtype. With "hopper" the
        device adds what it receives to its own fp32 sum, in the order of devices behind it, so
        results repeat bit for bit.

    Raises:
        InputError: shapes or dtypes that disagree.
        UnsupportedError: "hopper" is named and cannot compute the call.

    Example, on a mesh of one device:
        >>> mesh = jax.make_mesh((1,), ("tensor",))
        >>> x, w = jnp.ones((1, 4, 8)), jnp.ones((8, 2))
        >>> def on_device(x, w):
        ...     return pallas_kernels.matmul_reduce_scatter(((x, w),), axis="tensor")
        >>> specs = dict(in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        >>> jax.shard_map(on_device, mesh=mesh, **specs)(x, w).shape
        (1, 4, 2)
    """
    factors = tuple((x, w) for x, w in factors)
    _check(list(factors), transposed)
    devices = lax.axis_size(axis)
    for x, _ in factors:
        if x.shape[1] % devices:
            raise InputError(f"{x.shape[1]} positions do not divide over {axis}={devices}")
    call = dispatch.scattering(factors, axis=axis, transposed=transposed)
    chosen = _choose("matmul_reduce_scatter", implementation, call)
    return _scatter(chosen, axis, transposed, vary_alike(factors))


def gathered_product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    axis: str,
    transposed: bool = False,
    implementation: CollectiveImplementation = "auto",
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns ``all_gather_matmul`` and the gathered x [B, D M, K], without a gradient rule.

    It is for callers that have a gradient rule of their own. Arguments and errors are those of
    ``all_gather_matmul``, but weights have x's dtype.
    """
    weights = tuple(weights)
    chosen = _gathers_by(implementation, x, weights, axis=axis, transposed=transposed)
    return _MODULES[chosen].all_gather_product(x, weights, axis=axis, transposed=transposed)


def _gathers_by(
    implementation: str, x: jax.Array, weights: Any, *, axis: str, transposed: bool
) -> str:
    """The implementation of a call that is valid."""
    _check([(x, w) for w in weights], transposed)
    call = dispatch.gathering(x, weights, axis=axis, transposed=transposed)
    return _choose("all_gather_matmul", implementation, call)


def _choose(op: str, implementation: str, call: dispatch.CollectiveCall) -> str:
    if implementation == "auto":
        return dispatch.fastest(op, call)
    return choose(op, implementation, NAMES, call.unsupported)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(chosen: str, axis: str, transposed: bool, x: Any, weights: Any) -> Any:
    return _gather_forward(chosen, axis, transposed, x, weights)[0]


def _gather_forward(chosen: str, axis: str, transposed: bool, x: Any, weights: Any) -> Any:
    products, rows = _MODULES[chosen].all_gather_product(
        x, _rounded(x, weights), axis=axis, transposed=transposed
    )
    return products, (rows, weights)


def _gather_backward(chosen: str, axis: str, transposed: bool, kept: Any, d_out: Any) -> Any:
    rows, weights = kept
    factors = tuple(zip(d_out, _rounded(rows, weights), strict=True))
    dx = _MODULES[chosen].product_reduce_scatter(factors, axis=axis, transposed=not transposed)
    return dx, tuple(
        _weight_gradient(rows, d, w, transposed) for d, w in zip(d_out, weights, strict=True)
    )


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scatter(chosen: str, axis: str, transposed: bool, factors: Any) -> Any:
    rounded = tuple((x, w.astype(x.dtype)) for x, w in factors)
    return _MODULES[chosen].product_reduce_scatter(rounded, axis=axis, transposed=transposed)


def _scatter_forward(chosen: str, axis: str, transposed: bool, factors: Any) -> Any:
    return _scatter(chosen, axis, transposed, factors), factors


def _scatter_backward(chosen: str, axis: str, transposed: bool, factors: Any, d_out: Any) -> Any:
    weights = tuple(w for _, w in factors)
    products, d_rows = _MODULES[chosen].all_gather_product(
        d_out, _rounded(d_out, weights), axis=axis, transposed=not transposed
    )
    return (
        tuple(
            (dx, _weight_gradient(x, d_rows, w, transposed))
            for dx, (x, w) in zip(products, factors, strict=True)
        ),
    )


_scatter.defvjp(_scatter_forward, _scatter_backward)


def _rounded(x: jax.Array, weights: Any) -> tuple[jax.Array, ...]:
    return tuple(w.astype(x.dtype) for w in weights)


def _weight_gradient(x: jax.Array, d: jax.Array, weight: jax.Array, transposed: bool) -> jax.Array:
    return pinned_einsum("BMK,BMN->NK" if transposed else "BMK,BMN->KN", x, d, result=weight.dtype)


def _check(factors: list[tuple[jax.Array, jax.Array]], transposed: bool) -> None:
    """Raises InputError if an x or weight does not fit the others."""
    if not factors:
        raise InputError("no weight: give one or more")
    shape = factors[0][0].shape
    at = 1 if transposed else 0
    for x, w in factors:
        if x.ndim != 3 or w.ndim != 2 or x.shape[:2] != shape[:2] or x.shape[2] != w.shape[at]:
            raise InputError(
                f"x is {list(x.shape)}, the weight {list(w.shape)}: they are [B, M, K] and "
                f"{'[N, K]' if transposed else '[K, N]'}, with B and M alike"
            )
        if x.dtype != factors[0][0].dtype or not jnp.issubdtype(w.dtype, jnp.floating):
            raise InputError(f"x is {x.dtype}, the weight {w.dtype}: all x have one float dtype")
