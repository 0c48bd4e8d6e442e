"""Every reader of a run accepts the same runs, and a finished run is looked at before it counts."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from e2e.damages import ACCEPTED, LOGS, REFUSED, cut, flip, of_steps
from e2e.runs import STEPS, assert_same_run, checkpoints, metrics
from tokenizers import models

from jaxinfra.cli.main import main
from jaxinfra.errors import JaxinfraError
from jaxinfra.serving.load import load_model


def readers(run: Path, place: Path, cache: Path) -> dict[str, bool]:
    """Who accepts a run. Resuming goes last: it mends."""
    where = ["--cache", str(cache)]
    commands = {
        "evaluate": ["evaluate", str(run), *where],
        "convert": ["convert", str(run), str(place / "out")],
        "generate": ["generate", str(run), "--prompt", "the", "--max-new-tokens", "2"],
    }
    found = {name: main(words) == 0 for name, words in commands.items()}
    try:
        load_model(run)
        found["load_model"] = True
    except JaxinfraError:
        found["load_model"] = False
    found["resume"] = main(["train", "--resume", str(run), "--no-sample", *where]) == 0
    return found


_FAST = ("another angle of rotation", "another token")


def rarely(names, *, often=()):
    return [each if each in often else pytest.param(each, marks=pytest.mark.slow) for each in names]


@pytest.mark.parametrize("damage", rarely((*REFUSED, *ACCEPTED), often=_FAST))
def test_readers_agree(bench, whole, tmp_path, capsys, damage):
    run = shutil.copytree(whole, tmp_path / "run")
    (REFUSED | ACCEPTED)[damage](run)
    found = readers(run, tmp_path, bench.cache)
    said = capsys.readouterr().err
    assert set(found.values()) == {damage in ACCEPTED}, (found, said)
    assert "Traceback" not in said


@pytest.mark.parametrize("damage", rarely(LOGS))
def test_what_is_only_a_log_stops_no_run(bench, whole, tmp_path, capsys, damage):
    """It has a step left to do, and writes all of them; what was no log is kept beside them."""
    run = shutil.copytree(whole, tmp_path / "run")
    ACCEPTED[damage](run)
    settings = ["--steps", str(STEPS + 1), "--no-sample", "--cache", str(bench.cache)]
    assert main(["train", "--resume", str(run), *settings]) == 0, capsys.readouterr().err
    assert metrics(run)[-1]["step"] == STEPS + 1
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS + 1
    assert (run / "loss.png").is_file()
    assert (run / "tensorboard").is_dir()


REMEDIED = {
    "newest flipped": of_steps(flip, STEPS),
    "newest cut": of_steps(cut, STEPS),
    "newest without its manifest": of_steps(lambda each: (each / "manifest.json").unlink(), STEPS),
}


@pytest.mark.slow  # a run more each; `test_causes.py` has what it finds and says
@pytest.mark.parametrize("damage", REMEDIED)
def test_a_remedy_of_doctor_is_one(bench, whole, tmp_path, capsys, damage):
    """The command that it names makes the run what it was, or sets aside what it said it would."""
    run = shutil.copytree(whole, tmp_path / "a run")
    REMEDIED[damage](run)
    assert main(["doctor", "checkpoint", str(run)]) == 1
    (command,) = re.findall(r"jaxinfra (train --resume .+)", capsys.readouterr().out)
    ended = bench.run([*shlex.split(command), "--no-sample", "--cache", bench.cache])
    assert ended.code == 0, ended
    assert "checkpoint set aside" in ended.stderr
    assert main(["doctor", "checkpoint", str(run)]) == 0
    assert_same_run(run, whole)


def test_doctor_says_what_nothing_needs(whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "a run")
    oldest, *_, newest = checkpoints(run)
    of_steps(flip, oldest)(run)
    assert main(["doctor", "checkpoint", str(run)]) == 1
    said = capsys.readouterr().out
    assert "jaxinfra train" not in said, f"step {newest} is good, and what --resume goes on from"
    (words,) = re.findall(r"rm -r (.*)", said)
    for path in shlex.split(words):
        shutil.rmtree(path)
    assert main(["doctor", "checkpoint", str(run)]) == 0
    assert checkpoints(run)[-1] == newest


def test_no_remedy_is_named_where_there_is_none(bench, whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    of_steps(flip)(run)
    assert main(["doctor", "checkpoint", str(run)]) == 1
    assert "jaxinfra train" not in capsys.readouterr().out


@pytest.mark.slow  # compiles a step for eight devices; `test_config.py` has what is said
def test_an_edit_that_is_allowed_is_said(bench, whole, tmp_path, capsys, caplog):
    """And the run goes on with it, on a mesh of eight devices."""
    run = shutil.copytree(whole, tmp_path / "run")
    ACCEPTED["another learning rate"](run)
    load_model(run)
    assert "settings changed since it was saved: optimizer.learning_rate" in caplog.text
    settings = ["--steps", str(STEPS + 1), "--no-sample", "--cache", str(bench.cache)]
    assert main(["train", "--resume", str(run), *settings, "--mesh", "fsdp=4,tensor=2"]) == 0
    assert json.loads((run / "config.json").read_text())["mesh"]["fsdp"] == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer.learning_rate: saved 0.004, now 0.002" in said
    assert f"training.steps: saved {STEPS}, now {STEPS + 1}" in said
    assert checkpoints(run)[-1] == metrics(run)[-1]["step"] == STEPS + 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, capsys, value):
    """By every command, before anything is written; and looked at where that is asked for."""
    from safetensors.numpy import load_file, save_file

    golden = Path(__file__).parents[1] / "golden" / "hf" / "qwen3"
    model = shutil.copytree(golden, tmp_path / "model")
    (file, *_) = sorted(model.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][0] = value
    save_file(tensors, file)
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.save(str(model / "tokenizer.json"))
    for words in (
        ["generate", str(model), "--prompt", "a", "--max-new-tokens", "1"],
        ["convert", str(model), str(tmp_path / "out")],
        ["evaluate", str(model)],
    ):
        assert main(words) == 1, words
        assert "not finite" in capsys.readouterr().err, words
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(model), str(tmp_path / "out"), "--allow-nonfinite"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["format"] == "jaxinfra"
