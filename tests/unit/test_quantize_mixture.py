"""Scaled inputs of latent attention and of experts: the same model, rounded better."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.hf import from_hf_config, to_hf_config
from jaxinfra.model.definition import by_path, define_model, nest
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.ops.activation import activated
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize import equivalence, prepare
from jaxinfra.quantize.layers import CalibrationModel, positions_of_layers, read_layer
from jaxinfra.quantize.prepare import clipped_ranges, output_error
from jaxinfra.quantize.quantize import SourceModel, quantize_model
from jaxinfra.quantize.recipes import Method, quantization_recipe
from jaxinfra.quantize.statistics import RoutedTokens, statistics_of

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 61, (3, 24)).astype(np.int32)
SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
LATENT = SIZES | {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
}
SHARED = SIZES | {"shared_expert_intermediate_size": 32, "head_dim": 8}


def model_of(family, sizes):
    """A model of random weights whose norms make some channels much larger than others."""
    file = GOLDEN / family / "config.json"
    config = from_hf_config(json.loads(file.read_text()) | sizes)
    definition = define_model(config, execution_on())
    values, rng = {}, np.random.default_rng(0)  # the same whichever tests came before
    for path, leaf in by_path(definition.arrays).items():
        values[path] = rng.normal(0, 0.2, leaf.shape).astype(leaf.dtype)
        if path.endswith("norm/scale"):
            large = np.where(np.arange(leaf.shape[-1]) % 11 == 0, 8.0, 0.5)
            values[path] = np.broadcast_to(large, leaf.shape).astype(leaf.dtype)
    return definition, values


def scaled(definition, values, recipe):
    """The model with scaled inputs, not rounded."""
    source = LiveParameters(arrays=values)
    running = CalibrationModel(definition.config, source, POLICIES[PolicyName.FP32])
    changed = {path: value for path, value in values.items() if not path.startswith("blocks/")}
    for place in positions_of_layers(definition.config):
        layer = {path: jnp.asarray(x) for path, x in read_layer(source, definition, place).items()}
        dims = running.matrices(place)
        kept = {path for path in dims if path.split("/")[1] in ("router", "shared_scale")}
        block = definition.config.blocks[place.block]
        layer, _ = prepare.with_scaled_inputs(
            layer, {}, block, recipe, dims, quantized=frozenset(dims.keys() - kept)
        )
        changed |= {(place.path(path), place.at): x for path, x in layer.items()}
    stacks = {key[0] for key in changed if isinstance(key, tuple)}
    for path in stacks:
        layers = sorted(key for key in changed if isinstance(key, tuple) and key[0] == path)
        changed[path] = jnp.stack([changed.pop(key) for key in layers])
    return changed


def logits(definition, values):
    keys = {
        tuple(int(k) if k.isdigit() else k for k in path.split("/")): jnp.asarray(x)
        for path, x in values.items()
    }
    return definition.bind(nest(keys))(jnp.asarray(IDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "kept"),
    [
        ("deepseek_v3", LATENT, "router"),
        # A learned scale of shared experts, and grouped attention: what is kept is told alike.
        pytest.param("qwen2_moe", SHARED, "shared_scale", marks=pytest.mark.slow),
    ],
)
def test_scaling_changes_no_bit_where_scales_are_powers_of_two(monkeypatch, family, sizes, kept):
    """Scaling rounds nothing then, so each product and sum is the same number."""
    found = []

    def powers(group, rounded, parameters, seen, recipe, dims):
        shape = dims[rounded[0]].matrix(parameters[rounded[0]]).shape
        found.append(group.norm or group.columns)
        shape = shape[:-1] if group.by_expert else shape[-2:-1]
        return jnp.asarray(2.0 ** RNG.integers(-3, 4, shape), jnp.float32)

    monkeypatch.setattr(prepare, "_scales", powers)
    definition, values = model_of(family, sizes)
    recipe = quantization_recipe("awq-int4", group=32)
    want = logits(definition, values)
    changed = scaled(definition, values, recipe)
    np.testing.assert_array_equal(logits(definition, changed), want)
    assert {"mlp_norm", "mlp/up", "mlp/shared_up/weight"} <= set(found)
    if family == "deepseek_v3":
        assert {"attention/kv_norm", "attention/query_norm", "attention/kv_up/weight"} <= set(found)
    # A weight that is kept, and forgotten, computes something else.
    path = next(path for path in values if path.endswith(f"mlp/{kept}/weight"))
    wrong = logits(definition, changed | {path: values[path]})
    assert not np.array_equal(wrong, want)


def test_experts_are_judged_by_their_own_tokens():
    """Sums over routed tokens, expert by expert, against loops over them; one has none."""
    config = ExpertsConfig(num_experts=3, top_k=1, hidden_dim=8, kind=MlpKind.SWIGLU)
    x = RNG.normal(size=(10, 4)).astype(np.float32)
    chosen = np.array([[0], [2], [0], [0], [2], [2], [0], [3], [0], [2]], np.int32)  # 3 is none
    gate, up = (RNG.normal(size=(3, 4, 8)).astype(np.float32) for _ in range(2))
    weights = ExpertWeights(
        gate_EDF=jnp.asarray(gate),
        up_EDF=jnp.asarray(up),
        down_EFD=jnp.zeros((3, 8, 4), jnp.float32),
    )
    routed = RoutedTokens(
        x_MD=jnp.asarray(x), expert_MC=jnp.asarray(chosen), weights=weights, config=config
    )
    inward, outward = routed.statistics(block=4)
    for e in range(3):
        mine = x[chosen[:, 0] == e]
        hidden = np.asarray(activated(config.kind, mine @ up[e], mine @ gate[e]))
        for seen, inputs in ((inward, mine), (outward, hidden)):
            assert seen.count[e] == len(mine)
            np.testing.assert_allclose(seen.magnitude_K[e], np.abs(inputs).sum(0), rtol=1e-5)
            blocks = inputs.reshape(len(mine), inputs.shape[1] // 4, 4)
            want = np.einsum("mgr,mgs->grs", blocks, blocks)
            np.testing.assert_allclose(seen.products_GRR[e], want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # Of a rearrangement alone, without which nothing of AWQ's is right.
def test_groups_are_the_same_in_one_block_or_several():
    whole = statistics_of(jnp.asarray(RNG.normal(size=(9, 64)), jnp.float32), 64)
    w = jnp.asarray(RNG.normal(size=(64, 3)), jnp.float32)
    form = quantization_recipe("awq-int4", group=32).form
    squares = whole.products_GRR[0].reshape(2, 32, 2, 32)
    parts = jnp.stack([squares[0, :, 0], squares[1, :, 1]])
    blocks = dataclasses.replace(whole, products_GRR=parts)
    np.testing.assert_array_equal(
        clipped_ranges(w, whole, form=form), clipped_ranges(w, blocks, form=form)
    )
    first = w.at[32:].set(0.0)
    np.testing.assert_allclose(output_error(first, whole), output_error(first, blocks), rtol=1e-5)


@pytest.mark.slow  # Whole models; scales and statistics are held to their own above.
@pytest.mark.parametrize(("family", "sizes"), [("deepseek_v3", LATENT), ("qwen2_moe", SHARED)])
@pytest.mark.parametrize("name", ["awq-int4", "w8a8"])
def test_scaled_inputs_lose_less_than_rounding(tmp_path, family, sizes, name):
    definition, values = model_of(family, sizes)
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    model = SourceModel(
        definition=definition,
        source=LiveParameters(arrays=values),
        hf=to_hf_config(definition.config),
        tokenizer_directory=tmp_path,
    )
    recipe = quantization_recipe(name, group=32)
    plain = dataclasses.replace(recipe, method=Method.PLAIN)
    if name == "awq-int4":
        plain = quantization_recipe("rtn-int4", group=32)
    errors = {}
    for which, each in (("scaled", recipe), ("plain", plain)):
        report = quantize_model(model, tmp_path / which, each, ids_BT=IDS)
        errors[which] = [layer.error for layer in report.layers]
    assert all(s < 0.8 * p for s, p in zip(errors["scaled"], errors["plain"], strict=True)), errors


def test_clamped_hidden_layers_are_not_divided():
    block = model_of("gpt_oss", {})[0].config.blocks[0]
    found = equivalence.scaled_inputs(block, Method.AWQ)
    assert [group.norm for group in found] == ["attention_norm", "mlp_norm"]
