"""Gradients of a batch through a pipeline and without one, for the tests of pipelines."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import ContextMethod, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, define_model
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.runtime.compile_cache import cache_for_stages
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.job import batch_in_zigzag
from jaxinfra.training.pipeline_gradients import make_pipeline_gradient
from tests.sharded import oracle
from tests.sharded.cases import COMPILER_OPTIONS, drawn, packed_batch

ROWS = 32  # of the whole batch: up to 16 micro-batches on two data shards
LABEL_SMOOTHING = 0.1
Z_LOSS = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, cut into micro-batches and stages."""

    model: ModelConfig
    mesh: MeshConfig
    micro_batches: int
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: int = 2
    remat: Remat = Remat.NONE
    context_method: ContextMethod = ContextMethod.AUTO
    rows: int = ROWS
    policy: Policy = POLICIES[PolicyName.FP32]

    @property
    def batch(self) -> Batch:
        """In the order in which the mesh's devices hold it."""
        return batch_in_zigzag(jax.device_get(packed_batch(rows=self.rows)), self.mesh.context)


def compiled(case: Case) -> tuple[jax.stages.Compiled, Placement, ModelDefinition]:
    """The gradient function on the case's mesh, and without a pipeline where it has no stages."""
    placement = Placement(
        mesh=make_mesh(case.mesh, devices=jax.devices()[: case.mesh.num_devices]),
        rules=state_rules(ShardingConfig()),
    )
    execution = execution_on(
        placement,
        policy=case.policy,
        context_method=case.context_method,
        remat=case.remat,
    )
    model = define_model(case.model, execution)
    training = TrainingConfig(
        steps=1,
        batch_size=case.rows,
        sequence_length=16,
        accumulation=case.micro_batches,
        remat=case.remat,
        z_loss=Z_LOSS,
        label_smoothing=LABEL_SMOOTHING,
    )
    if case.mesh.pipe > 1:
        gradient = make_pipeline_gradient(
            model,
            training=training,
            pipeline=PipelineConfig(schedule=case.schedule, chunks=case.chunks),
            placement=placement,
        )
    else:
        gradient = AccumulatedGradient(model, training=training, placement=placement)
    arguments = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model.shapes,
        placement.parameters(model),
    )
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.batch),
        case.batch,
    )
    key, scale = _key_and_scale(placement)
    lowered = jax.jit(gradient).lower(arguments, {}, batch, key=key, loss_scale=scale)
    with cache_for_stages(case.mesh.pipe):
        return lowered.compile(COMPILER_OPTIONS), placement, model


def _key_and_scale(placement: Placement) -> tuple[jax.Array, jax.Array]:
    whole = placement.replicated
    return jax.device_put(jax.random.key(5), whole), jax.device_put(np.float32(1.0), whole)


def loss_and_gradients(case: Case) -> tuple[np.ndarray, Any]:
    """Whole, on the host."""
    program, placement, model = compiled(case)
    parameters = jax.device_put(drawn(case.model), placement.parameters(model))
    batch = jax.device_put(case.batch, placement.batch)
    key, scale = _key_and_scale(placement)
    learned = program(parameters, {}, batch, key=key, loss_scale=scale)
    return jax.device_get((learned.loss, learned.gradients))


@functools.cache
def alone(config: ModelConfig, micro_batches: int, remat: Remat, rows: int) -> Any:
    """The same on one device, without a pipeline."""
    case = Case(
        model=config, mesh=MeshConfig(), micro_batches=micro_batches, remat=remat, rows=rows
    )
    return loss_and_gradients(case)


@functools.cache
def exact(config: ModelConfig, rows: int) -> Any:
    """The same in float64, from the papers' formulas, and how far fp32 may be from it."""
    batch, how = packed_batch(rows=rows), {"z_loss": Z_LOSS, "label_smoothing": LABEL_SMOOTHING}
    return oracle.rounded(oracle.samples(config, drawn(config), batch, **how))
