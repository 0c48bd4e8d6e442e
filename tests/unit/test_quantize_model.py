"""``jaxinfra quantize``: what it writes is what it measured, in formats that are read back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxinfra.api.models import save
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.cli.main import main
from jaxinfra.config.model import (
    stacked,
)
from jaxinfra.config.own import OwnFeedForward
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError, DataError, UnsupportedError
from jaxinfra.hf import quantization_of, to_hf_config
from jaxinfra.model.definition import by_path, define_model, is_weight
from jaxinfra.ops.multiply import as_array
from jaxinfra.ops.quantized import WeightCode, WeightFormat
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize.equivalence import scaled_inputs
from jaxinfra.quantize.layers import CalibrationModel
from jaxinfra.quantize.prepare import awq_scales, clipped_ranges, output_error, smooth_scales
from jaxinfra.quantize.quantize import (
    SourceModel,
    calibration_ids,
    quantize_model,
    source_model,
)
from jaxinfra.quantize.recipes import RECIPES, Method, config_of, quantization_recipe
from jaxinfra.quantize.statistics import statistics_of
from jaxinfra.serving.load import load
from tests.golden_families import write_directory
from tests.small_models import dense

RNG = np.random.default_rng(0)
CONFIG = dense(vocab_size=48, heads=(4, 4), hidden_dim=64, tie_embeddings=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    definition = define_model(CONFIG, execution_on())
    values = jax.tree.map(
        lambda leaf: jnp.asarray(RNG.normal(0, 0.2, leaf.shape), leaf.dtype), definition.shapes
    )
    for block in values["blocks"].values():
        # Some inputs are larger than others, as those of trained models are.
        large = np.where(np.arange(CONFIG.model_dim) % 11 == 0, np.float32(8), np.float32(0.5))
        for norm in ("attention_norm", "mlp_norm"):
            block[norm]["scale"] = jnp.asarray(np.broadcast_to(large, block[norm]["scale"].shape))
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizers.Tokenizer(models.BPE()).save(str(directory / "tokenizer.json"))
    model = SourceModel(
        definition=definition,
        source=LiveParameters(arrays=by_path(values)),
        hf=to_hf_config(CONFIG),
        tokenizer_directory=directory,
    )
    return model, values


IDS = RNG.integers(0, CONFIG.vocab_size, (3, 24)).astype(np.int32)


def logits(definition, parameters):
    run = jax.jit(lambda parameters, ids: definition.bind(parameters)(ids))
    return np.asarray(run(parameters, IDS))


def slow_but(names, *fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(RECIPES, "rtn-int4"))
def test_what_is_written_is_read_back(source, tmp_path, name):
    """Logits of the directory, weights kept packed, are near the original's, and each layer's
    error is that of its format.
    """
    model, values = source
    recipe = quantization_recipe(name, group=32)
    layers = []
    report = quantize_model(model, tmp_path / "out", recipe, ids_BT=IDS, report=layers.append)
    bits = recipe.form.code.bits
    # Of random weights and inputs some of which are 16 times as large as others: elements are off
    # by half a step of 1/7 of the largest of 32, of 1/127 of all, or of 1/16 of themselves.
    worst = {"awq-int4": 0.2, "rtn-int4": 0.5}.get(name, 0.15 if "fp8" in name else 0.05)
    assert len(layers) == 2
    assert all(0 < layer.error < worst for layer in layers)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert quantization_of(written) is not None
    assert report.quantized_bytes < report.num_quantized * (bits + 2) / 8
    back = load_pretrained(tmp_path / "out", keep_packed=True)
    want = logits(model.definition, values)
    error = np.linalg.norm(logits(back.definition, back.parameters) - want) / np.linalg.norm(want)
    assert error < 2 * worst


def test_a_quantized_model_is_saved_dequantized(source, tmp_path):
    model, _ = source
    path, plain = tmp_path / "quantized", tmp_path / "plain"
    quantize_model(model, path, quantization_recipe("int8"), ids_BT=IDS)
    words = models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    packed = load(path)
    save(packed, plain)
    want = by_path(packed.parameters, is_leaf=is_weight)
    assert any(map(is_weight, want.values()))
    for name, got in by_path(load(plain).parameters).items():
        np.testing.assert_array_equal(got, as_array(want[name], got.dtype), err_msg=name)


def test_a_layer_is_on_the_device_at_a_time(source, tmp_path, monkeypatch):
    """At the last of six no more is there than at the first, on its way or done."""
    model, _ = source
    run, held = CalibrationModel.run, {}

    def counted(self, place, *arguments, **options):
        held[place.number] = sum(array.nbytes for array in jax.live_arrays())
        return run(self, place, *arguments, **options)

    monkeypatch.setattr(CalibrationModel, "run", counted)
    config = dataclasses.replace(CONFIG, stacks=stacked(CONFIG.blocks[0], num_layers=6))
    definition = define_model(config, execution_on())
    shapes = by_path(definition.arrays)
    deep = dataclasses.replace(
        model,
        definition=definition,
        source=LiveParameters(arrays={p: np.ones(x.shape, x.dtype) for p, x in shapes.items()}),
        hf=to_hf_config(config),
    )
    quantize_model(deep, tmp_path / "out", quantization_recipe("int8"), ids_BT=IDS)
    one = sum(4 * x.size for path, x in shapes.items() if path.startswith("blocks/")) // 6
    assert held.keys() == set(range(6))
    assert max(held.values()) < held[0] + one / 2


def test_scales_are_chosen_by_what_inputs_are():
    """AWQ's are no worse than none by its own measure, which is the outputs' error itself."""
    x = RNG.normal(size=(50, 32)) * np.where(np.arange(32) % 9 == 0, 20, 1)
    x, w = x.astype(np.float32), RNG.normal(size=(32, 8)).astype(np.float32)
    statistics = jax.jit(statistics_of, static_argnums=1)
    form = WeightFormat(code=WeightCode.INT4, group_rows=32)
    seen = statistics(x, 32)
    scales, best, plain = jax.device_get(awq_scales([w], [seen], seen.mean_K, form=form))
    assert best < 0.8 * plain
    assert scales[0] > 1.5 * scales[1]
    off = RNG.normal(size=(32, 8)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(output_error)(off, seen), np.sum(np.square(x @ off)), rtol=1e-5
    )
    # One weight far beyond the others of its group: cutting it off is worth it where little hears.
    w = np.abs(w)
    w[1, 0] = 12.0
    quiet = x.copy()
    quiet[:, 1] = 1e-3
    clip = np.asarray(clipped_ranges(w, statistics(quiet, 32), form=form))
    assert clip.shape == (1, 8)
    assert clip[0, 0] <= 0.6
    smooth = smooth_scales([w], seen.largest_K)
    want = np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))
    np.testing.assert_allclose(smooth, want, rtol=1e-5)


def test_what_cannot_be_quantized_is_named(source, tmp_path):
    model, _ = source
    with pytest.raises(ConfigError, match="unknown recipe 'awq'; did you mean 'awq-int4'"):
        quantization_recipe("awq")
    with pytest.raises(ConfigError, match="group size 48"):
        quantization_recipe("rtn-int4", group=48)
    recipe = quantization_recipe("awq-int4", group=32)
    with pytest.raises(ConfigError, match="give a text with --calibrate"):
        quantize_model(model, tmp_path / "a", recipe, ids_BT=None)
    beyond = np.array([[0, CONFIG.vocab_size]])
    with pytest.raises(DataError, match=r"ids 0\.\.48, the model's vocabulary is 0\.\.47"):
        quantize_model(model, tmp_path / "a", recipe, ids_BT=beyond)
    recipe = quantization_recipe("rtn-int4")
    with pytest.raises(ConfigError, match=r"32 inputs, which groups of 128 do not divide"):
        quantize_model(model, tmp_path / "b", recipe, ids_BT=None)
    block = dataclasses.replace(CONFIG.blocks[0], feed_forward=OwnFeedForward())
    with pytest.raises(UnsupportedError, match="with a layer OwnFeedForward"):
        scaled_inputs(block, Method.AWQ)


@pytest.mark.slow_cases("gemma3n")
@pytest.mark.parametrize("name", ["mamba", "gemma3n"])
def test_layers_without_one_half_or_of_several_inputs_are_quantized(tmp_path, name):
    """Each layer's weights are found, though it cannot run without those before it."""
    write_directory(name, tmp_path / "a")
    bytes_tokenizer().save(tmp_path / "a" / "tokenizer.json")
    with source_model(tmp_path / "a") as model:
        quantize_model(model, tmp_path / "b", quantization_recipe("fp8"), ids_BT=None)
        with pytest.raises(ConfigError, match=r"and 4 elements share 32 bits .* choose fp8"):
            quantize_model(model, tmp_path / "c", quantization_recipe("int8"), ids_BT=None)
        alone = {"gemma3n": r"with takes_keys, layer_input_dim, streams: .* without --calibrate"}
        said = alone.get(name, "with a layer SelectiveScanConfig")
        with pytest.raises(UnsupportedError, match=said):
            quantize_model(model, tmp_path / "c", quantization_recipe("w8a8"), ids_BT=IDS)
    before, after = (load_pretrained(tmp_path / each).parameters for each in "ab")
    before, after = by_path(before), by_path(after)
    rounded = {path for path, x in before.items() if not np.array_equal(x, after[path])}
    assert {path.split("/")[0] for path in rounded} == {"blocks"}
    for path in rounded:  # by half of the step of 3 bits at most, beside the smallest
        off = np.abs(np.asarray(before[path]) - np.asarray(after[path]))
        assert off.max() <= np.abs(before[path]).max() / 16


@pytest.mark.parametrize("name", RECIPES)
def test_configs_say_what_the_files_hold(name):
    recipe = quantization_recipe(name)
    read = quantization_of({"quantization_config": config_of(recipe, kept=["lm_head"])})
    assert read is not None
    group = getattr(read, "group", 0)
    assert group in (0, -1, recipe.form.group_rows)


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert main(["quantize", str(tmp_path), str(tmp_path / "out"), "--recipe", "w8a8"]) == 1
    assert "--recipe w8a8 needs a text: add --calibrate FILE" in capsys.readouterr().err


def test_rows_are_no_calibration_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="holds rows"):
        calibration_ids(tmp_path / "rows.jsonl", tmp_path, sequence_length=8, num_sequences=1)
