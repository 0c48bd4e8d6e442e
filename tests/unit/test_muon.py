"""Muon against its definition in NumPy; which parameters it is for; what its state holds."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxinfra import axes
from jaxinfra.config.codec import override
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.optimizer import LearningRateSchedule, MuonConfig, OptimizerConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import DimsLeaf, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.place import path_name
from jaxinfra.training.optim.muon import is_hidden_matrix, matrix_sides
from jaxinfra.training.optim.optimizer import make_optimizer
from tests.sharded import oracle
from tests.sharded.cases import gemma_like, gpt_like, llama_like

CONFIG = OptimizerConfig(
    learning_rate=0.05,
    schedule=LearningRateSchedule.CONSTANT,
    muon=MuonConfig(momentum=0.8, rate=3.0),
)
STEPS = 4
# Name, dims, shape, and for a hidden matrix the shape of one layer's.
PARAMETERS = {
    "query": ((axes.LAYERS, axes.EMBED, axes.Q_HEADS, axes.HEAD), (2, 6, 2, 4), (6, 8)),
    "out": ((axes.LAYERS, axes.Q_HEADS, axes.HEAD, axes.EMBED), (2, 2, 4, 5), (8, 5)),
    "down": ((axes.LAYERS, axes.MLP, axes.EMBED), (3, 7, 4), (7, 4)),
    "alone": ((axes.EMBED, axes.MLP), (4, 6), (4, 6)),
    "table": ((axes.VOCAB, axes.EMBED), (9, 4), None),
    "bias": ((axes.LAYERS, axes.Q_HEADS, axes.HEAD), (2, 2, 4), None),
    "scale": ((axes.LAYERS, axes.EMBED), (2, 4), None),
}


def near_orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five quintic Newton-Schulz steps, as Jordan et al. 2024 publish them."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(config: OptimizerConfig, theta: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Of one matrix."""
    assert config.muon is not None
    beta, rate = config.muon.momentum, config.learning_rate * config.muon.rate
    momentum = np.zeros_like(theta)
    for t, gradient in enumerate(gradients, start=1):
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum / (1 - beta ** (t + 1)) + (1 - beta) * gradient / (1 - beta**t)
        update = 0.2 * np.sqrt(max(theta.shape)) * near_orthogonal(ahead)
        theta = theta - rate * (update + config.weight_decay * theta)
    return theta


def draws(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {name: rng.normal(size=shape) for name, (_, shape, _) in PARAMETERS.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_optimizer_is_muon(clip_norm):
    """In float64, where rounding cannot hide a fault.

    A Newton-Schulz step turns an error of 1 into at most 3.5 (the largest slope of its polynomial
    up to 1.1), five of them into 525, and each adds a rounding of sums over at most 8 terms.
    """
    config = dataclasses.replace(CONFIG, clip_norm=clip_norm)
    dims = {name: DimsLeaf(dims) for name, (dims, _, _) in PARAMETERS.items()}
    start, *gradients = draws(1 + STEPS)
    with jax.enable_x64(True):
        optimizer = make_optimizer(config, dims=dims, steps=STEPS)

        @jax.jit
        def apply(parameters, state, gradient):
            updates, state = optimizer.update(gradient, state, parameters)
            return optax.apply_updates(parameters, updates), state

        parameters, state = start, optimizer.init(start)
        for gradient in gradients:
            parameters, state = apply(parameters, state, gradient)
        parameters = jax.device_get(parameters)
    exact = [oracle.clipped(gradient, clip_norm)[0] for gradient in gradients]
    rates = [config.learning_rate] * STEPS
    bound = STEPS * 525 * 10 * 8 * float(np.finfo(np.float64).eps)
    for name, (_, shape, matrix) in PARAMETERS.items():
        mine = [gradient[name] for gradient in exact]
        if matrix is None:
            decay = name == "table"
            want = oracle.adamw(config, start[name], mine, rates, decay=decay)
        else:
            layers = start[name].reshape(-1, *matrix)
            by_layer = [gradient.reshape(-1, *matrix) for gradient in mine]
            want = np.stack(
                [muon(config, layers[i], [g[i] for g in by_layer]) for i in range(len(layers))]
            ).reshape(shape)
        assert parameters[name].dtype == np.float64
        np.testing.assert_allclose(parameters[name], want, rtol=0, atol=bound, err_msg=name)


def test_updates_have_the_size_of_adamw_s():
    """So that its learning rates carry over: at rate 1, root mean squares of 0.2."""
    dims = {name: DimsLeaf(dims) for name, (dims, _, _) in PARAMETERS.items()}
    config = dataclasses.replace(CONFIG, learning_rate=1.0, weight_decay=0.0, muon=MuonConfig())
    optimizer = make_optimizer(config, dims=dims, steps=STEPS)
    start, gradient = (jax.tree.map(np.float32, drawn) for drawn in draws(2))
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(start), start)
    for name, (_, _, matrix) in PARAMETERS.items():
        size = float(np.sqrt(np.mean(np.square(updates[name]))))
        if matrix is None:
            assert size == pytest.approx(1.0, rel=1e-4)  # Adam's first step is the sign
        else:
            # Singular values end between 0.68 and 1.13, and of a matrix that is not square the
            # longer side's share of them is what the scale makes up for.
            whole = 0.2 * np.sqrt(min(matrix) * max(matrix) / np.prod(matrix))
            assert 0.68 * whole <= size <= 1.13 * whole, name


@pytest.mark.parametrize("make", [llama_like, gpt_like, gemma_like])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0, targets=("query", "down"))])
def test_it_is_for_hidden_matrices(make, lora):
    model = define_model(make(), execution_on(), lora=lora)
    found, others = set(), set()
    for (path, leaf), named in zip(
        jax.tree_util.tree_leaves_with_path(model.shapes), jax.tree.leaves(model.dims), strict=True
    ):
        name = path_name(path)
        (found if is_hidden_matrix(named.dims) else others).add(name)
        if name in found:
            assert sorted(sum(matrix_sides(named.dims), ())) == list(range(1, len(leaf.shape)))
    assert all(name.endswith(("/weight", "/a", "/b")) for name in found)
    assert all(name.endswith(("/bias", "/scale", "/table")) for name in others)


def test_state_is_one_moment_of_a_matrix_and_two_of_the_rest():
    model = define_model(llama_like(), execution_on())
    optimizer = make_optimizer(CONFIG, dims=model.dims, steps=STEPS)
    moments: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        jax.eval_shape(optimizer.init, model.shapes)
    ):
        for name, shape in jax.tree_util.tree_leaves_with_path(model.shapes):
            if path_name(path).endswith("/" + path_name(name)):
                assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
                moments[path_name(name)] = moments.get(path_name(name), 0) + 1
    assert {name for name, count in moments.items() if count == 1} == {
        f"blocks/0/{name}/weight"
        for name in (
            *(f"attention/{part}" for part in ("query", "key", "value", "out")),
            *(f"mlp/{part}" for part in ("gate", "up", "down")),
        )
    }
    assert set(moments.values()) == {1, 2}
    assert len(moments) == len(jax.tree.leaves(model.shapes))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.muon.momentum=0.9", "no setting 'optimizer.muon.momentum'"),  # it is AdamW
        ('optimizer.muon={"momentum": 1}', r"momentum=1.0 must be in \[0, 1\)"),
        ('optimizer.muon={"rate": 0}', "rate=0.0 be positive"),
        ('optimizer.muon={"beta": 0.9}', r"extra fields found \(beta\)"),
    ],
)
def test_wrong_settings(setting, message):
    with pytest.raises(ConfigError, match=message):
        override(run_preset("small"), [setting])


def test_it_is_chosen_by_a_setting():
    assert run_preset("small").optimizer.muon is None
    chosen = override(run_preset("small"), ["optimizer.muon={}"])
    assert chosen.optimizer.muon == MuonConfig()
    assert override(chosen, ["optimizer.muon=none"]) == run_preset("small")
