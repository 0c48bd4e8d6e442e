"""Pipeline schedules beside the same work without a pipeline and beside FSDP, in one process.

    python -m experiments.bench.training.pipeline # 3B shapes over all GPUs here
    JAX_NUM_CPU_DEVICES=4 python -m experiments.bench.training.pipeline --layers 8 --width 64 \\
        --hidden 128 \
        --heads 4 --kv-heads 2 --head-dim 16 --vocab 512 --length 64   # a check on a CPU

What is timed is loss and gradients of a batch of m micro-batches; an optimizer would add the same
to all. ``alone`` is one device with a stage's layers, the embedding and the loss: what the last
stage does. ``own cost`` is the time of a pipeline without any overhead, over ``alone``. It follows
from the schedule's table: stages wait only for their neighbors, a backward takes two forwards, and
the last stage computes the loss.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from experiments.bench.environment import clocks, environment
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.run import AttentionImplementation, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.pipeline.schedule import make_schedule
from jaxinfra.parallel.pipeline.tick_program import make_tick_program, run
from jaxinfra.parallel.place import Placement
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.pipeline_gradients import make_pipeline_gradient

_TRACEABLE = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Variant to measure: a mesh, and a schedule where it has stages."""

    name: str
    mesh: MeshConfig
    num_layers: int
    micro_batches: int  # one after the other on a device
    rows: int  # sequences of the whole batch
    schedule: PipelineSchedule | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A variant, being compiled while others are lowered or compiled."""

    variant: Variant
    placement: Placement
    parameters: Any  # shapes with their shardings
    initialize: Callable[[jax.Array], Any]
    program: Future[jax.stages.Compiled]
    traceable: Future[jax.stages.Compiled] | None


def prepare(args: argparse.Namespace, variant: Variant, pool: ThreadPoolExecutor) -> Prepared:
    """Lowers a variant here, and compiles it in the pool."""
    placement = Placement(
        mesh=make_mesh(variant.mesh, devices=jax.devices()[: variant.mesh.num_devices]),
        rules=state_rules(ShardingConfig()),
    )
    execution = execution_on(
        placement,
        policy=POLICIES[PolicyName(args.policy)],
        attention=AttentionImplementation(args.attention),
        remat=Remat(args.remat),
    )
    model = define_model(model_config(args, variant.num_layers), execution)
    training = TrainingConfig(
        steps=1,
        batch_size=variant.rows,
        sequence_length=args.length,
        accumulation=variant.micro_batches,
        remat=Remat(args.remat),
    )
    if variant.schedule is None:
        gradient = AccumulatedGradient(model, training=training, placement=placement)
    else:
        gradient = make_pipeline_gradient(
            model,
            training=training,
            pipeline=PipelineConfig(schedule=variant.schedule, chunks=args.chunks),
            placement=placement,
        )

    def typed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    key = jax.eval_shape(jax.random.key, 0)
    parameters = jax.tree.map(
        typed, jax.eval_shape(model.initialize, key), placement.parameters(model)
    )
    inputs = jax.tree.map(lambda x: typed(x, placement.batch), batch(args, variant.rows))
    lowered = jax.jit(gradient).lower(
        parameters,
        {},
        inputs,
        key=typed(key, placement.replicated),
        loss_scale=jax.ShapeDtypeStruct((), np.float32, sharding=placement.replicated),
    )
    is_traced = args.trace is not None and variant.name in args.traced
    return Prepared(
        variant=variant,
        placement=placement,
        parameters=parameters,
        initialize=model.initialize,
        program=pool.submit(lowered.compile),
        # Kernels in command buffers are traced without the scope they come from.
        traceable=pool.submit(lowered.compile, _TRACEABLE) if is_traced else None,
    )


def measure(args: argparse.Namespace, prepared: Prepared, parameters: Any) -> dict[str, Any]:
    """Times one variant, and traces one more run where that is asked for."""
    variant, placement = prepared.variant, prepared.placement
    program = prepared.program.result()
    inputs = jax.device_put(batch(args, variant.rows), placement.batch)
    key, scale = jax.device_put((jax.random.key(1), np.float32(1)), placement.replicated)
    learned = program(parameters, {}, inputs, key=key, loss_scale=scale)  # warm-up
    loss = learned.loss
    del learned
    seconds = []
    for _ in range(args.repeats):
        jax.block_until_ready(loss)
        start = time.perf_counter()
        learned = program(parameters, {}, inputs, key=key, loss_scale=scale)
        jax.block_until_ready(learned)
        seconds.append(time.perf_counter() - start)
        loss = learned.loss
        del learned
    memory: Any = program.memory_analysis()
    step_s = statistics.median(seconds)
    tokens = variant.rows * args.length
    row = {
        "name": variant.name,
        "step_s": step_s,
        "spread": (max(seconds) - min(seconds)) / step_s,
        "tokens_per_s_a_device": tokens / step_s / variant.mesh.num_devices,
        "temp_gib": memory.temp_size_in_bytes / 2**30,
        "loss": float(loss),
    }
    if prepared.traceable is not None:
        program = prepared.traceable.result()
        jax.block_until_ready(program(parameters, {}, inputs, key=key, loss_scale=scale))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        directory = args.trace / variant.name.replace(" ", "-")
        with jax.profiler.trace(str(directory), profiler_options=options):
            start = time.perf_counter()
            jax.block_until_ready(program(parameters, {}, inputs, key=key, loss_scale=scale))
            row["traced_step_s"] = time.perf_counter() - start
        (directory / "environment.json").write_text(json.dumps(environment()))
    return row


def model_config(args: argparse.Namespace, num_layers: int) -> ModelConfig:
    """A Llama of the sizes asked for."""
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            rope=RopeConfig(),
        ),
        feed_forward=MlpConfig(hidden_dim=args.hidden),
    )
    return ModelConfig(
        vocab_size=args.vocab,
        model_dim=args.width,
        max_positions=args.length,
        stacks=stacked(block, num_layers=num_layers),
        tie_embeddings=False,
    )


def batch(args: argparse.Namespace, rows: int) -> Batch[np.ndarray]:
    """Uniform ids, one document a row."""
    ids = np.random.default_rng(0).integers(0, args.vocab, (rows, args.length + 1), np.int32)
    return Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        segment_ids=None,
        positions=None,
        weights=np.ones((rows, args.length), np.float32),
    )


def own_cost(args: argparse.Namespace, variant: Variant) -> float:
    """Time of the schedule's table over the last stage's work."""
    assert variant.schedule is not None
    pipeline = PipelineConfig(schedule=variant.schedule, chunks=args.chunks)
    chunks, stages = pipeline.chunks_per_stage, variant.mesh.pipe
    schedule = make_schedule(
        variant.schedule,
        stages=stages,
        micro_batches=variant.micro_batches,
        chunks=chunks,
        backward_ticks=pipeline.backward_ticks,
    )
    layer = (
        args.width * (args.head_dim * 2 * (args.heads + args.kv_heads) + 3 * args.hidden)
        + args.length * args.heads * args.head_dim
    )  # causal scores and their product, as parameters
    # Cost of the loss in forwards of a chunk: its forward and both gradients run at once.
    head = 3 * args.vocab * args.width / (layer * variant.num_layers / stages / chunks)
    timeline = run(make_tick_program(schedule), head=head)
    return timeline.total / (variant.micro_batches * (3 * chunks + head))


def variants(args: argparse.Namespace, micro_batches: int) -> list[Variant]:
    devices = len(jax.devices())
    rows = micro_batches * args.rows
    alone = Variant(
        name=f"alone m={micro_batches}",
        mesh=MeshConfig(),
        num_layers=args.layers // devices,
        micro_batches=micro_batches,
        rows=rows,
    )
    fsdp = Variant(
        name=f"fsdp m={micro_batches}",
        mesh=MeshConfig(fsdp=devices),
        num_layers=args.layers,
        micro_batches=max(1, micro_batches // devices),
        rows=rows,
    )
    piped = [
        Variant(
            name=f"{name} m={micro_batches}",
            mesh=MeshConfig(pipe=devices),
            num_layers=args.layers,
            micro_batches=micro_batches,
            rows=rows,
            schedule=PipelineSchedule(name),
        )
        for name in args.schedules
    ]
    return [alone, *piped, fsdp]


def add_sizes(parser: argparse.ArgumentParser, *, layers: int) -> None:
    """Options of the model, and of how it is run."""
    sizes = {"layers": layers, "width": 3072, "hidden": 8192, "heads": 24, "kv-heads": 8}
    # A vocabulary of 128,256 would make the last stage half as long again as the others.
    sizes |= {"head-dim": 128, "vocab": 32000, "length": 4096, "rows": 1, "repeats": 3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--policy", default="bf16")
    parser.add_argument("--remat", default="dots", choices=[remat.value for remat in Remat])
    parser.add_argument("--attention", default="auto")


def main() -> None:
    names = [schedule.value for schedule in PipelineSchedule]
    parser = argparse.ArgumentParser(prog="jaxinfra bench pipeline", description=__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16])
    order = ["1f1b", "zb_h1", "interleaved", "gpipe", "zb_v"]
    parser.add_argument("--schedules", nargs="+", default=order, choices=names)
    parser.add_argument("--chunks", type=int, default=2, help="a stage, interleaved")
    add_sizes(parser, layers=32)
    parser.add_argument("--budget-s", type=float, default=110.0, help="start nothing after it")
    parser.add_argument("--jobs", type=int, default=8, help="programs compiled at a time")
    parser.add_argument("--only", nargs="+", help='variants, such as "1f1b m=16"; default: all')
    parser.add_argument("--trace", type=pathlib.Path, help="trace into this directory")
    parser.add_argument("--traced", nargs="+", default=["1f1b m=16"], help="what to trace")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    began = time.perf_counter()
    wanted = [
        variant
        for micro_batches in args.micro_batches
        for variant in variants(args, micro_batches)
        if args.only is None or variant.name in args.only
    ]
    rows: list[dict[str, Any]] = []
    # All are compiled before any is timed: XLA tries matrix products on the GPU meanwhile.
    with ThreadPoolExecutor(max_workers=args.jobs) as pool:
        prepared = [prepare(args, variant, pool) for variant in wanted]
    compile_s = time.perf_counter() - began
    print(f"{len(prepared)} variants lowered and compiled in {compile_s:.1f} s", flush=True)
    alone_s: dict[int, float] = {}
    mesh, parameters = None, None
    for each in prepared:
        variant = each.variant
        if time.perf_counter() - began > args.budget_s:
            row: dict[str, Any] = {"name": variant.name, "error": "--budget-s is spent"}
        else:
            if variant.mesh != mesh:
                mesh, parameters = variant.mesh, None  # the last ones make room
                shardings = jax.tree.map(lambda x: x.sharding, each.parameters)
                initialize = jax.jit(each.initialize, out_shardings=shardings)
                parameters = initialize(jax.random.key(0))
            row = row_of(args, each, parameters, alone_s.get(variant.micro_batches))
        rows.append(row)
        if variant.mesh.num_devices == 1 and "step_s" in row:
            alone_s[variant.micro_batches] = row["step_s"]
        print(text_of(row), flush=True)
        if args.out:
            settings = {key: str(value) for key, value in vars(args).items()}
            report = {"environment": environment(), "settings": settings, "rows": rows}
            report |= {"compile_s": compile_s, "clocks_after": clocks()}
            args.out.write_text(json.dumps(report, indent=1) + "\n")


def row_of(
    args: argparse.Namespace, prepared: Prepared, parameters: Any, alone_s: float | None
) -> dict[str, Any]:
    """A variant's figures, a schedule's beside its own cost; a failure is a row, too."""
    variant = prepared.variant
    try:
        row = measure(args, prepared, parameters)
    except (RuntimeError, ValueError) as error:
        return {"name": variant.name, "error": str(error)[:300]}
    if variant.schedule is not None and alone_s is not None:
        row |= {"over_alone": row["step_s"] / alone_s, "own_cost": own_cost(args, variant)}
        row["over_own_cost"] = row["over_alone"] / row["own_cost"]
    return row


def text_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:18s} {row['error']}"
    text = (
        f"{row['name']:18s} {1e3 * row['step_s']:9.1f} ms  {row['tokens_per_s_a_device']:8.0f} "
        f"tokens/s a device  temp {row['temp_gib']:6.2f} GiB"
    )
    if "own_cost" in row:
        text += (
            f"  over alone {row['over_alone']:.3f}, own cost {row['own_cost']:.3f}, "
            f"ratio {row['over_own_cost']:.3f}"
        )
    return text


if __name__ == "__main__":
    main()
