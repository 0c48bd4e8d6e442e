"""Lion and Adafactor against their formulas in NumPy; on a mesh they are one device's."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.optimizer import (
    LearningRateSchedule,
    MuonConfig,
    OptimizerConfig,
    OptimizerKind,
)
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import DimsLeaf, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.training.optim.optimizer import make_optimizer
from tests.sharded.cases import gpt_like

RATE, DECAY = 0.01, 0.1
CONFIG = OptimizerConfig(
    learning_rate=RATE,
    schedule=LearningRateSchedule.CONSTANT,
    weight_decay=DECAY,
    beta1=0.9,
    beta2=0.99,
    clip_norm=None,
)
DIMS = {"matrix": DimsLeaf(("embed", "mlp")), "scale": DimsLeaf(("embed",))}
SHAPES = {"matrix": (128, 256), "scale": (128,)}


def config(kind: OptimizerKind) -> OptimizerConfig:
    return dataclasses.replace(CONFIG, kind=kind)


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def third_update(kind: OptimizerKind) -> dict[str, np.ndarray]:
    optimizer = make_optimizer(config(kind), dims=DIMS, steps=10)
    parameters = drawn(0)
    state, updates, update = optimizer.init(parameters), None, jax.jit(optimizer.update)
    for step in range(3):
        updates, state = update(drawn(step + 1), state, parameters)
    return updates


def test_lion():
    moment = dict.fromkeys(SHAPES, 0.0)
    for step in range(3):
        gradient = drawn(step + 1)
        turned = {name: 0.9 * moment[name] + 0.1 * gradient[name] for name in SHAPES}
        moment = {name: 0.99 * moment[name] + 0.01 * gradient[name] for name in SHAPES}
    parameters, found = drawn(0), third_update(OptimizerKind.LION)
    decayed = {"matrix": DECAY * parameters["matrix"], "scale": 0.0}
    for name in SHAPES:
        clear = np.abs(turned[name]) > 1e-6  # of the rest rounding decides the sign
        expected = -RATE * (np.sign(turned[name]) + decayed[name])
        np.testing.assert_allclose(found[name][clear], expected[clear], rtol=1e-5)


def test_adafactor():
    rows, columns, whole = np.zeros(128), np.zeros(256), np.zeros(128)
    for step in range(3):
        gradient = {name: value.astype(np.float64) for name, value in drawn(step + 1).items()}
        decay = 1.0 - (step + 1.0) ** -0.8
        square = gradient["matrix"] ** 2 + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(axis=1)
        columns = decay * columns + (1 - decay) * square.mean(axis=0)
        whole = decay * whole + (1 - decay) * (gradient["scale"] ** 2 + 1e-30)
    moment = np.outer(rows, columns) / rows.mean()
    steps = {
        "matrix": gradient["matrix"] / np.sqrt(moment),
        "scale": gradient["scale"] / np.sqrt(whole),
    }
    steps = {k: v / max(1.0, float(np.sqrt(np.mean(v**2)))) for k, v in steps.items()}
    steps["matrix"] += DECAY * drawn(0)["matrix"]
    found = third_update(OptimizerKind.ADAFACTOR)
    for name in SHAPES:
        # A dozen roundings of means of up to 256 terms in fp32.
        np.testing.assert_allclose(found[name], -RATE * steps[name], rtol=1e-4, atol=1e-8)


STACKS = {
    "query": (DimsLeaf(("layers", "embed", "heads", "head")), (3, 130, 4, 40)),
    "out": (DimsLeaf(("layers", "heads", "head", "embed")), (3, 4, 40, 130)),
    "up": (DimsLeaf(("layers", "experts", "embed", "mlp")), (3, 2, 128, 130)),
    "narrow": (DimsLeaf(("layers", "embed", "mlp")), (200, 130, 8)),
    "scale": (DimsLeaf(("layers", "embed")), (200, 130)),
    "bias": (DimsLeaf(("layers", "heads", "head")), (3, 4, 40)),
}
KINDS = {
    "adamw": CONFIG,
    "lion": config(OptimizerKind.LION),
    "adafactor": config(OptimizerKind.ADAFACTOR),
    "muon": dataclasses.replace(CONFIG, muon=MuonConfig()),
}


@pytest.mark.quick_cases("up-muon", "query-adafactor", "narrow-lion", "bias-adamw")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_stepped_as_its_layers_are(kind, name):
    leaf, shape = STACKS[name]
    shape = (min(shape[0], 4), *shape[1:]) if kind == "muon" else shape
    stacked = sum(dim in ("layers", "experts") for dim in leaf.dims)
    inside = DimsLeaf(leaf.dims[stacked:])
    rng = np.random.default_rng(0)
    # Layers of very different gradients.
    sizes = 10.0 ** rng.uniform(-3, 3, (*shape[:stacked], *[1] * (len(shape) - stacked)))
    given = [(rng.normal(size=shape) * sizes).astype(np.float32) for _ in range(3)]

    def updates(dims, values):
        optimizer = make_optimizer(KINDS[kind], dims={"x": dims}, steps=10)
        state, update = optimizer.init({"x": values[0]}), jax.jit(optimizer.update)
        for gradient in values[1:]:
            found, state = update({"x": gradient}, state, {"x": values[0]})
        return np.asarray(found["x"])

    together = updates(leaf, given).reshape(-1, *shape[stacked:])
    apart = zip(*(each.reshape(-1, *shape[stacked:]) for each in given), strict=True)
    for number, values in enumerate(list(apart)[:5]):
        alone = updates(inside, list(values))
        np.testing.assert_allclose(together[number], alone, rtol=2e-5, atol=1e-7)


@pytest.mark.slow_cases("lion")
@pytest.mark.parametrize("kind", [OptimizerKind.LION, OptimizerKind.ADAFACTOR])
def test_on_a_mesh_updates_are_one_device_s(kind):
    model = define_model(gpt_like(), execution_on())
    optimizer = make_optimizer(config(kind), dims=model.dims, steps=10)
    placement = Placement(
        mesh=make_mesh(MeshConfig(fsdp=4, tensor=2)), rules=state_rules(ShardingConfig())
    )
    shares, states = placement.updates(model), placement.optimizer(optimizer, model)
    rng = np.random.default_rng(0)
    parameters, gradients = (
        jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.shapes)
        for _ in range(2)
    )
    state = optimizer.init(parameters)
    alone, _ = jax.jit(optimizer.update)(gradients, state, parameters)
    step = jax.jit(
        optimizer.update, in_shardings=(shares, states, shares), out_shardings=(shares, states)
    )
    spread, after = step(gradients, state, parameters)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_muon_is_beside_adamw_only():
    with pytest.raises(ConfigError, match=r"set optimizer\.muon=none"):
        dataclasses.replace(CONFIG, kind=OptimizerKind.LION, muon=MuonConfig())
