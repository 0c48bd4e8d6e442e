"""Published values: exact ones reproduced, measured ones within the stated error."""

import math

import ml_dtypes
import numpy as np
import published_check
import pytest

from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.model.flops import attention_flops, forward_flops, visible_pairs
from jaxinfra.planning.formats import FORMATS
from jaxinfra.planning.model import find_model, total_parameters


def test_exact_values():
    values = list(published_check.exact_values())
    assert len(values) == len({each.name for each in values}) > 40
    assert {each.name: each.ours for each in values} == {
        each.name: each.published for each in values
    }


def test_measured_steps_are_predicted_with_one_set_of_constants_a_gpu_type():
    steps = published_check.measured_steps()
    assert {each.device for each in steps} == {"a100", "h100", "h200"}
    assert published_check.mean_error(steps) <= published_check.BOUND
    assert max(abs(each.error) for each in steps) < 0.15


def test_published_rates_agree_with_published_tokens():
    for _, published, ours in published_check.published_rates():
        assert abs(published - ours) < 1.0


def test_published_mixtures_have_their_published_sizes():
    billions = {"mixtral_8x7b": 46.7, "mixtral_8x22b": 140.6, "qwen3_30b_a3b": 30.5}
    for name, published in billions.items():
        assert round(total_parameters(find_model(name)) / 1e9, 1) == published


def test_gpt_layer():
    model = find_model("gpt3_175b")
    config = model.config
    table = (config.vocab_size + config.max_positions) * config.model_dim
    layers = total_parameters(model) - table - 2 * config.model_dim
    assert layers == config.num_layers * (12 * config.model_dim**2 + 13 * config.model_dim)


def brute_pairs(length, window, start):
    return sum(
        1
        for query in range(start, start + length)
        for key in range(query + 1)
        if window is None or key > query - window
    )


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("length", "start"), [(1, 0), (9, 0), (5, 4), (1, 12), (6, 20)])
def test_visible_pairs_are_counted(length, window, start):
    expected = brute_pairs(length, window, start)
    assert visible_pairs(length, window=window, start=start) == expected


def test_forward_flops_of_a_gpt_layer_are_megatrons():
    """Not causal: 24 B L H^2 + 4 B H L^2. Of all pairs, T (T + 1) / 2 are causal."""
    width, length, batch = 64, 32, 3
    heads = GroupedAttentionConfig(num_q_heads=4, num_kv_heads=4, head_dim=16, rope=None)
    weights = 2.0 * 12 * width**2 * length * batch
    core = batch * attention_flops(heads, length) * length**2 / visible_pairs(length)
    expected = 2.0 * (12 * batch * length * width**2 + 2 * batch * width * length**2)
    assert weights + core == expected


def test_training_is_three_forwards_and_splits_over_tokens():
    model = find_model("llama3_8b")
    assert model.training_flops(128, batch=4) == 12 * model.forward_flops(128)
    sizes = model.config, model.matmul_parameters
    first, rest = model.forward_flops(100), forward_flops(*sizes, 28, start=100)
    assert math.isclose(first + rest, model.forward_flops(128), rel_tol=1e-12)


def test_a_tied_table_is_multiplied_and_an_untied_one_looked_up():
    tied, untied = find_model("llama32_1b"), find_model("llama3_8b")
    norms = (2 * tied.config.num_layers + 1) * tied.config.model_dim
    assert tied.matmul_parameters == total_parameters(tied) - norms
    table = untied.config.vocab_size * untied.config.model_dim
    norms = (2 * untied.config.num_layers + 1) * untied.config.model_dim
    assert untied.matmul_parameters == total_parameters(untied) - norms - table


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda each: each.name)
def test_formats_are_those_of_ml_dtypes(number_format):
    dtype = {
        "fp32": np.float32,
        "bf16": ml_dtypes.bfloat16,
        "fp16": np.float16,
        "fp8 e5m2": ml_dtypes.float8_e5m2,
        "fp8 e4m3": ml_dtypes.float8_e4m3fn,
        "fp4 e2m1": ml_dtypes.float4_e2m1fn,
    }.get(number_format.name)
    if dtype is None:
        # No such type: tf32 is fp32's range with fp16's fraction, int8 is a byte.
        twin = {"tf32": ("fp32", "fp16"), "int8": ("int8", "int8")}[number_format.name]
        by_name = {each.name: each for each in FORMATS}
        assert number_format.smallest_normal == by_name[twin[0]].smallest_normal
        assert number_format.epsilon == by_name[twin[1]].epsilon
        return
    info = ml_dtypes.finfo(dtype)
    assert number_format.largest == float(info.max)
    assert number_format.smallest_normal == float(info.smallest_normal)
    assert number_format.smallest == float(info.smallest_subnormal)
    assert number_format.epsilon == float(info.eps)
