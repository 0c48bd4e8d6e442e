"""What delays a step, in the milliseconds that are won without it, with what to do about each."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.diagnostics.delay import Delay, Explanation
from jaxinfra.diagnostics.device_delays import device_delays
from jaxinfra.diagnostics.host_delays import evaluation_delays, host_delays, rarely
from jaxinfra.diagnostics.rank_delays import straggler_delays, without_waiting
from jaxinfra.diagnostics.traced_run import TracedRun
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.recorder import RECOMPILED, read_incidents, read_records

_SHARE = 0.1
"""Share of a step that saves cost at least to count."""
_LINE = 0.02
"""Share of a step under which a device's delay is not worth a line."""
_STALL_S = 1.0
"""Seconds of a save under which it is what every save takes."""


def explain_step(directory: Path, traced: TracedRun | None = None) -> Explanation | None:
    """What delays the step of a run: by its device traces, if there are any, and its own records.

    None where there is neither.
    """
    run = RunDirectory(directory)
    lines, _ = read_log(run.metrics_file, holds=dict[str, Any])
    steps = [line["step_s"] for line in lines if line.get("step_s")]
    step_ms = 1e3 * statistics.median(steps) if steps else 0.0
    found = []
    if traced is not None:
        step_ms = traced.waterfall.span_ms
        found = device_delays(traced.waterfall, traced.step)
        stragglers = straggler_delays(traced.by_device)
        found = without_waiting(found, stragglers, least_ms=_LINE * step_ms) + stragglers
    if not step_ms:
        return None
    records = read_records(run.recorder)
    hosts = host_delays(records, step_ms=step_ms, steps=len(steps))
    if hosts:  # which is why the device idles
        found = [each for each in found if each.cause != "host dispatch"]
    found += hosts
    found += evaluation_delays(records, step_ms=step_ms)
    found += checkpoint_delays(lines, step_ms=step_ms)
    found += incident_delays(read_incidents(run.incidents_file), steps_ms=[1e3 * s for s in steps])
    found.sort(key=lambda each: -each.ms)
    return Explanation(step_ms=step_ms, delays=tuple(found))


def checkpoint_delays(lines: Sequence[Mapping[str, Any]], *, step_ms: float) -> list[Delay]:
    """Saves for which steps stood still, spread over all steps."""
    stalls = [line["stall_s"] for line in lines if line.get("stall_s")]
    # A job of a few steps saves at its end alone.
    if len(stalls) < 2 or statistics.median(stalls) < _STALL_S:
        return []
    steps = sum("step_s" in line for line in lines)
    ms, usual = 1e3 * sum(stalls) / max(steps, 1), 1e3 * statistics.median(stalls)
    seldom = rarely(usual, step_ms)
    won = ms - usual / seldom
    if won < _SHARE * step_ms:
        return []
    return [
        Delay(
            cause="checkpoints",
            ms=won,
            text=f"steps stood still for {usual / 1e3:.2f} s at each of {len(stalls)} saves",
            remedy=f"checkpoint.every={seldom}, or a faster disk",
        )
    ]


def incident_delays(
    incidents: Sequence[Mapping[str, Any]], *, steps_ms: Sequence[float]
) -> list[Delay]:
    """Steps that compiled again because the shape of an argument changed."""
    found = [each for each in incidents if each["kind"] == RECOMPILED]
    if not found or not steps_ms:
        return []
    usual = statistics.median(steps_ms)
    lost = sum(ms - usual for ms in sorted(steps_ms)[-len(found) :])
    return [
        Delay(
            cause="recompilation",
            ms=max(0.0, lost / len(steps_ms)),
            text=f"{len(found)} times, at step {found[0]['step']}: {found[0]['text']}",
            remedy="give every batch one shape",
        )
    ]
