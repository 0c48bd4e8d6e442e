"""Exact numerics on a Hopper GPU: rows of kernels, and an engine beside a training program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.precision import Numerics, PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.model.definition import define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.rope import apply_rope, rope_table
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.ops.exact_product import ordered_einsum
from jaxinfra.parallel.execution import execution_on
from jaxinfra.reinforcement.sampler import sampling_programs
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from tests.exact_scores import (
    PROMPTS,
    num_different,
    policy,
    random_parameters,
    sampled,
    trained_scores,
)
from tests.small_models import dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def random(key, *shape):
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)


def test_a_row_of_a_product_is_the_same_among_any_number():
    x, w = random(1, 1024, 512), random(2, 512, 384)
    whole = pallas_kernels.ordered_matmul(x, w)
    for rows in (1, 8, 64, 200, 300):
        assert np.array_equal(pallas_kernels.ordered_matmul(x[:rows], w), whole[:rows])


@pytest.mark.parametrize("spec", ["BTD,Dr->BTr", "BTr,rD->BTD"])
def test_a_row_of_an_adapters_product_is_the_same_among_any_number(spec):
    size = {"D": 512, "r": 3}
    x = random(1, 1, 300, size[spec[2]])
    w = random(2, *(size[letter] for letter in spec[4:6]))
    product = functools.partial(ordered_einsum, spec, weight=w, out=jnp.dtype("float32"))
    whole = product(x)
    np.testing.assert_allclose(whole, jnp.einsum(spec, x, w), atol=0.5)
    for rows in (1, 64, 256):
        assert np.array_equal(product(x[:, :rows]), whole[:, :rows])


@pytest.mark.parametrize("rows", [3, 64])
def test_the_kernel_that_appends_keys_rotates_as_training_does(rows):
    heads, pools = random(5, rows, 1, 16, 128), [jnp.zeros((rows, 64, 4, 128), jnp.bfloat16)] * 2
    at = 7 * jnp.arange(rows)[:, None] % 61
    angles = rope_table(RopeConfig(), head_dim=128, positions_BT=at, is_exact=True)
    q, k, _ = jax.jit(
        functools.partial(pallas_kernels.append_heads, implementation="hopper", is_ordered=True)
    )(heads, *pools, jnp.arange(rows)[:, None], at, angles)
    want = jax.jit(functools.partial(apply_rope, is_exact=True))(heads[:, :, :12], angles)
    assert np.array_equal(q, want[:, :, :8])
    assert np.array_equal(k[jnp.arange(rows), at[:, 0]], want[:, 0, 8:])


@pytest.mark.parametrize(
    ("width", "cap", "window"),
    [(128, None, None), (128, 30.0, None), (64, None, None), (128, None, 77), (64, None, 130)],
)
def test_a_token_attends_as_in_its_whole_row(width, cap, window):
    q = random(1, 1, 256, 8, width)
    k, v = random(2, 1, 256, 2, width), random(3, 1, 256, 2, width)
    left = None if window is None else (window - 1, 0)
    whole = pallas_kernels.flash_attention(
        q, k, v, is_causal=True, logit_soft_cap=cap, local_window_size=left,
        implementation="hopper",
    )  # fmt: skip
    pools = [x.reshape(-1, 64, 2, width) for x in (k, v)]
    ordered = functools.partial(
        pallas_kernels.paged_attention, is_ordered=True, soft_cap=cap, window=window
    )
    ends = ((0, 1), (255, 1)) if (width, cap) == (128, None) else ()
    for first, count in (*ends, (130, 1), (37, 100)):
        part, lengths = slice(first, first + count), jnp.array([first + count])
        got = ordered(q[:, part], *pools, jnp.arange(4)[None], lengths)
        assert np.array_equal(got, whole[:, part])


EXPERTS = ExpertsConfig(
    num_experts=8, top_k=2, hidden_dim=192, shared_hidden_dim=128, shared_gate=True
)


# Four heads of keys are rotated and appended by a kernel, two are not. Routers are fp32.
@pytest.mark.parametrize(
    ("kv_heads", "window", "experts"), [(4, 21, None), (2, None, EXPERTS)], ids=["dense", "experts"]
)
def test_scores_of_an_engine_are_those_of_training(kv_heads, window, experts):
    config = dense(
        model_dim=256, heads=(8, kv_heads), head_dim=128, hidden_dim=256, vocab_size=192,
        tie_embeddings=False, attention={"window": window},
    )  # fmt: skip
    block = config.blocks[0]
    block = dataclasses.replace(block, feed_forward=experts or block.feed_forward)
    config = dataclasses.replace(config, stacks=stacked(block, num_layers=1))
    numbers = policy(PolicyName.BF16, Numerics.EXACT)
    definition = define_model(config, execution_on(policy=numbers))
    tree = random_parameters(definition)
    execution = execution_on(policy=numbers, decode_form=DecodeForm(packed=True))
    form = serving_form(definition, execution)
    options = EngineOptions(
        max_running=2, page_size=64, num_pages=9, chunk_sizes=(64,), max_piece_rows=1
    )
    engine = Engine(form.bind(serving_parameters(form, tree)), options=options)
    prompts = PROMPTS[1:4]  # one longer, two that share a beginning
    engine.runner.programs.make(sampling_programs(engine.limits, [len(ids) for ids in prompts]))
    found = sampled(engine, prompts)
    assert num_different(found, trained_scores(definition, tree, found, packed=False)) == 0
