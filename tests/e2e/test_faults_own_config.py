"""Faults on a user's own config: what it runs, and what it refuses before it runs."""

import json

import pytest
from e2e.runs import make_text

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.faults import own_config
from jaxinfra.faults.arena import STEPS, metrics

# What follows the faults, the faults, and words of the line.
REFUSALS = {
    "mesh": (
        ["small", "--mesh", "fsdp=2"],
        "1",
        ["--mesh is chosen by", "own mesh"],
    ),
    "steps": (["small", "--steps=40"], "1", ["--steps is chosen by", "12 steps"]),
    "setting": (
        ["--set", "training.steps=3"],
        "1",
        ["training.steps is chosen by"],
    ),
    "same setting": (
        ["--set=sharding.zero=1"],
        "1",
        ["sharding.zero is chosen by"],
    ),
    "run": (["--resume", "runs/a"], "1", ["--resume is chosen by", "--config"]),
    "batch": (["tiny", "--batch-size", "4"], "23", ["faults [23]", "multiple of 8"]),
    "scale": (
        ["tiny", "--policy", "fp16", "--set=precision.loss_scaling=dynamic"],
        "11",
        ["fault 11", "--policy bf16"],
    ),
    "preset": (["tinny"], "1", ["did you mean 'tiny'"]),
    "file": (["--config", "/no/config.json"], "1", ["/no/config.json"]),
    "two": (["tiny", "--config", "/no/config.json"], "1", ["give one of them"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused_before_anything_runs(tmp_path, capsys, case):
    options, fault, words = REFUSALS[case]
    assert main(["faults", "--logs", str(tmp_path / "logs"), fault, "--", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert [word for word in words if word not in line] == [], line
    assert not (tmp_path / "logs").exists()


def test_a_model_too_large_for_this_machine_is_refused(tmp_path, capsys, monkeypatch):
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 99999999 kB\nMemAvailable:      8 kB\n")
    monkeypatch.setattr(own_config, "_MEMORY", memory)
    options = ["tiny", "--set=model.stacks.0.repeats=1"]
    assert main(["faults", "--logs", str(tmp_path / "logs"), "1", "--", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "in 3 copies of the state" in line
    assert "model.stacks.0.repeats=2" in line


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_faults_of_a_config_file(tmp_path, capsys):
    """Edited by hand: another model, two micro-batches, dropout, bf16, a mesh and steps."""
    settings = {
        "model.stacks.0.repeats": 3,
        "model.model_dim": 48,
        "model.dropout_rate": 0.1,
        "model.vocab_size": 300,
        "model.stacks.0.pattern.0.mixer.head_dim": 12,
        "model.stacks.0.pattern.0.feed_forward.hidden_dim": 96,
        "training.accumulation": 2,
        "training.sequence_length": 32,
        "training.steps": 50_000,
        "data.source": make_text(tmp_path / "text"),
        "data.heldout_fraction": 0.2,
        "data.tokenizer.kind": "bytes",
        "precision.policy": "bf16",
        "mesh.fsdp": 64,
        "sharding.zero": 1,
    }
    config = codec.override(
        run_preset("tiny"), [f"{key}={value}" for key, value in settings.items()]
    )
    file, logs = tmp_path / "mine.json", tmp_path / "logs"
    file.write_text(codec.to_json(config))
    words = ["faults", "--jobs", "2", "--json", "--logs", str(logs), "5", "12"]
    assert main([*words, "--", "--config", str(file)]) == 0
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["number"]: one["passed"] for one in verdicts} == {5: True, 12: True}
    trained = json.loads((logs / "f5" / "config.json").read_text())
    assert (trained["model"]["model_dim"], trained["training"]["accumulation"]) == (48, 2)
    assert trained["mesh"]["replica"] == 2
    assert max(one["step"] for one in metrics(logs / "f5")) == STEPS
