"""What layers emit beside x reaches the step, whatever the step runs on.

A feed-forward kind of the tests' own (``tests/tally.py``) emits losses, counts, a maximum and
messages of its backward pass, and has state that rules change from these. Two steps of it on every
mesh give what one device gives.

Bounds: counts and biases are exact. Sums differ by their order alone; a token that took another
gain, a layer left out or counted twice would move them by parts in a hundred.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import (
    BlockConfig,
    MlpConfig,
    NormConfig,
)
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError
from jaxinfra.training.job import make_job
from tests import tally
from tests.sharded.cases import packed_batch
from tests.sharded.two_steps import MIXER, Case, assert_near, first_state, model_of, two_steps

GPIPE, ONE, INTERLEAVED, ZB_H1, ZB_V = PipelineSchedule


# Of two blocks one emits nothing. Scale offsets: a layer of zeros that pads a stage still has an
# input, and a loss of it.
MODEL = model_of(
    *(
        BlockConfig(mixer=MIXER, feed_forward=feed_forward, norm=NormConfig(scale_offset=1.0))
        for feed_forward in (tally.TallyConfig(hidden_dim=24), MlpConfig(hidden_dim=16))
    ),
    repeats=5,
)


@functools.cache
def start() -> Any:
    return first_state(Case().config(MODEL))


@functools.cache
def alone() -> dict[str, Any]:
    return two_steps(Case().config(MODEL), start())


def check(case: Case) -> None:
    got, want = two_steps(case.config(MODEL), start()), alone()
    jax.tree.map(np.testing.assert_array_equal, got["added"], want["added"])
    biases = [
        [state["blocks"][0]["mlp"]["bias"] for state in each["state"]] for each in (got, want)
    ]
    np.testing.assert_array_equal(*biases)
    for name, units in (
        ("loss", 8),
        ("losses", 32),
        ("largest", 32),
        ("state", 100),
        ("gradients", 100),
        ("parameters", 100),
    ):
        assert_near(got[name], want[name], units=units, what=f"{name} of {case}")


@pytest.mark.slow  # `unit/test_experts.py` has what experts emit
def test_what_is_emitted_is_used():
    """The oracle itself: losses move gradients, counts the biases, messages the history."""
    one = alone()
    state = one["state"]
    assert set(state[0]["blocks"]) == {0}  # the other block emits nothing
    own = [each["blocks"][0]["mlp"] for each in state]
    bias, history = own[0]["bias"], own[0]["history"]
    assert bias.shape == (5, 4)
    assert set(np.unique(np.abs(bias))) <= {0.0, tally.BIAS_STEP}
    assert np.any(own[1]["bias"] != bias)
    assert np.all(history > 0)
    counts = one["added"][0]["tokens"]
    assert np.sum(counts) == 5 * np.sum(np.asarray(packed_batch().segment_ids) >= 0)
    assert np.all(one["losses"][0]["router_z"] > 0)


# All axes that divide a layer at once, and each by itself, which says where a fault is.
CASES = {
    "fsdp, tensor and context": Case(
        mesh=MeshConfig(fsdp=2, tensor=2, context=2), accumulation=2, remat=Remat.DOTS
    ),
    "interleaved": Case(
        mesh=MeshConfig(pipe=2), accumulation=4, schedule=INTERLEAVED, remat=Remat.DOTS
    ),
    "replicas": Case(mesh=MeshConfig(replica=2), accumulation=2),
    **{
        f"{schedule.value} with {', '.join(others) or 'nothing'}": Case(
            mesh=MeshConfig(pipe=2, **others),
            accumulation=4,
            schedule=schedule,
            remat=remat,
        )
        for schedule, others, remat in (
            (GPIPE, {"tensor": 2}, Remat.NONE),
            (ONE, {"fsdp": 2, "tensor": 2}, Remat.DOTS),
            (ONE, {"context": 2}, Remat.NONE),
            (INTERLEAVED, {"fsdp": 2}, Remat.NONE),
            (ZB_H1, {}, Remat.NONE),
            (ZB_H1, {"fsdp": 2}, Remat.DOTS),
            (ZB_V, {}, Remat.DOTS),
            (ZB_V, {"tensor": 2}, Remat.FULL),
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_device(case):
    check(case)


def test_stacks_in_a_pipeline_are_refused():
    config = Case(mesh=MeshConfig(pipe=2), accumulation=2).config(MODEL)
    stack = config.model.stacks[0]
    two = dataclasses.replace(config.model, stacks=(stack, stack))
    with pytest.raises(ConfigError, match="2 stacks of layers with pipe=2"):
        make_job(dataclasses.replace(config, model=two))
