"""Examination of a machine's GPUs, host, software and settings."""

import os
from pathlib import Path

from jaxinfra.diagnostics.machine.finding import Finding, not_known
from jaxinfra.diagnostics.machine.gpu import (
    driver_findings,
    gpu_findings,
    kernel_log,
    num_gpus,
    xid_findings,
)
from jaxinfra.diagnostics.machine.host import host_findings, read_host
from jaxinfra.diagnostics.machine.nvml import (
    Answers,
    LiveAnswers,
    NoAnswerError,
    RecordedAnswers,
    asked_or_none,
)
from jaxinfra.diagnostics.machine.settings import (
    installed,
    setting_findings,
    software_findings,
    unknown_flag_findings,
)


def machine_findings(
    *, directory: Path, answers: Answers | None = None, record: Path | None = None
) -> list[Finding]:
    """Examines GPUs, host, software and settings; link speeds are measured elsewhere.

    Args:
        directory: the directory that runs are written to.
        answers: a recording of GPU readings, examined in place of this machine's GPUs.
        record: file to save this machine's GPU readings to.
    """
    source, found = answers, []
    if source is None:
        try:
            source = LiveAnswers()
        except NoAnswerError as error:
            source = RecordedAnswers({})
            why = f"no GPU here ({error}); the rest is checked"
            found.append(not_known("gpus", why, rule="NVIDIA's driver answers"))
    gpus = num_gpus(source)
    if gpus:
        found += driver_findings(source) + gpu_findings(source)
        memory = [asked_or_none(source, "nvmlDeviceGetMemoryInfo", gpu) for gpu in range(gpus)]
        gpu_bytes = sum(each["total"] for each in memory if each)
    else:
        gpu_bytes = 0
    if record is not None and isinstance(source, LiveAnswers):
        source.record(record)
    if answers is not None:
        return found  # of another machine, or another moment: only that is examined
    found += xid_findings(kernel_log()) if gpus else []
    found += host_findings(read_host(directory), gpu_bytes=gpu_bytes, gpus=gpus)
    found += software_findings(installed(), num_gpus=gpus)
    return found + unknown_flag_findings(os.environ) + setting_findings(os.environ, num_gpus=gpus)
