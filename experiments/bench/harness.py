"""Parts shared by the benchmarks: options, copy rate, error distances, interleaved contenders."""

import argparse
import dataclasses
import importlib
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.table import Table

type Call = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A call, and what waits for its result."""
MOST_CALLS = 1000


def options(text: str | None, *, budget: float) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that writes a table."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="write the rows there, as JSON")
    parser.add_argument("--budget", type=float, default=budget, help="seconds for all rows")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    return parser


def table_of(args: argparse.Namespace) -> Table:
    """The table that these options ask for."""
    return Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)


def compiled(f: Callable, *shapes: Any, options: dict | None = None) -> jax.stages.Compiled:
    """A function compiled for these shapes."""
    return jax.jit(f).lower(*shapes).compile(compiler_options=options)


def copied() -> float:
    """Bytes/s of a copy of 2 GiB, read and written."""
    x = jax.random.normal(jax.random.key(0), (1 << 29,), jnp.float32)
    plus = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(3):
        _, taken = profiler.measure(plus, iterations=5)(x)
        assert taken is not None, "the copy launched no kernel"
        times += taken
    return 2 * x.nbytes / (statistics.median(times) / 1e3)


def relative(got: jax.Array, want: jax.Array) -> float:
    """The norm of the difference over the norm of what is wanted."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


class KernelClock:
    """Times of kernels on the GPU, of any library's calls in this process."""

    def __init__(self):
        self.cupti: Any = importlib.import_module("jax_cuda13_plugin._mosaic_gpu_ext")

    def ms(self, call: Callable[[int], Any], wait: Callable[[Any], Any], count: int) -> list[float]:
        """The sum of the kernels of each of ``count`` calls."""
        self.cupti._cupti_init()
        try:
            # Results are dropped as they come: hundreds would not fit.
            last = None
            for i in range(count):
                last = call(i)
            wait(last)
        finally:
            taken = [ms for _, ms in self.cupti._cupti_get_timings(True)]
        each, rest = divmod(len(taken), count)
        assert each > 0, "the calls launched no kernel"
        assert rest == 0, f"{len(taken)} kernels of {count} calls"
        return [sum(taken[i * each : (i + 1) * each]) for i in range(count)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A call to time, with as many sets of arrays as pass through L2 before they repeat."""

    call: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    wait: Callable[[Any], Any] = jax.block_until_ready

    def once(self, i: int) -> Any:
        """The i-th call."""
        return self.call(*self.sets[i % len(self.sets)])


def kernel_ms(
    contenders: Mapping[str, Contender], *, rounds: int = 3, round_ms: float = 15.0
) -> dict[str, float]:
    """Median kernel times in ms of contenders that alternate."""
    clock = KernelClock()
    counts = {}
    for name, each in contenders.items():
        each.wait(each.once(0))
        first = clock.ms(each.once, each.wait, 2)
        counts[name] = max(4, min(MOST_CALLS, math.ceil(round_ms / first[1])))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, each in contenders.items():
            times[name] += clock.ms(each.once, each.wait, counts[name])
    return {name: statistics.median(taken) for name, taken in times.items()}


def sustained_ms(
    calls: Mapping[str, Call], *, turn: float = 0.06, rounds: int = 5
) -> dict[str, float]:
    """Median ms per call of contenders that alternate, each busy for ``turn`` seconds at a time.

    The GPU is at its power limit, as in training; the first round is left out.
    """
    counts = {}
    for name, (call, wait) in calls.items():
        wait(call())
        start = time.perf_counter()
        wait([call() for _ in range(3)])
        counts[name] = max(1, round(3 * turn / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, wait) in calls.items():
            start = time.perf_counter()
            result = call()
            for _ in range(counts[name] - 1):
                result = call()
            wait(result)
            times[name].append(1e3 * (time.perf_counter() - start) / counts[name])
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}
