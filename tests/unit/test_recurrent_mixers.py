"""Mixers with a state: what they compute of whole rows, of parts, of documents and of drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.kinds import Branches
from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    BlockConfig,
    ExpertsConfig,
    MlpConfig,
    ModelConfig,
    Stack,
    stacked,
)
from jaxinfra.config.recurrent import (
    GatedDeltaConfig,
    NoMixer,
    OutputGate,
    SelectiveScanConfig,
    ShortConvolutionConfig,
    StateSpaceConfig,
)
from jaxinfra.errors import ConfigError
from jaxinfra.model.cache import HELD, JointCache, StateCache, recurrent_bytes
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.recurrence import settled
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.parallel.execution import execution_on
from tests import small_models
from tests.seeds import seeded

SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 6}
MIXERS = {
    "gated_delta": GatedDeltaConfig(**SIZES),
    "delta_of_channels": GatedDeltaConfig(
        **SIZES | {"num_key_heads": 4},
        channel_decay=True,
        rank=5,
        gate=OutputGate.SIGMOID,
        conv_width=2,
    ),
    "state_space": StateSpaceConfig(**SIZES, norm_heads=2, bias=True, step_limit=(0.01, 0.5)),
    "selective_scan": SelectiveScanConfig(
        num_channels=12, state_dim=5, rank=3, bias=True, norm_epsilon=1e-5
    ),
    "short_convolution": ShortConvolutionConfig(num_heads=2, head_dim=5, bias=True),
}
MIXERS["beside_attention"] = AttentionBesideStateConfig(
    attention=small_models.dense().blocks[0].mixer,
    state_space=dataclasses.replace(MIXERS["state_space"], norm_before_gate=True),
    attention_in_scale=0.7,
    state_out_scale=1.3,
)
LENGTH = 40


def config(name, **changes) -> ModelConfig:
    """A layer with a state and one of attention, twice."""
    dense = small_models.dense()
    mixer = dataclasses.replace(MIXERS[name], **changes)
    recurrent = BlockConfig(mixer=mixer, feed_forward=MlpConfig(hidden_dim=24))
    pattern = (recurrent, dense.blocks[0])
    return dataclasses.replace(dense, stacks=(Stack(pattern=pattern, repeats=2),))


@functools.cache
def decoder(name):
    definition = define_model(config(name), execution_on())
    return definition.bind(drawn(definition))


def drawn(definition):
    rng = np.random.default_rng(seeded(0))
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype), definition.shapes
    )


def ids(*shape):
    return np.random.default_rng(seeded(1)).integers(0, 64, shape).astype(np.int32)


@jax.jit
def logits_of(decoder, ids_BT):
    return decoder(ids_BT)


@jax.jit
def run(decoder, ids_BT, positions_BT, cache):
    out = decoder.run(ids_BT, positions=positions_BT, cache=cache)
    return decoder.logits(out.x), out.cache


def positions(starts, counts, length):
    places = np.arange(length)[None]
    inside = places < np.array(counts)[:, None]
    return np.where(inside, np.array(starts)[:, None] + places, -1).astype(np.int32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


@pytest.mark.quick_cases("short_convolution")
@pytest.mark.parametrize("name", MIXERS)
def test_parts_with_padding_give_what_whole_rows_give(name):
    """Rows of a batch are at other places, and one gives nothing in a pass."""
    model, tokens = decoder(name), ids(2, LENGTH)
    want, cache = logits_of(model, tokens), model.empty_cache(batch=2, num_slots=64)
    done, found = [0, 0], np.zeros((2, LENGTH, 64), np.float32)
    for counts in ((30, 17), (0, 6), (1, 1), (1, 1), (8, 15)):
        length = 1 if max(counts) == 1 else 30  # each is a program
        given = np.zeros((2, length), np.int32)
        for row, (start, count) in enumerate(zip(done, counts, strict=True)):
            given[row, :count] = tokens[row, start : start + count]
        logits, cache = run(model, given, positions(done, counts, length), cache)
        for row, count in enumerate(counts):
            found[row, done[row] : done[row] + count] = logits[row, :count]
            done[row] += count
    assert done == [LENGTH, LENGTH]
    close(found, want)


@pytest.mark.quick_cases("short_convolution")
@pytest.mark.parametrize("name", MIXERS)
def test_documents_of_a_row_do_not_see_each_other(name):
    model, tokens = decoder(name), ids(1, LENGTH)
    segments = np.repeat([[0, 1, 2, -1]], [7, 1, 20, 12], axis=1).astype(np.int32)
    packed = model(tokens, segment_ids=segments)
    for start, stop in ((0, 7), (7, 8), (8, 28)):
        close(packed[:, start:stop], model(tokens[:, start:stop]))


@pytest.mark.slow_cases("delta_of_channels")
@pytest.mark.parametrize("name", ["gated_delta", "delta_of_channels"])
def test_the_serving_form_packs_projections_of_one_input(name):
    """The packed weight has the gate's columns, and a head of beta's and decay's, where these are
    projections of the input, as in the first of these layers, not where they are products of two.
    """
    definition = define_model(config(name, value_dim=8), execution_on())
    parameters, tokens = drawn(definition), ids(1, 9)
    form = serving_form(definition, execution_on(decode_form=DecodeForm(packed=True)))
    packed = serving_parameters(form, parameters)
    shape = by_path(packed)["blocks/0/attention/packed/weight"].shape
    assert shape[-2:] == (13 if name == "gated_delta" else 12, 8)
    close(jax.jit(form.bind(packed))(tokens), jax.jit(definition.bind(parameters))(tokens))
    # Beside quantized weights, numbers per head are apart.
    apart = serving_form(
        definition, execution_on(decode_form=DecodeForm(packed=True, numbers=False))
    )
    assert by_path(apart.arrays)["blocks/0/attention/packed/weight"].shape[-2:] == (12, 8)


def test_packed_layers_compute_a_token_s_convolutions_at_once():
    """Tokens one by one, of which a row lacks one, give what whole rows give."""
    both = config("gated_delta", value_dim=8)
    whole = dataclasses.replace(both, stacks=stacked(both.blocks[0], num_layers=1))
    definition = define_model(whole, execution_on())
    parameters, tokens = drawn(definition), ids(2, 6)
    form = serving_form(definition, execution_on(decode_form=DecodeForm(packed=True)))
    model = form.bind(serving_parameters(form, parameters))
    want = logits_of(definition.bind(parameters), tokens)
    cache, done = model.empty_cache(batch=2, num_slots=8), np.zeros(2, np.int32)
    convolve = model.blocks[0].attention.execution.kernels.convolve_in_slots
    assert convolve is not None
    for counts in ((1, 1), (0, 1), (1, 1), (1, 1), (1, 0), (1, 1)):
        given = tokens[np.arange(2), done][:, None]
        logits, cache = run(model, given, positions(done, counts, 1), cache)
        for row in np.flatnonzero(counts):
            close(logits[row, 0], want[row, done[row]])
        done += counts


def made_tentative(cache):
    if isinstance(cache, JointCache):
        return dataclasses.replace(cache, state=made_tentative(cache.state))
    return dataclasses.replace(cache, is_tentative=True)


@pytest.mark.quick_cases("gated_delta")
@pytest.mark.parametrize("name", MIXERS)
def test_a_tentative_pass_keeps_the_tokens_that_count(name):
    model, tokens = decoder(name), ids(3, LENGTH)
    empty = model.empty_cache(batch=3, num_slots=64)
    _, cache = run(model, tokens[:, :9], positions([0] * 3, [9] * 3, 9), empty)
    states = [(not hasattr(each, "format"), each) for each in cache]
    tentative = tuple(made_tentative(each) if has else each for has, each in states)
    given = positions([9] * 3, [4, 4, 2], 4)
    logits, held = run(model, tokens[:, 9:13], given, tentative)
    expected, _ = run(model, tokens[:, 9:13], given, cache)
    close(logits[:2], expected[:2])
    kept = [3, 1, 2]
    settle = functools.partial(settled, execution=execution_on())
    after = jax.jit(settle)(held, np.array(kept))
    _, want = run(model, tokens[:, 9:13], positions([9] * 3, kept, 4), cache)
    for (has, before), each, other in zip(states, after, want, strict=True):
        if has:
            assert not any(key.startswith(HELD) for key in each.arrays)
            both = ({n: x for n, x in c.arrays.items() if n not in "kv"} for c in (each, other))
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
                         *both)  # fmt: skip
            first = "state" if "state" in each.arrays else "value"
            assert not np.array_equal(before.arrays[first], each.arrays[first])


@pytest.mark.quick_cases("short_convolution")
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_reach_every_parameter(name):
    definition = define_model(config(name), execution_on())
    parameters = definition.initialize(jax.random.key(0))

    @jax.jit
    @jax.grad
    def gradient(parameters):
        logits = definition.bind(parameters)(ids(2, 12))
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    found = gradient(parameters)
    assert all(jax.tree.leaves(jax.tree.map(lambda x: bool(np.any(np.asarray(x) != 0)), found)))


@pytest.mark.quick_cases("gated_delta")
@pytest.mark.parametrize("name", [*MIXERS, "experts"])
def test_numbers_that_are_not_finite_stay_in_their_row(name):
    """A row's results and states are equal to the bit whatever other rows or padding hold."""
    if name == "experts":
        dense = small_models.dense()
        feed = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)
        block = dataclasses.replace(dense.blocks[0], feed_forward=feed)
        definition = define_model(
            dataclasses.replace(dense, stacks=stacked(block, num_layers=2)), execution_on()
        )
    else:
        definition = define_model(config(name), execution_on())
    parameters = drawn(definition)
    table = parameters["embedding"]["table"].at[62].set(np.inf).at[63].set(np.nan)
    model = definition.bind(parameters | {"embedding": {"table": table}})
    healthy, empty = ids(3, 13) % 62, model.empty_cache(batch=3, num_slots=64)
    _, cache = run(model, healthy[:, :9], positions([0] * 3, [9] * 3, 9), empty)
    healthy = healthy[:, 9:]
    spoilt = healthy.copy()
    spoilt[1, 1], spoilt[2, 2:] = 63, (62, 63)
    at = positions([9] * 3, [4, 4, 2], 4)
    (want, after), (got, spoilt_after) = (run(model, x, at, cache) for x in (healthy, spoilt))
    assert not np.isfinite(got[1, 1:]).any()
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2, :2], want[2, :2])
    arrays = [
        [x for each in cache for x in each.arrays.values()] for cache in (after, spoilt_after)
    ]
    for mine, theirs in zip(*arrays, strict=True):  # [L, B, ...]
        np.testing.assert_array_equal(theirs[:, [0, 2]], mine[:, [0, 2]])


def test_bytes_of_states_are_counted():
    cache = jax.eval_shape(lambda: decoder("gated_delta").empty_cache(batch=3, num_slots=16))
    held = [x for each in cache if isinstance(each, StateCache) for x in each.arrays.values()]
    num_bytes = sum(x.size * x.dtype.itemsize for x in held)
    assert num_bytes == 3 * recurrent_bytes(config("gated_delta"), compute=4) > 0
    assert recurrent_bytes(small_models.dense()) == 0


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        (GatedDeltaConfig, {"num_value_heads": 3}, "num_value_heads=3 is not a multiple"),
        (GatedDeltaConfig, {"rank": 0}, "rank=0"),
        (GatedDeltaConfig, {"conv_width": 0}, "conv_width=0"),
        (StateSpaceConfig, {"norm_heads": 3}, "norm_heads=3 does not divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kind, changes, match):
    with pytest.raises(ConfigError, match=match):
        kind(**({"norm_heads": 1} if kind is StateSpaceConfig else {}) | SIZES | changes)


def test_a_convolution_and_a_block_have_something():
    with pytest.raises(ConfigError, match="head_dim=0"):
        ShortConvolutionConfig(num_heads=2, head_dim=0)
    with pytest.raises(ConfigError, match="without mixer and feed-forward"):
        BlockConfig(mixer=NoMixer(), feed_forward=None)
    with pytest.raises(ConfigError, match="side by side are two"):
        BlockConfig(
            mixer=NoMixer(), feed_forward=MlpConfig(hidden_dim=8), branches=Branches.PARALLEL
        )


def test_a_block_of_one_branch_is_half_of_a_block():
    """x + mixer(norm(x)) and then x + feed_forward(norm(x)), as two blocks or as one."""
    dense = small_models.dense()
    whole = dense.blocks[0]
    pattern = (
        dataclasses.replace(whole, feed_forward=None),
        dataclasses.replace(whole, mixer=NoMixer()),
    )
    apart = dataclasses.replace(dense, stacks=(Stack(pattern=pattern, repeats=2),))
    one, two = (define_model(each, execution_on()) for each in (dense, apart))
    parameters = one.initialize(jax.random.key(0))
    parts = {0: {}, 1: {}}
    for name, value in parameters["blocks"][0].items():
        parts[int(name.startswith("mlp"))][name] = value
    split = parameters | {"blocks": parts}
    np.testing.assert_array_equal(one.bind(parameters)(ids(2, 9)), two.bind(split)(ids(2, 9)))


@pytest.mark.parametrize("name", MIXERS)
def test_adapters_are_beside_each_projection_of_a_name(name):
    """Some layers of a hybrid lack a projection, such as keys, or the mixer itself."""
    hybrid = config(name)
    alone = BlockConfig(mixer=NoMixer(), feed_forward=MlpConfig(hidden_dim=24))
    stacks = (*hybrid.stacks, Stack(pattern=(alone,), repeats=1))
    model = dataclasses.replace(hybrid, stacks=stacks)
    lora = LoraConfig(rank=2, targets=("query", "key", "out", "up"))
    found = by_path(define_model(model, execution_on(), lora=lora).shapes)
    adapted = {path for path in found if "/adapter/" in path}
    assert {path.split("/adapter")[0].split("/")[-1] for path in adapted} == {*lora.targets}
    assert any(path.startswith("blocks/2/mlp/up/adapter") for path in adapted)
    assert sum(path.startswith("blocks/1/attention/key/adapter") for path in adapted) == 2
    with pytest.raises(
        ConfigError, match=r"'kv_up': this model has no such projection; it has .*query"
    ):
        define_model(model, execution_on(), lora=LoraConfig(targets=("kv_up",)))
