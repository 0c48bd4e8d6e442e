"""A checksum of the rows that a step was trained on, so that two runs can be compared."""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

# A process sends its number to the others as a float32, which holds no larger whole numbers.
MODULUS = 1 << 24


def rows_sum(tokens_BT: Int32[np.ndarray, "B T"], *, first: int) -> int:
    """Returns the sum of (number of the row in the batch + 1) x CRC-32 of its tokens, modulo 2^24.

    Sums of a batch's parts add up to the whole batch's, however many processes read it.

    Args:
        tokens_BT: some rows of a batch.
        first: number of the first of them.
    """
    rows = enumerate(np.ascontiguousarray(tokens_BT), start=first + 1)
    return sum(number * zlib.crc32(row) for number, row in rows) % MODULUS


def whole_sum(parts: Sequence[float], *, copies: int) -> str:
    """Returns the whole batch's sum in hexadecimal, from the sums of its parts.

    Args:
        parts: one sum per process; processes that hold the same rows give the same sum.
        copies: how many processes hold the same rows.
    """
    return f"{sum(map(int, parts)) // copies % MODULUS:06x}"
