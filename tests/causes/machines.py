"""Made-up machines, in the form in which real ones are recorded."""

import json
from pathlib import Path
from typing import Any

from jaxinfra.diagnostics.machine.host import HostState

RECORDED_H200 = Path(__file__).with_name("h200.json")
"""What the driver of a machine with one H200 answered (``jaxinfra doctor --record``)."""

_GIB = 1 << 30
_LINKS = range(18)
_COUNTERS = (161, 162, 163)


def gpu_answers(gpus: int = 2, *, name: str = "NVIDIA H200", watts: int = 700) -> dict[str, Any]:
    """What the driver of a healthy idle node answers, as ``LiveAnswers.record`` writes it."""
    answers: dict[str, Any] = {
        "library": "nvidia-ml-py 13",
        "nvmlDeviceGetCount[]": gpus,
        "nvmlSystemGetDriverVersion[]": "580.159.04",
        "nvmlSystemGetCudaDriverVersion_v2[]": 13000,
    }
    for gpu in range(gpus):
        fields = [[field, link] for field in _COUNTERS for link in _LINKS]
        memory = {"total": 140 * _GIB, "used": _GIB, "free": 139 * _GIB}
        answers |= {
            f"nvmlDeviceGetName[{gpu}]": name,
            f"nvmlDeviceGetMigMode[{gpu}]": [0, 0],
            f"nvmlDeviceGetMemoryInfo[{gpu}]": memory,
            f"nvmlDeviceGetClockInfo[{gpu}, 1]": 345,
            f"nvmlDeviceGetMaxClockInfo[{gpu}, 1]": 1980,
            f"nvmlDeviceGetCurrentClocksEventReasons[{gpu}]": 1,
            f"nvmlDeviceGetUtilizationRates[{gpu}]": {"gpu": 0, "memory": 0},
            f"nvmlDeviceGetEnforcedPowerLimit[{gpu}]": 1000 * watts,
            f"nvmlDeviceGetPowerManagementDefaultLimit[{gpu}]": 1000 * watts,
            f"nvmlDeviceGetPowerUsage[{gpu}]": 76_000,
            f"nvmlDeviceGetTemperature[{gpu}, 0]": 31,
            f"nvmlDeviceGetTemperatureThreshold[{gpu}, 1]": 90,
            f"nvmlDeviceGetEccMode[{gpu}]": [1, 1],
            f"nvmlDeviceGetTotalEccErrors[{gpu}, 1, 0]": 0,
            f"nvmlDeviceGetTotalEccErrors[{gpu}, 0, 0]": 0,
            f"nvmlDeviceGetRemappedRows[{gpu}]": [0, 0, 0, 0],
            f"nvmlDeviceGetCurrPcieLinkWidth[{gpu}]": 16,
            f"nvmlDeviceGetMaxPcieLinkWidth[{gpu}]": 16,
            f"nvmlDeviceGetCurrPcieLinkGeneration[{gpu}]": 5,
            f"nvmlDeviceGetMaxPcieLinkGeneration[{gpu}]": 5,
            f"nvmlDeviceGetComputeRunningProcesses[{gpu}]": [],
            f"nvmlDeviceGetFieldValues{json.dumps([gpu, fields])}": [0] * len(fields),
            **{f"nvmlDeviceGetNvLinkState[{gpu}, {link}]": 1 for link in _LINKS},
        }
    return answers


def busy_answers(gpus: int = 2, *, clock: int = 1980, **node: Any) -> dict[str, Any]:
    """The same of a node at work."""
    answers = gpu_answers(gpus, **node)
    for gpu in range(gpus):
        answers |= {
            f"nvmlDeviceGetUtilizationRates[{gpu}]": {"gpu": 99, "memory": 40},
            f"nvmlDeviceGetCurrentClocksEventReasons[{gpu}]": 0,
            f"nvmlDeviceGetClockInfo[{gpu}, 1]": clock,
        }
    return answers


GOOD_HOST = HostState(
    memory_bytes=200 * _GIB,
    total_bytes=256 * _GIB,
    cgroup_limit=None,
    cgroup_used=None,
    cpus=32,
    cpu_limit=None,
    cpu_throttled=0.0,
    shared_bytes=64 * _GIB,
    open_files=65536,
    disk_free=500 * _GIB,
    write_rate=2e9,
    clock_synchronized=True,
    clock_error_s=0.002,
)
