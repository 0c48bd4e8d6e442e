"""Measures the host's time in serving, without a device: per decode step, and per streamed token.

    python -m experiments.bench.serving.serve_host --out experiments/results/serve-host-cpu.json

Programs are stand-ins that give the same token at once, so what is left is the host's own work:
planning, inputs, reading, text, events; a program's own call, which depends on the device, is not
in it. "step of R rows": CPU microseconds of the engine's thread, the median of blocks of steps.
"streamed": --clients of another process (``serve``) ask this one for streams;
CPU microseconds of this process for each token, and how many it streams in a second.
"""

import argparse
import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp

from experiments.bench.table import Table
from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.config.precision import PolicyName
from jaxinfra.faults.servers import CONTEXT, write_served_model
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.program_set import ProgramKey
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.engine.runner import ModelRunner
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.serving.sampling import SamplingConfig

PROMPT, NEW = 8, CONTEXT - 8
DRAWN = ord("e")
BLOCK = 10  # steps that are timed together
PLAIN = SamplingConfig(temperature=0.8)


@contextlib.contextmanager
def without_programs() -> Iterator[None]:
    """Replaces every program inside the context: each of its rows gets the letter e."""
    given = {}

    def call(runner: ModelRunner, key: ProgramKey, *arguments: Any) -> Any:
        del runner, arguments
        if key.name != "step":
            return None
        if key.rows not in given:
            given[key.rows] = jnp.full(key.rows, DRAWN, jnp.int32)
        return given[key.rows], None

    with mock.patch.object(ModelRunner, "call", call):
        yield


def engine_of(model: LoadedModel, rows: int) -> Engine:
    """An engine with room for as many requests."""
    options = EngineOptions(
        max_running=rows, page_size=16, num_pages=1 + rows * CONTEXT // 16, max_step_tokens=2048
    )
    return Engine.of(model, options=options)


def step(model: LoadedModel, rows: int) -> dict[str, Any]:
    """CPU time of a step in which all requests decode."""
    engine, blocks = engine_of(model, rows), []
    for seed in range(3):
        for place in range(rows):
            prompt = tuple(97 + (seed + place + i) % 26 for i in range(PROMPT))
            engine.submit(GenerationRequest(prompt_ids=prompt, max_new_tokens=NEW, sampling=PLAIN))
        while engine.scheduler.waiting or any(
            stream.total - stream.computed > 1 for stream in engine.scheduler.running
        ):
            engine.step()
        for _ in range(NEW // BLOCK - 2):
            begun = time.thread_time()
            for _ in range(BLOCK):
                engine.step()
            blocks.append((time.thread_time() - begun) / BLOCK)
        while engine.is_busy:
            engine.step()
    return {"cpu_us": round(1e6 * statistics.median(blocks), 1), "blocks": len(blocks)}


def streamed(model: LoadedModel, path: pathlib.Path, args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of a token from the engine to a client's socket."""
    engine = engine_of(model, args.clients)
    thread = EngineThread(engine, max_open=2 * args.clients)
    service = Service(model, thread, path=path, name="letters", limits=ServiceLimits())
    server = HttpServer(
        application(service, api_key=None), ServerOptions(port=0), drain=thread.drain
    )
    thread.start()
    with server.running() as address:
        options = {
            "--url": address, "--concurrency": args.clients, "--seconds": args.seconds,
            "--prompt-tokens": PROMPT, "--new-tokens": NEW, "--num-ids": 128,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        begun, cpu = time.perf_counter(), time.process_time()
        command = [sys.executable, "-m", "experiments.bench.serving.serve", *words]
        with tempfile.TemporaryDirectory() as made:
            subprocess.run([*command, "--out", f"{made}/load.json"], check=True)
        taken, worked = time.perf_counter() - begun, time.process_time() - cpu
    thread.close()
    tokens = engine.counts.generated_tokens
    return {
        "cpu_us": round(1e6 * worked / tokens, 1),
        "tokens": tokens,
        "tokens_s": round(tokens / taken),
        "clients": args.clients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + 600)
    with tempfile.TemporaryDirectory() as made, nonfinite_allowed(), without_programs():
        path = write_served_model(pathlib.Path(made) / "letters")
        model = load(path, policy=PolicyName.FP32)
        for rows in args.rows:
            table.add(f"step of {rows} rows", lambda rows=rows: step(model, rows))
        table.add("streamed", lambda: streamed(model, path, args))


if __name__ == "__main__":
    main()
