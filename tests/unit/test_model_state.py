"""State of a model outside of a run's steps: in model files, in runs that start from them, compared
between devices.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.checkpoint.peft_files import Adapters, MergedParameters
from jaxinfra.config.data import DataConfig
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, ModelConfig, Stack
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.run import RunConfig, TrainingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf import weight_map
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.hashes import StateHash
from jaxinfra.training.describe import placement_table
from jaxinfra.training.job import make_job
from jaxinfra.training.start import first_state, with_frozen
from tests import tally

MODEL = ModelConfig(
    vocab_size=64,
    model_dim=16,
    max_positions=32,
    stacks=(
        Stack(
            pattern=(
                BlockConfig(
                    mixer=GroupedAttentionConfig(
                        num_q_heads=2, num_kv_heads=2, head_dim=4, rope=RopeConfig()
                    ),
                    feed_forward=tally.TallyConfig(hidden_dim=8),
                ),
            ),
            repeats=2,
        ),
    ),
    tie_embeddings=True,
)
RUN = RunConfig(
    model=MODEL,
    data=DataConfig(),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    training=TrainingConfig(steps=1, batch_size=2, sequence_length=8),
)


@pytest.fixture(scope="module")
def arrays():
    """Of every parameter and of the state, random, by path."""
    rng = np.random.default_rng(0)
    return {
        path: jax.numpy.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        for path, leaf in by_path(define_model(MODEL, execution_on()).arrays).items()
    }


@pytest.fixture(scope="module")
def directory(arrays, tmp_path_factory) -> Path:
    """A model with a state, in files."""
    place = tmp_path_factory.mktemp("models")
    write_ours(
        LiveParameters(arrays=arrays),
        define_model(MODEL, execution_on()),
        place / "model",
        hf=None,
        tokenizer_directory=place,
        dtype=None,
        max_shard_bytes=10**9,
    )
    return place / "model"


def assert_equal(tree, arrays) -> None:
    for path, leaf in by_path(tree).items():
        np.testing.assert_array_equal(leaf, arrays[path], err_msg=path)


def test_files_hold_the_state(directory, arrays):
    loaded = load_pretrained(directory)
    assert by_path(loaded.parameters).keys() == arrays.keys()
    assert_equal(loaded.parameters, arrays)
    decoder = loaded.definition.bind(loaded.parameters)
    np.testing.assert_array_equal(decoder.blocks[0].mlp.bias[...], arrays["blocks/0/mlp/bias"])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, targets=("query", "value"))])
def test_a_run_starts_from_a_models_state(directory, arrays, lora):
    init = read_initial(directory).init
    job = with_frozen(make_job(dataclasses.replace(RUN, init=init, lora=lora)))
    state = first_state(job)
    assert by_path(state.model_state).keys() == {
        f"blocks/0/mlp/{name}" for name in ("bias", "history")
    }
    assert_equal(state.model_state, arrays)
    if lora is None:
        assert_equal(state.parameters, arrays)


def test_adapters_are_exported_with_the_state_they_were_trained_with(arrays):
    """Not with that of the model that they adapt."""
    after = {"blocks/0/mlp/bias": arrays["blocks/0/mlp/bias"] + 1.0}
    source = MergedParameters(
        base=LiveParameters(arrays=arrays),
        adapters=Adapters(lora=LoraConfig(), arrays={}),
        state=LiveParameters(arrays=after),
    )
    whole = (slice(0, 2), slice(0, 4))
    for path, expected in (*after.items(), ("blocks/0/mlp/gain", arrays["blocks/0/mlp/gain"])):
        np.testing.assert_array_equal(source.read(path, whole), expected)


def test_an_architecture_without_a_place_for_the_state_is_refused():
    model = define_model(MODEL, execution_on())
    with pytest.raises(ConfigError, match="a llama checkpoint has no tensor for"):
        weight_map("llama", MODEL, model.arrays)


def test_copies_of_the_state_are_compared():
    mesh = MeshConfig(replica=2)
    job = make_job(dataclasses.replace(RUN, mesh=mesh), devices=jax.devices()[:2])
    abstract = job.abstract_state()
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract
    )
    guard = StateHash(abstract)
    assert guard.compare(np.asarray(guard(state))) == []
    bias = state.model_state["blocks"][0]["mlp"]["bias"]
    parts = [np.array(shard.data) for shard in bias.addressable_shards]
    parts[1].reshape(-1).view(np.uint32)[3] ^= 1 << 20
    placed = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, bias.addressable_shards, strict=True)
    ]
    state.model_state["blocks"][0]["mlp"]["bias"] = jax.make_array_from_single_device_arrays(
        bias.shape, bias.sharding, placed
    )
    (found,) = guard.compare(np.asarray(guard(state)))
    assert found.tensor == "model_state/blocks/0/mlp/bias"
    table = placement_table(job)
    assert [line for line in table.splitlines() if "mlp/bias" in line and "changed by rule" in line]
