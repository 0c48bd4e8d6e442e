"""Layers at both ends of a model that stay out of 8 bits: in the program, in what it computes, in
the records, in what else reads a layer's recipe.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.model import ModelConfig, stacked
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling, PolicyName, PrecisionConfig
from jaxinfra.config.run import Remat, TrainingConfig
from jaxinfra.diagnostics.bisect import StepPieces
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model, merged
from jaxinfra.model.repetition import in_eight_bits
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops.fp8 import QUANTIZED
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.describe import describe_job
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.job import make_job
from tests.dropped_casts import casts_dropped
from tests.sharded.cases import build, drawn, gemma_like, gradients_of, llama_like, packed_batch
from tests.unit.test_recompute import small_run

LAYERS = 3
NUM_PROJECTIONS = 7  # of a layer: query, key, value, out, gate, up, down
NUM_INPUTS = 4  # of these; three projections share one, and two
CASTS = NUM_INPUTS + 2 * NUM_PROJECTIONS  # with one scale: inputs, weights and cotangents
ALL_IN, ONE_IN = (0, 0), (1, 1)


def deep(*stacks: int) -> ModelConfig:
    """Layers of these stacks."""
    (only,) = llama_like().stacks
    each = (stacked(*only.pattern, num_layers=count) for count in stacks or (LAYERS,))
    return dataclasses.replace(llama_like(), stacks=tuple(stack for (stack,) in each))


def precision_of(out: tuple[int, int] | None) -> PrecisionConfig:
    """Layers that stay out at both ends; None: nothing is in 8 bits."""
    if out is None:
        return PrecisionConfig(policy=PolicyName.BF16)
    return PrecisionConfig(
        policy=PolicyName.BF16,
        fp8=Fp8Matmuls(scaling=Fp8Scaling.SQUARES, first_layers_out=out[0], last_layers_out=out[1]),
    )


def model_of(out: tuple[int, int] | None, config: ModelConfig | None = None, *, unroll=LAYERS):
    execution = execution_on(policy=policy_of(precision_of(out)), unroll=unroll)
    return define_model(config or deep(), execution)


def gradient_jaxpr(model):
    training = TrainingConfig(steps=1, batch_size=8, sequence_length=16)
    gradient, batch = AccumulatedGradient(model, training=training), packed_batch()

    def run(parameters, state):
        key, scale = jax.random.key(0), jnp.float32(1.0)
        return gradient(parameters, state, batch, key=key, loss_scale=scale)

    return jax.make_jaxpr(run)(model.shapes, model.state_shapes)


def equations(jaxpr):
    """All of a jaxpr, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda node: hasattr(node, "eqns") or hasattr(node, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def num_casts(jaxpr) -> int:
    """To 8 bits."""
    casts = [each for each in equations(jaxpr) if each.primitive.name == "convert_element_type"]
    return sum("float8" in str(each.params["new_dtype"]) for each in casts)


def forward_jaxpr(model):
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    tree = merged(model.shapes, model.state_shapes)
    return jax.make_jaxpr(lambda tree, ids: model.bind(tree).hidden(ids))(tree, ids).jaxpr


def layers_in(model) -> list[int]:
    """Casts to 8 bits in each layer of the forward pass."""
    return [
        num_casts(equation.params["jaxpr"].jaxpr)
        for equation in forward_jaxpr(model).eqns
        if equation.params.get("name") == "repetition"
    ]


def test_layers_at_the_ends_multiply_in_bf16_and_the_others_in_8_bits():
    model = model_of(ONE_IN)
    assert layers_in(model) == [
        0,
        NUM_INPUTS + NUM_PROJECTIONS,
        0,
    ]
    # One array of records for all layers: a run may go on with another number left out.
    assert str(model.state_shapes) == str(model_of(ALL_IN).state_shapes)


@pytest.mark.slow  # layers at the ends are held below
def test_with_all_layers_out_the_gradient_is_the_bf16_models():
    """The same program: so are loss and gradients, to the bit."""
    models = [model_of(out, deep(2), unroll=1) for out in ((1, 1), None)]
    ours, plain = (str(gradient_jaxpr(model)) for model in models)
    assert ours == plain
    assert not models[0].state_shapes


def test_a_stack_of_its_own_loops_and_has_no_records():
    model = model_of((1, 0), deep(1, 2), unroll=1)
    assert list(model.state_shapes["blocks"]) == [1]
    assert num_casts(forward_jaxpr(model)) == NUM_INPUTS + NUM_PROJECTIONS


def test_a_pattern_is_left_out_layer_by_layer():
    policy = policy_of(precision_of((1, 2)))
    assert gemma_like().num_layers == 4
    assert in_eight_bits(gemma_like(), policy, slice(0, 2)) == [(False, True), (False, False)]


def test_pieces_of_a_step_know_which_layer_they_are():
    model, batch = model_of(ONE_IN), packed_batch()
    tree = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), merged(model.shapes, model.state_shapes)
    )
    training = TrainingConfig(steps=1, batch_size=8, sequence_length=16)
    pieces = StepPieces(model, training).of(
        tree, batch, key=jax.random.key(0), scale=jnp.ones(()), layer_scale=jnp.ones(())
    )
    x = jnp.zeros((8, 16, model.config.model_dim), jnp.bfloat16)
    found = {
        piece.name: num_casts(jax.make_jaxpr(piece.function)(piece.arrays, x, *piece.others).jaxpr)
        for piece in pieces[1:-1]
    }
    assert found == {"layer 0": 0, "layer 1": NUM_INPUTS + NUM_PROJECTIONS, "layer 2": 0}


@pytest.mark.parametrize(
    ("out", "settings", "why"),
    [
        ((1, 0), {"unroll": 1}, r"set training\.unroll to 2, or give the layers .* own"),
        ((2, 1), {"unroll": 2}, "more than the model's 2 layers"),
        ((1, 0), {"unroll": 1, "mesh": "pipe=2"}, "one program; use fsdp"),
    ],
    ids=["loop", "too many", "pipe"],
)
def test_what_would_be_ignored_is_refused(out, settings, why):
    mesh = settings.pop("mesh", None)
    config = dataclasses.replace(small_run(**settings), precision=precision_of(out))
    if mesh:
        config = dataclasses.replace(config, mesh=parse_mesh(mesh))
    with pytest.raises(ConfigError, match=why):
        make_job(config, devices=jax.devices()[: config.mesh.num_devices])


@pytest.mark.parametrize("scaling", Fp8Scaling)
def test_no_cast_to_8_bits_can_be_dropped(scaling):
    """XLA for GPUs drops casts there and back, and then nothing would be in 8 bits."""
    precision = PrecisionConfig(policy=PolicyName.BF16, fp8=Fp8Matmuls(scaling=scaling))
    model = define_model(deep(), execution_on(policy=policy_of(precision), unroll=LAYERS))
    assert not casts_dropped(gradient_jaxpr(model).jaxpr, most_bytes=1)


def test_less_than_no_layers_are_refused():
    with pytest.raises(ConfigError, match="must be at least 0"):
        Fp8Matmuls(last_layers_out=-1)


@functools.cache
def learned(out: tuple[int, int] | None, *stacks: int):
    """Loss, gradients by layer, and state after a step."""
    step = build(deep(*stacks), precision=precision_of(out), unroll=LAYERS)
    parameters = drawn(deep())
    if len(stacks) > 1:
        ends = np.cumsum((0, *stacks))
        blocks = {
            i: jax.tree.map(lambda leaf, i=i: leaf[ends[i] : ends[i + 1]], parameters["blocks"][0])
            for i in range(len(stacks))
        }
        parameters = parameters | {"blocks": blocks}
    state = dataclasses.replace(step.state(), parameters=parameters)
    state, metrics = step.step(jax.device_put(state, step.shardings), packed_batch())
    of_layers = gradients_of(state)["blocks"]
    gradients = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *of_layers.values())
    return jax.device_get((metrics.loss, gradients, state.model_state))


@pytest.mark.slow  # the forward pass of the default test says which layers are in which format
def test_gradients_of_layers_left_out_are_in_bf16():
    assert num_casts(gradient_jaxpr(model_of(ONE_IN)).jaxpr) == CASTS


@pytest.mark.slow
def test_layers_left_out_compute_as_a_stack_without_8_bits():
    """Beside a model whose layers are stacks of their own, of which the ends know no 8 bits."""
    loss, gradients, state = learned(ONE_IN)
    apart = learned(ONE_IN, 1, 1, 1)
    np.testing.assert_allclose(loss, apart[0], rtol=1e-6)
    chex.assert_trees_all_close(gradients, apart[1], rtol=1e-4, atol=1e-6)
    assert list(apart[2]["blocks"]) == [1]
    for out in (ALL_IN, None):
        assert learned(out)[0] != loss
    record = state["blocks"][0]["mlp"]["down"]["quantization"]
    assert np.all(record[[0, 2]] == 0.0)
    np.testing.assert_allclose(record[1], apart[2]["blocks"][1]["mlp"]["down"]["quantization"][0])


@pytest.mark.slow  # compiles a step
def test_recomputation_is_priced_layer_by_layer():
    """What is kept of a layer in 8 bits has other names and bytes than of one in bf16."""
    config = dataclasses.replace(
        small_run(unroll=2, remat=Remat.OPTIMAL, memory_budget_gib=1.0),
        precision=precision_of((1, 0)),
    )
    job = make_job(config)
    assert "in all layers but the first 1" in describe_job(job)
    plain, eight = job.config.training.kept
    assert plain.layers == eight.layers == 1
    assert QUANTIZED in eight.names
    assert QUANTIZED not in plain.names
