"""Moves of pages and states on the device, and between the device and the host's memory.

Dims: N page or slot, L layers.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfra.serving.engine.programs import DeviceState, Pools

PAGES_AT_ONCE = 8
"""Number of pages that one copy, save or restore call moves."""

type MovedPages = tuple[Pools, Pools]
"""Pages of the model's and the draft model's pools, [L, N, size, ...] each."""

type Moved[Leaf] = tuple[tuple[dict[str, Leaf], ...], tuple[dict[str, Leaf], ...]]
"""Contents of ``MovedPages`` with other leaves, such as NumPy arrays or shapes."""


def copy_pages(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """Returns the state with pages copied, all read before any write; ignores pages beyond the
    last.
    """
    return write_pages(state, to_N, read_pages(state, from_N))


def copy_states(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """Returns the state with layers' states copied between slots."""
    states = jax.tree.map(lambda stored: stored.at[:, to_N].set(stored[:, from_N]), state.states)
    return dataclasses.replace(state, states=states)


def read_pages(state: DeviceState, from_N: Int[Array, "N"]) -> MovedPages:
    """Returns the contents of these pages; a number beyond the last page reads the last one."""

    def read(stored: jax.Array) -> jax.Array:
        return stored[:, jnp.minimum(from_N, stored.shape[1] - 1)]

    return jax.tree.map(read, (state.pools, state.draft_pools))


def write_pages(state: DeviceState, to_N: Int[Array, "N"], pages: MovedPages) -> DeviceState:
    """Returns the state with contents written to these pages; pages beyond the last are ignored."""

    def written(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[:, to_N].set(new, mode="drop")

    pools, draft_pools = jax.tree.map(written, (state.pools, state.draft_pools), pages)
    return dataclasses.replace(state, pools=pools, draft_pools=draft_pools)


def moved_shapes(state: DeviceState) -> Moved[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the page contents that one save or restore call moves."""
    pages = jax.ShapeDtypeStruct((PAGES_AT_ONCE,), np.int32)
    return jax.eval_shape(read_pages, state, pages)


def batches[Pair](pairs: Sequence[Pair], padding: Pair) -> Iterator[tuple[int, list[Pair]]]:
    """Splits pairs into padded lists, one per call; yields each with its number of real pairs."""
    for first in range(0, len(pairs), PAGES_AT_ONCE):
        part = [*pairs[first : first + PAGES_AT_ONCE]]
        yield len(part), part + [padding] * (PAGES_AT_ONCE - len(part))


@final
class HostMemory:
    """Host memory for KV-cache pages, in slots of one page each.

    Args:
        shapes: shapes and dtypes of the page contents that one call moves.
    """

    def __init__(self, shapes: Moved[jax.ShapeDtypeStruct], *, num_slots: int):
        leaves, self._tree = jax.tree.flatten(shapes)
        # The system gives memory as slots are first written.
        self._stored = [
            np.empty((num_slots, leaf.shape[0], *leaf.shape[2:]), leaf.dtype) for leaf in leaves
        ]
        self._coming: list[tuple[list[int], list[jax.Array]]] = []

    def take(self, slots: list[int], pages: MovedPages) -> None:
        """Starts copying pages from the device into host slots; returns before the copy is done."""
        leaves = jax.tree.leaves(pages)
        for leaf in leaves:
            leaf.copy_to_host_async()
        self._coming.append((slots, leaves))

    def collect(self) -> None:
        """Waits for copies under way. Until then the copied arrays stay in device memory too."""
        coming, self._coming = self._coming, []
        for slots, leaves in coming:
            for stored, leaf in zip(self._stored, leaves, strict=True):
                stored[slots] = np.moveaxis(np.asarray(leaf), 1, 0)[: len(slots)]

    def pages(self, slots: list[int]) -> Moved[np.ndarray]:
        """Returns the contents of these slots, which may be overwritten at once."""
        self.collect()
        read = [np.ascontiguousarray(np.moveaxis(stored[slots], 0, 1)) for stored in self._stored]
        return jax.tree.unflatten(self._tree, read)
