"""Batches in the order in which devices hold their tokens."""

import dataclasses

import jax
import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.parallel.context.zigzag import to_zigzag


def in_zigzag(batch: Batch[np.ndarray], num_shards: int) -> Batch[np.ndarray]:
    """The batch with every row's tokens in zig-zag order, and their positions with them.

    Sums over tokens do not change; attention knows the order, and all else goes by position. A
    batch for one shard is returned as it is.
    """
    if num_shards == 1:
        return batch
    if batch.positions is None:
        # The decoder would count by index, which is no longer the position.
        rows, length = batch.tokens.shape
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        batch = dataclasses.replace(batch, positions=positions)
    return jax.tree.map(lambda x: to_zigzag(np.asarray(x), num_shards), batch)
