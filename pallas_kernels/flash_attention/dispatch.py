"""Who computes a call: a named implementation or none, or for "auto" the first that can.

``Call`` says what is asked. An implementation answers with a reason why it cannot serve it, or
None. Nothing else decides, so a named implementation never silently becomes another.
"""

import dataclasses
import functools
import logging

import jax

from pallas_kernels.common import device
from pallas_kernels.common.errors import InputError, UnsupportedError

from . import cudnn, hopper
from .preference import preferences
from .sharding import MeshAxes, axes_left_to_the_compiler
from .spec import AttentionMasks, AttentionSpec

NAMES = ("hopper", "cudnn", "xla", "reference")
BACKWARDS = ("fused", "split")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One validated call of ``flash_attention``; of the arrays only shapes and dtypes are read."""

    spec: AttentionSpec
    masks: AttentionMasks
    q: jax.Array
    k: jax.Array
    v: jax.Array
    backward: str
    return_residual: bool
    mesh_axes: MeshAxes | None = None

    def describe(self) -> str:
        """One line for logs and errors: equal lines are equal cases."""
        B, T, N, H = self.q.shape
        S, K = self.k.shape[1:3]
        arrays = [
            field.name
            for field in dataclasses.fields(self.masks)
            if getattr(self.masks, field.name) is not None
        ]
        return (
            f"{self.q.dtype} b{B} t{T} s{S} heads {N}/{K} width {H}/{self.v.shape[3]} "
            f"left={self.spec.left} right={self.spec.right} cap={self.spec.logit_soft_cap} "
            f"arrays=[{' '.join(arrays)}] backward={self.backward} "
            f"residual={self.return_residual}"
        )


def why_not(name: str, call: Call) -> str | None:
    """The reason why one of ``NAMES`` cannot compute a call and its gradient; None if it can."""
    match name:
        case "hopper":
            return _why_not_hopper(call)
        case "cudnn":
            return _why_not_split(None) or cudnn.unsupported(
                call.spec,
                call.masks,
                call.q,
                call.k,
                call.v,
                backward=call.backward,
                return_residual=call.return_residual,
            )
        case _:
            return None


def _why_not_hopper(call: Call) -> str | None:
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    reasons = [
        _why_not_split(call.mesh_axes),
        hopper.unsupported(call.spec, call.masks, call.q, call.k, call.v),
    ]
    if call.spec.right is not None:
        reasons.append(device.miscompiled(device.CAUSAL_ATTENTION))
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_split(axes: MeshAxes | None) -> str | None:
    left = axes_left_to_the_compiler()
    if not left or axes is not None:
        return None
    return (
        f"the shard_map around it leaves mesh axes {', '.join(left)} to the compiler, which cannot "
        "split a custom call there: make it a shard_map over all axes, or for the Hopper kernels "
        "pass mesh_axes"
    )


def choose(implementation: str, call: Call) -> str:
    """The implementation that will run: the named one, or what "auto" prefers on this device.

    Raises:
        InputError: no such implementation, or no such backward.
        UnsupportedError: the named implementation cannot serve the call.
    """
    if call.backward not in BACKWARDS:
        raise InputError(f"backward={call.backward!r} must be one of {', '.join(BACKWARDS)}")
    if implementation == "auto":
        return _automatic(call)
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


def _automatic(call: Call) -> str:
    reasons = {}
    for name in preferences(call.spec, call.masks, call.q, call.k, call.v):
        reason = why_not(name, call)
        if reason is None:
            refusals = "; ".join(f"not {other}: {reasons[other]}" for other in reasons)
            announce(name, device.target().slug, call.describe(), refusals)
            return name
        reasons[name] = reason
    raise AssertionError("xla serves every call")


@functools.cache
def announce(name: str, device_kind: str, case: str, refusals: str | None) -> None:
    """Logs a choice; the cache makes it once for each distinct case."""
    because = f" ({refusals})" if refusals else ""
    _logger.info("flash_attention on %s uses %s for %s%s", device_kind, name, case, because)
