"""Experts in few bits: a step of few tokens dequantizes as many experts as tokens choose."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.kinds import MlpKind
from jaxinfra.hf import from_hf_config
from jaxinfra.model.definition import define_model, is_weight
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.experts import ExpertWeights, apply_experts
from jaxinfra.ops.quantized import WeightCode, WeightFormat, round_weight
from jaxinfra.parallel.execution import execution_on
from tests.largest_float import largest_float

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
E, D, F = 16, 32, 48
RECIPE = Recipe(compute=jnp.dtype(jnp.bfloat16), accum=jnp.dtype(jnp.float32))
INT4 = WeightFormat(code=WeightCode.INT4, group_rows=16)
FORMATS = {
    "int4 with zeros": INT4,
    "int8": WeightFormat(code=WeightCode.INT8),
    "fp8 blocks": WeightFormat(code=WeightCode.E4M3, group_rows=16, group_columns=16),
}
CHOICES = (
    jnp.asarray([[3, 9], [0, 3]], jnp.int32),  # two tokens meet one expert
    jnp.asarray([[5, 5], [5, 5]], jnp.int32),
    jnp.asarray([[15, 2], [E, E]], jnp.int32),  # the last expert, and none
    jnp.asarray([[E, E], [E, E]], jnp.int32),
)
SIZES = {
    "qwen2_moe": {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 16},
    "deepseek_v3": {"hidden_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 16},
}


def drawn_experts(form, *, bias=False):
    rng = np.random.default_rng(0)

    def weight(*shape):
        values = jnp.asarray(rng.normal(0, 0.2, (E, *shape)), jnp.float32)
        return round_weight(values, form, num_leading=1, has_zeros=form.code is WeightCode.INT4)

    def vector(width):
        return jnp.asarray(rng.normal(0, 1, (E, width)), jnp.float32) if bias else None

    return ExpertWeights(
        gate_EDF=weight(D, F),
        up_EDF=weight(D, F),
        down_EFD=weight(F, D),
        gate_bias_EF=vector(F),
        up_bias_EF=vector(F),
        down_bias_ED=vector(D),
    )


def dequantized(tree, dtype=RECIPE.compute):
    return jax.tree.map(
        lambda leaf: leaf.dequantize(dtype) if is_weight(leaf) else leaf, tree, is_leaf=is_weight
    )


def tokens(expert_NK):
    rng = np.random.default_rng(1)
    x_ND = jnp.asarray(rng.normal(size=(len(expert_NK), D)), jnp.float32)
    return x_ND, expert_NK, jnp.asarray(rng.uniform(size=expert_NK.shape), jnp.float32)


@functools.partial(jax.jit, static_argnames=("kind", "room"))
def applied(experts, choices, *, kind=MlpKind.SWIGLU, room=None):
    return apply_experts(*tokens(choices), experts, kind=kind, recipe=RECIPE, room=room)


def require_equal(experts, choices, **options):
    """To the bit: the same products in the same order."""
    got = applied(experts, choices, **options)
    want = applied(dequantized(experts), choices, **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    return np.asarray(got[0], np.float32)


def test_equals_what_all_experts_compute():
    experts = drawn_experts(INT4)
    results = [require_equal(experts, choices) for choices in CHOICES]
    assert np.all(np.any(np.stack(results[:2]), axis=-1)), "each token has what experts add"
    assert not results[-1].any()
    assert not results[-2][1].any()


@pytest.mark.slow  # A program for each; the gather above does not depend on what it gathers.
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_formats_biases_and_bounded_room(form):
    experts = drawn_experts(form, bias=True)
    for choices in CHOICES:
        require_equal(experts, choices)
        require_equal(experts, choices, kind=MlpKind.SWIGLU_CLAMPED, room=3)
    many = jnp.arange(18, dtype=jnp.int32).reshape(9, 2) % E  # all experts, dequantized together
    require_equal(experts, many)
    require_equal(experts, many, room=7)


def model(family, **keys):
    values = json.loads((GOLDEN / family / "config.json").read_text()) | SIZES[family] | keys
    return define_model(from_hf_config(values), execution_on())


def rounded(parameters):
    """Experts in int4, of each layer of a stack that has some."""

    def in_int4(path, leaf):
        has_experts = path[-2].key == "mlp" and path[-1].key in ("gate", "up", "down")
        return round_weight(leaf, INT4, num_leading=2) if has_experts else leaf

    return jax.tree_util.tree_map_with_path(in_int4, parameters)


def test_a_step_makes_no_array_of_all_experts():
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    definition = model("qwen2_moe", **one)
    few = jax.eval_shape(rounded, definition.arrays)
    experts = definition.config.blocks[0].feed_forward
    whole = experts.num_experts * experts.hidden_dim * definition.config.model_dim

    def largest(num_tokens):
        ids = jnp.zeros((1, num_tokens), jnp.int32)
        return largest_float(lambda tree: definition.bind(tree)(ids), few)

    fewer = (experts.num_experts - 1) // experts.top_k  # tokens, with fewer choices than experts
    assert largest(fewer) < whole
    # With more choices all are dequantized together, which this sees.
    assert largest(fewer + 1) >= whole


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_models_compute_what_plain_numbers_do(family):
    definition = model(family)
    rng = np.random.default_rng(0)
    few = jax.jit(rounded)(
        jax.tree.map(
            lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype), definition.arrays
        )
    )
    plain = jax.jit(dequantized, static_argnums=1)(few, jnp.dtype(jnp.float32))
    ids = jnp.arange(2, dtype=jnp.int32)[None]
    run = jax.jit(lambda tree: definition.bind(tree)(ids))
    np.testing.assert_array_equal(run(few), run(plain))
