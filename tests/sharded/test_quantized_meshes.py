"""Weights and caches in few bits over devices: what one device computes, or a refusal."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfra.axes import EMBED, HEAD, LAYERS, MLP, Q_HEADS
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.ops.quantized import WeightCode, WeightFormat, round_weight
from jaxinfra.parallel.execution import execution_on, kernels_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import quantized_shardings
from jaxinfra.serving.load import serving_placement
from jaxinfra.serving.sampling import GREEDY
from tests.decoder_oracle import drawn
from tests.engine_models import CONFIG
from tests.generation import served
from tests.largest_float import largest_float

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "quantized"


def shapes(form, inputs, outputs, *, order=False):
    weight = jax.eval_shape(
        lambda w: round_weight(w, form, num_inputs=len(inputs), num_leading=1),
        jax.ShapeDtypeStruct((2, *inputs, *outputs), jnp.float32),
    )
    rows = jax.ShapeDtypeStruct((2, weight.matrix_shape[0]), jnp.int32)
    return dataclasses.replace(weight, order=rows) if order else weight


@pytest.fixture(scope="module")
def placement():
    return Placement(mesh=make_mesh(MeshConfig(tensor=4), devices=jax.local_devices()[:4]))


def test_parts_lie_as_their_weight(placement):
    int4 = WeightFormat(code=WeightCode.INT4, group_rows=16)
    into = shapes(int4, (32,), (8, 6))
    found = quantized_shardings(placement, into, (LAYERS, EMBED, Q_HEADS, HEAD), path="query")
    for part in found.parts.values():
        assert part.spec == PartitionSpec(None, None, "tensor")
    out = shapes(int4, (8, 16), (32,))
    found = quantized_shardings(placement, out, (LAYERS, Q_HEADS, HEAD, EMBED), path="out")
    for part in found.parts.values():
        assert part.spec == PartitionSpec(None, "tensor", None)
    whole = shapes(WeightFormat(code=WeightCode.INT8), (8, 16), (32,))
    found = quantized_shardings(placement, whole, (LAYERS, Q_HEADS, HEAD, EMBED), path="out")
    assert found.scales.spec == PartitionSpec(None, None, None)  # all rows share them


def test_groups_are_not_cut(placement):
    dims = (LAYERS, MLP, EMBED)
    form = WeightFormat(code=WeightCode.INT4, group_rows=16)
    with pytest.raises(ConfigError, match=r"mlp/down.*8 rows per device are no whole number of gr"):
        quantized_shardings(placement, shapes(form, (32,), (8,)), dims, path="mlp/down")
    blocks = WeightFormat(code=WeightCode.E4M3, group_rows=16, group_columns=16)
    with pytest.raises(ConfigError, match="24 columns per device"):
        quantized_shardings(
            placement, shapes(blocks, (16,), (96,)), (LAYERS, EMBED, MLP), path="mlp/up"
        )
    ordered = shapes(form, (128,), (8,), order=True)
    with pytest.raises(ConfigError, match=r"sorted by group \(act-order\)"):
        quantized_shardings(placement, ordered, dims, path="mlp/down")


def generated(definition, parameters):
    """Logits of whole sequences, and what is generated with a quantized cache."""
    execution = dataclasses.replace(definition.execution, cache_format=CacheFormat.INT8)
    decoder = define_model(definition.config, execution).bind(parameters)
    ids = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    tokens = served(decoder, prompts, max_new_tokens=6, sampling=GREEDY)
    return np.asarray(decoder(ids)), [(each.row, each.token) for each in tokens]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ct_int8", "ct_fp8"])
def test_a_mesh_computes_what_one_device_does(case):
    """Inputs are rounded by the largest element of all devices' parts of a token."""
    found = []
    for mesh in (MeshConfig(), MeshConfig(tensor=2)):
        place = serving_placement(read_model_directory(GOLDEN / case).config, mesh)
        model = load_pretrained(GOLDEN / case, placement=place, keep_packed=True)
        found.append(generated(model.definition, model.parameters))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-3)
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_groups_of_4_bits_over_devices():
    form = WeightFormat(code=WeightCode.INT4, group_rows=8)
    found = []
    for mesh in (MeshConfig(), MeshConfig(tensor=2)):
        place = serving_placement(CONFIG, mesh)
        definition = define_model(CONFIG, execution_on(place))
        parameters = jax.device_put(drawn(definition), place.parameters(definition))
        for info in definition.table():
            if info.path.startswith("blocks/") and info.matmul:
                _, number, layer, name, _ = info.path.split("/")
                node = parameters["blocks"][int(number)][layer][name]
                inputs = 2 if name == "out" else 1
                weight = round_weight(node["weight"], form, num_inputs=inputs, num_leading=1)
                shardings = quantized_shardings(place, weight, info.dims, path=info.path)
                node["weight"] = jax.tree.map(jax.device_put, weight, shardings)
        found.append(generated(definition, parameters))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-4)
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_a_checkpoint_whose_groups_would_be_cut_is_refused():
    place = serving_placement(read_model_directory(GOLDEN / "awq").config, MeshConfig(tensor=2))
    with pytest.raises(ConfigError, match="24 rows per device"):
        load_pretrained(GOLDEN / "awq", placement=place, keep_packed=True)


@pytest.mark.slow
def test_experts_are_dequantized_by_layer():
    """Routed experts, [layers, experts, inputs, outputs], compute what their numbers do."""
    model = load_pretrained(GOLDEN.parent / "hf" / "mixtral")
    form, plain = WeightFormat(code=WeightCode.INT8), model.parameters
    for block in plain["blocks"].values():
        for name in ("gate", "up", "down"):
            block["mlp"][name] = round_weight(block["mlp"][name], form, num_leading=2)
    got = model.definition.bind(plain)(jnp.arange(12, dtype=jnp.int32).reshape(2, 6))
    for block in plain["blocks"].values():
        for name in ("gate", "up", "down"):
            block["mlp"][name] = block["mlp"][name].dequantize(jnp.float32)
    want = model.definition.bind(plain)(jnp.arange(12, dtype=jnp.int32).reshape(2, 6))
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shares", "gathers"),
    [
        (MeshConfig(fsdp=2, tensor=2, expert=2), 4, False),
        # The shares alone, and the form that is kept where plain weights are gathered.
        pytest.param(MeshConfig(tensor=2), 2, False, marks=pytest.mark.slow),
        pytest.param(MeshConfig(fsdp=2, tensor=2), 4, True, marks=pytest.mark.slow),
    ],
    ids=["experts and tensor", "tensor", "width"],
)
def test_few_tokens_over_devices_meet_few_experts(mesh, shares, gathers):
    """To the bit what plain numbers give; no device makes all that it has of the experts."""
    config = ExpertsConfig(num_experts=16, top_k=2, hidden_dim=32)
    block = dataclasses.replace(CONFIG.blocks[0], feed_forward=config)
    place = serving_placement(
        dataclasses.replace(CONFIG, stacks=stacked(block, num_layers=1)), mesh
    )
    recipe = POLICIES[PolicyName.FP32].recipe(Site.EXPERTS)
    form = WeightFormat(code=WeightCode.INT4, group_rows=8)
    rng = np.random.default_rng(0)

    def few_bits():
        weight = jnp.asarray(rng.normal(size=(16, 32, 32)), jnp.float32)
        return round_weight(weight, form, num_leading=1, has_zeros=True)

    few = ExpertWeights(gate_EDF=few_bits(), up_EDF=few_bits(), down_EFD=few_bits())
    plain = few.changed(lambda weight: weight.dequantize(recipe.compute))
    x_BTD = jnp.asarray(rng.normal(size=(2, 1, 32)), jnp.float32)
    expert_BTK = jnp.asarray([[[3, 12]], [[12, 9]]], jnp.int32)
    weight_BTK = jnp.asarray(rng.uniform(size=(2, 1, 2)), jnp.float32)
    exchange = functools.partial(kernels_on(place).exchange, config=config, recipe=recipe)
    step = jax.jit(lambda experts: exchange(x_BTD, expert_BTK, weight_BTK, experts)[0])
    np.testing.assert_array_equal(step(few), step(plain))
    assert (largest_float(step, few) >= 16 * 32 * 32 // shares) == gathers
