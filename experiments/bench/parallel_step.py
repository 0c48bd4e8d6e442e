"""One step on several GPUs beside one GPU and beside plain JAX, in one process.

    python -m experiments.bench.parallel_step --part fsdp      # 1.2B: one GPU, FSDP, plain FSDP
    python -m experiments.bench.parallel_step --part tensor    # 8B shape: tensor parallel, FSDP
    python -m experiments.bench.parallel_step --preset tiny --batch 1 --length 32   # on CPU devices

Programs compile at the same time, then run one after the other, in turns. Ratios are of tokens a
second a GPU. Where a step's time goes, and how much of it is communication that nothing hides, is
read from a trace of each (``jaxinfra.diagnostics.waterfall``); a mesh here has one axis of several
devices, so that all of it is that axis's.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.bench import plain_step
from experiments.bench.environment import clocks, environment
from experiments.bench.step import LEARNING_RATE, WEIGHT_DECAY, data, without_rope_scaling
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import OptimizerConfig, Schedule
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets import MODELS, runs
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.trace import device_events
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.parallel.program import collectives
from jaxinfra.training.job import Job, make_job

O1 = {"optimization_level": "O1"}
"""XLA's own shortcut: among others it starts a loop's collectives one turn ahead."""


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled step and how to start it; ``run`` holds a state only while it measures."""

    name: str
    num_devices: int
    tokens: int  # a step, over all devices
    compiled: Any
    start: Callable[[], Callable[[], jax.Array]]  # allocates; the result does one step
    compile_s: float

    def measure(self, steps: int, trace: pathlib.Path | None) -> dict[str, Any]:
        """Seconds a step over ``steps``, the queue drained before and after."""
        advance = self.start()
        losses = [float(advance()), float(advance())]
        begin = time.perf_counter()
        pending = [advance() for _ in range(steps)]
        losses += [float(loss) for loss in pending]
        found: dict[str, Any] = {"step_s": (time.perf_counter() - begin) / steps, "losses": losses}
        if trace is not None:
            with jax.profiler.trace(str(trace)):
                jax.block_until_ready([advance() for _ in range(3)])
            found["waterfall"] = explain(device_events(trace), steps=3).as_json(top=25)
        return found


def ours(
    name: str,
    config: ModelConfig,
    mesh: MeshConfig,
    args: argparse.Namespace,
    *,
    rows: int,
    sharding: ShardingConfig | None = None,
    unroll: int = 1,
    options: dict[str, Any] | None = None,
) -> Contender:
    """The product's own step, as ``jaxinfra train`` builds it."""
    run = runs.pretraining(config)
    training = dataclasses.replace(
        run.training,
        batch_size=rows,
        sequence_length=args.length,
        accumulation=1,
        remat=Remat(args.remat),
        attention=AttentionImplementation(args.attention),
        unroll=unroll,
        z_loss=0.0,
    )
    optimizer = OptimizerConfig(
        learning_rate=LEARNING_RATE,
        schedule=Schedule.CONSTANT,
        weight_decay=WEIGHT_DECAY,
        clip_norm=None,
    )
    run = dataclasses.replace(
        run,
        training=training,
        optimizer=optimizer,
        precision=PrecisionConfig(policy=PolicyName.BF16),
        mesh=mesh,
        sharding=sharding or ShardingConfig(),
    )
    job = make_job(run, devices=jax.devices()[: mesh.num_devices])
    tokens, targets = data(config, batch=rows, length=args.length)
    batch = Batch(
        tokens=tokens,
        targets=targets,
        segment_ids=None,
        positions=None,
        weights=np.ones(tokens.shape, np.float32),
    )
    begin = time.perf_counter()
    lowered = job.train_step.lower(job.abstract_state(), _abstract(batch, job))
    compiled = lowered.compile(compiler_options=options)

    def start() -> Callable[[], jax.Array]:
        state, placed = job.initialize(), job.put(batch)

        def advance() -> jax.Array:
            nonlocal state
            state, metrics = compiled(state, placed)
            return metrics.loss

        return advance

    return Contender(
        name=name,
        num_devices=mesh.num_devices,
        tokens=rows * args.length,
        compiled=compiled,
        start=start,
        compile_s=time.perf_counter() - begin,
    )


def _abstract(batch: Batch, job: Job) -> Batch:
    sharding = job.placement.batch
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def plain(
    name: str, config: ModelConfig, args: argparse.Namespace, *, devices: int, rows: int
) -> Contender:
    """The hand-written step; on several devices fully sharded, the residual stream by rows."""
    block = config.blocks[0]
    shape = plain_step.Shape(
        layers=config.num_layers,
        width=config.model_dim,
        heads=block.attention.num_q_heads,
        kv_heads=block.attention.num_kv_heads,
        hidden=block.mlp.hidden_dim,
        vocab=config.vocab_size,
        batch=rows,
        length=args.length,
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # Every weight has the model's width; of two dims as long, the last.
        dim = max(i for i, size in enumerate(leaf.shape) if size == shape.width)
        return NamedSharding(mesh, PartitionSpec(*(None,) * dim, "fsdp"))

    optimizer, step = plain_step.make_step(
        shape,
        remat="dots",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        constrain=lambda x: jax.lax.with_sharding_constraint(x, by_row),
    )
    draw = functools.partial(plain_step.initialize, shape)
    shapes = jax.eval_shape(draw, jax.random.key(0))
    shardings = jax.tree.map(place, shapes)
    moments = optax.tree_utils.tree_map_params(
        optimizer.init,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )
    ids = data(config, batch=rows, length=args.length)

    def placed(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    begin = time.perf_counter()
    compiled = step.lower(
        placed(shapes, shardings),
        placed(jax.eval_shape(optimizer.init, shapes), moments),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row) for x in ids),
    ).compile()

    def start() -> Callable[[], jax.Array]:
        params = jax.jit(draw, out_shardings=shardings)(jax.random.key(0))
        state = jax.jit(optimizer.init, out_shardings=moments)(params)
        tokens, targets = (jax.device_put(x, by_row) for x in ids)

        def advance() -> jax.Array:
            nonlocal params, state
            params, state, loss = compiled(params, state, tokens, targets)
            return loss

        return advance

    return Contender(
        name=name,
        num_devices=devices,
        tokens=rows * args.length,
        compiled=compiled,
        start=start,
        compile_s=time.perf_counter() - begin,
    )


def contenders(args: argparse.Namespace, devices: int) -> dict[str, Callable[[], Contender]]:
    """By name; the first is what the others are divided by."""
    config = without_rope_scaling(MODELS[args.preset or _PRESETS[args.part]]())
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    elif args.part == "tensor" and args.preset is None:
        config = dataclasses.replace(config, num_layers=8)  # of 32; every layer is alike
    rows = args.batch * devices
    sharded = MeshConfig(fsdp=devices)

    def of(name: str, mesh: MeshConfig, rows: int, **how: Any):
        return functools.partial(ours, name, config, mesh, args, rows=rows, **how)

    if args.part == "fsdp":
        made = {
            "one": of("one", MeshConfig(), args.batch),
            "fsdp": of("fsdp", sharded, rows),
            "fsdp-O1": of("fsdp-O1", sharded, rows, options=O1),
            "fsdp-unroll2": of("fsdp-unroll2", sharded, rows, unroll=2),
            "zero1": of("zero1", sharded, rows, sharding=ShardingConfig(zero=1)),
            "plain-one": functools.partial(
                plain, "plain-one", config, args, devices=1, rows=args.batch
            ),
            "plain-fsdp": functools.partial(
                plain, "plain-fsdp", config, args, devices=devices, rows=rows
            ),
        }
    else:
        by_tensor, stream = MeshConfig(tensor=devices), ShardingConfig(sequence_parallel=True)
        made = {
            "fsdp": of("fsdp", sharded, rows),
            "tensor": of("tensor", by_tensor, rows),
            "tensor-sp": of("tensor-sp", by_tensor, rows, sharding=stream),
            "tensor-sp-O1": of("tensor-sp-O1", by_tensor, rows, sharding=stream, options=O1),
        }
    wanted = args.only or list(made)
    return {name: made[name] for name in wanted}


_PRESETS = {"fsdp": "llama32_1b", "tensor": "llama31_8b"}


def main() -> None:
    """Compiles, measures in turns, prints a line each and writes the JSON."""
    parser = argparse.ArgumentParser(prog="parallel_step", description=__doc__)
    parser.add_argument("--part", choices=["fsdp", "tensor"], default="fsdp")
    parser.add_argument("--preset", choices=sorted(MODELS), help="another model")
    parser.add_argument("--layers", type=int, help="fewer or more of them")
    parser.add_argument("--batch", type=int, default=4, help="sequences a GPU")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only", nargs="+", help="names of contenders, the reference first")
    parser.add_argument("--trace", action="store_true", help="trace each in the last round")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    makers = contenders(args, len(jax.devices()))
    with concurrent.futures.ThreadPoolExecutor(len(makers)) as pool:
        compiling = {name: pool.submit(make) for name, make in makers.items()}
    made, rows = {}, {}
    for name, future in compiling.items():
        if (error := future.exception()) is not None:  # a row, not the end of the others
            rows[name] = {"error": str(error)[:500]}
            print(f"{name}: FAILED {str(error)[:300]}", flush=True)
        else:
            made[name] = future.result()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in made}
    for number in range(args.rounds):
        for name, contender in made.items():
            with tempfile.TemporaryDirectory() as directory:
                is_traced = args.trace and number == args.rounds - 1
                trace = pathlib.Path(directory) if is_traced else None
                measured[name].append(contender.measure(args.steps, trace))
    reference = None
    for name, contender in made.items():
        row = _row(contender, measured[name])
        reference = reference or row["tokens_per_s_per_gpu"]
        row["ratio_to_first"] = row["tokens_per_s_per_gpu"] / reference
        rows[name] = row
        print(
            f"{name:14s} {row['ms']:9.2f} ms {row['tokens_per_s_per_gpu']:9.0f} tokens/s/GPU "
            f"x{row['ratio_to_first']:.3f} temp {row['temp_gib']:5.1f} GiB compile "
            f"{row['compile_s']:5.1f} s sent {row['sent_gb']:.2f} GB loss {row['losses'][0]:.4f} "
            f"-> {row['losses'][-1]:.4f} exposed {row['exposed_communication_ms']} ms",
            flush=True,
        )
    result = {
        "environment": environment(),
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "rows": rows,
        "clocks_after": clocks(),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def _row(contender: Contender, measured: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = statistics.median(each["step_s"] for each in measured)
    waterfall = measured[-1].get("waterfall")
    found = collectives(contender.compiled)
    large = [each for each in found if each.sent_bytes > 2**20]
    sent = sum(each.sent_bytes for each in large)
    hidden = sum(each.sent_bytes for each in large if each.covered_by)
    exposed = None if waterfall is None else waterfall["by_kind_ms"].get("collective", 0.0)
    return {
        "devices": contender.num_devices,
        "ms": seconds * 1e3,
        "rounds_ms": [each["step_s"] * 1e3 for each in measured],
        "tokens_per_s_per_gpu": contender.tokens / seconds / contender.num_devices,
        "temp_gib": contender.compiled.memory_analysis().temp_size_in_bytes / 2**30,
        "compile_s": contender.compile_s,
        "sent_gb": sum(each.sent_bytes for each in found) / 1e9,
        "sent_share_with_compute_in_schedule": hidden / sent if sent else None,
        "exposed_communication_ms": exposed,
        "losses": measured[-1]["losses"],
        "waterfall": waterfall,
    }


if __name__ == "__main__":
    main()
