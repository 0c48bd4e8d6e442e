"""Configs in TOML, YAML and JSON: whole, and as changes to a preset."""

import json
import sys
import types

import pytest

import jaxinfra
from jaxinfra.config import codec
from jaxinfra.errors import ConfigError

TOML = """
preset = "tiny"
[training]
steps = 60
[model]
tie_embeddings = false
stacks.0.repeats = 3
[model.stacks.0.pattern.0]
feed_forward = {type = "ExpertsConfig", num_experts = 4, top_k = 2, hidden_dim = 8}
[optimizer]
muon = "none"
"""
YAML = """
preset: tiny
training: {steps: 60}
model:
  tie_embeddings: false
  stacks:
    0:
      repeats: 3
      pattern:
        0:
          feed_forward: {type: ExpertsConfig, num_experts: 4, top_k: 2, hidden_dim: 8}
optimizer:
  muon: null
"""


def read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return jaxinfra.read_run_config(tmp_path / name)


def test_all_three_say_the_same(tmp_path):
    toml, yml = read(tmp_path, "a.toml", TOML), read(tmp_path, "a.yaml", YAML)
    assert toml == yml
    assert (toml.training.steps, toml.model.num_layers, toml.optimizer.muon) == (60, 3, None)
    assert toml.training.batch_size == jaxinfra.preset("tiny").training.batch_size
    assert toml.model.blocks[0].feed_forward.num_experts == 4
    assert read(tmp_path, "a.json", codec.to_json(toml)) == toml


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", 'preset = "tiny"\n[training]\nstep = 3', "training.step; did you mean 'steps'"),
        ("a.toml", 'preset = "tinny"', "did you mean 'tiny'"),
        ("a.toml", "preset = 3", "must be a preset's name"),
        ("a.toml", 'preset = "tiny"\ntraining.steps = "many"', "expected int"),
        ("a.toml", 'preset = "tiny"\nmodel.stacks.1.repeats = 2', "entries 0 to 0"),
        ("a.toml", "preset = ", "a.toml"),
        ("a.yaml", "preset: tiny\ntraining: {steps: 3, steps: 4}", "given twice"),
        ("a.yaml", "preset: tiny\nx: &a [1]\ny: *a", "aliases"),
        ("a.yaml", "- 1", "is no"),
        ("a.ini", "x", "unknown kind of file"),
        ("a.json", json.dumps({"training": {}}), "begin it with a preset"),
    ],
    ids=[
        *("typo", "preset", "kind", "type", "entry", "syntax", "twice", "alias", "list", "suffix"),
        "incomplete",
    ],
)
def test_refusals(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, name, text)


class Fake(types.ModuleType):
    """Stands for wandb and mlflow: notes calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        self.summary = {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_adapters(monkeypatch, tmp_path, name):
    kind = {"wandb": jaxinfra.WandbLogger, "mlflow": jaxinfra.MlflowLogger}[name]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        kind()
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    logger = kind()
    logger.on_begin(tmp_path / "run-7", jaxinfra.preset("tiny"))
    logger.on_step({"step": 3, "loss": 1.5, "samples": [0, 7], "heldout": None})
    logger.on_evaluation({"step": 3, "heldout_loss": 1.25})
    logger.on_end({"steps": 3})
    assert "run-7" in str(fake.calls[0])
    logged = [call for call in fake.calls if call[0] in ("log", "log_metrics")]
    assert [call[1][0] for call in logged] == [{"loss": 1.5}, {"heldout_loss": 1.25}]
    assert [call[2]["step"] for call in logged] == [3, 3]


def test_tensorboard(tmp_path):
    logger = jaxinfra.TensorBoardLogger(tmp_path)
    logger.on_step({"step": 1, "loss": 2.0})
    logger.on_end(None)
    (events,) = tmp_path.glob("events*")
    assert b"loss" in events.read_bytes()


def test_presets_are_listed_with_their_sizes():
    found = {each.name: each for part in ("3_8b", "a3b") for each in jaxinfra.presets(part)}
    assert found.keys() == {"llama3_8b", "qwen3_8b", "qwen3_30b_a3b"}
    assert found["llama3_8b"].parameters == 8_030_261_248
    assert 3.2e9 < found["qwen3_30b_a3b"].active_parameters < 3.4e9
    assert all(each.purpose for each in found.values())


def test_public_names_are_what_they_say():
    for name in jaxinfra.__all__:
        assert getattr(jaxinfra, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        jaxinfra.trane  # noqa: B018


def test_a_config_of_hugging_face_is_named_as_such(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    with pytest.raises(ConfigError, match=f"of a Hugging Face model.*--init {tmp_path}"):
        jaxinfra.read_run_config(tmp_path / "config.json")
