"""Choice of an attention call's implementation: the named one, or the fastest that supports it.

"auto" takes the first implementation that supports the call, in the order of times measured for
similar calls (``tuned/dispatch-DEVICE.json``). A row of that table has the case (``case_of``), the
choice {"implementation": name} and the time of the forward pass. If the case has a gradient, this
includes the backward pass.
"""

import math
import pathlib

from pallas_kernels.common import device, tables
from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError

from . import cudnn, hopper
from .sharding import axes_left_to_the_compiler
from .spec import AttentionCall, MeshAxes

NAMES = ("hopper", "cudnn", "xla", "reference")
TUNED = pathlib.Path(__file__).parent / "tuned"
QUESTION = "dispatch"

UNMEASURED = ("cudnn", "hopper", "xla")
"""Order in which "auto" tries implementations without measurements."""

_EXACT = ("dtype", "gradient")
_WORTH = {
    "head_width": 2.0, "value_width": 2.0, "mask": 1.0, "packed": 3.0, "group": 0.3,
    "q_length": 0.25, "kv_length": 0.25, "batch": 0.5, "heads": 0.75, "window": 0.5,
}  # fmt: skip
"""Distance of two cases that differ in a field; for counts, the distance of a factor of two."""
LEAST_DISTANCE = 0.25
"""Least distance from a measured case, because two measurements of one case differ, too."""
DECAY = 3
"""A measured case has weight ``distance ** -DECAY``. ``_WORTH`` and ``DECAY`` are round numbers
near those that best predict cases left out of the table (``bench.attention_table --left-out``)."""


def choose(implementation: str, call: AttentionCall, *, gradient: bool = True) -> str:
    """Returns the implementation that will run: the named one, or what "auto" prefers here.

    Args:
        gradient: whether the call is differentiated; "auto" then compares times of both passes.

    Raises:
        InputError: no such implementation.
        UnsupportedError: the named implementation cannot compute the call.
    """
    if implementation == "auto":
        return _automatic(call, gradient=gradient)
    if implementation not in NAMES:
        raise InputError(f"implementation={implementation!r} must be auto or {', '.join(NAMES)}")
    reason = why_not(implementation, call)
    if reason is not None:
        able = [name for name in NAMES if why_not(name, call) is None]
        raise UnsupportedError(
            f"implementation={implementation!r} cannot compute this attention: {reason}. "
            f"Call: {call.describe()}. These can: {', '.join(able)}"
        )
    return implementation


def why_not(name: str, call: AttentionCall) -> str | None:
    """Returns why ``name`` cannot compute a call and its gradient; None if it can."""
    match name:
        case "hopper":
            reasons = (
                why_not_this_device(causal=call.spec.right is not None),
                _why_not_split(call.mesh_axes),
                hopper.unsupported(call.spec, call.masks, call.q, call.k, call.v),
            )
            return next((reason for reason in reasons if reason is not None), None)
        case "cudnn":
            return _why_not_split(None) or cudnn.unsupported(call)
        case _:
            return None


def why_not_this_device(*, causal: bool) -> str | None:
    """Returns why the target device cannot run the Hopper kernels; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    return device.miscompiled(device.CAUSAL_ATTENTION) if causal else None


def _why_not_split(axes: MeshAxes | None) -> str | None:
    left = axes_left_to_the_compiler()
    if not left or axes is not None:
        return None
    return (
        f"the shard_map around it leaves mesh axes {', '.join(left)} to the compiler, which cannot "
        "split a custom call there: make it a shard_map over all axes, or for the Hopper kernels "
        "pass mesh_axes"
    )


def _automatic(call: AttentionCall, *, gradient: bool) -> str:
    reasons = {}
    for name in preferences(call, gradient=gradient):
        reason = why_not(name, call)
        if reason is None:
            refusals = "; ".join(f"not {other}: {reasons[other]}" for other in reasons)
            if gradient:
                announce("flash_attention", name, call.describe(), because=refusals)
            elif name != _automatic(call, gradient=True):
                announce("flash_attention, forward alone,", name, call.describe(), because=refusals)
            return name
        reasons[name] = reason
    raise AssertionError("xla serves every call")


def preferences(call: AttentionCall, *, gradient: bool) -> list[str]:
    """Returns all implementations in the order to try: measured ones by speed, then the others."""
    measured = rank(tables.find(TUNED, QUESTION), case_of(call, gradient=gradient))
    return measured + [name for name in UNMEASURED if name not in measured]


def case_of(call: AttentionCall, *, gradient: bool) -> dict[str, tables.Value]:
    """Returns the fields of a call on which the fastest implementation depends, such as dtype."""
    if call.spec.left is not None:
        mask = "window"
    else:
        mask = "full" if call.spec.right is None else "causal"
    (B, T, N, _), S = call.q.shape, call.k.shape[1]
    return {
        "dtype": call.q.dtype.name,
        "gradient": gradient,
        "head_width": call.q.shape[3],
        "value_width": call.v.shape[3],
        "mask": mask,
        "packed": call.masks.q_segment_ids is not None,
        "group": N // call.k.shape[2],
        "q_length": T,
        "kv_length": S,
        "batch": B,
        "heads": N,
        "window": S if call.spec.left is None else min(call.spec.left + 1, S),
    }


def rank(rows: tuple[tables.Row, ...], case: dict[str, tables.Value]) -> list[str]:
    """Ranks the implementations that were measured, fastest first.

    Times of different cases are not comparable. So an implementation's slowdown against the fastest
    one of each case is averaged over cases, weighted by similarity to ``case``. Only cases of the
    same dtype and gradient count. All widths and masks count, since each alone has few
    measurements.
    """
    measured: dict[tuple[tuple[str, tables.Value], ...], dict[str, float]] = {}
    for row in rows:
        other = dict(row.case)
        if all(other[name] == case[name] for name in _EXACT):
            measured.setdefault(row.case, {})[str(dict(row.choice)["implementation"])] = row.ms
    if not measured:
        return []
    apart = {other: LEAST_DISTANCE + _distance(dict(other), case) for other in measured}
    nearest = measured[min(apart, key=apart.__getitem__)]
    # XLA is timed where it is not hopeless, a kernel wherever it can compute a case.
    names = {name for ms in measured.values() for name in ms if name != "xla" or name in nearest}
    means = {name: _mean_lost(name, measured, apart) for name in names}
    ranked = sorted(means, key=lambda name: (means[name], name not in nearest))
    return [name for name in ranked if name in UNMEASURED]


def _mean_lost(
    name: str,
    measured: dict[tuple[tuple[str, tables.Value], ...], dict[str, float]],
    apart: dict[tuple[tuple[str, tables.Value], ...], float],
) -> float:
    lost = {
        other: math.log(ms[name] / min(ms.values())) for other, ms in measured.items() if name in ms
    }
    weights = {other: apart[other] ** -DECAY for other in lost}
    return sum(weights[other] * lost[other] for other in lost) / sum(weights.values())


def _distance(a: dict[str, tables.Value], b: dict[str, tables.Value]) -> float:
    return sum(worth * _apart(a[name], b[name]) for name, worth in _WORTH.items())


def _apart(a: tables.Value, b: tables.Value) -> float:
    """Returns how far two fields differ: counts by log2 of their ratio, others by 0 or 1."""
    if isinstance(a, int) and isinstance(b, int) and not isinstance(a, bool):
        return abs(math.log2(max(1, a)) - math.log2(max(1, b)))
    return float(a != b)
