"""Quantized checkpoints are read as the numbers that they stand for, whole and by slices."""

import json
import logging
import pathlib
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory, write_hf
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf.quantization import Mxfp4, ScaledFp8
from jaxinfra.model.definition import by_path
from tests.raw_tensors import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
BLOCK = (6, 8)  # divides no matrix here


def in_fp8(x):
    """Elements and scales of blocks, and what they stand for, an element at a time."""
    grid = tuple(-(-n // m) for n, m in zip(x.shape, BLOCK, strict=True))
    scales = np.zeros(grid, np.float32)
    elements = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    value = np.zeros(x.shape, np.float32)
    for i, j in np.ndindex(grid):
        rows = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
        scales[i, j] = np.abs(x[rows]).max() / 448
        elements[rows] = (x[rows] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
        value[rows] = elements[rows].astype(np.float32) * scales[i, j]
    return elements, scales, value


@pytest.fixture
def fp8(tmp_path):
    """DeepSeek-V3 in FP8 with a second module that predicts tokens, and the same model plainly."""
    quantized = shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "fp8")
    plain = shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "plain")
    tensors = load_file(quantized / "model.safetensors")
    stored, values = {}, dict(tensors)
    for name, x in tensors.items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], values[name] = in_fp8(x)
        else:
            stored[name] = x
    stored["model.layers.4.eh_proj.weight"] = np.ones((4, 8), np.float32)
    save(quantized, stored)
    save(plain, values)
    edit(
        quantized,
        num_nextn_predict_layers=2,
        quantization_config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
        },
    )
    return quantized, plain


def edit(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_fp8_weights_are_what_they_stand_for(fp8, tmp_path, caplog):
    quantized, plain = map(load_pretrained, fp8)
    assert "left out is multi-token prediction" in caplog.text
    assert "layers 4" in caplog.text
    want = by_path(plain.parameters)
    for path, value in by_path(quantized.parameters).items():
        np.testing.assert_array_equal(value, want[path], err_msg=path)
    # Written again, they are plain, and say so.
    directory = read_model_directory(fp8[0])
    write_hf(
        directory.open(quantized.definition),
        quantized.definition,
        tmp_path / "written",
        hf=directory.hf,
        tokenizer_directory=fp8[0],
        dtype=None,
        max_shard_bytes=10**9,
    )
    for name, value in load_file(tmp_path / "written" / "model.safetensors").items():
        np.testing.assert_array_equal(value, load_file(fp8[1] / "model.safetensors")[name])
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["num_nextn_predict_layers"] == 0


def test_any_slice_has_its_own_scales(fp8):
    reader = plain_tensors(open_tensor_files(fp8[0]), ScaledFp8(block=BLOCK))
    name = "model.layers.1.self_attn.q_b_proj.weight"
    rows, columns = reader.tensors[name].shape
    whole = reader.read(name, (slice(0, rows), slice(0, columns)))
    for start, stop in ((0, 1), (5, 13), (6, 12), (11, rows)):
        index = (slice(start, stop), slice(3, columns - 1))
        np.testing.assert_array_equal(reader.read(name, index), whole[index])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("scales", CheckpointError, "q_b_proj.weight_scale_inv are missing"),
        ("block", CheckpointError, "the config's block size"),
        ("config", ConfigError, "float8_e4m3fn, which the config's quantization_config does not"),
        ("method", ConfigError, "quant_method='quip'"),
    ],
)
def test_what_cannot_be_read_is_named(fp8, damage, error, message):
    path = fp8[0]
    if damage == "scales":
        values = {name: raw(path, name) for name in open_tensor_files(path).tensors}
        del values["model.layers.1.self_attn.q_b_proj.weight_scale_inv"]
        save(path, values)
    elif damage == "config":
        edit(path, quantization_config=None)
    elif damage == "method":
        edit(path, quantization_config={"quant_method": "quip"})
    else:
        edit(path, quantization_config={"quant_method": "fp8", "weight_block_size": [4, 4]})
    with pytest.raises(error, match=message):
        load_pretrained(path)


def raw(path, name):
    files = open_tensor_files(path)
    return files.read(name, tuple(slice(0, n) for n in files.tensors[name].shape))


def test_layers_beyond_the_last_are_refused_elsewhere(tmp_path):
    """Only where multi-token prediction is known to be what they are."""
    copy = shutil.copytree(GOLDEN / "mixtral", tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(16, np.float32)
    save(copy, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.2\.input_layernorm"):
        load_pretrained(copy)


NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of three bits: OCP MX, table 4


def stands_for(blocks, scales):
    """MXFP4 an element at a time: [experts, inputs, outputs]."""
    experts, outputs, groups, _ = blocks.shape
    result = np.zeros((experts, groups * 32, outputs), np.float64)
    for e, f, g, i in np.ndindex(experts, outputs, groups, 32):
        byte = int(blocks[e, f, g, i // 2])
        bits = byte >> 4 if i % 2 else byte & 15
        sign = -1.0 if bits & 8 else 1.0
        number = sign * NUMBERS[bits & 7] * 2.0 ** (int(scales[e, f, g]) - 127)
        result[e, 32 * g + i, f] = number
    return result


def test_mxfp4_weights_are_what_they_stand_for(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    path = shutil.copytree(GOLDEN / "gpt_oss", tmp_path / "mxfp4")
    edit(path, hidden_size=32, intermediate_size=64, quantization_config={"quant_method": "mxfp4"})
    rng = np.random.default_rng(0)
    stored, experts = {}, {}
    experts_of = {"gate_up_proj": (4, 128, 1, 16), "down_proj": (4, 32, 2, 16)}
    for name, x in load_file(path / "model.safetensors").items():
        last = name.rpartition(".")[2]
        if last in experts_of:
            blocks = rng.integers(0, 256, experts_of[last], np.uint8)
            scales = rng.integers(110, 130, experts_of[last][:3], np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            experts[name] = stands_for(blocks, scales)
        else:
            shape = [{16: 32, 20: 64, 40: 128}.get(n, n) for n in x.shape]
            stored[name] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
    save(path, stored)
    got = by_path(load_pretrained(path).parameters)
    for block in range(2):
        fused = experts[f"model.layers.{block}.mlp.experts.gate_up_proj"]
        prefix = f"blocks/{block}/mlp"
        for name, want in (
            ("gate", fused[..., 0::2]),
            ("up", fused[..., 1::2]),
            ("down", experts[f"model.layers.{block}.mlp.experts.down_proj"]),
        ):
            value = got[f"{prefix}/{name}"]
            assert value.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(value[0], np.float64), want, err_msg=name)


def test_any_slice_of_mxfp4_has_its_own_exponents(tmp_path):
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(110, 130, (2, 6, 3), np.uint8)
    save(tmp_path, {"w_blocks": blocks, "w_scales": scales})
    reader = plain_tensors(open_tensor_files(tmp_path), Mxfp4())
    assert dict(reader.tensors).keys() == {"w"}
    want = stands_for(blocks, scales)
    for inputs in (slice(0, 96), slice(31, 33), slice(40, 41), slice(64, 96)):
        index = (slice(1, 2), inputs, slice(2, 5))
        np.testing.assert_array_equal(reader.read("w", index).astype(np.float64), want[index])


@pytest.mark.parametrize("shape", [(2, 6, 3), (2, 6, 3, 8)])
def test_mxfp4_blocks_of_another_shape_are_named(tmp_path, shape):
    save(tmp_path, {"w_blocks": np.zeros(shape, np.uint8), "w_scales": np.zeros(shape, np.uint8)})
    with pytest.raises(CheckpointError, match="w_blocks is uint8"):
        plain_tensors(open_tensor_files(tmp_path), Mxfp4())
