"""Where a device's time goes: kernels of a profiler trace, grouped by the scopes of the program."""

import collections
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxinfra.core.errors import DataError

# From one HLO instruction to where in the source program it comes from.
_OP_NAME = re.compile(r"%(?P<op>[\w.\-]+) = .*?metadata=\{[^}]*op_name=\"(?P<name>[^\"]*)\"")
_COMPUTATION = re.compile(r"(?:ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<op>[\w.\-]+) = ")
_CALLS = re.compile(r"%(?P<op>[\w.\-]+) = .*calls=%(?P<computation>[\w.\-]+)")

SCOPES = ("attention/core", "attention", "mlp", "loss", "optimizer", "embedding", "final_norm")
"""Named scopes of the step, the more specific first; the rest counts as "other"."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All launches of one HLO instruction on one device."""

    hlo_op: str
    kernel: str
    launches: int
    total_ms: float


def kernel_times(trace: Path) -> list[KernelTime]:
    """Kernels on the first GPU of the newest trace under a directory, longest first.

    Raises DataError where there is no trace, or no GPU in it.
    """
    files = sorted(trace.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise DataError(f"{trace} holds no trace (*.xplane.pb); make one with --profile START:STOP")
    profile = jax.profiler.ProfileData.from_file(str(files[-1]))
    plane = next((p for p in profile.planes if p.name.startswith("/device:GPU:0")), None)
    if plane is None:
        names = ", ".join(p.name for p in profile.planes)
        raise DataError(f"{files[-1]} has no plane /device:GPU:0, only {names}")
    totals: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue  # derived lines repeat the kernels, grouped
        for event in line.events:
            stats = dict(event.stats)
            total = totals[str(stats.get("hlo_op", "")), event.name]
            total[0] += 1
            total[1] += event.duration_ns / 1e6
    times = [
        KernelTime(hlo_op=op, kernel=kernel, launches=int(count), total_ms=ms)
        for (op, kernel), (count, ms) in totals.items()
    ]
    return sorted(times, key=lambda time: -time.total_ms)


def op_names(hlo_text: str) -> dict[str, str]:
    """HLO instruction to its ``op_name``, such as ``jit(train_step)/layer/while/body/mlp/...``.

    An instruction that a fusion holds and that has no name of its own, such as a library's matmul
    writing into a slice, has the fusion's.
    """
    names = {match["op"]: match["name"] for match in _OP_NAME.finditer(hlo_text)}
    callers = {match["computation"]: match["op"] for match in _CALLS.finditer(hlo_text)}
    caller = None
    for line in hlo_text.splitlines():
        if computation := _COMPUTATION.match(line):
            caller = callers.get(computation["name"])
        elif caller in names and (instruction := _INSTRUCTION.match(line)):
            names.setdefault(instruction["op"], names[caller])
    return names


def time_by_scope(kernels: Iterable[KernelTime], names: dict[str, str]) -> dict[str, float]:
    """Milliseconds a scope; backward passes and recomputation under names of their own."""
    result: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        result[scope_of(names.get(kernel.hlo_op, ""))] += kernel.total_ms
    return dict(sorted(result.items(), key=lambda item: -item[1]))


def scope_of(op_name: str) -> str:
    """``mlp``, ``mlp backward`` or ``mlp recomputed`` from an ``op_name``."""
    # Autodiff and remat wrap scopes: transpose(jvp(mlp)), rematted_computation/mlp.
    plain = re.sub(r"[\w.]+\(|\)", "", op_name)
    scope = next((scope for scope in SCOPES if f"/{scope}/" in f"/{plain}/"), "other")
    if "rematted_computation" in op_name:
        return f"{scope} recomputed"
    return f"{scope} backward" if "transpose(" in op_name else scope
