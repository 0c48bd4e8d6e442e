"""Division of a measured step's time into the parts that ``jaxinfra plan`` predicts."""

import collections
from collections.abc import Mapping

from jaxinfra.diagnostics.waterfall import IDLE, Waterfall

_ENDS = ("loss", "embedding")
_PASSES = ("memory", "weights and gradients")  # the planner's, of one kind in a trace


def measured_parts(waterfall: Waterfall) -> dict[str, float]:
    """Returns a traced step's milliseconds by part of a plan; they add up to the step time."""
    found: dict[str, float] = collections.defaultdict(float)
    for (scope, kind), ms in waterfall.exposed_ms.items():
        if kind != "collective" or not waterfall.by_axis:
            found[_part(scope, kind)] += ms
    for axes, time in waterfall.by_axis.items():
        found[f"{axes} communication"] += time.exposed_ms
    return dict(found)


def _part(scope: str, kind: str) -> str:
    if kind == IDLE:
        return IDLE
    if kind == "collective":
        return "communication"
    if scope.endswith(" recomputed"):
        return "recomputation"
    place = scope.removesuffix(" backward")
    if place in _ENDS:
        return "loss and embedding"
    if place == "optimizer":
        return place
    return kind if kind in ("matmul", "attention", "copy") else "memory passes"


def predicted_beside_measured(
    predicted_s: Mapping[str, float], waterfall: Waterfall
) -> dict[str, tuple[float, float]]:
    """Returns a step's predicted and measured milliseconds by part, the largest first.

    Args:
        predicted_s: seconds by part, from a plan's time.
    """
    planned: dict[str, float] = collections.defaultdict(float)
    for name, seconds in predicted_s.items():
        planned["memory passes" if name in _PASSES else name] += 1e3 * seconds
    measured = measured_parts(waterfall)
    rows = {
        name: (planned.get(name, 0.0), measured.get(name, 0.0)) for name in {**planned, **measured}
    }
    return dict(sorted(rows.items(), key=lambda item: -max(item[1])))
