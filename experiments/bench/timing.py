"""Times functions on the device they run on, side by side.

Clocks, temperatures and neighbours change within seconds: candidates are interleaved in one
process, and their medians are compared with each other, never with a figure from another run.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.common import device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times of one candidate in milliseconds, in the order in which they were taken."""

    times_ms: tuple[float, ...]
    clock: str  # "kernel": time on the GPU alone; "wall": the host's clock around the call

    @property
    def median_ms(self) -> float:
        """The middle time: unmoved by a few interrupted calls."""
        return statistics.median(self.times_ms)


def measure(
    candidates: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    rounds: int = 5,
    iterations: int = 5,
) -> dict[str, Timing]:
    """Times each candidate ``rounds * iterations`` times, all of them in every round.

    On an NVIDIA GPU a time is the sum of the call's kernels (CUPTI), elsewhere the wall-clock time
    until the results are ready. Each candidate is compiled and run once before the first round.

    Args:
        candidates: by name, a function and its arguments; functions are jitted unless they are.
        rounds: rounds that each candidate has a part in.
        iterations: calls of a candidate in one round.
    """
    compiled = {
        name: (function if hasattr(function, "lower") else jax.jit(function), args)
        for name, (function, args) in candidates.items()
    }
    for function, args in compiled.values():
        jax.block_until_ready(function(*args))
    on_gpu = device.facts_of(jax.devices()[0]).capability is not None
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, (function, args) in compiled.items():
            turn = _kernel_times if on_gpu else _wall_times
            times[name] += turn(function, args, iterations)
    clock = "kernel" if on_gpu else "wall"
    return {name: Timing(times_ms=tuple(taken), clock=clock) for name, taken in times.items()}


def _kernel_times(function: Callable[..., Any], args: tuple[Any, ...], count: int) -> list[float]:
    _, times = profiler.measure(function, iterations=count)(*args)
    assert times is not None, "the call launched no kernel"
    return list(times) if isinstance(times, list) else [times]


def _wall_times(function: Callable[..., Any], args: tuple[Any, ...], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return times
