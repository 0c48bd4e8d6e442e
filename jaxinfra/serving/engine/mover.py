"""The moves of a step before its rows are computed: of pages and states, and to the host."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxinfra.serving.engine import moves
from jaxinfra.serving.engine.pages import NULL_PAGE
from jaxinfra.serving.engine.plan import SchedulerLimits, StepPlan
from jaxinfra.serving.engine.program_set import (
    COPY,
    KEEP,
    RESTORE,
    RESTORE_STATE,
    SAVE,
    SAVE_STATE,
)
from jaxinfra.serving.engine.programs import DeviceState


def _batches[Pair](pairs: Sequence[Pair], padding: Pair) -> Iterator[tuple[int, list[Pair]]]:
    """Splits pairs into padded lists, one per call; yields each with its number of real pairs."""
    for first in range(0, len(pairs), moves.PAGES_AT_ONCE):
        part = [*pairs[first : first + moves.PAGES_AT_ONCE]]
        yield len(part), part + [padding] * (moves.PAGES_AT_ONCE - len(part))


@final
class HostMemory:
    """Host memory for KV-cache pages or for states, in slots of one each.

    Args:
        shapes: shapes and dtypes of the contents that one call moves, [L, N, ...].
    """

    def __init__(self, shapes: Any, *, num_slots: int):
        leaves, self._tree = jax.tree.flatten(shapes)
        # The system gives memory as slots are first written.
        self._stored = [
            np.empty((num_slots, leaf.shape[0], *leaf.shape[2:]), leaf.dtype) for leaf in leaves
        ]
        self._coming: list[tuple[list[int], list[jax.Array]]] = []

    def take(self, slots: list[int], contents: Any) -> None:
        """Starts copying from the device into host slots; returns before the copy is done."""
        leaves = jax.tree.leaves(contents)
        for leaf in leaves:
            leaf.copy_to_host_async()
        self._coming.append((slots, leaves))

    def collect(self) -> None:
        """Waits for copies under way. Until then the copied arrays stay in device memory too."""
        coming, self._coming = self._coming, []
        for slots, leaves in coming:
            for stored, leaf in zip(self._stored, leaves, strict=True):
                stored[slots] = np.moveaxis(np.asarray(leaf), 1, 0)[: len(slots)]

    def contents(self, slots: list[int]) -> Any:
        """Returns the contents of these slots, which may be overwritten at once."""
        self.collect()
        read = [np.ascontiguousarray(np.moveaxis(stored[slots], 0, 1)) for stored in self._stored]
        return jax.tree.unflatten(self._tree, read)


@final
class Mover:
    """Moves a step's pages and states by compiled programs; has the host's copies.

    Args:
        call: runs a program with arguments, and returns its results.
    """

    def __init__(self, state: DeviceState, limits: SchedulerLimits, *, call: Callable[..., Any]):
        self._limits, self._call = limits, call
        self._pages = HostMemory(moves.moved_shapes(state), num_slots=limits.num_host_pages)
        shapes = moves.moved_state_shapes(state)
        self._states = HostMemory(shapes, num_slots=limits.num_host_states)

    def move(self, plan: StepPlan) -> None:
        """Starts all moves of a step."""
        beyond = self._limits.num_pages
        for count, padded in _batches(plan.saves, (NULL_PAGE, 0)):
            pages, slots = zip(*padded, strict=True)
            self._pages.take([*slots[:count]], self._call(SAVE, np.array(pages, np.int32)))
        for pairs in (plan.copies, [(NULL_PAGE, page) for page in plan.zeros]):
            for _, padded in _batches(pairs, (NULL_PAGE, beyond)):
                self._call(COPY, *np.array(padded, np.int32).T.copy())
        for _, padded in _batches(plan.restores, (0, beyond)):
            slots, pages = zip(*padded, strict=True)
            self._call(RESTORE, np.array(pages, np.int32), self._pages.contents([*slots]))
        for source, target in plan.states:
            self._move_state(source, target)

    def _move_state(self, source: int, target: int) -> None:
        first = self._limits.host_state_slots.start
        from_N, to_N = np.array([[source], [target]], np.int32)
        if target >= first:
            self._states.take([target - first], self._call(SAVE_STATE, from_N))
        elif source >= first:
            self._call(RESTORE_STATE, to_N, self._states.contents([source - first]))
        else:
            self._call(KEEP, from_N, to_N)

    def collect(self) -> None:
        """Waits for copies to the host that are under way."""
        self._pages.collect()
        self._states.collect()
