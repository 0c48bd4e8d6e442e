"""Two steps through the job of a run, and how near those of a mesh are to one device's."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxinfra.config.data import DataConfig
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, ModelConfig, Stack
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.run import Remat, RunConfig, TrainingConfig
from jaxinfra.runtime.compile_cache import cache_for_stages
from jaxinfra.training.job import make_job
from tests.sharded.cases import OPTIMIZER, gradients_of, packed_batch

STEPS = 2
EPSILON = float(np.finfo(np.float32).eps)
MIXER = GroupedAttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=4, rope=RopeConfig())


def model_of(*pattern: BlockConfig, repeats: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        model_dim=16,
        max_positions=64,
        stacks=(Stack(pattern=pattern, repeats=repeats),),
        tie_embeddings=True,
        init_std=0.2,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """How the steps run."""

    mesh: MeshConfig = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    accumulation: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    remat: Remat = Remat.NONE
    unroll: int = 1

    def config(self, model: ModelConfig) -> RunConfig:
        return RunConfig(
            model=model,
            data=DataConfig(),
            optimizer=OPTIMIZER,
            training=TrainingConfig(
                steps=STEPS,
                batch_size=8,
                sequence_length=16,
                accumulation=self.accumulation,
                remat=self.remat,
                unroll=self.unroll,
            ),
            mesh=self.mesh,
            sharding=self.sharding,
            exchange=self.exchange,
            pipeline=PipelineConfig(schedule=self.schedule),
        )


def first_state(config: RunConfig) -> Any:
    """Drawn on the host: a program that draws compiles longer than a step."""
    abstract = make_job(config, devices=jax.devices()[:1]).abstract_state()
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda zero: rng.normal(0.0, 0.2, zero.shape).astype(zero.dtype), zeros.parameters
    )
    scale = dataclasses.replace(zeros.loss_scale, value=np.ones_like(zeros.loss_scale.value))
    return dataclasses.replace(zeros, parameters=parameters, loss_scale=scale)


def two_steps(config: RunConfig, start: Any) -> dict[str, Any]:
    """What they tell and leave, on the host; gradients are the first step's."""
    job = make_job(config, devices=jax.devices()[: config.mesh.num_devices])
    state = jax.device_put(start, job.shardings)
    metrics, states = [], []
    with cache_for_stages(config.mesh.pipe):
        for step in range(STEPS):
            batch = job.put(jax.device_get(packed_batch(seed=step)))
            state, values = job.train_step(state, batch)
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(values))
    sums = [values.sums[0] for values in metrics]
    return {
        "loss": [values.loss for values in metrics],
        "gradients": gradients_of(states[0]),
        "losses": [each.losses for each in sums],
        "added": [each.added for each in sums],
        "largest": [each.largest for each in sums],
        "state": [state.model_state for state in states],
        "parameters": states[-1].parameters,
    }


def assert_near(got: Any, want: Any, *, units: float, what: str) -> None:
    """Each leaf within so many units in the last place of its largest element."""
    pairs = jax.tree.leaves(
        jax.tree.map(lambda *leaves: leaves, got, want), is_leaf=lambda x: isinstance(x, tuple)
    )
    for mine, theirs in pairs:
        error = np.max(np.abs(mine - theirs))
        assert error <= units * EPSILON * np.max(np.abs(theirs)), f"{what}: {error}, {theirs}"
