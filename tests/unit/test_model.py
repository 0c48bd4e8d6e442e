"""The decoder: sizes of published models, causality, packing, recomputation, initialization."""

import dataclasses
import functools
import math
import operator
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.model import ModelConfig, NormConfig, stacked
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.errors import ConfigError
from jaxinfra.model.block import Block
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.place import path_name
from tests.lowered_matmuls import matmuls
from tests.sharded import oracle
from tests.sharded.cases import (
    ALIKE_TO_THE_BIT,
    COMPILER_OPTIONS,
    build,
    drawn,
    gemma_like,
    gpt_like,
    gradients_of,
    llama_like,
    packed_batch,
)
from tests.tolerance import assert_within_rounding

ON_CPU = (AttentionImplementation.XLA, AttentionImplementation.REFERENCE)
# Every model, every implementation, and all masks and caps at once with both.
MODELS_ON_CPU = [
    (llama_like, AttentionImplementation.XLA),
    (gpt_like, AttentionImplementation.REFERENCE),
    (gemma_like, AttentionImplementation.XLA),
    (gemma_like, AttentionImplementation.REFERENCE),
]


def initialized(config: ModelConfig):
    model = define_model(config, execution_on())
    draw = jax.jit(model.initialize, compiler_options=COMPILER_OPTIONS)
    return jax.device_get(draw(jax.random.key(0)))


def jitted(function, compiler_options=COMPILER_OPTIONS):
    return jax.jit(function, compiler_options=compiler_options)


@functools.cache
def forward(config: ModelConfig, implementation: AttentionImplementation, to_the_bit: bool):
    model = define_model(config, execution_on(attention=implementation))

    def logits(parameters, tokens, **batch):
        return model.bind(parameters)(tokens, **batch)

    return jitted(logits, ALIKE_TO_THE_BIT if to_the_bit else COMPILER_OPTIONS)


def decoder(
    config: ModelConfig,
    implementation=AttentionImplementation.XLA,
    parameters=None,
    to_the_bit=False,
):
    """(tokens, segment_ids=, positions=) to logits."""
    parameters = drawn(config) if parameters is None else parameters
    return functools.partial(forward(config, implementation, to_the_bit), parameters)


@pytest.mark.slow_cases("llama_like-xla", "gpt_like-reference", "gemma_like-reference")
@pytest.mark.parametrize(("make", "implementation"), MODELS_ON_CPU)
def test_logits_are_the_oracle_s(make, implementation):
    config, batch = make(), packed_batch(rows=3)
    model = decoder(config, implementation)
    got = model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)
    want = oracle.logits(config, drawn(config), batch)
    assert got.dtype == jnp.float32
    assert_within_rounding(got, want)


@functools.cache
def jacobian(config: ModelConfig, implementation: AttentionImplementation):
    """(table, tokens, segment_ids) to a number a position, by the table's rows."""
    model = define_model(config, execution_on(attention=implementation))
    direction = jnp.asarray(np.random.default_rng(0).normal(size=config.vocab_size), jnp.float32)

    def probes(table, tokens, segment_ids):
        parameters = {**jax.tree.map(jnp.asarray, drawn(config)), "embedding": {"table": table}}
        logits = model.bind(parameters)(tokens, segment_ids=segment_ids)
        return jnp.einsum("tv,v->t", logits[0], direction)

    return jitted(jax.jacrev(probes))


def seen_by(config: ModelConfig, implementation, segment_ids=None) -> np.ndarray:
    """bool [T, S]: whether the logits at t move with the token embedded at s."""
    length = 12
    tokens = jnp.arange(length)[None]  # each token once: its table row is its position's input
    table = jnp.asarray(drawn(config)["embedding"]["table"])
    found = jacobian(config, implementation)(table, tokens, segment_ids)
    return np.asarray(jnp.any(found[:, :length] != 0.0, axis=-1))


AGE = np.arange(12)[:, None] - np.arange(12)[None, :]


@pytest.mark.slow_cases("llama_like-xla", "gemma_like-xla", "gemma_like-reference")
@pytest.mark.parametrize(("make", "implementation"), MODELS_ON_CPU)
def test_no_token_sees_the_future_or_another_document(make, implementation):
    config = dataclasses.replace(make(), tie_embeddings=False)
    for sizes in ([12], [5, 4, 3]):
        documents = np.repeat(np.arange(len(sizes)), sizes)
        same_document = documents[:, None] == documents[None, :]
        seen = seen_by(config, implementation, jnp.asarray(documents)[None])
        np.testing.assert_array_equal(seen, (AGE >= 0) & same_document)


@pytest.mark.slow_cases("reference", "xla")
@pytest.mark.parametrize("implementation", ON_CPU)
def test_receptive_field_of_windows_adds_up_over_layers(implementation):
    config = dataclasses.replace(llama_like(), tie_embeddings=False)
    block = config.blocks[0]
    windowed = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, window=3))
    config = dataclasses.replace(config, stacks=stacked(windowed, num_layers=config.num_layers))
    reach = config.num_layers * (3 - 1)
    np.testing.assert_array_equal(seen_by(config, implementation), (AGE >= 0) & (reach >= AGE))


@pytest.mark.slow  # logits of GPT-2: `test_hf_golden.py`
def test_learned_positions_are_added_where_the_batch_says():
    config = gpt_like()
    run = decoder(config)
    tokens = packed_batch(rows=1).tokens
    default = run(tokens)
    counted = jnp.arange(tokens.shape[1])[None]
    np.testing.assert_array_equal(run(tokens, positions=counted), default)
    assert (run(tokens, positions=counted + 1) != default).any()
    last = jnp.array([[config.max_positions - 1]])
    assert jnp.isfinite(run(tokens[:, :1], positions=last)).all()
    assert jnp.isnan(run(tokens[:, :1], positions=last + 1)).all(), "beyond the table"
    with pytest.raises(ConfigError, match=f"the model has learned {config.max_positions} posit"):
        run(jnp.zeros((1, config.max_positions + 1), jnp.int32))


@pytest.mark.slow
def test_scan_over_layers_is_a_loop():
    """Four layers scanned one at a time, in pairs, and unrolled into one repetition."""
    config = llama_like().with_layers(4)
    tokens = packed_batch(rows=2).tokens
    scanned = decoder(config, to_the_bit=True)(tokens)
    for pattern in (2, 4):
        stacks = drawn(config)["blocks"][0]
        blocks = {
            i: jax.tree.map(operator.itemgetter(slice(i, None, pattern)), stacks)
            for i in range(pattern)
        }
        unrolled = decoder(
            dataclasses.replace(
                config, stacks=stacked(*config.blocks * pattern, num_layers=config.num_layers)
            ),
            parameters={**drawn(config), "blocks": blocks},
            to_the_bit=True,
        )
        np.testing.assert_array_equal(unrolled(tokens), scanned)


def test_layers_of_a_pattern_are_traced_once(monkeypatch):
    monkeypatch.setattr(Block, "__call__", chex.assert_max_traces(Block.__call__, n=1))
    model = decoder(llama_like().with_layers(8))
    model(packed_batch(rows=2).tokens)


@functools.cache
def stepped(remat: Remat, unroll: int = 1):
    config = llama_like()
    built = build(config, remat=remat, unroll=unroll, compiler_options=ALIKE_TO_THE_BIT)
    state, metrics = built.step(built.state(), packed_batch())
    return jax.device_get((metrics.loss, gradients_of(state)))


@pytest.mark.slow_cases("full")
@pytest.mark.parametrize(
    "remat",
    [
        Remat.FULL,
        *(
            pytest.param(remat, marks=pytest.mark.slow)
            for remat in (Remat.NAMED, Remat.DOTS, Remat.MLP)
        ),
    ],
)
def test_recomputation_changes_no_bit(remat):
    chex.assert_trees_all_equal(stepped(remat), stepped(Remat.NONE))


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("remat", [Remat.NONE, pytest.param(Remat.DOTS, marks=pytest.mark.slow)])
def test_unrolling_changes_no_bit(remat):
    chex.assert_trees_all_equal(stepped(remat, unroll=2), stepped(remat))


@pytest.mark.slow_cases("none-0-0", "dots-0-0", "mlp-2-0", "named-6-0")
@pytest.mark.parametrize(
    ("remat", "projections", "core"),
    [
        (Remat.NONE, 0, 0),
        (Remat.DOTS, 0, 0),
        (Remat.MLP, 2, 0),
        # All but the last: nothing in the backward pass reads its result.
        (Remat.NAMED, 6, 0),
        (Remat.FULL, 6, 2),
    ],
)
def test_what_is_recomputed(remat, projections, core):
    built = build(llama_like(), policy=PolicyName.BF16, remat=remat)
    traced = built.step.trace(built.shapes, packed_batch())
    found = matmuls(traced.lower(lowering_platforms=("cuda",)))
    backward = [each.scope for each in found if "transpose(jvp(layer))" in each.scope]
    counts = Counter("core" in scope for scope in backward)
    assert counts == {False: 2 * 7 + projections, True: 5 + core}


def test_initial_deviation_shrinks_with_depth_into_the_residual_stream():
    config = dataclasses.replace(gpt_like().with_layers(8), model_dim=64, init_std=0.02)
    into_stream = 0.02 / math.sqrt(2 * 8)
    for path, leaf in jax.tree_util.tree_flatten_with_path(initialized(config))[0]:
        name = path_name(path)
        if name.endswith("bias"):
            assert not leaf.any()
        elif name.endswith("scale"):
            assert (leaf == 1.0).all()
        else:
            std = into_stream if name.endswith(("out/weight", "down/weight")) else 0.02
            within = 5 / math.sqrt(2 * leaf.size)
            assert np.std(leaf) == pytest.approx(std, rel=within), name
            assert abs(np.mean(leaf)) <= 5 * std / math.sqrt(leaf.size), name


@pytest.mark.slow
def test_scale_offset_starts_at_one():
    config = dataclasses.replace(llama_like(), final_norm=NormConfig(scale_offset=1.0))
    scale = initialized(config)["final_norm"]["scale"]
    assert not scale.any(), "offset 1 + scale 0"
