"""Time, throughput and memory of a run."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax

from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.runtime.devices import device_peak
from jaxinfra.training.job import Job


@final
class Clock:
    """Time of a run over all its resumptions; compilation, evaluation and saves are in no step.

    Args:
        records: of the run so far. Steps that a kill undid are not among them, nor is their time.
        began: ``time.perf_counter()`` at the start of this session.
    """

    def __init__(self, job: Job, records: Sequence[dict[str, Any]], *, began: float):
        training = job.config.training
        self._tokens = training.batch_size * training.sequence_length
        flops = self._tokens * training_flops_per_token(job.model, training.sequence_length)
        peak = device_peak(jax.devices()[0].device_kind)
        devices = job.placement.mesh.size
        self._ideal_s = None if peak is None else flops / (peak.bf16_flops * devices)
        self._before_s = max((record.get("elapsed_s", 0.0) for record in records), default=0.0)
        self._began = began
        self._last: float | None = None  # when the last step was recorded
        self.step_s: float | None = None  # moving average

    def lap(self) -> float | None:
        """Seconds of the step now recorded; None for a session's first, which compiled."""
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            return None
        lap = now - last
        self.step_s = lap if self.step_s is None else 0.9 * self.step_s + 0.1 * lap
        return lap

    @contextlib.contextmanager
    def paused(self, *, when: bool = True) -> Iterator[None]:
        """Time within is nobody's step, where ``when`` is true."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if when and self._last is not None:
                self._last += time.perf_counter() - began

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run so far, its set-up included."""
        return self._before_s + time.perf_counter() - self._began

    def tokens_per_s(self, step_s: float | None) -> float | None:
        """Over all devices, at that time a step."""
        return None if step_s is None else self._tokens / step_s

    def rates(self, step_s: float | None) -> dict[str, float | None]:
        """A step's time, what follows from it, and the most memory so far, for its record."""
        rates = {"tokens_per_s": self.tokens_per_s(step_s), "mfu": self.mfu(step_s)}
        return {"step_s": step_s, **rates, "peak_bytes": peak_bytes()}

    def mfu(self, step_s: float | None) -> float | None:
        """Model FLOPs over the devices' dense bf16 peak; None where either is not known."""
        return None if self._ideal_s is None or step_s is None else self._ideal_s / step_s


def median_step_s(records: Sequence[dict[str, Any]]) -> float | None:
    """Over all sessions, without the first step of each."""
    laps = [record["step_s"] for record in records if record.get("step_s") is not None]
    return statistics.median(laps) if laps else None


def peak_bytes() -> int:
    """Most memory ever held: of the first device where it counts, else of this process."""
    counters = jax.local_devices()[0].memory_stats() or {}
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(counters.get("peak_bytes_in_use", resident))
