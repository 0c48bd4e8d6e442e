"""Shuffling by random access: a keyed bijection of ``range(size)``, computed per element."""

import hashlib

import numpy as np
from jaxtyping import Int64, Integer

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permute(
    index: Integer[np.ndarray, "*shape"], *, size: int, key: str, inverse: bool = False
) -> Int64[np.ndarray, "*shape"]:
    """Maps each ``index`` by a pseudo-random permutation of ``range(size)``, or by its inverse.

    An eight-round Feistel network on the bits of the index; a result outside the range is sent
    through again (cycle walking: Black and Rogaway 2002), which keeps it a bijection. No table is
    stored, and unlike NumPy's generators the order can never change with a library's version, so
    a checkpoint's data order outlives the environment that wrote it.
    """
    value = np.array(index, dtype=np.uint64, ndmin=1)
    num_bits = (size - 1).bit_length()
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8")
    rounds = list(enumerate(keys))  # each undoes itself
    if inverse:
        rounds.reverse()

    def once(x: np.ndarray) -> np.ndarray:
        high, low = x >> low_bits, x & low_mask
        for round_index, round_key in rounds:
            if round_index % 2:
                low = low ^ (_mix(high ^ round_key) & low_mask)
            else:
                high = high ^ (_mix(low ^ round_key) & high_mask)
        return (high << low_bits) | low

    value = once(value)
    while (outside := value >= size).any():
        value[outside] = once(value[outside])
    return value.astype(np.int64).reshape(np.shape(index))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
