"""The form that serving runs computes what the model computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ExpertsConfig, MlpConfig, Stack
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import (
    can_pack,
    serving_form,
    serving_parameters,
    with_read_weights,
)
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.load import LoadedModel, serving_placement
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from tests.decoder_oracle import attention, drawn, model, oracle
from tests.generation import served
from tests.tolerance import assert_within_rounding

GATED = MlpConfig(kind=MlpKind.SWIGLU, hidden_dim=24, bias=True)
# Two stacks, one of two blocks, with all that is packed, and what is not.
_PATTERN = model(attention(window=5, qkv_bias=True), attention(num_kv_heads=1))
CONFIG = dataclasses.replace(
    _PATTERN,
    stacks=(
        Stack(pattern=(dataclasses.replace(_PATTERN.blocks[0], feed_forward=GATED),), repeats=3),
        Stack(pattern=_PATTERN.stacks[0].pattern, repeats=2),
    ),
)
PROMPTS = ((5,) * 3, tuple(range(1, 24)))


@pytest.fixture(scope="module")
def forms():
    definition = define_model(CONFIG, execution_on())
    parameters = drawn(definition)
    served = serving_form(definition, execution_on(decode_form=DecodeForm(packed=True)))
    return definition, parameters, served


def test_what_is_not_packed_is_not_copied(forms):
    definition, parameters, served = forms
    given, arrays = by_path(parameters), by_path(serving_parameters(served, parameters))
    assert {path: x.shape for path, x in arrays.items()} == {
        path: x.shape for path, x in by_path(served.arrays).items()
    }
    assert sum(x.size for x in arrays.values()) == definition.num_parameters
    assert arrays["blocks/0/attention/packed/weight"].shape[0] == 3
    for path, x in arrays.items():
        assert x is given.get(path) or "/packed/" in path


def test_what_was_packed_is_freed(forms):
    """The same values; of what was given that is left which is used as it is."""
    _, parameters, served = forms
    want = by_path(serving_parameters(served, parameters))
    given = jax.tree.map(jnp.copy, parameters)
    got = by_path(serving_parameters(served, given, consumes=True))
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value)
    for path, value in by_path(given).items():
        assert value.is_deleted() == (path not in want), path


def test_weights_in_fp32_are_rounded_once():
    """Serving a run that trained in bf16 gives the logits of training, to the last bit: weights are
    rounded to bf16 when they are read, as training rounds them at each product."""
    dense = _PATTERN.blocks[1]
    routed = dataclasses.replace(
        dense, feed_forward=ExpertsConfig(hidden_dim=8, num_experts=4, top_k=2)
    )
    config = dataclasses.replace(_PATTERN, stacks=(Stack(pattern=(dense, routed), repeats=1),))
    policy = POLICIES[PolicyName.BF16]
    definition = define_model(config, execution_on(policy=policy))
    parameters = drawn(definition)
    read = with_read_weights(definition, parameters)
    kept = {path.split("/")[-2] for path, x in by_path(read).items() if x.dtype == jnp.float32}
    assert {name for name in kept if not name.endswith("norm")} == {"router"}
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 8)).astype(np.int32)
    np.testing.assert_array_equal(*(definition.bind(each)(ids) for each in (parameters, read)))
    execution = execution_on(policy=policy, decode_form=DecodeForm(packed=True))
    packed = by_path(serving_parameters(serving_form(definition, execution), parameters))
    assert packed["blocks/0/attention/packed/weight"].dtype == jnp.bfloat16


def test_logits_are_within_rounding(forms):
    _, parameters, served = forms
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    decoder = served.bind(serving_parameters(served, parameters))
    assert_within_rounding(jax.jit(decoder)(ids), oracle(parameters, CONFIG, ids))


@pytest.fixture(scope="module")
def decoders(forms):
    definition, parameters, _ = forms
    loaded = LoadedModel(
        definition=definition,
        parameters=parameters,
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
    )
    return loaded.decoder, loaded.serving_decoder(is_unrolled=True)


@pytest.mark.slow_cases("drawn", "greedy")
@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(top_k=5)], ids=["greedy", "drawn"])
def test_generation_is_the_same(decoders, sampling):
    plain, form = (
        [(t.row, t.token) for t in served(each, PROMPTS, max_new_tokens=8, sampling=sampling)]
        for each in decoders
    )
    assert plain == form


def test_what_cannot_be_packed_is_refused():
    adapted = define_model(CONFIG, execution_on(), lora=LoraConfig(rank=2, targets=("query",)))
    with pytest.raises(UnsupportedError, match="adapters"):
        serving_form(adapted, execution_on(decode_form=DecodeForm(packed=True)))
    even = dataclasses.replace(CONFIG, vocab_size=32)
    placement = serving_placement(even, MeshConfig(tensor=2))  # one key head for two devices
    spread = define_model(even, execution_on(placement))
    assert not can_pack(spread.shapes, even, spread.execution.place)


def test_each_device_packs_its_own_columns():
    pattern = model(attention(qkv_bias=True))
    block = dataclasses.replace(pattern.blocks[0], feed_forward=GATED)
    config = dataclasses.replace(
        pattern, vocab_size=32, stacks=(Stack(pattern=(block,), repeats=3),)
    )
    placement = serving_placement(config, MeshConfig(tensor=2))
    definition = define_model(config, execution_on(placement))
    parameters = jax.device_put(drawn(definition), placement.parameters(definition))
    assert can_pack(parameters, config, definition.execution.place)
    form = serving_form(definition, execution_on(placement, decode_form=DecodeForm(packed=True)))
    packed = serving_parameters(form, parameters)
    arrays = by_path(packed)
    assert {path: x.sharding for path, x in arrays.items()} == by_path(placement.parameters(form))
    for path, axis, names in (
        ("attention/packed/bias", 1, ("query", "key", "value")),
        ("mlp/packed/weight", 2, ("gate", "up")),
    ):
        layer, _, leaf = path.split("/")
        parts = [by_path(parameters)[f"blocks/0/{layer}/{name}/{leaf}"] for name in names]
        for i, shard in enumerate(arrays[f"blocks/0/{path}"].addressable_shards):
            own = [part.addressable_shards[i].data for part in parts]
            np.testing.assert_array_equal(shard.data, jnp.concatenate(own, axis=axis))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16)).astype(np.int32)
    logits = jax.jit(form.bind(packed))(ids)
    assert_within_rounding(logits, oracle(drawn(definition), config, ids))
