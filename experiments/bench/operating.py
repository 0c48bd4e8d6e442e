"""What ``jaxinfra memory`` and ``jaxinfra trace`` say of a step, beside the device.

    python -m experiments.bench.operating --out experiments/results/operating-h200.json

Compiles the 1.2B step as it trains, CUDA graphs and all; runs it; compares predicted bytes with the
allocator's peak; traces two steps and counts the device time that has a scope.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from experiments.bench.environment import environment
from jaxinfra.cli.main import main as command
from jaxinfra.config import codec
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.memory.report import report_memory
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.profile import Profiler, ProfileRange


def batch_of(vocab: int, rows: int, length: int) -> Batch:
    """Random tokens, one document a row."""
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), np.int32)
    shape = (rows, length)
    return Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        weights=np.ones(shape, np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--set", action="append", default=[], help="settings of the run")
    parser.add_argument("--traceable", action="store_true", help="without CUDA graphs")
    parser.add_argument("--trace", type=Path, required=True, help="where the trace goes")
    parser.add_argument("--text", type=Path, help="write the compiled program there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = codec.override(
        pretraining(MODELS[args.preset]()),
        [
            f"training.batch_size={args.batch}",
            f"training.sequence_length={args.length}",
            "training.accumulation=1",
            *args.set,
        ],
    )
    job = make_job(config, traceable=args.traceable, devices=jax.devices()[:1])
    began = time.perf_counter()
    lowered = lower_step(job)
    compiled = lowered.compile()
    row = {"compile_s": time.perf_counter() - began, "options": args.set}
    if args.text is not None:
        args.text.write_text(compiled.as_text() or "")
    report = report_memory(lowered)
    state = job.initialize()
    batch = job.put(batch_of(config.model.vocab_size, args.batch, args.length))
    profiler = Profiler(ProfileRange(start=4, stop=6), args.trace)
    profiler.describe(job, state, batch)
    times = []
    for step in range(10):
        profiler.before_step(step)
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        profiler.after_step(step, metrics.loss)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    row |= {
        "step_ms": 1e3 * float(np.median(times[1:4] + times[7:])),
        "predicted_bytes": report.total_bytes,
        "peak_bytes_in_use": peak,
        "error": None if peak is None else report.total_bytes / peak - 1,
        "by_role": report.by_role(),
        "explained": report.explained(),
    }
    print(json.dumps(row), flush=True)
    args.out.write_text(json.dumps({"environment": environment(), "rows": [row]}, indent=1) + "\n")
    command(["trace", str(args.trace)])


if __name__ == "__main__":
    main()
