"""Training steps on meshes that a benchmark compiles and runs: ours by name, and plain JAX.

A name is a base and what differs from its settings, joined by "+": ``fsdp+unroll16+O1`` is fully
sharded, 16 layers a loop body, under XLA's options of the name O1. ``rounded`` sums weights'
gradients over devices in bf16, as plain JAX does; ``kept`` gathers weights once for both passes.
``squares`` and other scalings multiply projections in 8 bits. ``NAME=VALUE`` is an
XLA option by itself.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.bench.training import plain_step
from experiments.bench.training.step_programs import LEARNING_RATE, WEIGHT_DECAY, data
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.config.precision import (
    Fp8Matmuls,
    Fp8Scaling,
    PolicyName,
    PrecisionConfig,
    WeightGradients,
)
from jaxinfra.config.presets import runs
from jaxinfra.config.run import AttentionImplementation, Remat, RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.training.job import Job, make_job
from jaxinfra.training.xla_options import LARGE_MESSAGES, PEER_COPIES, Options, parse_options

OPTIONS: dict[str, Options] = {
    # XLA's own shortcut: among others it starts a loop's collectives one round ahead.
    "O1": {"optimization_level": "O1"},
    # Messages of a layer's weights and a layer's gradients.
    "near": LARGE_MESSAGES,
    # Between two GPUs, permutes of them by DMA engines.
    "copies": PEER_COPIES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that the contenders of one comparison share."""

    config: ModelConfig
    batch: int  # rows per device
    length: int
    remat: str
    attention: str
    devices: Sequence[jax.Device]


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled step and how to start it."""

    name: str
    num_devices: int
    tokens: int  # a step, over all devices
    compiled: Any
    start: Callable[[], Callable[[], jax.Array]]  # allocates; the result does one step
    compile_s: float


_BASES: dict[str, Callable[[int], tuple[MeshConfig, ShardingConfig]]] = {
    "one": lambda n: (MeshConfig(), ShardingConfig()),
    "fsdp": lambda n: (MeshConfig(fsdp=n), ShardingConfig()),
    "zero1": lambda n: (MeshConfig(fsdp=n), ShardingConfig(zero=1)),
    "zero2": lambda n: (MeshConfig(fsdp=n), ShardingConfig(zero=2)),
    "replica": lambda n: (MeshConfig(replica=n), ShardingConfig()),
    "tensor": lambda n: (MeshConfig(tensor=n), ShardingConfig()),
    "tensor-sp": lambda n: (MeshConfig(tensor=n), ShardingConfig(sequence_parallel=True)),
}


def contender(name: str, setting: Setting) -> Contender:
    """Makes the contender of a name; the module's docstring explains the names."""
    base, *changes = name.split("+")
    if base in ("plain-one", "plain-fsdp"):
        return _plain(name, setting, devices=1 if base == "plain-one" else len(setting.devices))
    if base not in _BASES:
        raise SystemExit(
            f"contender {name!r}: bases are {', '.join(_BASES)}, plain-one, plain-fsdp"
        )
    mesh, sharding = _BASES[base](len(setting.devices))
    options: Options = {}
    unroll, remat, gradients, fp8 = 1, setting.remat, WeightGradients.FP32, None
    for change in changes:
        if change in OPTIONS:
            options |= OPTIONS[change]
        elif change.startswith("unroll"):
            unroll = int(change.removeprefix("unroll"))
        elif change == "rounded":
            gradients = WeightGradients.COMPUTE
        elif change == "kept":
            sharding = dataclasses.replace(sharding, keep_gathered=True)
        elif change in list(Remat):
            remat = change
        elif change in list(Fp8Scaling):
            fp8 = Fp8Matmuls(scaling=Fp8Scaling(change))
        else:
            options |= parse_options([change])
    precision = PrecisionConfig(policy=PolicyName.BF16, weight_gradients=gradients, fp8=fp8)
    return _ours(
        name,
        setting,
        mesh,
        sharding,
        unroll=unroll,
        remat=remat,
        precision=precision,
        options=options,
    )


def _ours(
    name: str,
    setting: Setting,
    mesh: MeshConfig,
    sharding: ShardingConfig,
    *,
    unroll: int,
    remat: str,
    precision: PrecisionConfig,
    options: Options,
) -> Contender:
    """The product's own step, as ``jaxinfra train`` builds it."""
    config, rows = setting.config, setting.batch
    rows *= 1 if mesh.num_devices == 1 else len(setting.devices)
    run = runs.pretraining(config)
    training = dataclasses.replace(
        run.training,
        batch_size=rows,
        sequence_length=setting.length,
        accumulation=1,
        remat=Remat(remat),
        attention=AttentionImplementation(setting.attention),
        unroll=unroll,
        z_loss=0.0,
    )
    optimizer = OptimizerConfig(
        learning_rate=LEARNING_RATE,
        schedule=LearningRateSchedule.CONSTANT,
        weight_decay=WEIGHT_DECAY,
        clip_norm=None,
    )
    run = dataclasses.replace(
        run,
        training=training,
        optimizer=optimizer,
        precision=precision,
        mesh=mesh,
        sharding=sharding,
    )
    return of_run(name, run, setting.devices[: mesh.num_devices], options)


def of_run(name: str, run: RunConfig, devices: Sequence[jax.Device], options: Options) -> Contender:
    """The step of a run, compiled, on random tokens."""
    job = make_job(run, devices=devices)
    rows, length = run.training.batch_size, run.training.sequence_length
    tokens, targets = data(run.model, batch=rows, length=length)
    batch = Batch(
        tokens=tokens,
        targets=targets,
        segment_ids=None,
        positions=None,
        weights=np.ones(tokens.shape, np.float32),
    )
    begin = time.perf_counter()
    lowered = job.train_step.lower(job.abstract_state(), _abstract(batch, job))
    compiled = lowered.compile(compiler_options=options or None)

    def start() -> Callable[[], jax.Array]:
        state, placed = job.initialize(), job.put(batch)

        def advance() -> jax.Array:
            nonlocal state
            state, metrics = compiled(state, placed)
            return metrics.loss

        return advance

    return Contender(
        name=name,
        num_devices=len(devices),
        tokens=rows * length,
        compiled=compiled,
        start=start,
        compile_s=time.perf_counter() - begin,
    )


def _abstract(batch: Batch, job: Job) -> Batch:
    sharding = job.placement.batch
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def _plain(name: str, setting: Setting, *, devices: int) -> Contender:
    """The hand-written step; on several devices fully sharded, the residual stream by rows."""
    block, rows = setting.config.blocks[0], setting.batch * devices
    assert block.feed_forward is not None, "presets"
    shape = plain_step.Shape(
        layers=setting.config.num_layers,
        width=setting.config.model_dim,
        heads=block.mixer.num_q_heads,
        kv_heads=block.mixer.num_kv_heads,
        hidden=block.feed_forward.hidden_dim,
        vocab=setting.config.vocab_size,
        batch=rows,
        length=setting.length,
    )
    mesh = Mesh(np.array(setting.devices[:devices]), ("fsdp",))
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
    ids = data(setting.config, batch=rows, length=setting.length)

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
        tokens=rows * setting.length,
        compiled=compiled,
        start=start,
        compile_s=time.perf_counter() - begin,
    )
