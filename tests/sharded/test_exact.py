"""Exact numerics on a mesh: its axes change no bit of a log-probability."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.ops.exact_rows import ordered_sum
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, serving_rules, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.serving.engine.engine import Engine
from tests.exact_scores import (
    LATENT,
    SMALL_CHUNKS,
    WHOLE_PROMPTS,
    WINDOWED,
    num_different,
    policy,
    random_parameters,
    sampled,
    trained_scores,
)
from tests.sharded.cases import llama_like
from tests.sharded.pipeline_cases import Case, loss_and_gradients
from tests.small_models import dense


def placed(mesh: MeshConfig, rules=None) -> Placement:
    devices = jax.devices()[: mesh.num_devices]
    rules = state_rules(ShardingConfig(), mesh) if rules is None else rules
    return Placement(mesh=make_mesh(mesh, devices=devices), rules=rules)


def on(mesh: MeshConfig, config, name, rules=None, **options):
    placement = placed(mesh, rules)
    execution = execution_on(placement, policy=policy(name))
    return define_model(config, execution, **options), placement


def models():
    config = dense(
        heads=(8, 4), attention=WINDOWED, hidden_dim=352, vocab_size=300, tie_embeddings=False
    )
    latent = dataclasses.replace(config.blocks[0], mixer=LATENT)
    return {
        "windows": (config, {}),
        "latents": (dataclasses.replace(config, stacks=stacked(latent, num_layers=2)), {}),
        "adapter": (config, {"lora": LoraConfig(rank=3, alpha=5.0)}),
    }


TRAINERS = {
    "fsdp=4": MeshConfig(fsdp=4),
    "tensor=2": MeshConfig(tensor=2),
    "tensor=4": MeshConfig(tensor=4),
    "fsdp=2 tensor=2": MeshConfig(fsdp=2, tensor=2),
    "pipe=2": MeshConfig(pipe=2),
}


FP32, BF16 = PolicyName.FP32, PolicyName.BF16


@pytest.mark.slow_cases("7", "1000")
@pytest.mark.parametrize("width", [7, 300, 1000])
def test_a_row_has_the_same_sum_whatever_rows_a_device_has(width):
    x_MD = jax.random.normal(jax.random.key(width), (32, width))
    sums = np.asarray(jax.jit(ordered_sum)(x_MD))
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2), devices=jax.devices()[:8])
    for names in (("fsdp", "tensor"), ("tensor", "fsdp")):
        place = jax.NamedSharding(mesh, jax.P(names[0], names[1] if width % 4 == 0 else None))
        np.testing.assert_array_equal(jax.jit(ordered_sum)(jax.device_put(x_MD, place)), sums)
    np.testing.assert_array_equal([jax.jit(ordered_sum)(x_D)[0] for x_D in x_MD], sums[:, 0])
    np.testing.assert_allclose(sums[:, 0], np.asarray(x_MD, np.float64).sum(1), atol=1e-5 * width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [("windows", FP32), ("windows", BF16), ("latents", BF16), ("adapter", BF16)]
)
def test_scores_do_not_depend_on_meshes_of_engine_and_trainer(kind, name):
    config, options = models()[kind]
    one = define_model(config, execution_on(policy=policy(name)), **options)
    tree = random_parameters(one)
    found = sampled(Engine(one.bind(tree), options=WHOLE_PROMPTS))
    for mesh in (MeshConfig(tensor=2), MeshConfig(fsdp=4)):
        served, placement = on(mesh, config, name, rules=serving_rules(mesh), **options)
        shards = jax.device_put(tree, placement.parameters(served))
        again = sampled(Engine(served.bind(shards), options=SMALL_CHUNKS))
        assert [each.tokens for each in again] == [each.tokens for each in found]
        assert num_different(found, [each.scores for each in again]) == 0
    different = {}
    for named, mesh in TRAINERS.items():
        trained, placement = on(mesh, config, name, **options)
        scores = trained_scores(trained, tree, found, placement=placement)
        different[named] = num_different(found, scores)
    assert different == dict.fromkeys(TRAINERS, 0)


@pytest.mark.slow
def test_the_loss_of_stages_is_that_of_one_device():
    case = Case(
        model=llama_like().with_layers(4), mesh=MeshConfig(pipe=2, tensor=2), micro_batches=4,
        policy=policy(PolicyName.BF16),
    )  # fmt: skip
    alone = dataclasses.replace(case, mesh=MeshConfig())
    assert loss_and_gradients(case)[0] == loss_and_gradients(alone)[0]


def test_what_a_tensor_axis_would_sum_in_another_order_is_refused():
    config = dense(heads=(8, 4))
    feed = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=16)
    block = dataclasses.replace(config.blocks[0], feed_forward=feed)
    mixture = dataclasses.replace(config, stacks=stacked(block, num_layers=2))
    with pytest.raises(ConfigError, match="numerics=exact with experts over tensor=2"):
        on(MeshConfig(tensor=2), mixture, PolicyName.FP32)
    with pytest.raises(UnsupportedError, match=r"mesh with tensor=3.*tensor=2 or 4"):
        on(MeshConfig(tensor=3), config, PolicyName.FP32)
