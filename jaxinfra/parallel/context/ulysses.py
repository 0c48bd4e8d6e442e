"""Ulysses: heads instead of tokens on each device while attention runs (Jacobs et al. 2023).

An all-to-all gives each of P devices N/P heads of the whole sequence; attention is local, by any
implementation; a second one brings the tokens back. P must divide the key/value heads of a tensor
shard.

Bytes a device sends: (2 N + 2 K) t H b (P-1)/P forward, as many backward: against the ring's
2 K t H b (P-1), less where P > (N + K)/K. Nothing overlaps them within a layer.

Dims: B batch, t tokens of a device, T of the sequence, N query heads, n = N/P, K key/value heads,
k = K/P, H head width.
"""

import jax

from jaxinfra.core.errors import ConfigError
from jaxinfra.parallel.collectives import all_gather, all_to_all, num_devices
from jaxinfra.parallel.context.zigzag import chunks_in_sequence, chunks_in_zigzag


def require_heads(num_kv_heads: int, num_shards: int) -> None:
    """Raises ConfigError where the devices cannot share the key/value heads equally."""
    if num_kv_heads % num_shards:
        raise ConfigError(
            f"context_method=ulysses spreads {num_kv_heads} key/value heads (of a tensor shard) "
            f"over context={num_shards} devices, which does not divide; choose "
            "context_method=ring, or a context size that divides"
        )


def heads_to_tokens(out_BTnH: jax.Array, axis: str) -> jax.Array:
    """All heads of this device's tokens, [B, t, N, H] in zig-zag order."""
    out_BTnH = chunks_in_zigzag(out_BTnH, num_devices(axis))
    return all_to_all(out_BTnH, axis, split_dim=1, concat_dim=2)


def tokens_to_heads(x_BtNH: jax.Array, axis: str) -> jax.Array:
    """This device's heads of all tokens, [B, T, n, H] in the sequence's order."""
    x_BTnH = all_to_all(x_BtNH, axis, split_dim=2, concat_dim=1)
    return chunks_in_sequence(x_BTnH, num_devices(axis))


def all_documents(ids_Bt: jax.Array | None, axis: str) -> jax.Array | None:
    """Documents of all tokens, [B, T] in the sequence's order."""
    if ids_Bt is None:
        return None
    return chunks_in_sequence(all_gather(ids_Bt, axis, dim=1), num_devices(axis))
