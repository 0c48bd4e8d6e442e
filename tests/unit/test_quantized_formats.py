"""Quantized directories that other programs made: read bit for bit, kept packed or not."""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import quantization_of
from jaxinfra.model.definition import by_path
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import can_pack, serving_form, serving_parameters
from jaxinfra.ops.quantized import (
    Activations,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    as_kernels_read,
    concatenated_columns,
    packed_as_kernels_read,
    round_weight,
)
from jaxinfra.parallel.execution import execution_on
from pallas_kernels.common import device
from pallas_kernels.quantized_weight import Arrangement

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "quantized"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
ROUNDS_INPUTS = ("ct_int8", "ct_fp8")


def directory(case):
    return GOLDEN / case


def reader(path):
    config = json.loads((path / "config.json").read_text())
    return plain_tensors(open_tensor_files(path), quantization_of(config))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_reference_dequantizes(case):
    golden, read = np.load(directory(case) / "golden.npz"), reader(directory(case))
    sums = [name for name in golden if name.startswith("sums/")]
    assert len(sums) == 14
    for name in sums:
        weight = name.removeprefix("sums/")
        outputs, inputs = read.tensors[weight].shape
        whole = read.read(weight, (slice(0, outputs), slice(0, inputs)))
        digest = hashlib.sha256(np.ascontiguousarray(whole, np.float32).tobytes()).digest()
        assert digest == golden[name].tobytes(), name
        index = (slice(3, outputs - 2), slice(5, inputs - 6))
        np.testing.assert_array_equal(read.read(weight, index), whole[index])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_packed_stands_for_the_same(case):
    plain = by_path(load_pretrained(directory(case)).parameters)
    kept = quantized_by_path(load_pretrained(directory(case), keep_packed=True))
    assert len(kept) == 7
    for path, leaf in kept:
        assert leaf.format.group_columns == (16 if case == "fp8_blocks" else 1)
        assert (leaf.order is not None) == (case == "gptq_act")
        np.testing.assert_array_equal(leaf.dequantize(jnp.float32), plain[path], err_msg=path)


def quantized_by_path(model):
    found = jax.tree_util.tree_leaves_with_path(
        model.parameters, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in found
        if isinstance(leaf, QuantizedWeight)
    ]


def logits(case, **options):
    model = load_pretrained(directory(case), **options)
    ids = np.load(directory(case) / "golden.npz")["ids"]
    return np.asarray(model.definition.bind(model.parameters)(jnp.asarray(ids, jnp.int32)))


def test_logits_are_the_references():
    want = np.load(directory("awq") / "golden.npz")["logits32"]
    assert np.ptp(want) > 1
    np.testing.assert_allclose(logits("awq", keep_packed=True), want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_format_are_the_references(case):
    want = np.load(directory(case) / "golden.npz")["logits32"]
    np.testing.assert_allclose(logits(case), want, atol=1e-3)
    got = logits(case, keep_packed=True)
    if case in ROUNDS_INPUTS:
        # Each product's inputs are rounded to 8 bits besides.
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        # Four products of each of two layers, one after another: e4m3 has three bits behind the
        # first, so each is off by at most 2**-4.
        assert 1e-3 < error < np.sqrt(8) * 2.0**-4
    else:
        np.testing.assert_allclose(got, want, atol=1e-3)


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("awq", {"bits": 3}, "bits=3: weights of 4 bits"),
        ("awq", {"version": "gemv"}, "version='gemv'.*layouts gemm is read"),
        ("awq", {"group_size": 0}, "group_size=0"),
        ("awq", {"group_size": "16"}, "group_size='16' is no int"),
        ("gptq", {"bits": 2}, "bits=2: weights of 4 or 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq", {"dynamic": {"x": {}}}, "dynamic="),
        ("gptq", {"rotation": "hadamard"}, "unknown keys.*rotation"),
        ("fp8_blocks", {"activation_scheme": "static"}, "activation_scheme='static'"),
        ("fp8_blocks", {"weight_block_size": [16, -1]}, "weight_block_size=.16, -1."),
        ("ct_int8", {"format": "marlin-24"}, "format='marlin-24'"),
        ("ct_int8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("ct_int8", {"config_groups": {}}, "0 config_groups"),
        ("ct_int8", {"config_groups": {"group_0": 3}}, "no object with keys"),
    ],
)
def test_configs_that_are_not_read_are_named(case, changes, message):
    values = json.loads((directory(case) / "config.json").read_text())
    values["quantization_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        quantization_of(values)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qzeros", None, r"qzeros are missing"),
        ("scales", lambda x: x[:, :-1], r"scales has shape \[2, 31\]"),
        ("scales", lambda x: x.astype(np.int8), r"elements of type int8"),
        ("qweight", lambda x: x[0], r"q_proj.qweight has shape"),
        ("g_idx", lambda x: x + 7, "names groups 7 to 8 of 2"),
        ("g_idx", lambda x: x * 0, "groups of other sizes than group_size=16"),
        ("qzeros", lambda x: x | 15, "zero points stored as 15"),
    ],
)
def test_hostile_files_are_named(tmp_path, name, change, message):
    path = shutil.copytree(directory("gptq"), tmp_path / "copy")
    tensors = load_file(path / "model.safetensors")
    if change is None:
        del tensors[f"{Q_PROJ}.{name}"]
    else:
        tensors[f"{Q_PROJ}.{name}"] = np.ascontiguousarray(change(tensors[f"{Q_PROJ}.{name}"]))
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reader(path).read(f"{Q_PROJ}.weight", (slice(0, 32), slice(0, 32)))


def test_packed_shapes_must_agree(tmp_path):
    path = shutil.copytree(directory("ct_int4"), tmp_path / "copy")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{Q_PROJ}.weight_shape"] = np.array([32, 1 << 40], np.int64)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has room for"):
        dict(reader(path).tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["awq", "gptq_act", "fp8_blocks"])
def test_the_serving_form_multiplies_the_same_weights(case):
    """Queries, keys and values side by side, but where act-order gives each rows of its own."""
    model = load_pretrained(directory(case), keep_packed=True)
    definition = model.definition
    packed = can_pack(model.parameters, definition.config, definition.execution.place)
    assert packed == (case != "gptq_act")
    execution = execution_on(
        policy=definition.execution.policy, decode_form=DecodeForm(packed=packed)
    )
    form = serving_form(definition, execution)
    straight = form.bind(serving_parameters(form, model.parameters))
    ids = jnp.asarray(np.load(directory(case) / "golden.npz")["ids"], jnp.int32)
    np.testing.assert_allclose(straight(ids), logits(case, keep_packed=True), atol=1e-4)


def test_serving_arranges_for_devices_on_which_the_kernel_was_measured():
    eight, four, rounding, codes = (
        round_weight(jnp.ones((256, 128)), form)
        for form in (
            WeightFormat(code=WeightCode.INT8),
            WeightFormat(code=WeightCode.INT4, group_rows=128),
            WeightFormat(code=WeightCode.INT8, activations=Activations.INT8),
            WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3),
        )
    )
    assert as_kernels_read(eight) is eight
    with device.compiling_for(device.H200):
        assert as_kernels_read(eight).arrangement is Arrangement.FRAGMENTS
        assert as_kernels_read(four).arrangement is Arrangement.FRAGMENTS
        assert as_kernels_read(rounding).arrangement is Arrangement.FRAGMENTS
        assert as_kernels_read(codes).arrangement is Arrangement.TRANSPOSED
    with device.compiling_for(dataclasses.replace(device.H200, kind="NVIDIA H100 80GB HBM3")):
        assert as_kernels_read(four) is four


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("code", [WeightCode.INT4, WeightCode.E4M3])
def test_packing_layer_by_layer_is_packing_whole_stacks(code, leading):
    form = WeightFormat(code=code, group_rows=128)
    if code is WeightCode.E4M3:
        form = WeightFormat(code=code, activations=Activations.E4M3)
    rng = np.random.default_rng(0)
    weights = [
        round_weight(
            jnp.asarray(rng.normal(size=(*leading, 256, columns)), jnp.float32),
            form,
            num_leading=len(leading),
        )
        for columns in (128, 384)
    ]
    joined = concatenated_columns(weights, axis=-1)
    with device.compiling_for(device.H200):
        found, expected = packed_as_kernels_read(weights, axis=-1), as_kernels_read(joined)
        assert expected.arrangement is not Arrangement.ROWS
        assert as_kernels_read(found) is found
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    jax.tree.map(np.testing.assert_array_equal, packed_as_kernels_read(weights, axis=-1), joined)
