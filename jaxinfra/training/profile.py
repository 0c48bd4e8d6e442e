"""Profiler traces of a range of steps."""

import dataclasses
import json
import os
from pathlib import Path
from typing import NotRequired, TypedDict, final

import jax
from jaxtyping import Array, Float

from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.hlo.program import MatmulShape, collectives, launches, matmul_shapes
from jaxinfra.runtime.files import whole_number
from jaxinfra.training.job import Job
from jaxinfra.training.state import State
from jaxinfra.training.xla_options import describe_options

COLLECTIVES_FILE = "collectives.json"
"""File beside a trace that lists the program's collectives and their mesh axes."""

LAUNCHES_FILE = "launches.json"
"""File beside a trace that lists the program's kernel launches, in order."""

STEP_FILE = "step.json"
"""File beside a trace with its ``TracedStep``."""


class TracedStep(TypedDict):
    """Facts about a traced step that the profiler does not record, such as the kind of device."""

    device_kind: str
    limit_bytes: int | None  # memory of a device that JAX may use; None: unknown
    step_bytes: int  # memory of the compiled step per device
    accumulation: int
    matmuls: list[MatmulShape]
    # "name=value": options of the step, then of XLA_FLAGS; absent in older traces.
    xla_options: NotRequired[list[str]]


def rank_directory(directory: Path, rank: int) -> Path:
    """Returns the directory of a rank's trace below a run's ``trace`` directory. Each rank has its
    own, as the profiler names its files by host, and several ranks may share a host.
    """
    return directory / f"rank-{rank:05d}" if rank else directory


def _xla_options(job: Job) -> list[str]:
    own = describe_options(job.options).split(", ") if job.options else []
    return own + os.environ.get("XLA_FLAGS", "").split()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRange:
    """Range of training steps [start, stop) to trace; step 0 is the one that compiles."""

    start: int
    stop: int

    def require_within(self, *, first: int, steps: int) -> None:
        """Raises ConfigError unless the range is within the remaining steps [first, steps)."""
        if self.start < first or self.stop > steps:
            raise ConfigError(
                f"--profile {self.start}:{self.stop}: the steps to come are {first}:{steps}; "
                "choose a range within"
            )


def parse_profile_range(text: str) -> ProfileRange:
    """Parses a range of steps such as "10:13"."""
    start, _, stop = text.partition(":")
    first, last = whole_number(start), whole_number(stop)
    if first is None or last is None or first >= last:
        raise ConfigError(f"--profile {text!r}: write START:STOP, whole steps with START < STOP")
    return ProfileRange(start=first, stop=last)


@final
class Profiler:
    """Starts and stops XLA's traces around a range of steps; XProf or Perfetto open them.

    Each rank traces its own devices; the first one describes the program.
    """

    def __init__(self, steps: ProfileRange | None, directory: Path):
        self._steps = steps
        self._directory = directory
        self._running = False

    def describe(self, job: Job, state: State, batch: Batch) -> None:
        """Writes the kernels and collectives of a training step to a file, if steps are traced.

        This compiles the step; its first call then reuses the compiled program.
        """
        mesh = job.placement.mesh
        if self._steps is None or jax.process_index() > 0:
            return
        compiled = job.train_step.lower(state, batch).compile()
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / LAUNCHES_FILE).write_text(json.dumps(launches(compiled)))
        device = jax.local_devices()[0]
        traced = TracedStep(
            device_kind=device.device_kind,
            limit_bytes=(device.memory_stats() or {}).get("bytes_limit"),
            step_bytes=step_bytes(compiled),
            accumulation=job.config.training.accumulation,
            matmuls=matmul_shapes(compiled),
            xla_options=_xla_options(job),
        )
        (self._directory / STEP_FILE).write_text(json.dumps(traced))
        if mesh.size > 1:
            found = [
                {
                    "instruction": each.instruction,
                    "kind": each.kind,
                    "scope": each.scope,
                    "axes": each.axes(mesh.shape),
                    "sent_bytes": each.sent_bytes,  # per device and call
                }
                for each in collectives(compiled)
            ]
            (self._directory / COLLECTIVES_FILE).write_text(json.dumps(found))

    def before_step(self, step: int) -> None:
        """Starts the trace if its range begins with ``step`` (from 0). Called before ``step`` is
        dispatched.
        """
        if self._steps is not None and step == self._steps.start:
            place = rank_directory(self._directory, jax.process_index())
            jax.profiler.start_trace(str(place), create_perfetto_trace=True)
            self._running = True

    def after_step(self, step: int, result: Float[Array, ""]) -> None:
        """Stops the trace if ``step`` is the last of its range, after waiting for the step's
        result. Called after ``step`` is dispatched.
        """
        if self._running and self._steps is not None and step + 1 >= self._steps.stop:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Ends the trace if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
