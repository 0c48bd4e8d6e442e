"""The batch of arrays that a training or evaluation step reads."""

import dataclasses

import jax
import numpy as np


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
