"""Every reader of a run accepts the same runs, and a finished run is looked at before it counts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from e2e.runs import STEPS, assert_same_run, checkpoints

from jaxinfra.cli.main import main
from jaxinfra.core.errors import JaxinfraError
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.serving.load import load_model


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return change


def flip(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run / name).write_bytes(data)

    return change


def append(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + data)


def damage_steps(*steps: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for step in steps:
            files = (run / "checkpoints" / f"step_{step:08d}" / "arrays").rglob("*")
            largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
            data = bytearray(largest.read_bytes())
            data[len(data) // 2] ^= 1
            largest.write_bytes(data)

    return change


def whole_run_edits(run: Path) -> None:
    """What a person may change."""
    edit("config.json", '"learning_rate": 0.004', '"learning_rate": 0.002')(run)


REFUSED = {
    "another angle of rotation": edit("config.json", '"theta": 10000.0', '"theta": 11000.0'),
    "another norm's epsilon": edit("config.json", '"epsilon": 1e-05', '"epsilon": 1e-06'),
    "another token": edit("tokenizer.json", '"a"', '"\\u00e4"'),
    "no tokenizer": lambda run: (run / "tokenizer.json").unlink(),
    "config a list": lambda run: (run / "config.json").write_text("[]"),
    "config null": lambda run: (run / "config.json").write_text("null"),
    "config cut": lambda run: (run / "config.json").write_text('{"model": '),
    "config twice": edit("config.json", "{", '{"model": {}, '),
    "all checkpoints damaged": lambda run: damage_steps(*checkpoints(run))(run),
    "no checkpoints' manifests": lambda run: [
        path.unlink() for path in (run / "checkpoints").glob("*/manifest.json")
    ],
}
ACCEPTED = {
    "nothing": lambda run: None,
    "summary cut": lambda run: (run / "summary.json").write_text("{"),
    "summary a list": lambda run: (run / "summary.json").write_text("[]"),
    "metrics end in a stray byte": append("metrics.jsonl", b"\xff"),
    "metrics with a spoilt line": edit("metrics.jsonl", "\n", "\nnull\n"),
    "incidents spoilt": lambda run: (run / "incidents.jsonl").write_bytes(b"\xff\n[]\n"),
    "goodput spoilt": lambda run: (run / "goodput.jsonl").write_text("[]\n{}\n"),
    "newest checkpoint damaged": damage_steps(STEPS),
    "another learning rate": whole_run_edits,
}


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


_FAST = ("another angle of rotation", "another token", "metrics end in a stray byte")


@pytest.mark.parametrize(
    "damage",
    [
        damage if damage in _FAST else pytest.param(damage, marks=pytest.mark.slow)
        for damage in (*REFUSED, *ACCEPTED)
    ],
)
def test_readers_agree(bench, whole, tmp_path, capsys, damage):
    run = shutil.copytree(whole, tmp_path / "run")
    (REFUSED | ACCEPTED)[damage](run)
    found = readers(run, tmp_path, bench.cache)
    said = capsys.readouterr().err
    assert set(found.values()) == {damage in ACCEPTED}, (found, said)
    assert "Traceback" not in said


def test_a_finished_run_is_made_good_again(bench, whole, tmp_path, capsys):
    """As doctor says: it names the command, and the command does it."""
    run = shutil.copytree(whole, tmp_path / "run")
    damage_steps(STEPS)(run)
    assert main(["doctor", "checkpoint", str(run)]) == 1
    (command,) = re.findall(r"jaxinfra (train --resume \S+)", capsys.readouterr().out)
    ended = bench.run([*command.split(), "--no-sample", "--cache", bench.cache])
    assert ended.code == 0, ended
    assert "checkpoint set aside" in ended.stderr
    assert main(["doctor", "checkpoint", str(run)]) == 0
    assert_same_run(run, whole)


def test_an_edit_that_is_allowed_is_said(bench, whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    whole_run_edits(run)
    settings = ["--steps", str(STEPS + 1), "--no-sample", "--cache", str(bench.cache)]
    assert main(["train", "--resume", str(run), *settings]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer.learning_rate: saved 0.004, now 0.002" in said
    assert f"training.steps: saved {STEPS}, now {STEPS + 1}" in said


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
    bytes_tokenizer().save(model / "tokenizer.json")
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
