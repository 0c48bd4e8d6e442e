"""Layers of experts on meshes: loss, gradients, router statistics and the state of routers are what
one device gives.

Bounds: counts and biases are exact. Sums differ by their order alone; a token that went to another
expert, was left out or counted twice would move them by parts in a hundred.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    NormConfig,
)
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.routing import BalanceConfig, RoutingConfig, Scoring
from jaxinfra.config.run import Remat
from tests.sharded.two_steps import MIXER, Case, assert_near, first_state, model_of, two_steps

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


MODEL = model_of(BlockConfig(mixer=MIXER, feed_forward=EXPERTS, norm=NormConfig()), repeats=2)


@functools.cache
def start() -> Any:
    return first_state(Case().config(MODEL))


@functools.cache
def alone(accumulation: int) -> dict[str, Any]:
    """Loads are evened out within a micro-batch, so that their number is part of the objective."""
    return two_steps(Case(accumulation=accumulation).config(MODEL), start())


def check(case: Case) -> None:
    got, want = two_steps(case.config(MODEL), start()), alone(case.accumulation)
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
    "stages": Case(mesh=MeshConfig(pipe=2, fsdp=2, expert=2), accumulation=2),
}
MORE = {
    "stages and tensor": Case(
        mesh=MeshConfig(pipe=2, fsdp=2, tensor=2, expert=2), accumulation=4, remat=Remat.DOTS
    ),
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


@pytest.mark.slow  # by default `test_pipeline_gradients.py` has stages with experts
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_equals_one_device(case):
    check(case)
