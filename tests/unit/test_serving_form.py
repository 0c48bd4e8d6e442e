"""The form that serving runs computes what the model computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import MlpConfig, Stack
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
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
    placement = serving_placement(model(attention(), vocab_size=32), MeshConfig(tensor=2))
    with pytest.raises(UnsupportedError, match="packed projections over 2 devices"):
        execution_on(placement, decode_form=DecodeForm(packed=True))
