"""Loading a run, and the errors of people who name something else; the command line on top."""

import argparse
import dataclasses
import io
import json
import logging
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfra
from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.cli.generate import add_arguments, run
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import CheckpointConfig, RunConfig, TrainingConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import CheckpointError, ConfigError, DataError
from jaxinfra.serving.load import load_run
from jaxinfra.training.job import make_job
from tests.small_models import dense

MODEL = dense(vocab_size=260, model_dim=16, heads=(2, 1), hidden_dim=24)
RUN = RunConfig(
    model=MODEL,
    data=DataConfig(tokenizer=TokenizerConfig(kind=TokenizerKind.BYTES)),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
    training=TrainingConfig(steps=4, batch_size=1, sequence_length=16),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with steps 2 and 4, and the states in them."""
    path = tmp_path_factory.mktemp("runs") / "tiny-1"
    path.mkdir()
    (path / "config.json").write_text(codec.to_json(RUN))
    bytes_tokenizer().save(path / "tokenizer.json")
    first = make_job(RUN).initialize()
    second = dataclasses.replace(
        first, parameters=jax.tree.map(lambda x: x + 1.0, first.parameters)
    )
    identity = {"model": codec.to_dict(MODEL)}
    with Checkpointer(path / "checkpoints", CheckpointConfig(), identity=identity) as saver:
        saver.save(2, first, data_state={})
        saver.save(4, second, data_state={})
    return path, {2: first, 4: second}


@pytest.fixture
def run_copy(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copy")


def flip_a_bit(checkpoint):
    largest = max((checkpoint / "arrays").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_load_run_reads_the_newest_checkpoint(saved):
    path, states = saved
    loaded = load_run(path)
    assert (loaded.step, loaded.config) == (4, RUN)
    assert loaded.tokenizer.fingerprint == bytes_tokenizer().fingerprint
    chex.assert_trees_all_equal(loaded.parameters, states[4].parameters, strict=True)
    earlier = load_run(path, step=2)
    assert earlier.step == 2
    chex.assert_trees_all_equal(earlier.parameters, states[2].parameters, strict=True)


def test_load_model_maps_ids_to_float32_logits(saved):
    path, states = saved
    ids = jnp.arange(10).reshape(2, 5)
    want = make_job(RUN).model.bind(states[4].parameters)(ids)
    model = jaxinfra.load_model(str(path))
    logits = model(ids)
    assert (logits.shape, logits.dtype) == ((2, 5, 260), jnp.float32)
    np.testing.assert_array_equal(logits, want)
    half = jaxinfra.load_model(path, dtype="bfloat16")
    assert half.hidden(ids).dtype == jnp.bfloat16
    assert half(ids).dtype == jnp.float32


def test_the_policy_is_the_trained_one_unless_named(run_copy):
    values = codec.to_dict(RUN)
    values["precision"]["policy"] = "bf16"
    (run_copy / "config.json").write_text(json.dumps(values))
    assert load_run(run_copy).decoder.execution.policy.compute == jnp.bfloat16
    loaded = load_run(run_copy, policy=PolicyName.FP32)
    assert loaded.decoder.execution.policy.compute == jnp.float32


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_copy, saved, caplog):
    flip_a_bit(run_copy / "checkpoints" / "step_00000004")
    with caplog.at_level(logging.WARNING):
        loaded = load_run(run_copy)
    assert loaded.step == 2
    chex.assert_trees_all_equal(loaded.parameters, saved[1][2].parameters, strict=True)
    assert "step 4" in caplog.text
    assert (run_copy / "checkpoints" / "step_00000004").is_dir(), "readers move nothing"


def write_config(change):
    def spoil(run):
        values = codec.to_dict(RUN)
        change(values)
        (run / "config.json").write_text(json.dumps(values))

    return spoil


def damage_all(run):
    for checkpoint in (run / "checkpoints").glob("step_*"):
        flip_a_bit(checkpoint)


def rewritten(name: str, text: str):
    return lambda run: (run / name).write_text(text)


def removed(pattern: str):
    def spoil(run):
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


SPOILED = {
    "no_directory": (shutil.rmtree, ConfigError, "it does not exist; name one that"),
    "no_config": (removed("config.json"), ConfigError, "has no config.json"),
    "half_a_config": (rewritten("config.json", '{"mo'), ConfigError, "not JSON"),
    "list": (rewritten("config.json", "[1]"), ConfigError, "is no object"),
    "hf": (rewritten("config.json", '{"model_type": "llama"}'), ConfigError, "Hugging Face"),
    "no_model": (write_config(lambda run: run.pop("model")), ConfigError, "'model' is missing"),
    "no_init": (
        write_config(lambda run: run.update(lora={"rank": 2})),
        ConfigError,
        "lora without init",
    ),
    "unknown_key": (
        write_config(lambda run: run["training"].update(bach=1)),
        ConfigError,
        "config.json is no config of this version: .*bach",
    ),
    "no_tokenizer": (removed("tokenizer.json"), ConfigError, "has no tokenizer.json"),
    "other_json": (rewritten("tokenizer.json", "{}"), DataError, "not a tokenizer"),
    "no_checkpoints": (removed("checkpoints"), CheckpointError, "has no checkpoints/"),
    "empty_checkpoints": (removed("checkpoints/step_*"), CheckpointError, "no checkpoint in"),
    "all_damaged": (damage_all, CheckpointError, "no good checkpoint in"),
    "another_model": (
        write_config(lambda run: run["model"].update(model_dim=32)),
        CheckpointError,
        "model.model_dim: saved 16, now 32",
    ),
}


@pytest.mark.parametrize(("spoil", "error", "message"), SPOILED.values(), ids=list(SPOILED))
def test_what_is_not_a_whole_run_is_refused_in_one_line(run_copy, spoil, error, message):
    spoil(run_copy)
    with pytest.raises(error, match=message) as caught:
        load_run(run_copy)
    assert "\n" not in str(caught.value)


def test_a_step_or_dtype_that_is_not_there(saved):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3.*2, 4"):
        load_run(saved[0], step=3)
    with pytest.raises(ConfigError, match="unknown dtype 'float61'; did you mean 'float16'"):
        jaxinfra.load_model(saved[0], dtype="float61")


def test_import_is_cheap():
    code = "import sys, jaxinfra; assert 'load_model' in dir(jaxinfra); print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
    with pytest.raises(AttributeError, match="lode_model"):
        _ = jaxinfra.lode_model


def generate(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


def test_command_streams_text_and_says_how_fast(saved, capsys, monkeypatch):
    options = ("--max-new-tokens", 12, "--top-k", 20, "--top-p", 0.9, "--seed", 5)
    assert generate(saved[0], "--prompt", "def f", *options) == 0
    shown = capsys.readouterr()
    assert "tokens of step 4: the first after" in shown.err
    assert "tokens/s" in shown.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f")))
    assert generate(saved[0], "--prompt", "-", *options, "--policy", "fp32") == 0
    assert capsys.readouterr().out == shown.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", -1), "temperature=-1.0"),
        (("--top-p", 2), "top_p=2.0"),
        (("--max-new-tokens", 0), "max_new_tokens=0"),
        (("--step", 7), "no checkpoint of step 7"),
    ],
)
def test_command_refuses(saved, options, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        generate(saved[0], "--prompt", "x", *options)
