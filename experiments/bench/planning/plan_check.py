"""The planner beside the machine: steps predicted, then measured, and the errors.

    python -m experiments.bench.planning.plan_check --device h200 --out plan-h200.json
    python -m experiments.bench.planning.plan_check --presets tiny --rows 2 --length 64 # on a CPU

    python -m experiments.bench.planning.plan_check --against fsdp.json tensor.json pipeline.json

Runs the real training step: on one device several model sizes, forms of recomputation, batches and
lengths; on several devices every mesh axis. A case's prediction is printed and written before its
program runs. A case that fails, out of memory or otherwise, is an entry with its error.
``--against`` compares with steps that other benchmarks have measured (``plan_results``).
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.planning.plan_results import measured_steps
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.trace import events_by_device
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.layout import UNROLLED, Layout, refusal, run_config
from jaxinfra.planning.model import find_model
from jaxinfra.planning.plan import Plan, make_plan
from jaxinfra.training.job import Job, lower_step, make_job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step to predict and measure."""

    preset: str
    layout: Layout

    @property
    def name(self) -> str:
        """Name of the setting, unique within the table."""
        layout = self.layout
        words = [self.preset, layout.describe(), f"remat {layout.remat.value}"]
        words.append(f"{layout.accumulation} x {layout.micro_rows} x {layout.length}")
        words += ["ZeRO 1"] if layout.zero == 1 else []
        words += ["sequence parallel"] if layout.sequence_parallel else []
        words += [] if layout.traits.scans_layers else ["unrolled"]
        return ", ".join(words)


def one_device(presets: list[str], *, rows: int, length: int) -> list[Case]:
    """Recomputation, accumulation, lengths, sizes: about equally many tokens per step."""
    one = Layout(length=length, batch=rows)
    layouts = [dataclasses.replace(one, remat=remat) for remat in _RECOMPUTE]
    layouts += [
        dataclasses.replace(one, remat=Remat.NONE, traits=UNROLLED),
        dataclasses.replace(one, accumulation=rows),
        dataclasses.replace(one, length=rows * length, batch=1),
        dataclasses.replace(one, length=length // 4, batch=4 * rows),
    ]
    found = [Case(preset=presets[0], layout=layout) for layout in layouts]
    if len(presets) > 1:
        half = dataclasses.replace(one, batch=max(rows // 2, 1))
        found.append(Case(preset=presets[1], layout=dataclasses.replace(half, remat=Remat.FULL)))
    if len(presets) > 2:
        short = Layout(length=length // 4, batch=8 * rows)
        found.append(Case(preset=presets[2], layout=short))
    return found


_RECOMPUTE = (Remat.DOTS, Remat.NONE, Remat.MLP, Remat.FULL)


def several_devices(presets: list[str], *, devices: int, rows: int, length: int) -> list[Case]:
    """Each mesh axis alone, ZeRO 1, accumulation, and two axes together."""
    every = Layout(length=length, batch=rows * devices)
    half = dataclasses.replace(every, batch=max(rows * devices // 2, devices))
    layouts = [
        dataclasses.replace(every, mesh=MeshConfig(fsdp=devices)),
        dataclasses.replace(half, mesh=MeshConfig(tensor=devices)),
        dataclasses.replace(
            every, mesh=MeshConfig(context=devices), length=devices * length, batch=rows
        ),
        dataclasses.replace(every, mesh=MeshConfig(pipe=devices), accumulation=rows * devices),
        dataclasses.replace(every, mesh=MeshConfig(replica=devices)),
        dataclasses.replace(every, mesh=MeshConfig(fsdp=devices), zero=1),
        dataclasses.replace(every, mesh=MeshConfig(fsdp=devices), accumulation=rows),
    ]
    if devices % 2 == 0 and devices > 2:
        layouts.append(
            dataclasses.replace(
                half, mesh=MeshConfig(fsdp=devices // 2, tensor=2), sequence_parallel=True
            )
        )
    found = [Case(preset=presets[0], layout=layout) for layout in layouts]
    if len(presets) > 1:
        bigger = dataclasses.replace(half, mesh=MeshConfig(fsdp=devices), remat=Remat.FULL)
        found.append(Case(preset=presets[1], layout=bigger))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step and the job that it belongs to."""

    job: Job
    compiled: Any
    compile_s: float
    frozen: tuple[Any, ...] = ()  # the step's first argument, if adapters are trained


def compiled(case: Case, attention: AttentionImplementation) -> Program:
    """The step of ``jaxinfra train`` for this layout, compiled for the devices here."""
    on_gpu = jax.default_backend() == "gpu"
    config = run_config(
        MODELS[case.preset](),
        case.layout,
        policy=PolicyName.BF16 if on_gpu else PolicyName.FP32,
        attention=attention,
    )
    job = make_job(config, devices=jax.devices()[: case.layout.devices])
    begin = time.perf_counter()
    program = lower_step(job).compile()
    return Program(job=job, compiled=program, compile_s=time.perf_counter() - begin)


def measure(program: Program, *, steps: int, rounds: int, trace: bool) -> dict[str, Any]:
    """Median seconds per step over rounds, temporary bytes, and a trace's time by operation."""
    job = program.job
    analysis = program.compiled.memory_analysis()
    assert analysis is not None, "CPU and CUDA compilers report their memory"
    batch, state = job.put(_rows(job)), job.initialize()
    for _ in range(2):
        state, metrics = program.compiled(*program.frozen, state, batch)
    loss = float(metrics.loss)
    assert np.isfinite(loss), f"loss {loss}"
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = program.compiled(*program.frozen, state, batch)
        metrics.loss.block_until_ready()
        seconds.append((time.perf_counter() - start) / steps)
    found: dict[str, Any] = {
        "seconds": statistics.median(seconds),
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "temporary_bytes": analysis.temp_size_in_bytes,
        "compile_s": program.compile_s,
        "loss": loss,
        "clocks": clocks(),
    }
    if trace and jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                for _ in range(2):
                    state, metrics = program.compiled(*program.frozen, state, batch)
                metrics.loss.block_until_ready()
            events = events_by_device(pathlib.Path(directory))[0]
        found["waterfall"] = explain(events, steps=2).as_json(top=40)
    return found


def _rows(job: Job) -> Batch:
    training = job.config.training
    shape = (training.batch_size, training.sequence_length)
    ids = np.random.default_rng(0).integers(0, job.config.model.vocab_size, shape, dtype=np.int32)
    return Batch(
        tokens=ids,
        targets=np.roll(ids, -1, axis=1),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        weights=np.ones(shape, np.float32),
    )


def _prediction(plan: Plan) -> dict[str, Any]:
    return {
        "predicted_s": plan.time.total_s,
        "predicted_parts_s": plan.time.parts,
        "predicted_hidden_s": plan.time.hidden,
        "predicted_temporary_bytes": plan.memory.temporaries,
    }


def _compare(row: dict[str, Any]) -> str:
    """Adds the errors; returns the line that tells them."""
    row["error"] = row["predicted_s"] / row["seconds"] - 1
    line = (
        f"    measured {1e3 * row['seconds']:8.1f} ms: prediction {row['error']:+.1%}; temporaries "
        f"{row['temporary_bytes'] / 2**30:.2f} GiB"
    )
    if "predicted_temporary_bytes" in row:
        row["temporary_error"] = row["predicted_temporary_bytes"] / row["temporary_bytes"] - 1
        line += f": {row['temporary_error']:+.1%}"
    if "waterfall" in row:
        kinds = collections.Counter(row["waterfall"]["by_kind_ms"])
        line += "; " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.most_common())
    return line


def check(cases: list[Case], device: Device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicts, compiles and measures each; writes what is known after each."""
    rows: list[dict[str, Any]] = []
    # Some programs compile beside each other, but nothing compiles while a step is timed.
    for some in itertools.batched(cases, args.threads):
        predicted = [_predict(case, device) for case in some]
        for row in predicted:
            print(f"{row['case']}: predicted {1e3 * row['predicted_s']:.1f} ms", flush=True)
        rows += predicted
        _write(rows, args.out)
        attention = AttentionImplementation(args.attention)
        with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
            programs = [pool.submit(compiled, case, attention) for case in some]
        for row in predicted:
            # Any failure is a finding about its case; the others are still wanted.
            try:
                row |= measure(
                    programs.pop(0).result(),
                    steps=args.steps,
                    rounds=args.rounds,
                    trace=args.trace,
                )
                print(f"{row['case']}\n{_compare(row)}", flush=True)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
                print(f"{row['case']}\n    {row['failed']}", flush=True)
            gc.collect()
            _write(rows, args.out)
    return rows


def _predict(case: Case, device: Device) -> dict[str, Any]:
    model = find_model(case.preset)
    plan = make_plan(model, case.layout, device)
    return {"case": case.name, "mesh": case.layout.axes, **_prediction(plan)}


def compare_with_results(
    files: list[pathlib.Path], device: Device, out: pathlib.Path | None
) -> list[dict[str, Any]]:
    """Predictions beside steps that others measured; nothing runs."""
    rows = []
    for file in files:
        for step in measured_steps(file):
            plan = make_plan(step.model, step.layout, device)
            row: dict[str, Any] = {"case": step.name, "mesh": step.layout.axes}
            row |= _prediction(plan)
            if not step.optimizer:
                # Gradients are results of such a step, not temporaries.
                del row["predicted_temporary_bytes"]
                row["predicted_s"] -= row["predicted_parts_s"].pop("optimizer", 0.0)
            row |= {
                "seconds": step.seconds,
                "temporary_bytes": step.temporary_bytes,
                "environment": step.environment,
            }
            rows.append(row)
            print(f"{step.name}: predicted {1e3 * row['predicted_s']:.1f} ms\n{_compare(row)}")
    _write(rows, out, measured_here=False)
    return rows


_environment = functools.cache(environment)


def _write(
    rows: list[dict[str, Any]], out: pathlib.Path | None, *, measured_here: bool = True
) -> None:
    if out is None:
        return
    errors = [abs(row["error"]) for row in rows if "error" in row]
    mean = statistics.fmean(errors) if errors else None
    result = {"environment": _environment()} if measured_here else {}
    result |= {"mean_error": mean, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measures, predicts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--presets",
        nargs="+",
        default=["llama32_1b", "llama32_3b", "small"],
        help="of most cases, of a bigger and of a smaller one",
    )
    parser.add_argument("--device", default="h200")
    parser.add_argument("--rows", type=int, default=4, help="sequences a device")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", default="auto", choices=list(AttentionImplementation))
    parser.add_argument("--threads", type=int, default=4, help="programs compiled at a time")
    parser.add_argument("--trace", action="store_true", help="where each step's time goes, too")
    parser.add_argument(
        "--against", nargs="+", type=pathlib.Path, metavar="RESULTS", help="measure nothing"
    )
    parser.add_argument("--only", nargs="+", help="cases whose names contain one of these")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.against:
        _report(compare_with_results(args.against, find_device(args.device), args.out))
        return
    devices = len(jax.devices())
    sizes = {"rows": args.rows, "length": args.length}
    cases = (
        one_device(args.presets, **sizes)
        if devices == 1
        else several_devices(args.presets, devices=devices, **sizes)
    )
    if args.only:
        cases = [case for case in cases if any(words in case.name for words in args.only)]
    for case in cases:
        reason = refusal(find_model(case.preset), case.layout)
        if reason is not None:
            print(f"{case.name}: left out: {reason}")
    cases = [case for case in cases if refusal(find_model(case.preset), case.layout) is None]
    _report(check(cases, find_device(args.device), args))


def _report(rows: list[dict[str, Any]]) -> None:
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if errors:
        print(f"mean of absolute errors over {len(errors)} cases: {statistics.fmean(errors):.1%}")


if __name__ == "__main__":
    main()
