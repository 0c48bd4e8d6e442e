"""Bytes that context parallelism sends in one layer, by method; tests read them off programs."""

import dataclasses

from jaxinfra.config.run import ContextMethod
from jaxinfra.hlo.collective_bytes import sent_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContextBytes:
    """The bytes that one device sends in one layer."""

    forward: float
    backward: float


def context_bytes(
    method: ContextMethod,
    *,
    num_shards: int,
    tokens: int,
    q_width: float,
    kv_width: float,
    itemsize: float,
    is_packed: bool,
) -> ContextBytes:
    """Counts the bytes that a device sends in full-length (not windowed) attention.

    Args:
        num_shards: P, the context axis.
        tokens: of one device, all its rows: B t.
        q_width, kv_width: of queries, and of keys and values together, over all heads of one
            device (its tensor shard).
        itemsize: bytes of an activation's element.
        is_packed: whether rows have segment ids, 4 bytes per token.
    """
    keys = tokens * kv_width
    ids = 4 * tokens if is_packed else 0

    def sent(kind: str, array_bytes: float) -> float:
        return sent_bytes(kind, array_bytes, num_shards)

    match method:
        case ContextMethod.AUTO | ContextMethod.RING:
            # Keys and documents both ways round; back, sums of the gradients in fp32.
            turns = num_shards - 1
            there = turns * sent("shift", keys * itemsize + ids)
            return ContextBytes(forward=there, backward=there + turns * sent("shift", keys * 4))
        case ContextMethod.ALL_GATHER:
            every = num_shards * keys * itemsize
            return ContextBytes(
                forward=sent("all-gather", every + num_shards * ids),
                backward=sent("reduce-scatter", every),
            )
        case ContextMethod.ULYSSES:
            elements = 2 * tokens * q_width + keys  # queries and outputs
            moved = sent("all-to-all", elements * itemsize)
            return ContextBytes(
                forward=moved + sent("all-gather", num_shards * ids), backward=moved
            )
