"""Pages on their way: from one to another, to the host's memory and back.

Dims: N page that is moved, L layers, P page of a pool.
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
"""Pages that a call moves."""

type MovedPages = tuple[Pools, Pools]
"""Pages of the model's and the draft model's pools, [L, N, size, ...] each."""

type Moved[Leaf] = tuple[tuple[dict[str, Leaf], ...], tuple[dict[str, Leaf], ...]]
"""The same of arrays that are not the device's."""


def copy_pages(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """The state with pages copied, all of them read first; one beyond the last is nobody's."""
    return write_pages(state, to_N, read_pages(state, from_N))


def read_pages(state: DeviceState, from_N: Int[Array, "N"]) -> MovedPages:
    """These pages; the last one in the place of one beyond it."""

    def read(stored: jax.Array) -> jax.Array:
        return stored[:, jnp.minimum(from_N, stored.shape[1] - 1)]

    return jax.tree.map(read, (state.pools, state.draft_pools))


def write_pages(state: DeviceState, to_N: Int[Array, "N"], pages: MovedPages) -> DeviceState:
    """The state with these pages in other ones' places; one beyond the last is nobody's."""

    def written(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[:, to_N].set(new, mode="drop")

    pools, draft_pools = jax.tree.map(written, (state.pools, state.draft_pools), pages)
    return dataclasses.replace(state, pools=pools, draft_pools=draft_pools)


def moved_shapes(state: DeviceState) -> Moved[jax.ShapeDtypeStruct]:
    """What ``read_pages`` gives of as many pages as a call moves."""
    pages = jax.ShapeDtypeStruct((PAGES_AT_ONCE,), np.int32)
    return jax.eval_shape(read_pages, state, pages)


def batches[Pair](pairs: Sequence[Pair], padding: Pair) -> Iterator[tuple[int, list[Pair]]]:
    """The pairs in calls, each filled up, and how many of a call's are not padding."""
    for first in range(0, len(pairs), PAGES_AT_ONCE):
        part = [*pairs[first : first + PAGES_AT_ONCE]]
        yield len(part), part + [padding] * (PAGES_AT_ONCE - len(part))


@final
class HostMemory:
    """Pages in the host's memory, by slot.

    Args:
        shapes: of what a call moves.
    """

    def __init__(self, shapes: Moved[jax.ShapeDtypeStruct], *, num_slots: int):
        leaves, self._tree = jax.tree.flatten(shapes)
        # The system gives memory as slots are first written.
        self._stored = [
            np.empty((num_slots, leaf.shape[0], *leaf.shape[2:]), leaf.dtype) for leaf in leaves
        ]
        self._coming: list[tuple[list[int], list[jax.Array]]] = []

    def take(self, slots: list[int], pages: MovedPages) -> None:
        """These slots get the first of these pages; they are on their way when this returns."""
        leaves = jax.tree.leaves(pages)
        for leaf in leaves:
            leaf.copy_to_host_async()
        self._coming.append((slots, leaves))

    def collect(self) -> None:
        """Waits for what is on its way: until then the device keeps it too."""
        coming, self._coming = self._coming, []
        for slots, leaves in coming:
            for stored, leaf in zip(self._stored, leaves, strict=True):
                stored[slots] = np.moveaxis(np.asarray(leaf), 1, 0)[: len(slots)]

    def pages(self, slots: list[int]) -> Moved[np.ndarray]:
        """What lies in these slots; slots may be written again at once."""
        self.collect()
        read = [np.ascontiguousarray(np.moveaxis(stored[slots], 0, 1)) for stored in self._stored]
        return jax.tree.unflatten(self._tree, read)
