"""Which values layers keep, so that as little as possible is computed again within a room of bytes.

A set of values of a block is priced by its graph; of all sets those stay that nothing beats in both
bytes and time. Which layer takes which is found by dynamic programming over layers and bytes.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxinfra.runtime.devices import DevicePeak
from jaxinfra.training.recompute.block_graph import BlockGraph, Kept, keeping

MOST_NAMES = 14
"""Whose sets are all looked at; of more, those are dropped whose keeping saves the least."""
BINS = 4096
"""Parts of the room that bytes are counted in, rounded up."""
MATMUL_SHARE = 0.62
"""Of the peak of the tensor cores that matmuls reach in a step that is at its power limit, and
attention here too: those that an H200 computed again in a step of 8B shapes did."""
MEMORY_SHARE = 0.85
"""Of the memory's bandwidth that passes over it reach."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A set of values that a repetition may keep."""

    names: tuple[str, ...]
    bytes: int  # per device and repetition
    seconds: float  # of what is computed again, per repetition
    matmuls: int  # that are computed again, per repetition


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Repetitions that keep the same."""

    options: tuple[Option, ...]  # from the one of least bytes
    count: int = 1
    # Of each, there as long as what is kept: its input, and its weights where they are cast early.
    fixed_bytes: int = 0
    gradient_bytes: int = 0  # of each, there from its backward pass to the end
    policies: tuple[Option, ...] = ()  # what fixed policies keep, to be compared with


def seconds_of(kept: Kept, peak: DevicePeak, *, shards: int = 1) -> float:
    """The time of computing again what is not kept.

    Args:
        shards: devices that the work is divided over.
    """
    matmuls = kept.flops / (MATMUL_SHARE * peak.bf16_flops)
    return (matmuls + kept.moved_bytes / (MEMORY_SHARE * peak.hbm_bytes_per_s)) / shards


def best_options(graph: BlockGraph, peak: DevicePeak, *, shards: int = 1) -> tuple[Option, ...]:
    """The sets that no other beats in bytes and time, from the one of least bytes on."""

    def option(names: frozenset[str]) -> Option:
        return option_of_policy(graph, tuple(names), peak, shards=shards)

    names = _worth_keeping(graph, option)
    found = {
        each.names: each
        for number in range(len(names) + 1)
        for chosen in itertools.combinations(names, number)
        for each in (option(frozenset(chosen)),)
    }
    ordered = sorted(found.values(), key=lambda each: (each.bytes, each.seconds, len(each.names)))
    best: list[Option] = []
    for each in ordered:
        if not best or each.seconds < best[-1].seconds:
            best.append(each)
    return tuple(best)


def option_of_policy(
    graph: BlockGraph, names: Sequence[str] | None, peak: DevicePeak, *, shards: int = 1
) -> Option:
    """What a fixed policy keeps.

    Args:
        names: as ``kept_by``; None: all that the backward pass reads.
    """
    if names is None:
        size = sum(graph.sizes[value] for value in graph.needed if value in graph.makers)
        return Option(names=(), bytes=size // shards, seconds=0.0, matmuls=0)
    kept = keeping(graph, frozenset(names))
    return Option(
        names=kept.names,
        bytes=kept.bytes // shards,
        seconds=seconds_of(kept, peak, shards=shards),
        matmuls=kept.matmuls,
    )


def _worth_keeping(graph: BlockGraph, option) -> list[str]:
    """Names whose values the backward pass may read; of too many, those that save most."""
    everything = option(frozenset(graph.names))
    # What keeping one alone makes unread does not matter: its set is another's.
    reachable = [
        name
        for name in graph.names
        if name in everything.names or name in option(frozenset({name})).names
    ]
    if len(reachable) <= MOST_NAMES:
        return reachable
    without = {
        name: option(frozenset(reachable) - {name}).seconds - everything.seconds
        for name in reachable
    }
    most = sorted(reachable, key=without.__getitem__)[-MOST_NAMES:]
    return [name for name in reachable if name in most]


def peak_bytes(layers: Sequence[Layers], chosen: Sequence[Option]) -> int:
    """The most that kept values and gradients take together: when the backward pass comes to a
    layer, all before it are kept, and the gradients of those behind it are there.
    """
    kept = np.cumsum(
        [
            (option.bytes + each.fixed_bytes) * each.count
            for each, option in zip(layers, chosen, strict=True)
        ]
    )
    gradients = np.array([each.gradient_bytes * each.count for each in layers])
    behind = gradients.sum() - np.cumsum(gradients)
    return int(max(gradients.sum(), (kept + behind).max()))


def cheapest(layers: Sequence[Layers], *, room: int) -> tuple[Option, ...] | None:
    """An option for each of the layers whose sum of seconds is least, of those whose
    ``peak_bytes`` fit the room, but for the rounding of bytes to ``BINS`` parts of it; None where
    none fits.
    """
    total = sum(each.gradient_bytes * each.count for each in layers)
    if room < total or room <= 0:
        return None
    unit = max(room // BINS, 1)
    best = np.zeros(1)  # of each number of units kept so far, the least seconds
    taken: list[np.ndarray] = []
    behind = total
    for each in layers:
        behind -= each.gradient_bytes * each.count
        most = (room - behind) // unit
        units = _units(each, unit)
        after = np.full(int(most) + 1, np.inf)
        choice = np.full(int(most) + 1, -1)
        for index, (option, used) in enumerate(zip(each.options, units, strict=True)):
            count = min(len(best), len(after) - used)
            if count <= 0:
                continue
            seconds = best[:count] + option.seconds * each.count
            part = after[used : used + count]
            is_less = seconds < part
            part[is_less] = seconds[is_less]
            choice[used : used + count][is_less] = index
        best = after
        taken.append(choice)
    if not np.isfinite(best).any():
        return None
    at = int(np.argmin(best))
    chosen: list[Option] = []
    for each, choice in zip(reversed(layers), reversed(taken), strict=True):
        index = int(choice[at])
        chosen.append(each.options[index])
        at -= _units(each, unit)[index]
    return _in_order(layers, chosen[::-1])


def _in_order(layers: Sequence[Layers], chosen: Sequence[Option]) -> tuple[Option, ...]:
    """The same options, of layers that are alike those of more bytes behind: what is kept up to a
    layer is no more then, and equal sets lie together.
    """
    ordered: list[Option] = []
    for _, run in itertools.groupby(zip(layers, chosen, strict=True), key=lambda pair: pair[0]):
        ordered += sorted((option for _, option in run), key=lambda option: option.bytes)
    return tuple(ordered)


def _units(layers: Layers, unit: int) -> list[int]:
    """Bytes of each option in parts of the room, rounded up."""
    sizes = [(option.bytes + layers.fixed_bytes) * layers.count for option in layers.options]
    return [-(-size // unit) for size in sizes]
