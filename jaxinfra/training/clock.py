"""Time, throughput and memory of a run."""

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxinfra.core.devices import device_peak
from jaxinfra.models.flops import training_flops_per_token
from jaxinfra.training.job import Job


class Clock:
    """Time of a run over all its resumptions, without compilation and evaluation in step times."""

    def __init__(self, job: Job, records: list[dict[str, Any]]):
        training = job.config.training
        self.first = True
        self._tokens = training.batch_size * training.sequence_length
        flops = self._tokens * training_flops_per_token(
            job.config.model,
            num_parameters=job.model.num_parameters,
            sequence_length=training.sequence_length,
        )
        peak = device_peak(jax.devices()[0].device_kind)
        devices = job.placement.mesh.size
        self._ideal_s = None if peak is None else flops / (peak.bf16_flops * devices)
        self._before_s = max((r.get("elapsed_s", 0.0) for r in records), default=0.0)
        self._began = self._last = time.perf_counter()
        self.step_s = math.nan  # moving average

    def start(self) -> None:
        """The first step, which compiled, is done."""
        self.first = False
        self._last = time.perf_counter()

    def lap(self) -> tuple[float, float]:
        """Elapsed seconds of the run, and of the step now recorded."""
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        self.step_s = lap if math.isnan(self.step_s) else 0.9 * self.step_s + 0.1 * lap
        return self.elapsed_s, lap

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time within is nobody's step."""
        began = time.perf_counter()
        yield
        self._last += time.perf_counter() - began

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run so far."""
        return self._before_s + time.perf_counter() - self._began

    @property
    def tokens_per_s(self) -> float:
        """Now, over all devices."""
        return self._tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the devices' dense bf16 peak; None where that is not known."""
        return None if self._ideal_s is None else self._ideal_s / self.step_s

    def median_tokens_per_s(self, records: list[dict[str, Any]]) -> float:
        """Over all recorded steps but the first, whose lap held the compilation."""
        laps = [record["step_s"] for record in records if "step_s" in record]
        return self._tokens / statistics.median(laps)


def peak_bytes() -> int:
    """Most memory ever held: of the first device where it counts, else of this process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(statistics.get("peak_bytes_in_use", resident))
