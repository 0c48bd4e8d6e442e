"""Training steps of whole models on all GPUs of one node, each beside the planner's prediction.

    python -m experiments.bench.node --rows 8b-fp8 8b-bf16 --out node-h200-x4.json
    python -m experiments.bench.node --rows 70b-lora
    python -m experiments.bench.node --small # the same meshes with tiny models, on CPU devices

A row is a layout of one model over the node's n devices. ``8b-fp8`` and ``8b-bf16`` shard over
fsdp=n, ``8b-fp8-hsdp`` over replica=2 x fsdp=n/2, and ``8b-fp8-tensor`` over fsdp=n/2 x tensor=2
with sequence parallelism. ``8b-tensor`` is tensor=n with sequence parallelism, and ``8b-fsdp`` has
as many tokens on fsdp=n. ``30b-a3b`` shards experts over expert=n. ``70b-lora`` trains adapters
over a bf16 base that fsdp=n shards. A batch of the first four has 16 sequences of 8,192 tokens per
device, as Megatron-Bridge's published figures have on eight. A prediction is printed and written
before its step is compiled; the planner predicts no adapters. A row that fails is written with its
error.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.environment import clocks, environment
from experiments.bench.planning.plan_check import Program, measure
from jaxinfra.config.finetune import InitConfig, LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.optimizer import MomentFormat
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling, StoredWeights
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import Remat, RunConfig
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.layout import Layout, run_config
from jaxinfra.planning.model import find_model
from jaxinfra.planning.plan import make_plan
from jaxinfra.training.job import Job, lower_step, make_job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One training step of a model on n devices."""

    preset: str
    small: str  # preset for CPU devices
    layout: Callable[[int], Layout]
    change: Callable[[RunConfig], RunConfig] = lambda run: run
    is_planned: bool = True
    layers: int | None = None  # fewer than the model's, where it does not fit


def _layout(**settings: Any) -> Layout:
    return Layout(length=8192, **settings)


def _fsdp(n: int, **settings: Any) -> Layout:
    return _layout(mesh=MeshConfig(fsdp=n), batch=16 * n, accumulation=8, zero=2, **settings)


def _fp8(run: RunConfig) -> RunConfig:
    fp8 = Fp8Matmuls(scaling=Fp8Scaling.SQUARES)
    return dataclasses.replace(run, precision=dataclasses.replace(run.precision, fp8=fp8))


def _bf16_state(run: RunConfig) -> RunConfig:
    """Weights and moments in bf16: in fp32 those of 30B parameters do not fit four devices."""
    moments = {"first_moment": MomentFormat.BF16, "second_moment": MomentFormat.BF16}
    return dataclasses.replace(
        run,
        precision=dataclasses.replace(run.precision, weights=StoredWeights.BF16),
        optimizer=dataclasses.replace(run.optimizer, **moments),
    )


def _lora(run: RunConfig) -> RunConfig:
    lora = LoraConfig(rank=16, targets=("query", "key", "value", "out", "gate", "up", "down"))
    # The bench binds random weights; nothing is read.
    init = InitConfig(path="random weights", sha256="")
    return dataclasses.replace(run, lora=lora, init=init)


ROWS: dict[str, Row] = {
    "8b-fp8": Row(
        preset="llama31_8b",
        small="tiny",
        layout=functools.partial(_fsdp, recipe="fp8"),
        change=_fp8,
    ),
    "8b-bf16": Row(preset="llama31_8b", small="tiny", layout=_fsdp),
    "8b-fp8-hsdp": Row(
        preset="llama31_8b",
        small="tiny",
        layout=lambda n: _layout(
            mesh=MeshConfig(replica=2, fsdp=n // 2), batch=16 * n, accumulation=16, recipe="fp8"
        ),
        change=_fp8,
    ),
    "8b-fp8-tensor": Row(
        preset="llama31_8b",
        small="tiny",
        layout=lambda n: _layout(
            mesh=MeshConfig(fsdp=n // 2, tensor=2),
            batch=16 * n,
            accumulation=16,
            sequence_parallel=True,
            recipe="fp8",
        ),
        change=_fp8,
    ),
    "8b-tensor": Row(
        preset="llama31_8b",
        small="small",
        layout=lambda n: _layout(mesh=MeshConfig(tensor=n), batch=n, sequence_parallel=True),
    ),
    "8b-fsdp": Row(
        preset="llama31_8b",
        small="tiny",
        layout=lambda n: _layout(mesh=MeshConfig(fsdp=n), batch=n),
    ),
    "30b-a3b": Row(
        preset="qwen3_30b_a3b",
        small="tiny_moe",
        layout=lambda n: _layout(
            mesh=MeshConfig(fsdp=n, expert=n),
            batch=4 * n,
            accumulation=4,
            remat=Remat.FULL,
            recipe="bf16-summed",
        ),
        change=_bf16_state,
    ),
    "70b-lora": Row(
        preset="llama31_70b",
        small="tiny",
        layout=lambda n: _layout(mesh=MeshConfig(fsdp=n), batch=n, remat=Remat.FULL),
        change=_lora,
        is_planned=False,
    ),
}


def row_config(row: Row, devices: int, *, small: bool) -> tuple[Layout, RunConfig]:
    """The layout of a row on this many devices, and the run that trains it.

    ``small`` takes the tiny model, short sequences and one sequence per micro-batch.
    """
    layout = row.layout(devices)
    if small:
        layout = dataclasses.replace(layout, length=64)
    model = MODELS[row.small if small else row.preset]()
    return layout, row.change(run_config(model, layout))


def random_base(job: Job) -> tuple[Any, ...]:
    """Random weights for the frozen parameters of a job that trains adapters; else nothing."""
    if not job.model.frozen:
        return ()
    leaves, tree = jax.tree.flatten(job.model.frozen)
    shardings = jax.tree.leaves(job.frozen_shardings)

    def draw(shape: tuple[int, ...], dtype: jnp.dtype, seed: jax.Array) -> jax.Array:
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)

    drawn = [
        jax.jit(functools.partial(draw, leaf.shape, leaf.dtype), out_shardings=sharding)(seed)
        for seed, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    ]
    return (jax.tree.unflatten(tree, drawn),)


def predict(row: Row, layout: Layout, args: argparse.Namespace) -> dict[str, Any]:
    """The layout of a row and the planner's prediction of its step."""
    found: dict[str, Any] = {"layout": layout.describe(), "devices": layout.devices}
    if row.is_planned:
        model = find_model(row.small if args.small else row.preset)
        plan = make_plan(model, layout, find_device(args.device))
        found |= {"predicted_s": plan.time.total_s, "predicted_parts_s": plan.time.parts}
    return found


def compile_row(config: RunConfig) -> Program:
    """Compiles the step of ``jaxinfra train``; allocates no state."""
    begin = time.perf_counter()
    job = make_job(config)
    compiled = lower_step(job).compile()
    return Program(job=job, compiled=compiled, compile_s=time.perf_counter() - begin)


def measure_row(program: Program, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step and tokens/s per device of a compiled row."""
    program = dataclasses.replace(program, frozen=random_base(program.job))
    found = measure(program, steps=args.steps, rounds=args.rounds, trace=args.trace)
    training = program.job.config.training
    tokens = training.batch_size * training.sequence_length
    found["tokens_per_s_per_device"] = tokens / found["seconds"] / len(jax.devices())
    return found


def main() -> None:
    """Measures the rows one after the other, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--device", default="h200", help="device that the planner knows")
    parser.add_argument("--small", action="store_true", help="tiny models, for CPU devices")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4, help="programs compiled at a time")
    parser.add_argument("--trace", action="store_true", help="where a step's time goes, too")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "rows": {}}
    programs: dict[str, concurrent.futures.Future[Program]] = {}
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        for name in args.rows:
            layout, config = row_config(ROWS[name], len(jax.devices()), small=args.small)
            result["rows"][name] = found = predict(ROWS[name], layout, args)
            print(f"{name}: predicted {found.get('predicted_s')} s", flush=True)
            programs[name] = pool.submit(compile_row, config)
    for name, found in result["rows"].items():
        # Any failure is a finding about its row; the others are still wanted.
        try:
            found |= measure_row(programs.pop(name).result(), args)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:600]
        if "predicted_s" in found and "seconds" in found:
            found["error"] = found["predicted_s"] / found["seconds"] - 1
        gc.collect()
        print(f"{name}: {_line(found)}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result | {"clocks_after": clocks()}, indent=1) + "\n")


def _line(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"]
    error = f", prediction {found['error']:+.1%}" if "error" in found else ""
    return (
        f"{found['layout']}: {found['seconds']:.3f} s, "
        f"{found['tokens_per_s_per_device']:,.0f} tokens/s per device{error}, temporaries "
        f"{found['temporary_bytes'] / 2**30:.1f} GiB, compiled in {found['compile_s']:.0f} s"
    )


if __name__ == "__main__":
    main()
