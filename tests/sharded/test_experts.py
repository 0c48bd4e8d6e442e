"""Layers of experts on meshes: loss, gradients, router statistics and the state of routers are what
one device gives.

Bounds: counts and biases are exact. Sums differ by their order alone; a token that went to another
expert, was left out or counted twice would move them by parts in a hundred.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfra.config.data import DataConfig
from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    ModelConfig,
    NormConfig,
    Stack,
)
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.routing import BalanceConfig, RoutingConfig, Scoring
from jaxinfra.config.run import Remat, RunConfig, TrainingConfig
from tests.sharded.cases import OPTIMIZER
from tests.sharded.two_steps import STEPS, assert_near, first_state, two_steps

EXPERTS = ExpertsConfig(
    num_experts=8,
    top_k=2,
    hidden_dim=12,
    bias=True,
    shared_hidden_dim=8,
    shared_gate=True,
    routing=RoutingConfig(scoring=Scoring.SIGMOID, correction_bias=True, logit_bias=True),
    balance=BalanceConfig(switch_loss=0.05, sequence_loss=0.05, z_loss=0.01, bias_rate=0.125),
)


def model(*, num_layers: int) -> ModelConfig:
    mixer = GroupedAttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=4, rope=RopeConfig())
    block = BlockConfig(mixer=mixer, feed_forward=EXPERTS, norm=NormConfig())
    return ModelConfig(
        vocab_size=64,
        model_dim=16,
        max_positions=64,
        stacks=(Stack(pattern=(block,), repeats=num_layers),),
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

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            model=model(num_layers=2),
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


@functools.cache
def start() -> Any:
    return first_state(Case().config)


@functools.cache
def alone(accumulation: int) -> dict[str, Any]:
    """Loads are evened out within a micro-batch, so that their number is part of the objective."""
    return two_steps(Case(accumulation=accumulation).config, start())


def check(case: Case) -> None:
    got, want = two_steps(case.config, start()), alone(case.accumulation)
    np.testing.assert_array_equal(
        *([added["expert_tokens"] for added in each["added"]] for each in (got, want))
    )
    jax.tree.map(np.testing.assert_array_equal, got["state"], want["state"])
    for name, units in (("loss", 8), ("losses", 32), ("gradients", 100), ("parameters", 100)):
        assert_near(got[name], want[name], units=units, what=f"{name} of {case}")
    assert all(np.all(each.get("overflowed", 0.0) == 0.0) for each in got["added"])


PER_EXPERT = ExchangeConfig(form=ExchangeForm.PER_EXPERT)
# All that a step of experts can run on at once; each by itself is slow.
CASES = {
    "stages and tensor": Case(
        mesh=MeshConfig(pipe=2, fsdp=2, tensor=2, expert=2), accumulation=4, remat=Remat.DOTS
    ),
}
MORE = {
    "expert 2 of fsdp 4": Case(mesh=MeshConfig(fsdp=4, expert=2)),
    "expert 4, tensor 2, per expert": Case(
        mesh=MeshConfig(fsdp=4, tensor=2, expert=4), exchange=PER_EXPERT, remat=Remat.DOTS
    ),
    "without a loop": Case(mesh=MeshConfig(fsdp=4, tensor=2, expert=2), accumulation=2, unroll=2),
    "no expert axis": Case(mesh=MeshConfig(fsdp=2, tensor=2, replica=2), accumulation=2),
    "expert 8": Case(mesh=MeshConfig(fsdp=8, expert=8)),
    "context": Case(mesh=MeshConfig(fsdp=2, context=2, expert=4)),
    "context whole": Case(mesh=MeshConfig(context=4, fsdp=2, expert=8), exchange=PER_EXPERT),
    "replica": Case(mesh=MeshConfig(replica=2, fsdp=2, expert=4), accumulation=2),
    "replicas": Case(mesh=MeshConfig(replica=2, fsdp=2, expert=2), accumulation=2),
    "zero 1": Case(
        mesh=MeshConfig(fsdp=4, expert=2), sharding=ShardingConfig(zero=1), accumulation=2
    ),
    "sequence parallel": Case(
        mesh=MeshConfig(fsdp=2, tensor=2, expert=2),
        sharding=ShardingConfig(sequence_parallel=True),
        remat=Remat.FULL,
    ),
    "nodes of 2": Case(mesh=MeshConfig(fsdp=8, expert=8), exchange=ExchangeConfig(node_size=2)),
    "nodes of 4, replicas, context": Case(
        mesh=MeshConfig(replica=2, context=2, fsdp=2, expert=8),
        exchange=ExchangeConfig(form=ExchangeForm.PER_EXPERT, node_size=4),
        remat=Remat.DOTS,
    ),
    "stages": Case(mesh=MeshConfig(pipe=2, fsdp=2, expert=2), accumulation=4),
    "stages of nodes": Case(
        mesh=MeshConfig(pipe=2, fsdp=4, expert=4),
        exchange=ExchangeConfig(node_size=2),
        accumulation=2,
    ),
    "stages and context": Case(
        mesh=MeshConfig(pipe=2, context=2, fsdp=2, expert=4), accumulation=4
    ),
    "stages without an expert axis": Case(
        mesh=MeshConfig(pipe=2, fsdp=2, tensor=2), accumulation=4
    ),
    "zb": Case(
        mesh=MeshConfig(pipe=2, fsdp=2, expert=2),
        accumulation=4,
        schedule=PipelineSchedule.ZB_H1,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_device(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_equals_one_device_on_more_meshes(case):
    check(case)
