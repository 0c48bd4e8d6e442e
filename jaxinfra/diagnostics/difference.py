"""Comparison of a traced training step with another, and with the parts that a plan predicts."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping

from jaxinfra.diagnostics.waterfall import IDLE, KernelTime, Waterfall
from jaxinfra.training.profile import TracedStep

_LEAST = 0.01
"""Share of the first step under which a difference is not worth a line."""
_ALIKE = 0.03
"""Spread of the ratios of all kernels' times under which a device is slower as a whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One scope's difference in time between two steps; positive if the second step is slower."""

    scope: str
    kind: str
    ms: float
    text: str
    remedy: str  # empty where the second step is the faster one
    gain_ms: float | None = None  # saved by the remedy, over all changes with the same remedy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference in time between two steps, in total and by scope."""

    first_ms: float
    second_ms: float
    clock_ratio: float | None  # factor between kernel times, if it is the same for all kernels
    options: tuple[tuple[str, ...], tuple[str, ...]]  # XLA options only in the first, the second
    changes: tuple[Change, ...]  # largest first, by their size

    def paragraph(self) -> str:
        """Returns the summary of two steps' difference that ``jaxinfra trace A B`` prints first."""
        by = self.second_ms - self.first_ms
        share = by / self.first_ms
        begin = f"A step takes {self.first_ms:.1f} ms in the first and {self.second_ms:.1f} ms in "
        begin += f"the second ({share:+.1%}){_other_options(self.options)}."
        if self.clock_ratio is not None:
            return (
                f"{begin} Every kernel takes {self.clock_ratio - 1:+.0%} of its time, matmuls and "
                f"others alike: the device itself is {'slower' if by > 0 else 'faster'} (clock, "
                "power cap or heat). See jaxinfra doctor."
            )
        if not self.changes:
            return f"{begin} No part differs by more than {_LEAST:.0%} of a step."
        return " ".join([begin, *map(_sentence, self.changes[:4])])


def _sentence(change: Change) -> str:
    if not change.remedy:
        return f"{change.text}."
    gain = "" if change.gain_ms is None else f" (wins {change.gain_ms:.1f} ms)"
    return f"{change.text}. Remedy: {change.remedy}{gain}."


def compare_steps(
    first: Waterfall,
    second: Waterfall,
    first_step: TracedStep | None = None,
    second_step: TracedStep | None = None,
) -> Difference:
    """Explains why two training steps of one model differ in time.

    Args:
        first_step: the first step's compiled program, for its matmuls' formats and XLA options.
        second_step: the second step's compiled program.
    """
    before, after = _by_part(first), _by_part(second)
    steps = (first_step, second_step)
    options = _only_one_has(*(each.get("xla_options") if each else None for each in steps))
    changes = []
    for part in before.keys() | after.keys():
        ms = after.get(part, 0.0) - before.get(part, 0.0)
        if abs(ms) >= _LEAST * first.span_ms:
            scope, kind = part
            text, remedy = _text(scope, kind, ms, first, second, steps)
            if any(options) and remedy in (_LOOK, _LOOK_AT_LINKS, _FLAGS):
                remedy = _OPTIONS
            remedy = remedy if ms > 0 else ""
            changes.append(Change(scope=scope, kind=kind, ms=ms, text=text, remedy=remedy))
    changes.sort(key=lambda each: -abs(each.ms))
    by = second.span_ms - first.span_ms
    changes = [dataclasses.replace(each, gain_ms=_gain(each, changes, by)) for each in changes]
    scopes = {scope for scope, _ in before}
    other_formats = any(
        _formats(first, first_step, each) != _formats(second, second_step, each) for each in scopes
    )
    return Difference(
        first_ms=first.span_ms,
        second_ms=second.span_ms,
        clock_ratio=None if other_formats else _slower_alike(first, second),
        options=options,
        changes=tuple(changes),
    )


def _only_one_has(
    first: list[str] | None, second: list[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of XLA that differ; none where it was not written down."""
    if first is None or second is None:
        return (), ()
    return tuple(sorted({*first} - {*second})), tuple(sorted({*second} - {*first}))


def _other_options(options: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    said = [
        f"{' '.join(each)} in the {where}"
        for each, where in zip(options, ("first", "second"), strict=True)
        if each
    ]
    return f"; XLA's options differ: {', '.join(said)}" if said else ""


def _gain(change: Change, changes: list[Change], by: float) -> float | None:
    """Returns milliseconds that a remedy saves over all scopes; None if it is only a hint.

    No more than the whole step lost: what one place takes longer, its neighbors may take shorter
    for the same reason. And as much, but for idle time and communication, if there is no other
    remedy: the same kernels then take longer beside it.
    """
    if change.remedy not in _wanted(changes):
        return None
    if len(_wanted(changes)) == 1:
        apart = sum(max(0.0, each.ms) for each in changes if each.kind in ("collective", IDLE))
        return max(0.0, by - apart)
    return max(0.0, min(by, sum(each.ms for each in changes if each.remedy == change.remedy)))


def _wanted(changes: list[Change]) -> set[str]:
    """Returns the remedies that change a setting."""
    return {each.remedy for each in changes} - {"", _LOOK, _LOOK_AT_IDLE, _LOOK_AT_LINKS}


def _by_part(waterfall: Waterfall) -> dict[tuple[str, str], float]:
    """Returns exposed milliseconds by scope, with passes summed; communication and idle apart."""
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


_OWN = "a Mosaic GPU kernel"
# Not what is to be done, but where to look.
_LOOK = "see what else differs (jaxinfra compare)"
_LOOK_AT_IDLE = "see what jaxinfra trace says of the second run alone"
_FLAGS = "XLA's flags as in the first run (XLA_FLAGS, training.xla_options)"
_OPTIONS = "XLA's options as in the first run"
_LOOK_AT_LINKS = "compare training.xla_options, mesh and links of both (jaxinfra compare)"
_REMEDIES = {
    "attention/core": "training.attention=auto, and shapes that its kernel takes (jaxinfra plan "
    "says which it runs)",
    "loss": "the loss that ships (training.loss unset), which makes no array of all logits",
}


def _text(
    scope: str,
    kind: str,
    ms: float,
    first: Waterfall,
    second: Waterfall,
    steps: tuple[TracedStep | None, TracedStep | None],
) -> tuple[str, str]:
    """Describes what differs, and what makes the second step as fast as the first."""
    word = "longer" if ms > 0 else "shorter"
    if scope == IDLE:
        text = f"The device is idle {abs(ms):.1f} ms {word}: launches, input or the host"
        return text, _LOOK_AT_IDLE
    if kind == "collective":
        text = f"Communication that nothing hides takes {abs(ms):.1f} ms {word}"
        return text, _LOOK_AT_LINKS
    text = f"{scope} takes {abs(ms):.1f} ms {word}"
    recomputed = [
        sum(value for (name, _), value in each.exposed_ms.items() if name == f"{scope} recomputed")
        for each in (first, second)
    ]
    if abs(recomputed[1] - recomputed[0]) > 0.5 * abs(ms):
        both = f"({recomputed[0]:.1f} and {recomputed[1]:.1f} ms)"
        return f"{text}, which is recomputation {both}", "training.remat as in the first run"
    formats = [_formats(*each, scope) for each in zip((first, second), steps, strict=True)]
    if all(formats) and formats[0] != formats[1]:
        was, now = (", ".join(sorted(each)) for each in formats)
        return f"{text}: it multiplies in {now} in place of {was}", "precision as in the first run"
    old, new = (_main_kernels(each, scope) for each in (first, second))
    if old != new:
        remedy = _REMEDIES.get(scope, "") if _OWN in old and _OWN not in new else ""
        text = f"{text}: it runs {', '.join(new) or 'nothing'} in place of {', '.join(old)}"
        return text, remedy or _FLAGS
    return f"{text}, in the same kernels ({', '.join(new)})", _LOOK


def _formats(waterfall: Waterfall, step: TracedStep | None, scope: str) -> set[str]:
    """Returns the formats in which most of a scope's matmul time is spent."""
    dtypes = {each["instruction"]: each["dtype"] for each in step["matmuls"]} if step else {}
    ms: dict[str, float] = collections.defaultdict(float)
    for kernel in waterfall.kernels:
        if kernel.hlo_op in dtypes and _plain(kernel.scope) == scope:
            ms[dtypes[kernel.hlo_op]] += kernel.ms
    return {name for name, each in ms.items() if each > 0.2 * sum(ms.values())}


def _main_kernels(waterfall: Waterfall, scope: str) -> list[str]:
    """Families of the kernels that take most of a scope's time."""
    sums: dict[str, float] = collections.defaultdict(float)
    for kernel in waterfall.kernels:
        if _plain(kernel.scope) == scope:
            sums[_family(kernel)] += kernel.ms
    whole = sum(sums.values())
    return sorted(name for name, ms in sums.items() if ms > 0.2 * whole)


def _family(kernel: KernelTime) -> str:
    """Returns the library of a kernel; tiles and numbers in its name differ by shape."""
    name = kernel.kernel.lower()
    families = {
        "mosaic_gpu": _OWN,
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
    """Returns the common ratio of all kernels' times; None if there is none or it is 1."""
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


_ENDS = ("loss", "embedding")
_PASSES = ("memory", "weights and gradients")  # the planner's, of one kind in a trace


def measured_parts(waterfall: Waterfall) -> dict[str, float]:
    """Returns a traced step's milliseconds by ``StepTime.parts``; they add up to the step time."""
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
