"""The batch of arrays that a training or evaluation step reads, and a checksum of its rows, by
which two runs are compared.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from jaxinfra.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout[Array: (jax.Array, np.ndarray)]:
    """Arrays that a policy loss reads beside the tokens of completions, all float32 ``[B, T]``."""

    advantages: Array  # of each target's completion
    old: Array  # log probability of each target before the first step on it, in nats
    importance: Array  # truncated ratio of the trainer's probability to the engine's
    share: Array  # weight of the target in the loss, times the number of counted targets


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
    rollout: Rollout[Array] | None = None  # of completions that the model sampled; else None


def batch_of(tokens: Any, *, weights: Any = None) -> Batch[np.ndarray]:
    """Makes a batch of rows that hold one document each; each target is the next token.

    Args:
        tokens: int [B, T + 1]: T inputs and, shifted by one, T targets.
        weights: float [B, T]: 0 where a target does not count; by default all targets count.

    Raises:
        ConfigError: shapes do not fit, or tokens are not integers.

    Examples:
        >>> jaxinfra.batch_of([[1, 2, 3, 4]]).targets.tolist()
        [[2, 3, 4]]
    """
    rows = np.asarray(tokens)
    if rows.ndim != 2 or rows.shape[1] < 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ConfigError(
            f"tokens of shape {rows.shape} and dtype {rows.dtype}: give whole numbers of [batch, "
            "length + 1], with a length of at least 1"
        )
    shape = (rows.shape[0], rows.shape[1] - 1)
    counted = np.ones(shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    if counted.shape != shape:
        raise ConfigError(f"weights of shape {counted.shape} for targets of {shape}: give as many")
    return Batch(
        tokens=rows[:, :-1].astype(np.int32),
        targets=rows[:, 1:].astype(np.int32),
        segment_ids=None,
        positions=None,
        weights=counted,
    )


# A process sends its number to the others as a float32, which holds no larger whole numbers.
MODULUS = 1 << 24


def rows_checksum(tokens_BT: Int32[np.ndarray, "B T"], *, first: int) -> int:
    """Returns a checksum of rows: the sum of (row number in the batch + 1) x CRC-32 of its tokens,
    modulo 2^24.

    The checksums of a batch's parts add up to the whole batch's, however many processes read it.

    Args:
        tokens_BT: consecutive rows of a batch.
        first: number in the batch of the first of these rows.
    """
    rows = enumerate(np.ascontiguousarray(tokens_BT), start=first + 1)
    return sum(number * zlib.crc32(row) for number, row in rows) % MODULUS


def batch_checksum(parts: Sequence[float], *, copies: int) -> str:
    """Returns the checksum of a whole batch in hexadecimal, from those of its parts.

    Args:
        parts: one checksum per process; processes that hold the same rows give equal ones.
        copies: number of processes that hold the same rows.
    """
    return f"{sum(map(int, parts)) // copies % MODULUS:06x}"
