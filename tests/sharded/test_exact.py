"""Exact numerics on a mesh: data axes change no bit of a log-probability."""

import jax
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.serving.engine.engine import Engine
from tests.exact_scores import (
    WHOLE_PROMPTS,
    num_different,
    policy,
    random_parameters,
    sampled,
    trained_scores,
)
from tests.small_models import dense


@pytest.mark.slow
@pytest.mark.parametrize("name", [PolicyName.FP32, PolicyName.BF16])
def test_scores_of_one_device_are_those_of_training_on_four(name):
    config = dense(hidden_dim=352, vocab_size=72, tie_embeddings=False)
    numbers, mesh = policy(name), MeshConfig(fsdp=4)
    one = define_model(config, execution_on(policy=numbers))
    tree = random_parameters(one)
    found = sampled(Engine(one.bind(tree), options=WHOLE_PROMPTS))
    placement = Placement(
        mesh=make_mesh(mesh, devices=jax.devices()[:4]), rules=state_rules(ShardingConfig(), mesh)
    )
    four = define_model(config, execution_on(placement, policy=numbers))
    scores = trained_scores(four, tree, found, placement=placement)
    assert num_different(found, scores) == 0
