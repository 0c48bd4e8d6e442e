"""Functions and layers of a user's own: how configs name them, and what cannot be."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.own import OwnFeedForward, OwnMixer
from jaxinfra.config.parts import find_part, part, part_name
from jaxinfra.config.presets import runs
from jaxinfra.config.run import AttentionImplementation, RunConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hf.config import to_hf_config
from jaxinfra.model.definition import define_model
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import LayerOutput, Pass
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.model import plan_model
from jaxinfra.planning.search import Question, search


@part
def plain_attention(q, k, v, *, mask, distance):
    """Softmax attention written out."""
    del distance
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, where=mask[:, None]), v)


@part
def mean_square_norm(x, epsilon):
    """RMSNorm written out."""
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


class Averaged(nnx.Module):
    """The mean of all positions so far."""

    def __init__(self, config, *, model_dim, std, out_std, execution: Execution, rngs):
        del config, std, out_std, rngs
        self.scale = nnx.Param(jnp.ones(model_dim, execution.policy.param), axes=(None,))

    def __call__(self, x_BTD: jax.Array, given: Pass) -> LayerOutput:
        count_T = jnp.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype)
        mean_BTD = jnp.cumsum(x_BTD, axis=1) / count_T[None, :, None]
        return LayerOutput(x=mean_BTD * self.scale[...][None, None])


@part
@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragedConfig(OwnMixer):
    """A mixer of one setting."""

    strength: float = 1.0

    @property
    def layer(self):
        return Averaged


def with_block(run: RunConfig, **changes) -> RunConfig:
    stack = run.model.stacks[0]
    block = dataclasses.replace(stack.pattern[0], **changes)
    stacks = (dataclasses.replace(stack, pattern=(block,)),)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, stacks=stacks))


@pytest.fixture(scope="module")
def tiny() -> RunConfig:
    run = codec.override(
        runs.tiny(),
        ["model.vocab_size=32", "model.model_dim=16", "model.stacks.0.repeats=1"],
    )
    mixer = dataclasses.replace(run.model.blocks[0].mixer, num_q_heads=4, num_kv_heads=2)
    return with_block(run, mixer=mixer)


def own_attention(run: RunConfig, function) -> RunConfig:
    mixer = dataclasses.replace(run.model.blocks[0].mixer, function=part_name(function))
    return with_block(run, mixer=mixer)


def hidden(run: RunConfig, tokens, **options):
    model = define_model(run.model, execution_on())

    @jax.jit
    def compute(parameters, tokens, options):
        return model.bind(parameters).hidden(tokens, **options)

    return np.asarray(compute(model.initialize(jax.random.key(0)), tokens, options))


TOKENS = np.arange(12, dtype=np.int32).reshape(1, 12) % 7


def test_own_attention_and_norm_compute_what_the_built_in_ones_do(tiny):
    segments = np.array([[0] * 5 + [1] * 7], np.int32)
    own = own_attention(tiny, plain_attention)
    norm = dataclasses.replace(tiny.model.blocks[0].norm, function=part_name(mean_square_norm))
    own = with_block(own, norm=norm)
    expected, found = (hidden(run, TOKENS, segment_ids=segments) for run in (tiny, own))
    # One layer in fp32: sums of at most 384 terms, in another order.
    np.testing.assert_allclose(found, expected, atol=384 * 2**-23)
    assert np.max(np.abs(found - hidden(own, TOKENS))) > 1e-3  # documents are kept apart


def test_own_attention_decodes_over_a_cache(tiny):
    own = own_attention(tiny, plain_attention)
    model = define_model(own.model, execution_on())
    parameters = model.initialize(jax.random.key(0))

    @jax.jit
    def decode(parameters, tokens, positions, cache):
        step = model.bind(parameters).run(tokens, positions=positions, cache=cache)
        return step.x, step.cache

    cache, out = model.bind(parameters).empty_cache(batch=1, num_slots=16), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        positions = np.arange(start, end, dtype=np.int32)[None]
        x, cache = decode(parameters, TOKENS[:, start:end], positions, cache)
        out.append(x)
    np.testing.assert_allclose(np.concatenate(out, axis=1), hidden(own, TOKENS), atol=384 * 2**-23)


def test_a_config_names_its_parts_and_is_read_back(tiny):
    own = with_block(tiny, mixer=AveragedConfig(strength=2.0))
    text = codec.to_dict(own)
    assert text["model"]["stacks"][0]["pattern"][0]["mixer"]["type"].endswith(":AveragedConfig")
    assert codec.from_dict(RunConfig, text) == own
    hidden(own, TOKENS)


def test_another_process_imports_the_module(tmp_path):
    (tmp_path / "lent_parts.py").write_text(
        "import jaxinfra\n\n@jaxinfra.part\ndef marked(x):\n    return x\n\ndef plain(x): pass\n"
    )
    program = (
        "from jaxinfra.config.parts import find_part\n"
        "from jaxinfra.errors import ConfigError\n"
        "assert find_part('lent_parts:marked')(3) == 3\n"
        "for name in ('lent_parts:plain', 'os:system', 'nowhere:x', 'word'):\n"
        "    try:\n        find_part(name)\n"
        "    except ConfigError as error:\n        print(error)\n"
        "    else:\n        raise AssertionError(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("decorate it with @jaxinfra.part") == 2
    assert "PYTHONPATH" in done.stdout


def test_what_cannot_be_named():
    with pytest.raises(ConfigError, match="top of a module"):
        part(lambda x: x)
    with pytest.raises(ConfigError, match="no part"):
        find_part("word")


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        (MeshConfig(context=2), {}, "sees all of it"),
        (MeshConfig(), {"attention": AttentionImplementation.XLA}, "leave training.attention out"),
        (MeshConfig(pipe=2), {"loss": "a:b"}, "built-in cross entropy"),
    ],
    ids=["context", "implementation", "pipeline"],
)
def test_refusals(tiny, mesh, changes, words):
    own = own_attention(tiny, plain_attention)
    training = dataclasses.replace(own.training, **changes)
    with pytest.raises(ConfigError, match=words):
        validate(dataclasses.replace(own, mesh=mesh, training=training))


def test_a_mixer_without_a_cache_says_so(tiny):
    own = with_block(tiny, mixer=AveragedConfig())
    model = define_model(own.model, execution_on())
    decoder = model.bind(model.initialize(jax.random.key(0)))
    with pytest.raises(UnsupportedError, match="no pages of cached tokens"):
        decoder.empty_cache(batch=1, num_slots=16)
    with pytest.raises(UnsupportedError, match="not known to the planner"):
        search(plan_model(own.model), Question(devices=1, length=64, batch=1), find_device("h200"))


def test_nothing_else_can_say_such_a_model(tiny):
    with pytest.raises(ConfigError, match="no Hugging Face architecture"):
        to_hf_config(own_attention(tiny, plain_attention).model)


def test_a_mixer_is_no_feed_forward_layer(tiny):
    values = codec.to_dict(with_block(tiny, mixer=AveragedConfig()))
    block = values["model"]["stacks"][0]["pattern"][0]
    block["feed_forward"] = block["mixer"]
    with pytest.raises(ConfigError, match=OwnFeedForward.__name__):
        codec.from_dict(RunConfig, values)
