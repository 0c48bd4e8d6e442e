"""Experiments to copy run as they stand, at tiny size; the programs of the documentation too."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "experiments" / "examples"
SMALL = [
    "model.vocab_size=300",
    "model.model_dim=16",
    "model.stacks.0.repeats=2",
    "model.stacks.0.pattern.0.mixer.head_dim=4",
    "model.stacks.0.pattern.0.feed_forward.hidden_dim=32",
    "training.batch_size=2",
    "data.tokenizer.kind=bytes",
    "data.heldout_fraction=0.3",
]
FIGURES = {
    "ablation": (["--steps", "2"], ["full: held-out loss", "windowed: held-out loss"]),
    "learning_rate": (["--steps", "2", "--rates", "1e-3", "1e-2"], ["lowest held-out loss at"]),
    "new_layer": (["--steps", "2"], ["attention: held-out", "decay: held-out"]),
    "preferences": (["--steps", "20", "--rate", "1e-2"], ["dpo: 1.00", "simpo: 1.00", "orpo: "]),
    "long_context": (["--steps", "2", "--length", "64"], ["one: final loss", "difference"]),
    "fine_tune": (["--steps", "4"], ["before", "after"]),
    "mixture": (["--steps", "24"], ["tiny_moe: ", "times the mean load"]),
}


def run(module: str, *words: object, place: Path, devices: int = 1) -> str:
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    env |= {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"experiments.examples.{module}", *map(str, words)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def texts(tmp_path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    for number in range(8):
        (place / f"{number}.txt").write_text(f"{number} the cat sat on the mat. " * (20 + number))
    return place


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_an_experiment_is_a_page(path):
    lines = path.read_text().splitlines()
    limit = 40 if path.stem == "own_parts" else 60
    assert len(lines) <= limit
    assert path.stem == "own_parts" or "What to conclude" in " ".join(path.read_text().split())
    assert path.stem in (ROOT / "docs" / "experiments.md").read_text()


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_an_experiment_has_a_page(path):
    """Short, with what was printed and a picture; the lines it quotes are the script's."""
    page = (ROOT / "docs" / "experiments" / f"{path.stem}.md").read_text()
    results = ROOT / "experiments" / "results" / "example-experiments-cpu.json"
    measured = json.loads(results.read_text())["experiments"][path.stem]
    assert len(page.splitlines()) <= 60
    assert f"```\n{measured['command']}\n" in page
    assert f"```text\n{measured['printed']}\n```" in page
    assert f"]({path.stem}.png)" in page
    code = path.read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert all(line.strip() in code for line in block.splitlines())


def test_the_example_s_profile_is_explained(monkeypatch, capsys):
    """Pure arithmetic, which needs no process of its own."""
    monkeypatch.setattr(sys, "argv", ["explain_profile"])
    runpy.run_module("experiments.examples.explain_profile", run_name="__main__")
    assert "tensor: 8.17 ms exposed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_an_experiment_runs(name, texts, tmp_path):
    options, words = FIGURES[name]
    settings = [f"--set={each}" for each in (*SMALL, f"data.source={texts}")]
    if name in ("ablation", "new_layer", "learning_rate"):
        settings.append("--set=training.sequence_length=32")
    if name == "mixture":
        settings.append("--set=optimizer.warmup_steps=1")
    if name == "preferences":
        settings += ["--set=training.steps=4", "--set=optimizer.warmup_steps=1"]
    devices = 4 if name == "long_context" else 1
    said = run(name, *options, "--out", "out", *settings, place=tmp_path, devices=devices)
    assert all(each in said for each in words), said
    if name == "long_context":  # sums of another order, in fp32
        assert float(said.split()[-1]) < 1e-4
    pictures = {"ablation": "ablation.png", "learning_rate": "rates.png"}
    assert name not in pictures or (tmp_path / "out" / pictures[name]).stat().st_size > 10_000


@pytest.mark.slow
def test_a_model_learns_a_rule_from_its_reward_alone(tmp_path):
    words = ("--seeds", "1", "--steps", "60", "--out", "out")
    said = run("reinforcement", *words, place=tmp_path).splitlines()[-1]
    found = re.fullmatch(r"seed 1: reward ([\d.]+) -> ([\d.]+)", said)
    assert found, said
    assert float(found[1]) < 0.2
    assert float(found[2]) > 0.9


@pytest.mark.slow
def test_a_plan_says_how_many_gpus(tmp_path):
    said = run("planning", "--days", "7", "--devices", "8", "64", place=tmp_path)
    assert "64 GPUs suffice" in said


@pytest.mark.slow
def test_own_training_killed_and_run_again_is_the_same(tmp_path):
    """To the last bit; the second go begins with the checkpoint that the killed one has left."""
    toml = SCRIPTS / "own_training.toml"
    words = ("own_training", toml, tmp_path / "whole", tmp_path / "out-whole")
    told = run(*words, place=tmp_path, devices=8)
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    killed = [tmp_path / "killed", tmp_path / "out-killed"]
    command = [sys.executable, "-m", "experiments.examples.own_training", toml, *killed]
    job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    while job.poll() is None and not (killed[0] / "checkpoints" / "step_00000020").is_dir():
        time.sleep(0.01)
    job.kill()
    assert job.wait() != 0, "it was done before it was killed"
    again = run("own_training", toml, *killed, "again", place=tmp_path, devices=8)
    assert "resumed at step" in again
    assert again.splitlines()[-1] == told.splitlines()[-1]
    files = [path / "model.safetensors" for path in (words[3], killed[1])]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_own_model_loss_and_attention_train_on_eight_devices(texts, tmp_path):
    """In forty lines, with checkpoints and a resumption; another command then reads the run."""
    said = run("own_parts", texts, tmp_path / "run", place=tmp_path)
    assert "resumed at step 25" in said
    assert "fsdp=4, tensor=2" in said
    assert (tmp_path / "run" / "checkpoints").is_dir()
    where = str(tmp_path / "run")
    code = f"import jaxinfra; print(jaxinfra.generate({where!r}, ['the '], max_new_tokens=3))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "GeneratedText(prompt='the '" in done.stdout
