"""Norms and softmaxes of rows, each summed in an order that depends on its length only.

On a Hopper GPU the kernels over rows compute them, whose order follows the length. Elsewhere a row
is summed in a binary tree.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from jaxinfra.numerics.exact import pinned
from pallas_kernels.common import device
from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.rows.choice import LONGEST_WHOLE


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def ordered_sum(x: jax.Array, num_dims: int = 1) -> jax.Array:
    """Sums over the last dims, kept with size 1, in a binary tree of halves.

    No compiler changes the order of such sums, whatever rows it divides among devices.
    """
    leading = x.shape[: x.ndim - num_dims]
    sums = x.reshape(*leading, -1)
    width = sums.shape[-1]
    half = 1 << max(width - 1, 0).bit_length()
    sums = jnp.pad(sums, [(0, 0)] * len(leading) + [(0, half - width)])
    sums = jax.lax.optimization_barrier(sums)  # a product before it is rounded
    while half > 1:
        half //= 2
        sums = jax.lax.optimization_barrier(sums[..., :half] + sums[..., half:])
    return sums.reshape(*leading, *(1,) * num_dims)


def _sum_forward(x: jax.Array, num_dims: int) -> tuple[jax.Array, jax.Array]:
    return ordered_sum(x, num_dims), jnp.zeros((0, *x.shape), x.dtype)


def _sum_backward(num_dims: int, like: jax.Array, d_sum: jax.Array) -> tuple[jax.Array]:
    del num_dims
    return (jnp.broadcast_to(d_sum, like.shape[1:]),)


ordered_sum.defvjp(_sum_forward, _sum_backward)


def ordered_mean(x: jax.Array, num_dims: int) -> jax.Array:
    """Computes the mean over the last dims, kept with size 1."""
    count = math.prod(x.shape[x.ndim - num_dims :])
    return pinned(ordered_sum(x, num_dims) / count)


def kernel_rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array | None:
    """Computes RMSNorm over the last dim in x's dtype by a Hopper kernel; None without one."""
    if not device.target().is_gpu:
        return None
    y = pallas_kernels.rms_norm(whole_tiles(x), scale, epsilon=epsilon, implementation="hopper")
    assert isinstance(y, jax.Array), "no residual is given"
    return y[: math.prod(x.shape[:-1])].reshape(x.shape)


def whole_tiles(x: jax.Array) -> jax.Array:
    """Returns x as rows, of which short ones fill the kernels' tiles: these have several per warp,
    and other tiles where their number does not divide.
    """
    width = x.shape[-1]
    rows_MD = x.reshape(-1, width)
    if width > LONGEST_WHOLE:
        return rows_MD
    multiple = WARPS * (LONGEST_WHOLE // width)
    return jnp.pad(rows_MD, ((0, -rows_MD.shape[0] % multiple), (0, 0)))


def ordered_logsumexp(x: jax.Array) -> jax.Array:
    """Computes log(sum(exp(x))) over the last dim, kept with size 1."""
    if device.target().is_gpu:
        total_M = pallas_kernels.logsumexp(whole_tiles(x), implementation="hopper")
        return total_M[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], 1)
    largest = jnp.max(x, axis=-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest + jnp.log(ordered_sum(jnp.exp(x - largest)))


LOGSUMEXP_NAME = "ordered_logsumexp"
"""Checkpoint name of what the gradient of ``ordered_log_probability`` needs besides the logits."""


@jax.custom_vjp
def ordered_log_probability(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Computes the log probability of one id, [...], under logits [..., V]."""
    return _log_probability(logits, ids)[0]


def _log_probability(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = ordered_logsumexp(logits)
    return (jnp.take_along_axis(logits, ids[..., None], axis=-1) - total)[..., 0], total


def _log_probability_forward(logits: jax.Array, ids: jax.Array):
    value, total = _log_probability(logits, ids)
    return value, (logits, ids, checkpoint_name(total, LOGSUMEXP_NAME))


def _log_probability_backward(kept: tuple[jax.Array, ...], d_value: jax.Array):
    logits, ids, total = kept
    is_id = jax.lax.broadcasted_iota(ids.dtype, logits.shape, ids.ndim) == ids[..., None]
    return (is_id.astype(logits.dtype) - jnp.exp(logits - total)) * d_value[..., None], None


ordered_log_probability.defvjp(_log_probability_forward, _log_probability_backward)


def ordered_softmax(x: jax.Array) -> jax.Array:
    """Computes the softmax over the last dim."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    weights = jnp.exp(x - largest)
    return weights / ordered_sum(weights)
