"""On what a run's steps were computed: one line per session, by which a replay knows whether equal
bits may be asked for.
"""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from jaxinfra.config import codec
from jaxinfra.runtime.json_lines import drop_cut_line, read_log
from jaxinfra.training.job import Job

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What decides how sums are ordered and rounded, beside the config's other settings."""

    jax_version: str
    device_kind: str
    num_processes: int
    mesh: dict[str, Any]  # of the config
    xla_flags: str

    @classmethod
    def of(cls, job: Job) -> "Environment":
        """The one in which a job's steps run here."""
        device = job.placement.mesh.devices.flat[0]
        return cls(
            jax_version=jax.__version__,
            device_kind=device.device_kind,
            num_processes=jax.process_count(),
            mesh=codec.to_dict(job.config.mesh),
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )

    def differences(self, other: "Environment") -> list[str]:
        """What is not the same, with both values; how many devices there are is no matter."""
        found = []
        for field in dataclasses.fields(self):
            mine, theirs = (_alike(getattr(each, field.name)) for each in (self, other))
            if mine != theirs:
                found.append(f"{field.name} {mine} here, {theirs} there")
        return found


def _alike(value: Any) -> Any:
    """A value in words, without what changes no bit: the CPU devices that a host shows."""
    if isinstance(value, dict):
        return " x ".join(f"{axis}={size}" for axis, size in value.items() if size != 1) or "1"
    if not isinstance(value, str):
        return value
    words = (word for word in value.split() if "host_platform_device_count" not in word)
    return " ".join(sorted(words))


def record_environment(file: Path, job: Job, *, step: int) -> None:
    """Appends what the steps after this one are computed on; the first process does."""
    if jax.process_index() > 0:
        return
    line = {"step": step, **dataclasses.asdict(Environment.of(job))}
    try:
        drop_cut_line(file)
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    except OSError as error:  # it only tells what happened
        _LOG.warning("%s: %s; a replay will not know what the run ran on", file, error.strerror)


def environment_of(file: Path, *, step: int) -> Environment | None:
    """That of the session which did this step last; None where it is not known."""
    lines, _ = read_log(file, holds=dict[str, Any])
    names = {field.name for field in dataclasses.fields(Environment)}
    known = [line for line in lines if line.keys() >= names and line.get("step", step) < step]
    return Environment(**{name: known[-1][name] for name in names}) if known else None
