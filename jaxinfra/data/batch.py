"""The batch of arrays that a training or evaluation step reads, and a checksum of its rows, by
which two runs are compared.
"""

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch[Array: (jax.Array, np.ndarray)]:
    """Rows of packed documents, all ``[B, T]``: NumPy arrays when loaded, JAX arrays when placed.

    Attention stays within equal ``segment_ids``; a mean loss is ``sum(weights * loss) /
    sum(weights)``. Rows that hold one document each need no ``segment_ids`` and ``positions``; the
    loaders here always give them.
    """

    tokens: Array  # int32
    targets: Array  # int32: the token that follows
    segment_ids: Array | None  # int32: documents of a row 0, 1, 2...; -1 is padding
    positions: Array | None  # int32: 0, 1, 2... within each segment
    weights: Array  # float32: 0 where the target must not count
    # float32: log probability of each target under a reference model, where a loss compares.
    reference: Array | None = None


# A process sends its number to the others as a float32, which holds no larger whole numbers.
MODULUS = 1 << 24


def rows_sum(tokens_BT: Int32[np.ndarray, "B T"], *, first: int) -> int:
    """Returns a checksum of rows: the sum of (row number in the batch + 1) x CRC-32 of its tokens,
    modulo 2^24.

    The checksums of a batch's parts add up to the whole batch's, however many processes read it.

    Args:
        tokens_BT: consecutive rows of a batch.
        first: number in the batch of the first of these rows.
    """
    rows = enumerate(np.ascontiguousarray(tokens_BT), start=first + 1)
    return sum(number * zlib.crc32(row) for number, row in rows) % MODULUS


def whole_sum(parts: Sequence[float], *, copies: int) -> str:
    """Returns the checksum of a whole batch in hexadecimal, from those of its parts.

    Args:
        parts: one checksum per process; processes that hold the same rows give equal ones.
        copies: number of processes that hold the same rows.
    """
    return f"{sum(map(int, parts)) // copies % MODULUS:06x}"
