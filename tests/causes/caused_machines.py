"""Causes in machines: recorded answers of a driver, readings of a host, settings, versions."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from causes.causes import (
    DOCTOR,
    CauseVerdict,
    alarm_of,
    cause,
    healthy,
    verdict_of_findings,
)
from causes.machines import GOOD_HOST, RECORDED_H200, busy_answers, gpu_answers
from jaxinfra.diagnostics.machine.finding import Finding
from jaxinfra.diagnostics.machine.gpu import (
    LinkRate,
    driver_findings,
    gpu_findings,
    link_findings,
    xid_findings,
)
from jaxinfra.diagnostics.machine.host import host_findings
from jaxinfra.diagnostics.machine.nvml import RecordedAnswers
from jaxinfra.diagnostics.machine.settings import setting_findings, software_findings
from jaxinfra.faults.arena import Arena

_GIB = 1 << 30
_STRANGER = {"pid": 4711, "usedGpuMemory": 60 * _GIB}
# Cause: what GPU 1 of two answers, at work, and the words that name it.
_SICK_GPUS: dict[str, tuple[str, dict[str, Any], str]] = {
    "power-cap": (
        "a limit of 500 of 700 W, and clocks held by it",
        {
            "nvmlDeviceGetEnforcedPowerLimit[1]": 500_000,
            "nvmlDeviceGetPowerUsage[1]": 499_000,
            "nvmlDeviceGetCurrentClocksEventReasons[1]": 4,
            "nvmlDeviceGetClockInfo[1, 1]": 1290,
        },
        "gpu 1: power: limit 500 of 700 W",
    ),
    "throttled-by-heat": (
        "clocks held by a hardware slowdown for heat",
        {
            "nvmlDeviceGetCurrentClocksEventReasons[1]": 0x48,
            "nvmlDeviceGetClockInfo[1, 1]": 990,
            "nvmlDeviceGetTemperature[1, 0]": 91,
        },
        "gpu 1: clocks: SM 990 .*thermal",
    ),
    "locked-clocks": (
        "1,200 of 1,980 MHz at work, and nothing holds them",
        {"nvmlDeviceGetClockInfo[1, 1]": 1200},
        "gpu 1: clocks: SM 1200 of 1980",
    ),
    "memory-errors": (
        "three uncorrectable ECC errors",
        {"nvmlDeviceGetTotalEccErrors[1, 1, 0]": 3},
        "gpu 1: ECC: on, 3 uncorrectable",
    ),
    "rows-to-remap": (
        "a memory row that waits to be remapped",
        {"nvmlDeviceGetRemappedRows[1]": [0, 1, 1, 0]},
        "gpu 1: remapped rows: .*one waits",
    ),
    "narrow-slot": (
        "a PCIe link of 8 of 16 lanes",
        {"nvmlDeviceGetCurrPcieLinkWidth[1]": 8},
        "gpu 1: PCIe: .*8 of 16 lanes",
    ),
    "link-down": (
        "one of 18 NVLinks down",
        {"nvmlDeviceGetNvLinkState[1, 7]": 0},
        "gpu 1: NVLink: 17 of 18",
    ),
    "another-process": (
        "a process that holds 60 GiB",
        {
            "nvmlDeviceGetComputeRunningProcesses[1]": [_STRANGER],
            "nvmlDeviceGetMemoryInfo[1]": {
                "total": 140 * _GIB,
                "used": 61 * _GIB,
                "free": 79 * _GIB,
            },
        },
        "gpu 1: processes: .*4711",
    ),
    "lost-device": (
        "a GPU that does not answer",
        {"nvmlDeviceGetName[1]": {"error": "GPU is lost"}},
        "gpu 1: does not answer",
    ),
}
# Cause: what the host reads, and the words that name it.
_POOR_HOSTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "memory-limit": (
        "a control group with 62 of its 64 GiB in use",
        {"cgroup_limit": 64 * _GIB, "cgroup_used": 62 * _GIB},
        "host: cgroup: 62.0 of 64.0 GiB",
    ),
    "cpu-limit": (
        "a control group of 1.5 of 32 CPUs, which waits in 70% of its periods",
        {"cpu_limit": 1.5, "cpu_throttled": 0.7},
        "host: CPUs: 1.5 of 32",
    ),
    "little-shared-memory": (
        "32 MiB in /dev/shm",
        {"shared_bytes": 32 << 20},
        "host: shared memory: 0.03 GiB",
    ),
    "few-file-handles": ("1,024 open files", {"open_files": 1024}, "host: open files"),
    "full-disk": ("100 MiB free", {"disk_free": 100 << 20}, "host: disk space: 0.1 GiB"),
    "slow-disk": ("30 MB/s written", {"write_rate": 30e6}, "host: disk writes: 30 MB/s"),
}


def _node(answers: Mapping[str, Any]) -> list[Finding]:
    recorded = RecordedAnswers(answers)
    return driver_findings(recorded) + gpu_findings(recorded)


def _host(**values: Any) -> list[Finding]:
    state = dataclasses.replace(GOOD_HOST, **values)
    return host_findings(state, gpu_bytes=280 * _GIB, gpus=2)


def _enter_recordings() -> None:
    for name, (made, answers, words) in _SICK_GPUS.items():

        def judge_gpu(
            arena: Arena, answers: Mapping[str, Any] = answers, words: str = words
        ) -> CauseVerdict:
            del arena
            return verdict_of_findings(_node({**busy_answers(), **answers}), words=words)

        cause(name, DOCTOR, made=f"an answer of the driver: {made}")(judge_gpu)
    for name, (made, values, words) in _POOR_HOSTS.items():

        def judge_host(
            arena: Arena, values: Mapping[str, Any] = values, words: str = words
        ) -> CauseVerdict:
            del arena
            return verdict_of_findings(_host(**values), words=words)

        cause(name, DOCTOR, made=f"a reading of the host: {made}")(judge_host)


_enter_recordings()


@cause("xid-error", DOCTOR, made="a line of the kernel log: Xid 79")
def xid_error(arena: Arena) -> CauseVerdict:
    """What the driver wrote of a GPU that fell off the bus."""
    del arena
    line = "4,1,2,-;NVRM: Xid (PCI:0000:19:00): 79, pid=12, name=python, GPU has fallen off the bus"
    return verdict_of_findings(xid_findings([line]), words="Xid 79: .*0000:19:00.*off the bus")


@cause("slow-link", DOCTOR, made="a measured copy between two GPUs of four at 24 GB/s")
def slow_link(arena: Arena) -> CauseVerdict:
    """The others reach 390."""
    del arena
    return verdict_of_findings(link_findings(_links(24e9)), words="link: gpu 1 to gpu 2: 24.0")


def _links(rate: float) -> list[LinkRate]:
    names = [f"gpu {gpu}" for gpu in range(4)]
    pairs = [(a, b) for a in names for b in names if a != b]
    return [
        LinkRate(a, b, rate if (a, b) == ("gpu 1", "gpu 2") else 390e9, 450e9) for a, b in pairs
    ]


@cause("slow-flag", DOCTOR, made="XLA_FLAGS with xla_gpu_autotune_level=0")
def slow_flag(arena: Arena) -> CauseVerdict:
    """Matmuls keep untuned tiles."""
    del arena
    environment = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    words = "XLA_FLAGS xla_gpu_autotune_level: 0"
    return verdict_of_findings(setting_findings(environment, num_gpus=2), words=words)


@cause("mixed-versions", DOCTOR, made="a plugin of another version than JAX's")
def mixed_versions(arena: Arena) -> CauseVerdict:
    """They fail at start, or in a kernel."""
    del arena
    found = software_findings(_software(plugin="0.11.1"), num_gpus=2)
    return verdict_of_findings(found, words="software: jaxlib and plugins: .*0.11.1")


def _software(plugin: str) -> dict[str, str]:
    return {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-pjrt": plugin}


@healthy("recorded-h200", DOCTOR, what="what the driver of one H200 answered")
def recorded_h200(arena: Arena) -> str:
    """A machine that there is."""
    del arena
    return alarm_of(_node(json.loads(RECORDED_H200.read_text())))


@healthy("idle-node", DOCTOR, what="8 idle H200s")
def idle_node(arena: Arena) -> str:
    """Clocks and links sleep."""
    del arena
    return alarm_of(_node(gpu_answers(8)))


@healthy("node-at-its-power-limit", DOCTOR, what="8 H200s at 700 of 700 W and 1,530 of 1,980 MHz")
def node_at_its_power_limit(arena: Arena) -> str:
    """As any is that multiplies matrices."""
    del arena
    answers = busy_answers(8, clock=1530)
    for gpu in range(8):
        answers[f"nvmlDeviceGetCurrentClocksEventReasons[{gpu}]"] = 4
        answers[f"nvmlDeviceGetPowerUsage[{gpu}]"] = 697_430
        answers[f"nvmlDeviceGetTemperature[{gpu}, 0]"] = 66
    return alarm_of(_node(answers))


@healthy("h100-node", DOCTOR, what="4 H100s at work at their highest clocks")
def h100_node(arena: Arena) -> str:
    """Another model, with corrected errors and a few rows remapped."""
    del arena
    answers = busy_answers(4, name="NVIDIA H100 80GB HBM3")
    answers["nvmlDeviceGetTotalEccErrors[2, 0, 0]"] = 12
    answers["nvmlDeviceGetRemappedRows[2]"] = [2, 0, 0, 0]
    return alarm_of(_node(answers))


@healthy("a100-without-links", DOCTOR, what="2 A100s on PCIe 4 without NVLink")
def a100_without_links(arena: Arena) -> str:
    """Nothing tells of links that there are not."""
    del arena
    answers = busy_answers(2, name="NVIDIA A100-SXM4-80GB", watts=400)
    answers = {name: each for name, each in answers.items() if "NvLink" not in name}
    for gpu in range(2):
        answers[f"nvmlDeviceGetCurrPcieLinkGeneration[{gpu}]"] = 4
        answers[f"nvmlDeviceGetMaxPcieLinkGeneration[{gpu}]"] = 4
    return alarm_of(_node(answers))


@healthy("bare-metal-host", DOCTOR, what="a host without limits")
def bare_metal_host(arena: Arena) -> str:
    """Of two GPUs."""
    del arena
    return alarm_of(_host())


@healthy("container", DOCTOR, what="a container of 16 of 64 CPUs and 100 of 256 GiB, half in use")
def container(arena: Arena) -> str:
    """Limits that leave enough."""
    del arena
    limits = {"cpus": 64, "cpu_limit": 16.0, "cpu_throttled": 0.02}
    return alarm_of(_host(**limits, cgroup_limit=256 * _GIB, cgroup_used=100 * _GIB))


@healthy("usual-settings", DOCTOR, what="variables and flags that cost nothing, one CUDA, no Xid")
def usual_settings(arena: Arena) -> str:
    """And links as fast as each other."""
    del arena
    flags = "--xla_gpu_enable_triton_gemm=true --xla_gpu_enable_latency_hiding_scheduler=true"
    environment = {"XLA_FLAGS": flags, "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0,1"}
    found = setting_findings(environment, num_gpus=2)
    found += software_findings(_software(plugin="0.11.2"), num_gpus=2)
    return alarm_of(
        [*found, *xid_findings(["6,1,1,-;usb 1-1: new device"]), *link_findings(_links(385e9))]
    )
