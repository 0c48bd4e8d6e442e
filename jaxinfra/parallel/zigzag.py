"""Zig-zag order: the assignment of a sequence's tokens to the devices that shard it.

A sequence is cut into 2P chunks for P devices; device i has chunks i and 2P-1-i (Llama 3, section
3.3.2; "zigzag" ring attention). In causal attention chunk j sees j + 1 chunks. So every device
has (i + 1) + (2P - i) = 2P + 1 blocks of work, independent of i.

Sequences are reordered once, on the host (``to_zigzag``), with all arrays that have one element per
token: ids, targets, weights, documents and positions. From then on, a token's index is not its
position in the sequence; only attention depends on the order.

Dims: B batch, T position in the sequence or in zig-zag order.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int64, Shaped

from jaxinfra.errors import ConfigError


def chunk_length(length: int, num_shards: int) -> int:
    """Returns the tokens per chunk; raises ConfigError if the length is no multiple of 2P."""
    if length % (2 * num_shards):
        raise ConfigError(
            f"a sequence of {length} tokens does not divide into 2 x context={num_shards} equal "
            f"chunks; make it a multiple of {2 * num_shards}"
        )
    return length // (2 * num_shards)


def chunk_order(num_shards: int) -> tuple[int, ...]:
    """Returns chunks in zig-zag order, device by device: 0, 2P-1, 1, 2P-2, ..."""
    return tuple(
        chunk for shard in range(num_shards) for chunk in (shard, 2 * num_shards - 1 - shard)
    )


def zigzag_indices(length: int, num_shards: int) -> Int64[np.ndarray, "T"]:
    """Returns the position in the sequence of each token in zig-zag order."""
    chunks = np.arange(length).reshape(2 * num_shards, chunk_length(length, num_shards))
    return chunks[list(chunk_order(num_shards))].reshape(-1)


def to_zigzag(
    x_BT: Shaped[np.ndarray, "B T *rest"], num_shards: int
) -> Shaped[np.ndarray, "B T *rest"]:
    """Puts the tokens of the host's rows in zig-zag order."""
    return x_BT[:, zigzag_indices(x_BT.shape[1], num_shards)]


def from_zigzag(
    x_BT: Shaped[np.ndarray, "B T *rest"], num_shards: int
) -> Shaped[np.ndarray, "B T *rest"]:
    """Reorders the host's rows from zig-zag to natural order: the inverse of ``to_zigzag``."""
    return x_BT[:, np.argsort(zigzag_indices(x_BT.shape[1], num_shards))]


def chunks_in_sequence(
    x_BT: Shaped[Array, "B T *rest"], num_shards: int
) -> Shaped[Array, "B T *rest"]:
    """Reorders whole sequences from zig-zag to natural order, by a copy on the device."""
    slots = jnp.split(x_BT, 2 * num_shards, axis=1)
    return jnp.concatenate([slots[i] for i in np.argsort(chunk_order(num_shards))], axis=1)


def chunks_in_zigzag(
    x_BT: Shaped[Array, "B T *rest"], num_shards: int
) -> Shaped[Array, "B T *rest"]:
    """Reorders whole sequences from natural to zig-zag order: inverse of ``chunks_in_sequence``."""
    chunks = jnp.split(x_BT, 2 * num_shards, axis=1)
    return jnp.concatenate([chunks[i] for i in chunk_order(num_shards)], axis=1)
