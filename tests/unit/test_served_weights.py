"""Weights in few bits as planning prices them: what loading keeps, and what a decode step reads."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf import from_hf_config, to_hf_config
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.ops.quantized import H200 as TARGET
from jaxinfra.ops.quantized import QuantizedWeight, compiling_for
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import (
    Serving,
    by_weights,
    decode,
    served_arrays,
    stored_format,
    weight_bytes,
)
from jaxinfra.planning.model import find_model, plan_model
from jaxinfra.quantize.held import quantized_shapes
from jaxinfra.quantize.quantize import SourceModel, quantize_model
from jaxinfra.quantize.recipes import RECIPES, config_of, quantization_recipe
from jaxinfra.serving.load import serving_placement

GROUPED = GroupedAttentionConfig(num_q_heads=2, num_kv_heads=1, head_dim=64, rope=RopeConfig())
DENSE = BlockConfig(mixer=GROUPED, feed_forward=MlpConfig(hidden_dim=256))
SIZES = {"vocab_size": 48, "model_dim": 128, "max_positions": 64, "tie_embeddings": False}
MODELS = {"dense": ModelConfig(**SIZES, stacks=stacked(DENSE, num_layers=2))}
GOLDEN = Path(__file__).parents[1] / "golden"
H200, H100 = find_device("h200"), find_device("h100")


def small_mixture() -> ModelConfig:
    """Latent attention; a dense layer and one of experts, as DeepSeek-V3 has them."""
    values = json.loads((GOLDEN / "hf" / "deepseek_v3" / "config.json").read_text()) | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "n_routed_experts": 4,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 128,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "topk_group": 1,
        "v_head_dim": 64,
    }
    return from_hf_config(values)


MODELS["mixture"] = small_mixture()


def written(config, recipe, directory):
    """A directory of random weights, in bf16 but for those in few bits."""
    definition = define_model(
        config, execution_on(policy=stored_as_computed(POLICIES[PolicyName.BF16]))
    )
    rng = np.random.default_rng(0)
    values = {
        path: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype)
        for path, leaf in by_path(definition.arrays).items()
    }
    tokenizers.Tokenizer(models.BPE()).save(str(directory / "tokenizer.json"))
    model = SourceModel(
        definition=definition,
        source=LiveParameters(arrays=values),
        hf=to_hf_config(config),
        tokenizer_directory=directory,
    )
    ids_BT = np.arange(32, dtype=np.int32).reshape(2, 16) if recipe.needs_text else None
    quantize_model(model, directory / "out", recipe, ids_BT=ids_BT)
    return directory / "out"


@pytest.mark.slow
def test_devices_read_their_own_experts(tmp_path):
    """Packed experts over two devices are those of the files, not the first ones twice."""
    config = dataclasses.replace(MODELS["mixture"], vocab_size=64)
    directory = written(config, quantization_recipe("int8"), tmp_path)
    alone = load_pretrained(directory, keep_packed=True).parameters
    mesh = serving_placement(config, MeshConfig(fsdp=2, expert=2))
    spread = load_pretrained(directory, placement=mesh, keep_packed=True).parameters
    packed = spread["blocks"][1]["mlp"]["up"]
    assert isinstance(packed, QuantizedWeight)
    num_experts = packed.data.shape[1]
    assert {part.data.shape[1] for part in packed.data.addressable_shards} == {num_experts // 2}
    jax.tree.map(np.testing.assert_array_equal, spread, alone)


def require_alike(told, held):
    assert jax.tree.structure(told) == jax.tree.structure(held)
    for (path, shape), array in zip(
        jax.tree_util.tree_leaves_with_path(told), jax.tree.leaves(held), strict=True
    ):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype), path


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ("awq", "awq-int4"),
        ("ct_fp8", "w8a8-fp8"),
        ("fp8_blocks", "fp8-blocks"),
    ],
)
def test_shapes_are_those_of_what_other_programs_wrote(files, name):
    """As loaded; their groups and blocks are smaller than ours."""
    directory = GOLDEN / "quantized" / files
    recipe = quantization_recipe(name)
    size = {"awq": {"group_rows": 16}, "fp8_blocks": {"group_rows": 16, "group_columns": 16}}
    form = dataclasses.replace(recipe.form, **size.get(files, {}))
    recipe = dataclasses.replace(recipe, form=form)
    config = from_hf_config(json.loads((directory / "config.json").read_text()))
    held = load_pretrained(directory, keep_packed=True).parameters
    require_alike(quantized_shapes(config, recipe, policy=PolicyName.FP32), held)


@pytest.mark.slow  # Programs for each size; the test above holds shapes to files likewise.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_of_the_arrays_that_are_loaded(tmp_path, model, name):
    recipe = quantization_recipe(name)
    held = load_pretrained(written(MODELS[model], recipe, tmp_path), keep_packed=True).parameters
    require_alike(quantized_shapes(MODELS[model], recipe), held)
    planned = plan_model(MODELS[model])
    serving = Serving(devices=2, weights=name)  # several devices keep the files' order of codes
    loaded = sum(array.nbytes for array in jax.tree.leaves(held))
    assert weight_bytes(planned, H200, serving) == loaded


@pytest.mark.parametrize("name", ["bf16", "rtn-int4", "fp8-blocks"])
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_on_a_gpu_keeps_what_is_predicted(model, name):
    """Packed, layer by layer, codes in the order of the kernel where it takes them."""
    config = MODELS[model]
    recipe = None if name == "bf16" else quantization_recipe(name)
    loaded = quantized_shapes(config, recipe)
    policy = stored_as_computed(POLICIES[PolicyName.BF16])
    with compiling_for(TARGET):
        form = serving_form(
            define_model(config, execution_on(policy=policy)),
            execution_on(policy=policy, decode_form=DecodeForm(packed=True)),
        )
        held = jax.eval_shape(lambda tree: serving_parameters(form, tree), loaded)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    assert weight_bytes(plan_model(config), H200, Serving(weights=name)) == size


def test_what_a_decode_step_reads():
    """Of Llama-3-8B with int4 in groups of 128, and of a small mixture, counted by hand."""
    eight = find_model("llama3_8b")
    table, norms = 128_256 * 4096, 65 * 4096
    layers = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    codes = layers // 2 + layers // 128 * 2
    serving = Serving(weights="rtn-int4")
    assert weight_bytes(eight, H200, serving) == codes + 2 * (2 * table + norms)
    arrays = serving.arrays(eight, H200)
    rest = 2 * (table + norms)  # of the input table a token reads a row
    assert sum(each.traffic(3) for each in arrays) == codes + rest + 3 * 2 * 4096
    # Prompts, other GPUs and several of them dequantize: 16 bits are written, and read.
    many = sum(each.traffic(4096) for each in arrays)
    assert many == codes + 4 * layers + rest + 4096 * 2 * 4096
    for device, devices in ((H100, 1), (H200, 2)):
        other = dataclasses.replace(serving, devices=devices).arrays(eight, device)
        assert sum(each.traffic(1) for each in other) == codes + 4 * layers + rest + 2 * 4096
    # One H200 multiplies FP8 by FP8, for any number of rows. Over two GPUs XLA multiplies int8's
    # codes as they are, transposed for more than one row.
    elements = 32 * 14336 * 4096
    kept = elements + 4 * 32 * 4096
    for weights, devices, rows, want in (
        ("w8a8-fp8", 1, 64, kept),
        ("w8a8-fp8", 1, 65, kept),
        ("w8a8-fp8", 2, 1, kept + 4 * elements),
        ("w8a8", 1, 64, kept),
        ("w8a8", 2, 1, kept),
        ("w8a8", 2, 2, 3 * kept),
    ):
        arrays = Serving(weights=weights, devices=devices).arrays(eight, H200)
        (down,) = [each for each in arrays if each.stored.shape == (32, 14336, 4096)]
        assert down.traffic(rows) == want, (weights, devices, rows)

    mixture = plan_model(MODELS["mixture"])
    experts = 3 * 4 * 128 * 128
    routed = [e for e in served_arrays(mixture, "bf16", 128, None) if e.is_expert]
    assert sum(each.traffic(1) for each in routed) == experts  # half of them, in 16 bits
    assert sum(each.traffic(2) for each in routed) == 1.5 * experts
    routed = [e for e in served_arrays(mixture, "int8", 128, None) if e.is_expert]
    scales = 3 * 4 * 128 * 2
    # A token meets half of them: codes and scales of those, 16 bits written, and read. The choices
    # of two are as many as experts: all are dequantized, and those that were met are read.
    assert sum(each.traffic(1) for each in routed) == (experts + scales) / 2 + 2 * experts
    assert sum(each.traffic(2) for each in routed) == experts + scales + (2 + 1.5) * experts


@pytest.mark.slow  # The table that test_plan_prints_tables makes, looked at.
def test_formats_are_compared():
    wide = dataclasses.replace(DENSE, feed_forward=MlpConfig(hidden_dim=1032))
    model = plan_model(ModelConfig(**SIZES, stacks=stacked(wide, num_layers=8)))
    found = by_weights(model, H200, Serving(), context=64, batch=1)
    rows = {row["weights"]: row for row in found}
    assert rows["bf16"]["over_bf16"] == 1
    assert rows["fp8"]["over_bf16"] < 1  # of sizes that no kernel was measured for
    step = decode(model, H200, Serving(weights="fp8"), batch=1, context=64)
    assert rows["fp8"]["decode_s"] == step.seconds
    assert "1032 inputs, which groups of 128" in rows["rtn-int4"]["unsupported"]


def test_a_directory_is_priced_as_its_files_are(tmp_path):
    values = to_hf_config(MODELS["dense"])
    assert stored_format("llama3_8b") == ("bf16", 128)
    recipe = quantization_recipe("rtn-int4", group=64)
    values["quantization_config"] = config_of(recipe, kept=["lm_head"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    assert stored_format(str(tmp_path)) == ("rtn-int4", 64)
    values["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="name the nearest with --weights"):
        stored_format(str(file))
    with pytest.raises(ConfigError, match="unknown weight format 'fp4'"):
        Serving(weights="fp4")
    with pytest.raises(ConfigError, match="group size 48"):
        Serving(group=48)
