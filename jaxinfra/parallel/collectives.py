"""Collectives for use inside ``shard_map``, and the bytes that each device sends in them.

``axis`` is one mesh axis or several, outermost first; N is their number of devices. Every function
takes and returns this device's block, of any shape and dtype, and has a gradient. D is the bytes of
a device's block; ``collective_bytes`` computes the bytes that a device sends.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

type Axis = str | tuple[str, ...]
"""Mesh axes that a collective runs over."""

type Groups = tuple[tuple[int, ...], ...]
"""Equal groups of device numbers along some axes; a collective runs within each group."""


def num_devices(axis: Axis) -> int:
    """Returns the number N of devices along these axes, as a Python int."""
    return math.prod(jax.lax.axis_size(name) for name in _names(axis))


def rank(axis: Axis) -> Int32[Array, ""]:
    """Returns this device's number along these axes, 0..N-1."""
    return jax.lax.axis_index(_names(axis))


def all_gather(x: jax.Array, axis: Axis, *, dim: int = 0) -> jax.Array:
    """Gathers all blocks side by side along ``dim``, on every device. Sends D (N-1)."""
    return jax.lax.all_gather(x, _names(axis), axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: Axis, *, dim: int = 0) -> jax.Array:
    """Sums over devices; device i gets the i-th of N parts along ``dim``. Sends D (N-1)/N."""
    return jax.lax.psum_scatter(x, _names(axis), scatter_dimension=dim, tiled=True)


def all_reduce(x: Shaped[Array, "*dims"], axis: Axis) -> Shaped[Array, "*dims"]:
    """Sums over devices, on every device. Sends 2 D (N-1)/N: reduce-scatter, then all-gather."""
    return jax.lax.psum(x, _names(axis))


def all_to_all(
    x: jax.Array,
    axis: Axis,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    groups: Groups | None = None,
) -> jax.Array:
    """Sends part j along ``split_dim`` to device j, and concatenates what arrives.

    Received parts are in the senders' order along ``concat_dim``. Sends D (N-1)/N; with ``groups``,
    N is the number of devices in a group.
    """
    return jax.lax.all_to_all(
        x,
        _names(axis),
        split_axis=split_dim,
        concat_axis=concat_dim,
        axis_index_groups=groups,
        tiled=True,
    )


def shift[T](tree: T, axis: Axis) -> T:
    """Returns the arrays of the previous device in the ring. Sends D."""
    size = num_devices(axis)
    permutation = [(source, (source + 1) % size) for source in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, _names(axis), permutation), tree)


def shift_together[T](tree: T, axis: Axis) -> T:
    """Shifts arrays [B, T, ...] of any dtypes in one send; it has no gradient.

    XLA keeps only one collective in flight, so only one of several sends would overlap with a
    computation. Arrays are sent as integers, because a copy of floats may change a NaN's bits.
    """
    arrays, structure = jax.tree.flatten(tree)
    if not arrays:
        return tree
    unit = min(x.dtype.itemsize for x in arrays)
    lanes = [_as_integers(x, unit) for x in arrays]
    received = shift(jnp.concatenate(lanes, axis=2), axis)
    ends = list(itertools.accumulate(x.shape[2] for x in lanes))
    parts = jnp.split(received, ends[:-1], axis=2)
    return structure.unflatten(
        [_from_integers(part, like=x) for part, x in zip(parts, arrays, strict=True)]
    )


def _as_integers(x: jax.Array, itemsize: int) -> jax.Array:
    """The bits of x [B, T, ...] as unsigned integers of this size, [B, T, lanes]."""
    return jax.lax.bitcast_convert_type(x, f"uint{8 * itemsize}").reshape(*x.shape[:2], -1)


def _from_integers(lanes: jax.Array, *, like: jax.Array) -> jax.Array:
    ratio = like.dtype.itemsize // lanes.dtype.itemsize
    shape = like.shape if ratio == 1 else (*like.shape, ratio)
    return jax.lax.bitcast_convert_type(lanes.reshape(shape), like.dtype)


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis
