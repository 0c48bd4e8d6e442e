"""Ulysses: heads instead of tokens on each device while attention runs (Jacobs et al. 2023).

An all-to-all gives each of P devices N/P heads of the whole sequence; attention is local, by any
implementation; a second one brings the tokens back. P must divide the key/value heads of a tensor
shard.

Bytes a device sends: (2 N + 2 K) t H b (P-1)/P forward, as many backward: against the ring's
2 K t H b (P-1), less where P > (N + K)/K. Nothing overlaps them within a layer.

Dims: B batch, t tokens of a device, T of the sequence, N query heads, n = N/P, K key/value heads,
k = K/P, H head width.
"""

from jaxtyping import Array, Float, Int32

from jaxinfra.errors import ConfigError
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


def heads_to_tokens(out_BTnH: Float[Array, "B T n H"], axis: str) -> Float[Array, "B t N H"]:
    """All heads of this device's tokens, in zig-zag order."""
    out_BTnH = chunks_in_zigzag(out_BTnH, num_devices(axis))
    return all_to_all(out_BTnH, axis, split_dim=1, concat_dim=2)


def tokens_to_heads(x_BtNH: Float[Array, "B t N H"], axis: str) -> Float[Array, "B T n H"]:
    """This device's heads of all tokens, in the sequence's order."""
    x_BTnH = all_to_all(x_BtNH, axis, split_dim=2, concat_dim=1)
    return chunks_in_sequence(x_BTnH, num_devices(axis))


def all_documents(ids_Bt: Int32[Array, "B t"] | None, axis: str) -> Int32[Array, "B T"] | None:
    """Documents of all tokens, in the sequence's order."""
    if ids_Bt is None:
        return None
    return chunks_in_sequence(all_gather(ids_Bt, axis, dim=1), num_devices(axis))
