"""Ring collectives written from single sends, as what a library does can be read and counted.

All-reduce is reduce-scatter, then all-gather: 2 (N-1) steps in which each device sends D/N to the
next one, 2 D (N-1)/N in all, nearly independent of N (Patarasuk and Yuan 2009). XLA's own
collectives run the same rings, and trees for small arrays, inside one kernel: use those, and these
to explain and to check them, or where a step's work must fit between two sends.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxinfra.errors import ConfigError
from jaxinfra.parallel.collectives import Axis, num_devices, rank, shift


def ring_reduce_scatter(x: jax.Array, axis: Axis, *, dim: int = 0) -> jax.Array:
    """Device i gets the i-th of N parts of the sum: N-1 steps, sends D (N-1)/N.

    A part starts at the device after its owner and goes once round, each device adding its own; so
    that the order of a part's sum is its owner's place in the ring.
    """
    size, me = num_devices(axis), rank(axis)
    parts = _parts(x, size, dim)
    total = _part(parts, me - 1)
    for step in range(1, size):
        total = shift(total, axis) + _part(parts, me - 1 - step)
    return total


def ring_all_gather(x: jax.Array, axis: Axis, *, dim: int = 0) -> jax.Array:
    """All blocks side by side on every device: N-1 steps, sends D (N-1)."""
    size, me = num_devices(axis), rank(axis)
    # Derived from x: a constant would not vary over the mesh axes as its updates do.
    blocks = jnp.broadcast_to(x, (size, *x.shape))
    for step in range(1, size):
        x = shift(x, axis)
        blocks = jax.lax.dynamic_update_index_in_dim(blocks, x, (me - step) % size, 0)
    return jnp.concatenate(list(blocks), axis=dim)


def ring_all_reduce(
    x: Shaped[Array, "*dims"], axis: Axis, *, dim: int = 0
) -> Shaped[Array, "*dims"]:
    """The sum on every device: 2 (N-1) steps, sends 2 D (N-1)/N; ``dim`` must divide by N."""
    return ring_all_gather(ring_reduce_scatter(x, axis, dim=dim), axis, dim=dim)


def _parts(x: jax.Array, size: int, dim: int) -> jax.Array:
    if x.shape[dim] % size:
        raise ConfigError(
            f"dim {dim} of {x.shape} does not divide into {size} parts, one per device; pad it"
        )
    return jnp.stack(jnp.split(x, size, axis=dim))


def _part(parts: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(parts, index % parts.shape[0], 0, keepdims=False)
