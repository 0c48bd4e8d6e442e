"""Several processes that start from another model's weights: the same run as one process."""

import json

import pytest
from chat_model import write_model

from jaxinfra.faults.arena import Arena, metrics, state_sums

TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
STEPS = 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "lora", [(), ("--lora", "rank=2,targets=query+down")], ids=["full", "lora"]
)
def test_two_processes_start_from_the_same_weights_as_one(tmp_path, lora):
    model, text = write_model(tmp_path / "hf"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    options = ["--init", str(model), "--data", str(text), f"--set=data.heldout_source={text}"]
    options += ["--batch-size", "4", "--sequence-length", "64", "--learning-rate", "1e-3", *lora]
    arena = Arena(tmp_path / "runs", options=options, processes=2)
    two, alone = arena.reference(), arena.directory / "alone"
    with arena.start(
        [*arena.settings(), "--run", str(alone)], run="alone", environment=TWO_DEVICES
    ) as job:
        ended = job.end()
    assert ended.code == 0, ended.said
    found = [
        [record["loss"] for record in metrics(run) if "loss" in record] for run in (two, alone)
    ]
    assert len(found[0]) == STEPS
    assert found[0] == found[1], "a sum of two numbers has one rounding"
    assert state_sums(two, STEPS) == state_sums(alone, STEPS)
    assert json.loads((two / "config.json").read_text())["init"]["sha256"]
