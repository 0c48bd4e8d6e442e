"""Published values: exact ones reproduced, measured ones within the stated error."""

import math

import ml_dtypes
import numpy as np
import pytest

from jaxinfra.config.presets import MODELS
from jaxinfra.models.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning import selfcheck
from jaxinfra.planning.catalog import SHAPES, find_model
from jaxinfra.planning.flops import (
    attention_flops,
    forward_flops,
    gpt_layer_forward_flops,
    training_flops,
    visible_pairs,
)
from jaxinfra.planning.formats import FORMATS
from jaxinfra.planning.params import gpt_layer_parameters, matmul_parameters, total_parameters
from jaxinfra.planning.shapes import Heads

EXACT = list(selfcheck.exact_values())


@pytest.mark.parametrize("value", EXACT, ids=lambda value: value.name)
def test_exact_value(value):
    assert value.ours == value.published


def test_measured_steps_are_predicted_with_one_set_of_constants_a_gpu_type():
    steps = selfcheck.measured_steps()
    assert {each.device for each in steps} == {"a100", "h100", "h200"}
    assert selfcheck.mean_error(steps) <= selfcheck.BOUND
    assert max(abs(each.error) for each in steps) < 0.15


def test_published_rates_agree_with_published_tokens():
    for _, published, ours in selfcheck.published_rates():
        assert abs(published - ours) < 1.0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_shapes_have_the_decoders_parameters(name):
    config = MODELS[name]()
    assert total_parameters(find_model(name)) == define_model(config, execution_on()).num_parameters


def test_published_mixtures_have_their_published_sizes():
    billions = {"mixtral_8x7b": 46.7, "mixtral_8x22b": 140.6, "qwen3_30b_a3b": 30.5}
    for name, published in billions.items():
        assert round(total_parameters(SHAPES[name]()) / 1e9, 1) == published


def test_gpt_layer():
    shape = SHAPES["gpt3_175b"]()
    table = shape.vocab_size * shape.model_dim + shape.max_positions * shape.model_dim
    layers = total_parameters(shape) - table - 2 * shape.model_dim
    assert layers == shape.num_layers * gpt_layer_parameters(shape.model_dim)


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
    """Not causal: 24 B L H^2 + 4 B H L^2."""
    width, length, batch = 64, 32, 3
    heads = Heads(num_q_heads=4, num_kv_heads=4, head_dim=16)
    weights = 2.0 * 12 * width**2 * length * batch
    core = batch * attention_flops(heads, length, causal=False)
    assert weights + core == gpt_layer_forward_flops(batch=batch, length=length, width=width)


def test_training_is_three_forwards_and_splits_over_tokens():
    shape = find_model("llama3_8b")
    assert training_flops(shape, 128, batch=4) == 12 * forward_flops(shape, 128)
    first, rest = forward_flops(shape, 100), forward_flops(shape, 28, start=100)
    assert math.isclose(first + rest, forward_flops(shape, 128), rel_tol=1e-12)


def test_a_tied_table_is_multiplied_and_an_untied_one_looked_up():
    tied, untied = find_model("llama32_1b"), find_model("llama3_8b")
    norms = (2 * tied.num_layers + 1) * tied.model_dim
    assert matmul_parameters(tied) == total_parameters(tied) - norms
    table = untied.vocab_size * untied.model_dim
    norms = (2 * untied.num_layers + 1) * untied.model_dim
    assert matmul_parameters(untied) == total_parameters(untied) - norms - table


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
