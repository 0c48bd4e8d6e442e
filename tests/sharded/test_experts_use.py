"""Models with experts beyond a training step: generated from, saved and moved to other meshes, and
what is refused.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.config.exchange import ExchangeConfig, ExchangeImplementation
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ExpertsConfig, ModelConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.routing import BalanceConfig, RoutingConfig
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.adapters import add_adapters
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.load import serving_placement
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.training.job import make_job
from tests.generation import served
from tests.sharded.test_experts import MODEL as CONFIG
from tests.sharded.test_experts import start
from tests.sharded.two_steps import Case

LENGTH, PROMPTS = 16, [[5], [7, 25, 3, 29, 4, 8], [1, 2, 3]]


@functools.cache
def decoder(mesh: MeshConfig, config: ModelConfig = CONFIG):
    placement = serving_placement(config, mesh)
    definition = define_model(config, execution_on(placement))
    rng = np.random.default_rng(0)
    tree = jax.tree.map(
        lambda leaf: rng.normal(0.0, 0.6, leaf.shape).astype(leaf.dtype),
        define_model(config, execution_on()).arrays,
    )
    shardings = jax.tree.map(lambda a, b: b, definition.shapes, placement.parameters(definition))
    state = placement.model_state(definition)
    return definition.bind(jax.device_put(tree, _merged(shardings, state)))


def _merged(first, second):
    both = dict(first)
    for name, value in second.items():
        both[name] = _merged(both[name], value) if name in both else value
    return both


def generated(mesh: MeshConfig, config: ModelConfig = CONFIG) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for new in served(decoder(mesh, config), PROMPTS, max_new_tokens=6, sampling=GREEDY):
        rows.setdefault(new.row, []).append(new.token)
    return rows


@pytest.mark.slow
def test_greedy_is_argmax_without_a_cache():
    one = generated(MeshConfig())
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(6):
            padded = np.zeros((1, LENGTH), np.int32)  # causality hides the padding
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(decoder(MeshConfig())(padded)[0, len(ids) - 1])))
        assert one[row] == ids[len(prompt) :]
    assert len({token for tokens in one.values() for token in tokens}) > 3, "a telling sequence"


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [2, 4])
def test_generation_on_devices_that_share_experts(fsdp):
    """With 4, rows are spread over what the experts leave of them."""
    mesh = MeshConfig(fsdp=fsdp, tensor=2, expert=2)
    assert generated(mesh) == generated(MeshConfig())


@pytest.mark.slow  # `test_muon_meshes.py` moves a state
def test_a_checkpoint_moves_between_meshes_of_experts(tmp_path):
    """Experts that two of four devices share are then shared by four, and by none."""
    rng = np.random.default_rng(1)
    host = jax.tree.map(
        lambda a: rng.normal(size=a.shape).astype(a.dtype) if a.dtype == np.float32 else a,
        start(),
    )
    meshes = (
        MeshConfig(fsdp=4, expert=2),
        MeshConfig(fsdp=2, context=2, expert=4),
        MeshConfig(tensor=2),
    )
    for number, mesh in enumerate(meshes):
        job = make_job(Case(mesh=mesh).config(CONFIG), devices=jax.devices()[: mesh.num_devices])
        with Checkpointer(tmp_path / "run", CheckpointConfig(keep_last=5), identity={}) as saver:
            if number == 0:
                saver.save(1, jax.device_put(host, job.shardings), data_state={})
                saver.wait()
            restored = saver.restore(job.abstract_state()).state
        jax.tree.map(np.testing.assert_array_equal, restored, host)


def with_experts(**changes):
    run = run_preset("tiny_moe")
    (block,) = run.model.blocks
    experts = dataclasses.replace(block.feed_forward, **changes)
    stack = dataclasses.replace(
        run.model.stacks[0], pattern=(dataclasses.replace(block, feed_forward=experts),)
    )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, stacks=(stack,)))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            dataclasses.replace(run_preset("tiny"), mesh=MeshConfig(fsdp=2, expert=2)),
            "expert=2, but this model has no experts",
        ),
        (
            dataclasses.replace(run_preset("tiny_moe"), mesh=MeshConfig(fsdp=16, expert=16)),
            "num_experts=8 does not divide over expert=16",
        ),
        (
            dataclasses.replace(
                run_preset("tiny_moe"),
                mesh=MeshConfig(fsdp=8, expert=8),
                exchange=ExchangeConfig(node_size=3),
            ),
            "expert=8 is no multiple of exchange.node_size=3",
        ),
        (
            dataclasses.replace(
                with_experts(balance=BalanceConfig(capacity_factor=1.5)),
                mesh=MeshConfig(context=2),
            ),
            "capacity_factor=1.5 with context=2",
        ),
    ],
)
def test_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        validate(run)


def test_a_ragged_exchange_is_refused_where_there_is_none():
    exchange = ExchangeConfig(implementation=ExchangeImplementation.RAGGED)
    config = Case(mesh=MeshConfig(fsdp=2, expert=2), exchange=exchange).config(CONFIG)
    with pytest.raises(UnsupportedError, match="the CPU backend has no ragged_all_to_all"):
        make_job(config, devices=jax.devices()[:2])


def test_adapters_of_experts_are_refused():
    definition = define_model(CONFIG, execution_on())
    with pytest.raises(ConfigError, match=r"lora target 'up': .* experts have no adapters"):
        add_adapters(definition.bind({}), LoraConfig(targets=("up",)), rngs=None)
    # Of those named instead, none is refused.
    with pytest.raises(ConfigError, match=r"have no adapters; it has key, out, query, value$"):
        add_adapters(definition.bind({}), LoraConfig(targets=("kv_up",)), rngs=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": RoutingConfig(num_groups=3)}, "num_experts=8 is not a multiple of num_groups"),
        ({"top_k": 5, "routing": RoutingConfig(num_groups=4, top_groups=2)}, "top_k=5 exceeds"),
        ({"top_k": 9}, "top_k=9 must be between 1 and num_experts=8"),
    ],
)
def test_experts_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        ExpertsConfig(**({"num_experts": 8, "top_k": 2, "hidden_dim": 4} | changes))
