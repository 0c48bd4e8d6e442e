"""Quantized directories as other programs' releases spell them: read alike, or refused by name."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import quantization_of
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from tests.raw_tensors import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "quantized"
RNG = np.random.default_rng(0)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def config(case, **changes):
    values = json.loads((GOLDEN / case / "config.json").read_text())
    quantized = {
        key: value
        for key, value in (values["quantization_config"] | changes).items()
        if value != "absent"
    }
    return values | {"quantization_config": quantized}


# What the makers' configs say of how they worked, as published.
OPTIMUM = {"disable_exllama": False, "use_cuda_fp16": False, "block_name_to_quantize": "model"}
GPTQMODEL = {
    "hyb_act": False,
    "pack_dtype": "int32",
    "damp_auto_increment": 0.0025,
    "offload_to_disk": True,
    "pack_impl": "cpu",
}
AUTOROUND = {
    "amp": True,
    "autoround_version": "0.4.2",
    "data_type": "int",
    "enable_quanted_input": True,
    "iters": 200,
    "lr": 0.005,
    "nsamples": 512,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
}
TRANSFORMERS = {"modules_to_convert": None, "expert_dtype": "fp8", "scale_fmt": "float"}
DENSE = {"format": "dense", "global_sparsity": 0.1, "ignore": [], "targets": []}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        pytest.param("gptq", OPTIMUM, id="optimum"),
        pytest.param("gptq", GPTQMODEL, id="gptqmodel"),
        pytest.param("gptq", AUTOROUND, id="autoround"),
        pytest.param("gptq", {"format": "gptq", "checkpoint_format": "gptq"}, id="gptq-both"),
        pytest.param("gptq", {"dynamic": {"-:.*mlp.gate$": {}}}, id="qwen3-moe-gptq"),
        # Named so alone, it was read as the first version: every zero point one too large.
        pytest.param("gptq_act", {"checkpoint_format": "absent", "format": "gptq_v2"}, id="v2"),
        pytest.param("awq", {"format": "gemm", "backend": "auto"}, id="awq-both"),
        pytest.param("awq", {"version": "absent", "format": "gemm"}, id="awq-newer"),
        pytest.param("fp8_blocks", TRANSFORMERS, id="transformers-fp8"),
        pytest.param("fp8_blocks", {"fmt": "float8_e4m3fn"}, id="minimax-m2"),
        pytest.param("awq", {"checkpoint_format": "gemm", "pack_dtype": "int32"}, id="awq-model"),
        pytest.param("ct_int8", {"sparsity_config": DENSE}, id="dense"),
        pytest.param("ct_int8", {"moe_sparsity_config": None}, id="compressed-tensors-0.20"),
    ],
)
def test_releases_say_the_same(case, changes):
    assert quantization_of(config(case, **changes)) == quantization_of(config(case))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq", {"format": "gptq_v2", "checkpoint_format": "gptq"}, "both must name alike"),
        ("gptq", {"format": "marlin"}, "format='marlin'"),
        ("gptq", {"dynamic": {"-:lm_head": {}, "+:.*up.*": {"bits": 8}}}, r"dynamic=\{'\+:"),
        ("gptq", {"data_type": "fp"}, "read as integers"),
        ("gptq", {"pack_dtype": "int8"}, "words of 32 bits"),
        ("awq", {"format": "gemv"}, "format='gemv'"),
        ("awq", {"backend": "llm-awq"}, "backend='llm-awq'"),
        ("fp8_blocks", {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ("ct_int8", {"sparsity_config": DENSE | {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)
def test_other_layouts_are_refused(case, changes, message):
    with pytest.raises(ConfigError, match=message):
        quantization_of(config(case, **changes))


@pytest.mark.parametrize("targets", [["re:.*self_attn.*", "re:.*mlp.*"], ["LlamaMLP"]])
def test_layers_may_be_named_by_any_pattern(targets):
    """Of one group: which weights are in few bits is seen in the files."""
    values = config("ct_int8")
    values["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    assert quantization_of(values) == quantization_of(config("ct_int8"))


def changed(tmp_path, case, change):
    """A copy whose tensors ``change`` has edited."""
    path = shutil.copytree(GOLDEN / case, tmp_path / "copy")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def opened(path):
    directory = read_model_directory(path)
    return directory.open(define_model(directory.config, execution_on()))


def test_biases_of_zeros_are_none(tmp_path):
    """AutoGPTQ before 0.5 wrote one for every layer, of models without biases too."""

    def add(tensors, value=0.0):
        tensors[f"{Q_PROJ}.bias"] = np.full(32, value, np.float16)

    opened(changed(tmp_path, "gptq", add))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        opened(changed(tmp_path / "other", "gptq", lambda tensors: add(tensors, 0.5)))


def test_act_order_without_its_order_is_refused(tmp_path):
    path = changed(tmp_path, "gptq_act", lambda tensors: tensors.pop(f"{Q_PROJ}.g_idx"))
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx is missing"):
        opened(path)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_scale_of_a_tensor_has_either_name(tmp_path, name):
    """The first is AutoFP8's, the second that of transformers; both multiply."""
    elements = np.arange(-8, 8, dtype=np.float32).reshape(2, 8).astype(ml_dtypes.float8_e4m3fn)
    save(tmp_path, {"q.weight": elements, f"q.{name}": np.float32(0.75)})
    form = quantization_of(config("fp8_blocks", weight_block_size=None))
    read = plain_tensors(open_tensor_files(tmp_path), form).read
    got = read("q.weight", (slice(0, 2), slice(0, 8)))
    np.testing.assert_array_equal(got, elements.astype(np.float32) * np.float32(0.75))


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_scales_of_blocks_in_fewer_bits(tmp_path, kind):
    """Powers of two, which both kinds hold."""
    scales = np.ldexp(np.float32(1), np.arange(-4, 4).reshape(2, 4)).astype(kind)
    elements = RNG.normal(size=(24, 60)).astype(ml_dtypes.float8_e4m3fn)  # 16 divides neither
    save(tmp_path, {"q.weight": elements, "q.weight_scale_inv": scales})
    form = quantization_of(config("fp8_blocks", scale_fmt="ue8m0"))
    read = plain_tensors(open_tensor_files(tmp_path), form).read
    got = read("q.weight", (slice(0, 24), slice(0, 60)))
    for (i, j), value in np.ndenumerate(got):
        want = np.float32(elements[i, j]) * np.float32(scales[i // 16, j // 16])
        assert value == want


def test_one_zero_point_of_a_tensor(tmp_path):
    codes = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    parts = {"weight": codes, "weight_scale": np.float32([0.5]), "weight_zero_point": np.int8([3])}
    save(tmp_path, {f"q.{name}": part for name, part in parts.items()})
    values = config("ct_int8")
    group = values["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "tensor", "symmetric": False}
    read = plain_tensors(open_tensor_files(tmp_path), quantization_of(values)).read
    got = read("q.weight", (slice(0, 2), slice(0, 8)))
    np.testing.assert_array_equal(got, (codes.astype(np.float32) - 3) * np.float32(0.5))
