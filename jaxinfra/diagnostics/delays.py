"""Causes of a training step's delay, each with the milliseconds that it costs and its remedy."""

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.diagnostics.drift import drift_delays
from jaxinfra.diagnostics.host_delays import Delay, evaluation_delays, host_delays, steps_between
from jaxinfra.diagnostics.traced_run import TracedRun
from jaxinfra.diagnostics.waterfall import IDLE, Waterfall
from jaxinfra.hlo.program import MatmulShape
from jaxinfra.runtime.devices import DevicePeak, device_peak
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.recorder import RECOMPILED, read_incidents, read_records
from jaxinfra.training.profile import TracedStep

_SHARE = 0.04
"""Share of a step that a device is behind at least to count."""
_ALIKE = 0.5
"""Share of what a device is behind that its kernels, or its idle time, make up to be its reason."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Milliseconds per step of one device, split into computing, idle and waiting time."""

    name: str
    computing_ms: float  # copies too
    idle_ms: float
    waiting_ms: float  # exposed communication: waiting for other devices, or for the link

    @property
    def own_ms(self) -> float:
        """Milliseconds per step of the device's own work, without waiting for other devices."""
        return self.computing_ms + self.idle_ms


def device_times(ranks: Mapping[str, Waterfall]) -> list[DeviceTime]:
    """Splits each device's step time into computing, idle and waiting time."""
    found = []
    for name, waterfall in ranks.items():
        by_kind = waterfall.by_kind()
        idle, waiting = by_kind.get(IDLE, 0.0), by_kind.get("collective", 0.0)
        found.append(
            DeviceTime(
                name=name,
                computing_ms=sum(by_kind.values()) - idle - waiting,
                idle_ms=idle,
                waiting_ms=waiting,
            )
        )
    return found


def straggler_delays(ranks: Mapping[str, Waterfall]) -> list[Delay]:
    """Finds a slow device whose longer work makes the others wait for it in a collective.

    Do not pass devices of different pipeline stages, since their work differs.
    """
    times = device_times(ranks)
    if len(times) < 2:
        return []
    slowest = max(times, key=lambda each: each.own_ms)
    others = [each for each in times if each is not slowest]
    behind = slowest.own_ms - statistics.median(each.own_ms for each in others)
    step_ms = max(waterfall.span_ms for waterfall in ranks.values())
    # The last device waits for no other, and all others wait for it.
    waited = min(each.waiting_ms for each in others) - slowest.waiting_ms
    won = min(behind, waited)
    if won < _SHARE * step_ms:
        return []
    computing = statistics.median(each.computing_ms for each in others)
    more = slowest.computing_ms - computing
    if more > _ALIKE * behind:
        text = f"its kernels take {slowest.computing_ms:.1f} ms, the others' {computing:.1f}"
        remedy = "look at its clocks, power limit and heat (jaxinfra doctor on its host)"
    else:
        idle = statistics.median(each.idle_ms for each in others)
        text = f"it has nothing to do for {slowest.idle_ms:.1f} ms, the others for {idle:.1f}"
        remedy = "look at what else runs on its host's cores"
    return [Delay(cause=f"{slowest.name}, which is slow", ms=won, text=text, remedy=remedy)]


def without_waiting(
    delays: Sequence[Delay], stragglers: Sequence[Delay], *, least_ms: float
) -> list[Delay]:
    """Subtracts waiting for slow devices from a device's communication delays.

    Args:
        stragglers: delays by slow devices, from ``straggler_delays``.
        least_ms: smallest delay to return, in milliseconds.
    """
    waits = sum(each.ms for each in stragglers)
    found = []
    for each in sorted(delays, key=lambda each: -each.ms):
        if waits and each.cause.startswith("communication over"):
            taken = min(waits, each.ms)
            waits -= taken
            if each.ms - taken < least_ms:
                continue
            found.append(dataclasses.replace(each, ms=each.ms - taken))
        else:
            found.append(each)
    return found


_DEVICE_SHARE = 0.02
"""Share of a step under which a cause is not worth a line."""
_REACHED = 0.6
"""Share of a device's published FLOP/s that matmuls of good shapes reach under its power limit."""
_REACHED_BYTES = 0.7
"""Share of its published bytes/s that they reach where they are bound by those."""
_LAUNCH_MS = 0.005
"""Milliseconds of one launch, independent of its work."""
_SLOW = 2.0
"""Times what it should take, from which a matmul counts as slow."""
_FREE = 0.5
"""Share of a device's memory that, left free, makes recomputation a waste."""
_TILE = 64
"""Sizes of matmuls that are no multiple of it leave parts of the tensor cores idle."""
_FEW_ROWS = 1024
"""Tokens per launch under which micro-batches are the first thing to look at."""
_WIDE = ("f32", "f64")
_RATES = {"f8": 2.0, "s8": 2.0}  # of the bf16 rate, by the beginning of a type's name


def device_delays(waterfall: Waterfall, traced: TracedStep | None = None) -> list[Delay]:
    """Finds the delays in one device's trace, with the milliseconds that each costs per step.

    Causes: exposed communication by axis, idle time, copies, slow or unnecessarily wide matmuls,
    and recomputation that frees memory without need.

    Args:
        traced: the compiled program; without it the last three causes are not searched.
    """
    least = _DEVICE_SHARE * waterfall.span_ms
    found = list(_communication(waterfall, least))
    idle = waterfall.by_kind().get(IDLE, 0.0)
    if idle >= 2 * least:
        found.append(
            Delay(
                cause="host dispatch",
                ms=idle,
                text="the device waits for its next launch",
                remedy="leave CUDA graphs on (xla_gpu_enable_command_buffer), free the host's "
                "cores, or give a step more tokens",
            )
        )
    copies = waterfall.by_kind().get("copy", 0.0)
    if copies >= 3 * least:
        found.append(
            Delay(
                cause="copies",
                ms=copies,
                text="arrays are copied between layouts or stacked over layers",
                remedy="unroll the layers (training.unroll)",
            )
        )
    if traced is not None:
        found += _matmuls(waterfall, traced, least)
        found += _recomputation(waterfall, traced, least)
    return found


def _communication(waterfall: Waterfall, least: float) -> Iterator[Delay]:
    by_axis = {axes: time.exposed_ms for axes, time in waterfall.by_axis.items()}
    if not by_axis:
        by_axis = {"devices": waterfall.by_kind().get("collective", 0.0)}
    kernels = [each for each in waterfall.kernels if each.kind == "collective"]
    longest = kernels[0].hlo_op if kernels else "collectives"
    for axes, ms in by_axis.items():
        if ms >= least:
            yield Delay(
                cause=f"communication over {axes}",
                ms=ms,
                text=f"nothing runs beside it; the longest is {longest}",
                remedy="set combine thresholds in training.xla_options, make micro-batches "
                "larger, or lay this axis over faster links (jaxinfra plan)",
            )


def matmul_ms(shape: MatmulShape, peak: DevicePeak) -> float:
    """Returns the milliseconds of a matmul with these FLOPs and bytes, if its shape were ideal."""
    rate = next((rate for name, rate in _RATES.items() if shape["dtype"].startswith(name)), 1.0)
    computing = shape["flops"] / (_REACHED * rate * peak.bf16_flops)
    moving = shape["bytes"] / (_REACHED_BYTES * peak.hbm_bytes_per_s)
    return 1e3 * max(computing, moving) + _LAUNCH_MS


def _matmuls(waterfall: Waterfall, traced: TracedStep, least: float) -> list[Delay]:
    peak = device_peak(traced["device_kind"])
    shapes = {each["instruction"]: each for each in traced["matmuls"]}
    if peak is None or not shapes:
        return []
    ms: dict[str, float] = collections.defaultdict(float)
    launches: dict[str, int] = {}
    for kernel in waterfall.kernels:
        if kernel.hlo_op in shapes:  # some take several kernels, such as a sum of parts
            ms[kernel.hlo_op] += kernel.ms
            launches[kernel.hlo_op] = max(launches.get(kernel.hlo_op, 0), kernel.launches)
    slow: list[tuple[float, str]] = []
    wide: list[tuple[float, str]] = []
    for name, took in ms.items():
        should = matmul_ms(shapes[name], peak) * launches[name] / waterfall.steps
        if took > _SLOW * should:
            kind = wide if shapes[name]["dtype"] in _WIDE else slow
            kind.append((took - should, name))
    found = []
    if (lost := sum(each for each, _ in wide)) >= 2 * least:
        shape = shapes[max(wide)[1]]
        found.append(
            Delay(
                cause=f"matmuls in {shape['dtype']}",
                ms=lost,
                text=f"{len(wide)} of them, the slowest {_described(shape)}",
                remedy="precision.policy=bf16, which multiplies in 16 bits and adds in 32",
            )
        )
    if (lost := sum(each for each, _ in slow)) >= 2 * least:
        _, worst = max(slow)
        shape = shapes[worst]
        rate = shape["flops"] * launches[worst] / waterfall.steps / ms[worst] / 1e9
        found.append(
            Delay(
                cause="slow matmuls",
                ms=lost,
                text=f"{_described(shape)}, runs at {rate:.0f} of {peak.bf16_flops / 1e12:.0f} "
                f"TFLOP/s, and {len(slow) - 1} others at less than half of what they could",
                remedy=_remedy(shape, traced["accumulation"]),
            )
        )
    return found


def _described(shape: MatmulShape) -> str:
    batch = f"{shape['batch']} x " if shape["batch"] > 1 else ""
    sizes = f"[{shape['rows']}, {shape['depth']}] by [{shape['depth']}, {shape['columns']}]"
    return f"{shape['instruction']}, {batch}{sizes} in {shape['dtype']}"


def _remedy(shape: MatmulShape, accumulation: int) -> str:
    if shape["rows"] < _FEW_ROWS and accumulation > 1:
        return (
            f"fewer and larger micro-batches: training.accumulation below {accumulation} gives "
            f"each launch more than {shape['rows']} rows"
        )
    if odd := [size for size in (shape["depth"], shape["columns"]) if size % _TILE]:
        return f"make {', '.join(map(str, odd))} a multiple of {_TILE}, better of {2 * _TILE}"
    if shape["rows"] < _FEW_ROWS:
        return f"give a step more than {shape['rows']} tokens per device"
    return "leave XLA's autotuning on (xla_gpu_autotune_level, xla_gpu_enable_triton_gemm)"


def _recomputation(waterfall: Waterfall, traced: TracedStep, least: float) -> list[Delay]:
    limit, needs = traced["limit_bytes"], traced["step_bytes"]
    again = sum(ms for scope, ms in waterfall.by_scope().items() if scope.endswith(" recomputed"))
    if limit is None or needs > _FREE * limit or again < 2 * least:
        return []
    return [
        Delay(
            cause="recomputation",
            ms=again,
            text=f"activations are computed twice, and the step takes {needs / 2**30:.1f} of "
            f"{limit / 2**30:.1f} GiB",
            remedy="training.remat=auto takes the least that fits",
        )
    ]


_SAID_SHARE = 0.1
"""Share of a step that saves cost at least to count."""
_LINE = 0.02
"""Share of a step under which a device's delay is not worth a line."""
_STALL_S = 1.0
"""Seconds of a save under which it is what every save takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A training step's time and its delays, the largest first."""

    step_ms: float
    delays: tuple[Delay, ...]

    def paragraph(self) -> str:
        """Returns the summary of a step's delays that ``jaxinfra trace`` prints first."""
        if not self.delays:
            return (
                f"A step takes {self.step_ms:.1f} ms, and nothing that could be avoided delays it."
            )
        won = [
            f"{each.ms:.1f} ms ({each.ms / self.step_ms:.0%}) to {each.cause}: {each.text}. "
            f"Remedy: {each.remedy}."
            for each in self.delays
        ]
        return f"A step takes {self.step_ms:.1f} ms. It loses " + " It loses ".join(won)


def explain_step(directory: Path, traced: TracedRun | None = None) -> Explanation | None:
    """Explains the delays in a run's training step, from its records and any device traces.

    Returns None if the run has neither traces nor records.
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
    samples = any("rl/waited_s" in line for line in lines)
    hosts = host_delays(records, step_ms=step_ms, steps=len(steps), samples=samples)
    if hosts:  # which is why the device idles
        found = [each for each in found if each.cause != "host dispatch"]
    found += hosts
    found += evaluation_delays(records, step_ms=step_ms)
    found += checkpoint_delays(lines, step_ms=step_ms)
    incidents = read_incidents(run.incidents_file)
    found += incident_delays(incidents, steps_ms=[1e3 * s for s in steps])
    drifts = drift_delays(lines, records, incidents, hosts)
    if drifts and traced is None:
        step_ms = 1e3 * statistics.fmean(steps)  # the median has no share of what few steps lose
    found += drifts
    found.sort(key=lambda each: -each.ms)
    return Explanation(step_ms=step_ms, delays=tuple(found))


def checkpoint_delays(lines: Sequence[Mapping[str, Any]], *, step_ms: float) -> list[Delay]:
    """Returns the delay per step by checkpoint saves, from the lines of ``metrics.jsonl``."""
    stalls = [line["stall_s"] for line in lines if line.get("stall_s")]
    # A job of a few steps saves at its end alone.
    if len(stalls) < 2 or statistics.median(stalls) < _STALL_S:
        return []
    steps = sum("step_s" in line for line in lines)
    ms, usual = 1e3 * sum(stalls) / max(steps, 1), 1e3 * statistics.median(stalls)
    seldom = steps_between(usual, step_ms)
    won = ms - usual / seldom
    if won < _SAID_SHARE * step_ms:
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
    """Returns the delay per step by recompilations, from a run's incidents and step times."""
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
