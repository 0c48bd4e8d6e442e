"""Why one step takes longer than another: two waterfalls side by side."""

import collections
import dataclasses
import statistics
from typing import Any

from jaxinfra.diagnostics.waterfall import IDLE, KernelTime, Waterfall

_LEAST = 0.01
"""Share of the first step under which a difference is not worth a line."""
_ALIKE = 0.03
"""Spread of the ratios of all kernels' times under which a device is slower as a whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What differs in one place, positive where the second step takes longer."""

    scope: str
    kind: str
    ms: float
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Two steps, and where the second one's time goes that the first one does not take."""

    first_ms: float
    second_ms: float
    clock_ratio: float | None  # of all kernels' times alike, where they differ alike
    changes: tuple[Change, ...]  # largest first, by their size

    def paragraph(self) -> str:
        """The first thing ``jaxinfra trace A B`` says."""
        by = self.second_ms - self.first_ms
        share = by / self.first_ms
        begin = f"A step takes {self.first_ms:.1f} ms in the first and {self.second_ms:.1f} ms in "
        begin += f"the second ({share:+.1%})."
        if self.clock_ratio is not None:
            return (
                f"{begin} Every kernel takes {self.clock_ratio - 1:+.0%} of its time, matmuls and "
                "others alike: the device itself is slower (clock, power cap or heat). See "
                "jaxinfra doctor."
            )
        if not self.changes:
            return f"{begin} No part differs by more than {_LEAST:.0%} of a step."
        return " ".join([begin, *(f"{each.text}." for each in self.changes[:4])])

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self)


def compare_steps(first: Waterfall, second: Waterfall) -> Difference:
    """Explains the difference of two steps of one model."""
    before, after = _by_part(first), _by_part(second)
    changes = []
    for part in before.keys() | after.keys():
        ms = after.get(part, 0.0) - before.get(part, 0.0)
        if abs(ms) >= _LEAST * first.span_ms:
            scope, kind = part
            text = _text(scope, kind, ms, first, second)
            changes.append(Change(scope=scope, kind=kind, ms=ms, text=text))
    changes.sort(key=lambda each: -abs(each.ms))
    return Difference(
        first_ms=first.span_ms,
        second_ms=second.span_ms,
        clock_ratio=_slower_alike(first, second),
        changes=tuple(changes),
    )


def _by_part(waterfall: Waterfall) -> dict[tuple[str, str], float]:
    """Exposed time by scope, its passes together; communication and idle time apart."""
    found: dict[tuple[str, str], float] = collections.defaultdict(float)
    for (scope, kind), ms in waterfall.exposed_ms.items():
        if kind == "collective":
            found["communication", kind] += ms
        elif kind == IDLE:
            found[IDLE, IDLE] += ms
        else:
            found[_plain(scope), "computation"] += ms
    return dict(found)


def _plain(scope: str) -> str:
    return scope.removesuffix(" backward").removesuffix(" recomputed")


def _text(scope: str, kind: str, ms: float, first: Waterfall, second: Waterfall) -> str:
    word = "longer" if ms > 0 else "shorter"
    if scope == IDLE:
        return f"The device is idle {abs(ms):.1f} ms {word}: launches, input or the host"
    if kind == "collective":
        return f"Communication that nothing hides takes {abs(ms):.1f} ms {word}"
    text = f"{scope} takes {abs(ms):.1f} ms {word}"
    recomputed = [
        sum(value for (name, _), value in each.exposed_ms.items() if name == f"{scope} recomputed")
        for each in (first, second)
    ]
    if abs(recomputed[1] - recomputed[0]) > 0.5 * abs(ms):
        return f"{text}, which is recomputation ({recomputed[0]:.1f} and {recomputed[1]:.1f} ms)"
    was, now = (_main_kernels(each, scope) for each in (first, second))
    if was != now:
        return f"{text}: it runs {', '.join(now) or 'nothing'} in place of {', '.join(was)}"
    return f"{text}, in the same kernels ({', '.join(now)})"


def _main_kernels(waterfall: Waterfall, scope: str) -> list[str]:
    """Families of the kernels that take most of a scope's time."""
    sums: dict[str, float] = collections.defaultdict(float)
    for kernel in waterfall.kernels:
        if _plain(kernel.scope) == scope:
            sums[_family(kernel)] += kernel.ms
    whole = sum(sums.values())
    return sorted(name for name, ms in sums.items() if ms > 0.2 * whole)


def _family(kernel: KernelTime) -> str:
    """Who wrote a kernel: tiles and numbers in its name differ from shape to shape."""
    name = kernel.kernel.lower()
    families = {
        "mosaic_gpu": "a Mosaic GPU kernel",
        "nvjet": "cuBLAS",
        "cublas": "cuBLAS",
        "cutlass": "cuBLAS",
        "gemm_fusion": "Triton matmuls",
        "cudnn": "cuDNN",
        "fmha": "cuDNN",
        "sdpa": "cuDNN",
        "flash": "cuDNN",
    }
    return next((text for part, text in families.items() if part in name), "XLA fusions")


def _slower_alike(first: Waterfall, second: Waterfall) -> float | None:
    """The ratio by which all kernels' times differ, where it is one; None where it is none or 1."""
    before = {(each.hlo_op, each.kernel): each.ms for each in first.kernels}
    ratios = [
        (each.ms / before[each.hlo_op, each.kernel], each.ms)
        for each in second.kernels
        if before.get((each.hlo_op, each.kernel), 0.0) > 0.001 * first.span_ms
    ]
    covered = sum(ms for _, ms in ratios)
    if covered < 0.5 * second.span_ms or len(ratios) < 3:
        return None
    middle = statistics.median(ratio for ratio, _ in ratios)
    alike = sum(ms for ratio, ms in ratios if abs(ratio - middle) <= _ALIKE * middle)
    return middle if abs(middle - 1) > _ALIKE and alike > 0.8 * covered else None
