"""Serves a preset's shapes with few programs, so that a load can begin soon after the start.

    python -m experiments.bench.serving.serve_few llama31_8b --fp8 -- --cache fp8 --port 8123
        --max-running 1000 --max-step-tokens 3136 --max-context 2304 --max-open 3300

Weights are random, in bf16 or FP8. Options of ``jaxinfra serve`` come after ``--``. Programs are
those of greedy decoding, and of chunks of ``--chunk`` tokens. A line for every 100 steps has
milliseconds per step, and those of them in which the host waited for the device: if these are few,
the host holds up the device. It also has the CPU time of all threads, and of the engine's own.
"""

import argparse
import dataclasses
import gc
import pathlib
import sys
import tempfile
import time
from typing import Any
from unittest import mock

from experiments.bench.serving.serve_start import written
from jaxinfra.cli import engine_options
from jaxinfra.cli.entry import GARBAGE_THRESHOLDS
from jaxinfra.cli.main import main as command
from jaxinfra.serving.engine import runner
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions, options_on
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.program_set import LEAST_GREEDY, ProgramKey, listed_programs

STEPS = 100  # of a printed line


def fewer_programs(limits: SchedulerLimits, **kind: Any) -> tuple[ProgramKey, ...]:
    """Returns the engine's programs that greedy requests need."""

    def is_kept(key: ProgramKey) -> bool:
        if key.name != "step" or key.length > 1:
            return key.name != "score"
        return not key.is_full and (key.rows < LEAST_GREEDY or key.is_greedy)

    return tuple(key for key in listed_programs(limits, **kind) if is_kept(key))


class Told:
    """Runs an engine's steps, and prints how long they took."""

    def __init__(self) -> None:
        self._step, self._read = Engine.step, runner.ModelRunner.read
        self._number, self._waited = 0, 0.0
        self._last = (0.0, 0.0, 0.0)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds of the clock, and of CPU time of the process and of this thread."""
        return time.perf_counter(), time.process_time(), time.thread_time()

    def read(self, of: runner.ModelRunner, dispatched: runner.Dispatched) -> Any:
        """Calls ``ModelRunner.read``, and adds up the time that it takes."""
        begun = time.perf_counter()
        result = self._read(of, dispatched)
        self._waited += time.perf_counter() - begun
        return result

    def step(self, engine: Engine) -> Any:
        """Calls ``Engine.step``, and prints a line after every 100 steps."""
        result, running = self._step(engine), engine.scheduler.running
        self._number += bool(running)
        if self._number == 1:
            self._last = self._now()
        if running and self._number % STEPS == 0:
            now, pages = self._now(), engine.scheduler.allocator
            spent = [after - before for after, before in zip(now, self._last, strict=True)]
            took, cpu, own, waited = (1e3 * each / STEPS for each in (*spent, self._waited))
            print(
                f"step {self._number}: {took:.1f} ms, {waited:.1f} of waiting, CPU {cpu:.1f}, the "
                f"engine's {own:.1f}; {len(running)} run, {len(engine.scheduler.waiting)} wait, "
                f"{pages.num_free + pages.num_idle} pages are free",
                flush=True,
            )
            self._last, self._waited = now, 0.0
        return result


def main() -> int:
    """Writes the weights, and serves them until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--fp8", action="store_true", help="weights in e4m3, as w8a8-fp8 has them")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt in a call")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    gc.set_threshold(
        *GARBAGE_THRESHOLDS
    )  # as the command does: else the host has a third more to do

    def options(platform: str) -> EngineOptions:
        return dataclasses.replace(options_on(platform), chunk_sizes=(args.chunk,))

    told = Told()
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(engine_options, "options_on", options),
        mock.patch.object(runner, "listed_programs", fewer_programs),
        mock.patch.object(runner.ModelRunner, "read", lambda *given: told.read(*given)),
        mock.patch.object(Engine, "step", lambda engine: told.step(engine)),
    ):
        path = written(args.preset, pathlib.Path(place), in_8_bits=args.fp8)
        return command(["serve", str(path), *words[at + 1 :]])


if __name__ == "__main__":
    sys.exit(main())
