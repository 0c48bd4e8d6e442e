"""A checksum of the rows that a step was trained on, so that two runs can be compared."""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

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
