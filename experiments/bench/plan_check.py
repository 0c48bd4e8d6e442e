"""The planner beside the machine: measured steps and memory of several layouts, and their errors.

    python -m experiments.bench.plan_check --device h200 --out plan-h200.json
    python -m experiments.bench.plan_check --preset tiny --rows 2 --length 64   # on a CPU

Runs the real training step of each layout that the devices here allow: one device with each form
of recomputation, then all of them by fsdp, replica, tensor and ZeRO 1. Nothing is fitted to it.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import environment
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.data.batch import Batch
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.layout import Layout, Recompute, refusal
from jaxinfra.planning.plan import make_plan
from jaxinfra.planning.receipt import lower, run_config
from jaxinfra.training.job import Job, make_job


def layouts(shape, *, rows: int, length: int, devices: int) -> dict[str, Layout]:
    """Those of one device and of all, as many as the model's widths allow."""
    one = Layout(length=length, batch=rows)
    found = {
        f"1 device, {remat}": dataclasses.replace(one, remat=remat)
        for remat in (Recompute.NONE, Recompute.DOTS, Recompute.MLP, Recompute.FULL)
    }
    found["1 device, dots, 4 micro-batches"] = dataclasses.replace(
        one, batch=4 * rows, accumulation=4
    )
    found["1 device, dots, half the rows"] = dataclasses.replace(one, batch=max(rows // 2, 1))
    if devices > 1:
        every = dataclasses.replace(one, batch=rows * devices)
        found |= {
            f"fsdp={devices}": dataclasses.replace(every, fsdp=devices),
            f"fsdp={devices}, full": dataclasses.replace(every, fsdp=devices, remat=Recompute.FULL),
            f"fsdp={devices}, ZeRO 1": dataclasses.replace(every, fsdp=devices, zero=1),
            f"replica={devices}": dataclasses.replace(every, replica=devices),
            f"tensor={devices}": dataclasses.replace(every, tensor=devices),
        }
    return {name: each for name, each in found.items() if refusal(shape, each) is None}


def measure(job: Job, *, steps: int, rounds: int, seed: int) -> tuple[float, int]:
    """Median seconds a step over rounds, and the compiled step's temporary bytes."""
    training = job.config.training
    shape = (training.batch_size, training.sequence_length)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, job.config.model.vocab_size, shape, dtype=np.int32)
    batch = job.put(
        Batch(
            tokens=ids,
            targets=np.roll(ids, -1, axis=1),
            segment_ids=np.zeros(shape, np.int32),
            positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
            weights=np.ones(shape, np.float32),
        )
    )
    compiled = lower(job).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    state = job.initialize()
    for _ in range(2):
        state, metrics = compiled(state, batch)
    loss = float(metrics.loss)
    assert np.isfinite(loss), f"loss {loss}"
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics.loss)
        seconds.append((time.perf_counter() - start) / steps)
    return statistics.median(seconds), analysis.temp_size_in_bytes


def main() -> None:
    """Measures, predicts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama32_1b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--rows", type=int, default=4, help="sequences a device")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="layouts whose names contain this")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    model, device = MODELS[args.preset](), find_device(args.device)
    shape = shape_of(model, name=args.preset)
    on_gpu = jax.default_backend() == "gpu"
    policy = PolicyName.BF16 if on_gpu else PolicyName.FP32
    rows = []
    every = layouts(shape, rows=args.rows, length=args.length, devices=len(jax.devices()))
    for name, layout in every.items():
        if args.only and args.only not in name:
            continue
        config = run_config(model, layout, policy=policy, attention=AttentionImplementation.AUTO)
        job = make_job(config, devices=jax.devices()[: layout.devices])
        seconds, temporaries = measure(job, steps=args.steps, rounds=args.rounds, seed=0)
        plan = make_plan(shape, layout, device)
        row = {
            "layout": name,
            "mesh": layout.mesh,
            "seconds": seconds,
            "predicted_s": plan.time.total_s,
            "error": plan.time.total_s / seconds - 1,
            "temporary_bytes": temporaries,
            "predicted_temporary_bytes": plan.memory.temporaries,
            "temporary_error": plan.memory.temporaries / temporaries - 1,
            "parts_s": plan.time.parts,
        }
        rows.append(row)
        print(
            f"{name:34s} {1e3 * seconds:9.1f} ms, predicted {1e3 * plan.time.total_s:9.1f} "
            f"({row['error']:+.1%}); temporaries {temporaries / 2**30:6.2f} GiB, predicted "
            f"{plan.memory.temporaries / 2**30:6.2f} ({row['temporary_error']:+.1%})",
            flush=True,
        )
        jnp.zeros(()).block_until_ready()
        jax.clear_caches()
    mean = statistics.fmean(abs(row["error"]) for row in rows)
    print(f"mean of absolute errors of time over {len(rows)} layouts: {mean:.1%}")
    if args.out is not None:
        result = {"environment": environment(), "rows": rows, "mean_error": mean}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
