"""Exact numerics on a GPU, by what its programs launch: traced for one that need not be there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.cache import PagedCache
from jaxinfra.model.definition import define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.numerics.policy import stored_as_computed
from jaxinfra.ops.exact_product import ordered_einsum, three_parts
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.preferences import target_values
from pallas_kernels.common.device import H200, compiling_for
from tests.exact_scores import policy
from tests.small_models import dense

KERNELS = {
    "append_heads",
    "attention_forward",
    "grouped_matmul",
    "logsumexp",
    "paged_attention_chunk",
    "paged_attention_token",
    "rms_norm",
    "skinny_matmul",
}
"""Kernels whose order of sums, if they have any, depends on a token's own row alone."""

INT32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)


def kernels_and_sums(jaxpr):
    """Names of the launched kernels; sums of floats that are left to the compiler."""
    kernels, sums = set(), set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "mpmd_map":
            kernels.add(eqn.params["name"])
            continue
        is_float = any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars)
        if is_float and name in {"dot_general", "reduce_sum", "cumsum", "reduce_window_sum"}:
            sums.add(name)
        for inner in jaxprs_in_params(eqn.params):
            found = kernels_and_sums(inner)
            kernels, sums = kernels | found[0], sums | found[1]
    return kernels, sums


@pytest.fixture(scope="module")
def model():
    config = dense(
        model_dim=128, heads=(8, 4), head_dim=128, hidden_dim=128, vocab_size=128,
        tie_embeddings=False,
    )  # fmt: skip
    config = dataclasses.replace(config, stacks=stacked(config.blocks[0], num_layers=1))
    numbers = stored_as_computed(policy(PolicyName.BF16))
    with compiling_for(H200):
        definition = define_model(config, execution_on(policy=numbers))
        execution = execution_on(policy=numbers, decode_form=DecodeForm(packed=True))
        return definition, serving_form(definition, execution)


@pytest.mark.parametrize(
    ("rows", "length", "is_fresh"),
    [
        (1, 1, False),
        pytest.param(3, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 64, False, marks=pytest.mark.slow),
        pytest.param(3, 64, True, marks=pytest.mark.slow),
    ],
)
def test_all_sums_of_an_engine_step_are_in_kernels_of_one_order(model, rows, length, is_fresh):
    definition, form = model

    def step(tree, pools, tables, ids):
        decoder = form.bind(tree)
        cache = PagedCache(arrays=pools, tables_BM=tables, is_empty=is_fresh)
        return decoder.logits(decoder.run(ids, positions=ids, cache=(cache,)).x)

    pools = {name: jax.ShapeDtypeStruct((1, 9, 64, 4, 128), jnp.bfloat16) for name in "kv"}
    tree = jax.eval_shape(functools.partial(serving_parameters, form), definition.arrays)
    with compiling_for(H200):
        traced = jax.make_jaxpr(step)(tree, pools, INT32((rows, 1)), INT32((rows, length)))
    kernels, sums = kernels_and_sums(traced.jaxpr)
    assert not kernels - KERNELS
    assert "append_heads" in kernels or is_fresh
    assert not sums


@pytest.mark.slow
def test_all_sums_of_a_training_pass_are_in_kernels_of_one_order(model):
    definition, _ = model
    kernels, sums = traced_scores(definition)
    assert not kernels - KERNELS
    assert not sums


def traced_scores(definition):

    def scores(tree, ids, targets):
        return target_values(definition, tree, definition.bind(tree).hidden(ids), targets)

    with compiling_for(H200):
        traced = jax.make_jaxpr(scores)(definition.arrays, INT32((5, 64)), INT32((5, 64)))
    return kernels_and_sums(traced.jaxpr)


@pytest.mark.slow
def test_products_of_experts_and_their_router_are_in_kernels_of_one_order(model):
    block = model[0].config.blocks[0]
    experts = ExpertsConfig(
        num_experts=6, top_k=2, hidden_dim=128, shared_hidden_dim=128, shared_gate=True
    )
    block = dataclasses.replace(block, feed_forward=experts)
    config = dataclasses.replace(model[0].config, stacks=stacked(block, num_layers=1))
    with compiling_for(H200):
        kernels, sums = traced_scores(
            define_model(config, execution_on(policy=policy(PolicyName.BF16)))
        )
    assert not kernels - KERNELS
    assert sums == {"reduce_sum"}  # of a chosen expert's score and zeros


def test_an_fp32_weight_is_the_sum_of_three_of_sixteen_bits():
    weight = jax.random.normal(jax.random.key(1), (64, 48)) * jnp.logspace(-9.0, 3.0, 48)[None]
    parts = jax.jit(functools.partial(three_parts, dtype=jnp.dtype("bfloat16")))(weight)
    assert {part.dtype.name for part in parts} == {"bfloat16"}
    assert jnp.array_equal(sum(part.astype(jnp.float32) for part in reversed(parts)), weight)


def test_an_adapters_rank_is_filled_up_for_the_kernels():
    x, a, b = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 5, 256), (256, 3), (3, 256))
    )

    def product(x, a, b):
        low = ordered_einsum("BTD,Dr->BTr", x, a, out=x.dtype)
        return ordered_einsum("BTr,rD->BTD", low, b, out=jnp.dtype("float32"))

    with compiling_for(H200):
        assert jax.eval_shape(product, x, a, b).shape == (1, 5, 256)
