"""Health of every GPU: driver readings (NVML), kernel log (Xid errors) and measured copies.

Meanings of Xid errors: NVIDIA, "XID Errors", GPU deployment and management documentation.
"""

import collections
import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
import pynvml

from jaxinfra.diagnostics.machine.finding import Finding, Grade, graded, not_known
from jaxinfra.diagnostics.machine.nvml import Answers, NoAnswerError, asked_or_none
from jaxinfra.runtime.devices import device_peak

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_RULE = "the kernel log has no Xid error"
_RESET = "reset the GPU or restart the node before the next job"
_REPLACE = "take the node out of service and have the GPU replaced"
_PROGRAM = "a program's fault, or memory's: run the job again with compute-sanitizer"

# Number: what it says, whether the GPU itself is at fault, the remedy.
_MEANING = {
    13: ("a kernel raised an exception", Grade.WARN, _PROGRAM),
    31: ("a kernel read or wrote an unmapped address", Grade.WARN, _PROGRAM),
    43: ("a process was stopped after an error of its own", Grade.WARN, _PROGRAM),
    45: ("work was removed after an earlier error", Grade.WARN, "look at the error before it"),
    48: ("an uncorrectable memory error", Grade.FAIL, _RESET),
    62: ("an internal microcontroller halted", Grade.FAIL, _RESET),
    63: ("a memory row is to be remapped", Grade.FAIL, _RESET),
    64: ("a memory row could not be remapped", Grade.FAIL, _REPLACE),
    74: ("an NVLink error", Grade.FAIL, "restart the node; check links with nvidia-smi nvlink -e"),
    79: ("the GPU has fallen off the bus", Grade.FAIL, _REPLACE),
    92: ("many corrected memory errors", Grade.WARN, "watch the GPU; replace it if they go on"),
    94: ("a contained memory error", Grade.FAIL, "start the job again; reset the GPU"),
    95: ("an uncontained memory error", Grade.FAIL, _RESET),
    119: ("the GPU's system processor does not answer", Grade.FAIL, _RESET),
    120: ("an error of the GPU's system processor", Grade.FAIL, _RESET),
}


def kernel_log() -> list[str] | None:
    """Returns the lines of the Linux kernel log; None if this user may not read it."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        with contextlib.suppress(BlockingIOError):  # the end of what there is
            while record := os.read(descriptor, 1 << 16):
                lines.append(record.decode(errors="replace"))
    except OSError:
        return lines or None  # overwritten while it was read
    finally:
        os.close(descriptor)
    return lines


def xid_findings(lines: Iterable[str] | None) -> list[Finding]:
    """Returns one finding per kind of Xid error and GPU in the kernel log."""
    if lines is None:
        return [not_known("Xid errors", "the kernel log cannot be read here", rule=_RULE)]
    counts = collections.Counter(
        (match[1], int(match[2])) for line in lines if (match := _LINE.search(line))
    )
    if not counts:
        return [Finding(subject="Xid errors", grade=Grade.OK, value="none", rule=_RULE)]
    found = []
    for (place, number), times in sorted(counts.items()):
        text, grade, remedy = _MEANING.get(
            number, ("see NVIDIA's list of Xid errors", Grade.WARN, _RESET)
        )
        found.append(
            Finding(
                subject=f"Xid {number}",
                grade=grade,
                value=f"{times} on GPU {place}: {text}",
                rule=_RULE,
                remedy=remedy,
            )
        )
    return found


_BYTES = 256 << 20
_ROUNDS = 5
_SHARE = 0.6
"""Share of a link's published rate that one copy should reach."""
# Bytes/s of one PCIe lane and direction, by generation, after encoding.
_LANE = {3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}


class LinkRate(NamedTuple):
    """The measured copy rate of one link (host to GPU, or GPU to GPU) in one direction."""

    sender: str
    receiver: str
    bytes_per_s: float
    expected: float | None  # None where the topology does not say


def measure_links(answers: Answers, devices: Sequence[jax.Device]) -> list[LinkRate]:
    """Measures rates of 256 MiB copies, host to GPU and GPU to GPU, as medians."""
    host = np.zeros(_BYTES, np.uint8)
    found = []
    for device in devices:
        lanes = asked_or_none(answers, "nvmlDeviceGetMaxPcieLinkWidth", device.id)
        generation = asked_or_none(answers, "nvmlDeviceGetMaxPcieLinkGeneration", device.id)
        best = lanes * _LANE[generation] if lanes and generation in _LANE else None
        found.append(LinkRate("host", f"gpu {device.id}", _rate(host, device), best))
    for sender in devices:
        array = jax.device_put(host, sender)
        peak = device_peak(sender.device_kind)
        for receiver in devices:
            if receiver != sender:
                expected = None if peak is None else peak.link_bytes_per_s
                names = f"gpu {sender.id}", f"gpu {receiver.id}"
                found.append(LinkRate(*names, _rate(array, receiver), expected))
    return found


def _rate(array: np.ndarray | jax.Array, device: jax.Device) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        jax.device_put(array, device).block_until_ready()
        times.append(time.perf_counter() - began)
    return array.nbytes / statistics.median(times[1:])  # the first allocates


def link_findings(rates: Iterable[LinkRate]) -> list[Finding]:
    """Compares each link's measured rate with its nominal rate and with its peers' rates."""
    rates = list(rates)
    found = []
    for rate in rates:
        # Pageable memory of the host is copied twice: such ways are held to their like alone.
        own = None if rate.sender == "host" else rate.expected
        alike = [other.bytes_per_s for other in rates if (other.sender == "host") == (own is None)]
        usual = statistics.median(alike)
        ok = rate.bytes_per_s >= 0.5 * usual and (own is None or rate.bytes_per_s >= _SHARE * own)
        beside = "" if rate.expected is None else f" of {rate.expected / 1e9:.0f}"
        found.append(
            graded(
                f"link: {rate.sender} to {rate.receiver}",
                f"{rate.bytes_per_s / 1e9:.1f}{beside} GB/s",
                ok=ok,
                rule=f"{_SHARE:.0%} of NVLink's rate, and half of what the others reach",
                remedy="look at the links' errors above; restart the node; check its topology "
                "(nvidia-smi topo -m)",
            )
        )
    return found


_POWER_CAP = 0x4
# What holds a clock down: bit, name, grade, remedy. An idle GPU, and one held at clocks that
# somebody asked for, are no fault of the machine.
_REASONS = (
    (0x2, "clocks set by a user", Grade.WARN, "nvidia-smi --reset-applications-clocks"),
    (
        _POWER_CAP,
        "power cap",
        Grade.WARN,
        "raise the power limit (nvidia-smi -pl), or accept its clocks",
    ),
    (0x8, "hardware slowdown", Grade.FAIL, "check cooling and power supply; ask for another node"),
    (0x10, "sync boost", Grade.WARN, "remove the GPU from its sync-boost group"),
    (0x20, "software thermal", Grade.FAIL, "check fans, air flow and the other GPUs of the node"),
    (0x40, "hardware thermal", Grade.FAIL, "check cooling; ask for another node"),
    (0x80, "power brake", Grade.FAIL, "check the node's power supplies; ask for another node"),
)
_NVLINKS = 18  # of a Hopper or Blackwell GPU, the most so far
_COUNTERS = (
    ("replays", pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY),
    ("recoveries", pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY),
    ("CRC errors", pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC),
)
_SM_SHARE = 0.97
"""Share of a GPU's highest SM clock under which a busy GPU counts as slowed down."""
_POWER_SHARE = 0.98
"""Share of a GPU's own default power limit under which a limit counts as a cap."""
_DRAWN_SHARE = 0.9
"""Share of its power limit from which a GPU's clocks are bound by it."""
_LIMITED_SHARE = 0.6
"""Share of a GPU's highest SM clock that its own power limit leaves even to the hottest matmuls."""
_HOT_C = 5
"""Degrees below the slowdown temperature at which a GPU counts as hot."""


def num_gpus(answers: Answers) -> int:
    """Returns the number of GPUs that the driver reports; 0 if it does not answer."""
    return asked_or_none(answers, "nvmlDeviceGetCount") or 0


@final
class _Gpu:
    """One GPU's readings, by what follows ``nvmlDeviceGet`` in the names of NVML's functions."""

    def __init__(self, answers: Answers, number: int):
        self._answers, self.number = answers, number

    def ask(self, name: str, *args: Any) -> Any:
        return self._answers.ask(f"nvmlDeviceGet{name}", self.number, *args)

    def maybe(self, name: str, *args: Any) -> Any:
        return asked_or_none(self._answers, f"nvmlDeviceGet{name}", self.number, *args)

    @property
    def is_busy(self) -> bool:
        load = self.maybe("UtilizationRates")
        return bool(load and load["gpu"] > 0)

    @property
    def is_alone(self) -> bool:
        return num_gpus(self._answers) == 1


class _Verdict(NamedTuple):
    value: str
    ok: bool
    remedy: str
    otherwise: Grade = Grade.WARN


def gpu_findings(answers: Answers) -> list[Finding]:
    """Examines every GPU's readings, such as temperature, clocks and memory errors."""
    found = []
    for number in range(num_gpus(answers)):
        gpu = _Gpu(answers, number)
        try:
            gpu.ask("Name")
        except NoAnswerError as error:
            found.append(
                Finding(
                    subject=f"gpu {number}",
                    grade=Grade.FAIL,
                    value=f"does not answer: {error}",
                    rule="the driver reaches every GPU of the node",
                    remedy="reset the GPU or restart the node; where it happens again, replace it",
                )
            )
            continue
        for subject, (rule, check) in _CHECKS.items():
            subject = f"gpu {number}: {subject}"
            try:
                value, ok, remedy, otherwise = check(gpu)
            except NoAnswerError as error:
                found.append(not_known(subject, str(error), rule=rule))
                continue
            rated = graded(subject, value, ok=ok, rule=rule, remedy=remedy, otherwise=otherwise)
            found.append(rated)
    return found


def _others(gpu: _Gpu) -> _Verdict:
    others = [each for each in gpu.ask("ComputeRunningProcesses") if each["pid"] != os.getpid()]
    shown = [f"{each['pid']} ({_held(each['usedGpuMemory'])})" for each in others]
    remedy = "end them, or name other GPUs in CUDA_VISIBLE_DEVICES"
    return _Verdict(", ".join(shown) or "none", not others, remedy)


def _held(used: int | None) -> str:
    if used is None:  # in containers the driver may not tell
        return "memory not told"
    return f"{used / 2**30:.1f} GiB" if used >= 2**30 else f"{used / 2**20:.0f} MiB"


def _memory(gpu: _Gpu) -> _Verdict:
    memory = gpu.ask("MemoryInfo")
    used, total = memory["used"], memory["total"]
    value = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB in use"
    return _Verdict(value, used < 0.03 * total, "end what holds it (processes are listed above)")


def _power(gpu: _Gpu) -> _Verdict:
    limit, own = gpu.ask("EnforcedPowerLimit"), gpu.ask("PowerManagementDefaultLimit")
    drawn = gpu.maybe("PowerUsage")
    return _Verdict(
        f"limit {limit / 1000:.0f} of {own / 1000:.0f} W"
        + ("" if drawn is None else f", draws {drawn / 1000:.0f} W"),
        limit >= _POWER_SHARE * own,
        f"nvidia-smi -i {gpu.number} -pl {own / 1000:.0f}; one capped GPU slows all of its job",
    )


def _heat(gpu: _Gpu) -> _Verdict:
    degrees = gpu.ask("Temperature", pynvml.NVML_TEMPERATURE_GPU)
    limit = gpu.maybe("TemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return _Verdict(
        f"{degrees} C" + ("" if limit is None else f", slows down at {limit} C"),
        degrees <= (85 if limit is None else limit) - _HOT_C,
        "check cooling before clocks drop",
    )


def _clocks(gpu: _Gpu) -> _Verdict:
    now = gpu.ask("ClockInfo", pynvml.NVML_CLOCK_SM)
    most = gpu.ask("MaxClockInfo", pynvml.NVML_CLOCK_SM)
    reasons = gpu.ask("CurrentClocksEventReasons")
    at_limit = _draws_its_power(gpu)
    held = [entry for entry in _REASONS if reasons & entry[0] & ~(_POWER_CAP * at_limit)]
    busy = gpu.is_busy and not reasons & 0x1
    slow = busy and now < (_LIMITED_SHARE if at_limit else _SM_SHARE) * most
    value = f"SM {now} of {most} MHz" + ("" if busy else " (idle)")
    value += ", at its power limit" if at_limit else ""
    if not held:
        return _Verdict(value, not slow, "look for locked clocks: nvidia-smi --reset-gpu-clocks")
    value += ", held by " + ", ".join(name for _, name, _, _ in held)
    _, _, grade, remedy = next((entry for entry in held if entry[2] is Grade.FAIL), held[0])
    return _Verdict(value, False, remedy, grade)


def _draws_its_power(gpu: _Gpu) -> bool:
    """Tells whether a GPU uses the power its board allows, so its clocks are at their highest."""
    names = ("EnforcedPowerLimit", "PowerManagementDefaultLimit", "PowerUsage")
    limit, own, drawn = map(gpu.maybe, names)
    if not limit or not own or not drawn:
        return False
    return limit >= _POWER_SHARE * own and drawn >= _DRAWN_SHARE * limit


def _ecc(gpu: _Gpu) -> _Verdict:
    is_on = bool(gpu.ask("EccMode")[0])
    since = pynvml.NVML_VOLATILE_ECC
    lost = gpu.ask("TotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since)
    corrected = gpu.maybe("TotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since)
    return _Verdict(
        f"{'on' if is_on else 'off'}, {lost} uncorrectable, {corrected} corrected",
        is_on and lost == 0,
        "reset the GPU; go back to a checkpoint from before: results since are suspect"
        if is_on
        else "turn ECC on (nvidia-smi -e 1)",
        Grade.FAIL if is_on else Grade.WARN,
    )


def _rows(gpu: _Gpu) -> _Verdict:
    corrected, uncorrected, pending, failed = gpu.ask("RemappedRows")
    return _Verdict(
        f"{corrected + uncorrected} remapped"
        + (", one waits" if pending else "")
        + (", remapping FAILED" if failed else ""),
        not pending and not failed and uncorrected < 8,
        "replace the GPU" if failed or not pending else "reset the GPU (nvidia-smi -r)",
        Grade.FAIL if failed or pending else Grade.WARN,
    )


def _pcie(gpu: _Gpu) -> _Verdict:
    width, widest = gpu.ask("CurrPcieLinkWidth"), gpu.ask("MaxPcieLinkWidth")
    now, best = gpu.ask("CurrPcieLinkGeneration"), gpu.ask("MaxPcieLinkGeneration")
    busy = gpu.is_busy
    return _Verdict(
        f"generation {now} of {best}, {width} of {widest} lanes" + ("" if busy else " (idle)"),
        width == widest and (now == best or not busy),  # an idle link sleeps at a lower one
        "reseat the GPU or its riser; check the slot in the firmware's settings",
    )


def _nvlink(gpu: _Gpu) -> _Verdict:
    told = [gpu.maybe("NvLinkState", link) for link in range(_NVLINKS)]
    states = [state for state in told if state is not None]
    if not states:
        raise NoAnswerError("no link")
    errors = _link_errors(gpu, len(states))
    text = ", ".join(f"{count} {name}" for name, count in errors.items() if count)
    up = sum(states)
    return _Verdict(
        f"{up} of {len(states)} links up" + (f", {text}" if text else ""),
        # A GPU alone in its machine has its links down.
        up in ((0, len(states)) if gpu.is_alone else (len(states),)) and not any(errors.values()),
        "reset the node; where links stay down or errors come back, replace GPU or switch",
        Grade.FAIL if up < len(states) else Grade.WARN,
    )


def _link_errors(gpu: _Gpu, links: int) -> dict[str, int]:
    fields = [(field, link) for _, field in _COUNTERS for link in range(links)]
    counts = [value or 0 for value in gpu.maybe("FieldValues", fields) or ()]
    return {
        name: int(sum(counts[place * links : (place + 1) * links]))
        for place, (name, _) in enumerate(_COUNTERS)
    }


def _model(gpu: _Gpu) -> _Verdict:
    name, mig = gpu.ask("Name"), gpu.maybe("MigMode")
    divided = bool(mig and mig[0])
    return _Verdict(
        name + (", divided by MIG" if divided else ""),
        not divided and device_peak(name) is not None,
        "leave MIG off for training; peaks of further GPUs go into runtime/devices.py",
    )


# Subject: rule and check. What explains another finding comes before it: a process its memory, a
# cap its clocks.
_CHECKS: dict[str, tuple[str, Callable[[_Gpu], _Verdict]]] = {
    "processes": ("no other process computes on the GPU", _others),
    "memory": ("at most 3% is taken before a job starts", _memory),
    "power": (f"the limit is at least {_POWER_SHARE:.0%} of the board's own", _power),
    "temperature": (f"{_HOT_C} degrees below the slowdown temperature", _heat),
    "clocks": (
        f"at work, SM clocks stay above {_SM_SHARE:.0%} of the highest, and nothing holds them",
        _clocks,
    ),
    "ECC": ("ECC is on and has met no uncorrectable error since the driver was loaded", _ecc),
    "remapped rows": ("no row waits to be remapped, none failed to be, and few were", _rows),
    "PCIe": ("as wide and, at work, as fast as slot and GPU allow", _pcie),
    "NVLink": ("all links or none are up, and none repeats what it sends", _nvlink),
    "model": ("a whole GPU whose peaks are known, so that MFU means something", _model),
}


def driver_findings(answers: Answers) -> list[Finding]:
    """Compares the driver and its CUDA version with what JAX's CUDA plugin needs."""
    version = asked_or_none(answers, "nvmlSystemGetDriverVersion")
    cuda = asked_or_none(answers, "nvmlSystemGetCudaDriverVersion_v2")
    rule = "CUDA 13 needs driver 580 or newer"
    if version is None:
        return [not_known("driver", "not told", rule=rule)]
    major = int(version.split(".")[0])
    brought = "" if cuda is None else f", CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return [
        graded(
            "driver",
            f"{version}{brought}",
            ok=major >= 580,
            rule=rule,
            remedy="install a newer driver; jaxinfra[cuda] is of CUDA 13",
            otherwise=Grade.FAIL,
        )
    ]
