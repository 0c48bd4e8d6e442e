"""Exact numerics on a Hopper GPU: rows of kernels, and an engine beside a training program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxinfra.config.precision import Numerics, PolicyName
from jaxinfra.model.definition import define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.numerics.policy import stored_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from tests.exact_scores import num_different, policy, random_parameters, sampled, trained_scores
from tests.small_models import dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def random(key, *shape):
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)


def test_a_row_of_a_product_is_the_same_among_any_number():
    x, w = random(1, 1024, 512), random(2, 512, 384)
    whole = pallas_kernels.ordered_matmul(x, w)
    for rows in (1, 8, 64, 200, 300):
        assert np.array_equal(pallas_kernels.ordered_matmul(x[:rows], w), whole[:rows])


def test_a_token_attends_as_in_its_whole_row():
    q, k, v = random(1, 1, 256, 8, 128), random(2, 1, 256, 2, 128), random(3, 1, 256, 2, 128)
    whole = pallas_kernels.flash_attention(q, k, v, is_causal=True)
    pools = [x.reshape(-1, 64, 2, 128) for x in (k, v)]
    ordered = functools.partial(pallas_kernels.paged_attention, is_ordered=True)
    for first, count in ((0, 1), (130, 1), (255, 1), (37, 100)):
        part, lengths = slice(first, first + count), jnp.array([first + count])
        got = ordered(q[:, part], *pools, jnp.arange(4)[None], lengths)
        assert np.array_equal(got, whole[:, part])


def test_scores_of_an_engine_are_those_of_training():
    config = dense(
        model_dim=256, heads=(8, 2), head_dim=128, hidden_dim=256, vocab_size=192,
        tie_embeddings=False,
    )  # fmt: skip
    numbers = stored_as_computed(policy(PolicyName.BF16, Numerics.EXACT))
    definition = define_model(config, execution_on(policy=numbers))
    tree = random_parameters(definition)
    execution = execution_on(policy=numbers, decode_form=DecodeForm(packed=True))
    form = serving_form(definition, execution)
    options = EngineOptions(max_running=3, page_size=64, num_pages=9, chunk_sizes=(64,))
    engine = Engine(form.bind(serving_parameters(form, tree)), options=options)
    found = sampled(engine)
    assert num_different(found, trained_scores(definition, tree, found, packed=False)) == 0
