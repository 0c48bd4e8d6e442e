"""Ways to damage a finished run, and which of them leave a run that can be read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from e2e.runs import STEPS, checkpoints

from jaxinfra.checkpoint.checkpointer import Checkpointer, load_state
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.training.job import make_job

type Damage = Callable[[Path], object]


def edit(name: str, old: str, new: str) -> Damage:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text, (name, old)
        (run / name).write_text(text.replace(old, new, 1))

    return change


def write(name: str, data: bytes | str) -> Damage:
    data = data.encode() if isinstance(data, str) else data
    return lambda run: (run / name).write_bytes(data)


def append(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + data)


def instead(name: str, kind: str) -> Damage:
    """A directory, a pipe, a link to nowhere or to a device in a file's place; or nothing."""

    def change(run: Path) -> None:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/dev/zero")

    return change


def of_steps(change: Callable[[Path], object], *steps: int) -> Damage:
    """The change to these steps' checkpoints; to all without any."""
    return lambda run: [
        change(run / "checkpoints" / f"step_{step:08d}") for step in steps or checkpoints(run)
    ]


def flip(checkpoint: Path) -> None:
    """A bit of its largest file."""
    path = largest(checkpoint)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(checkpoint: Path) -> None:
    path = largest(checkpoint)
    path.write_bytes(path.read_bytes()[:-1])


def largest(checkpoint: Path) -> Path:
    files = [path for path in (checkpoint / "arrays").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def linked_manifest(checkpoint: Path) -> None:
    """The same bytes, elsewhere."""
    elsewhere = checkpoint.parent.parent / f"manifest-{checkpoint.name}"
    (checkpoint / "manifest.json").rename(elsewhere)
    (checkpoint / "manifest.json").symlink_to(elsewhere)


def renamed(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name(f"step_{int(checkpoint.name[5:]) + 1:08d}"))


def not_finite(run: Path) -> None:
    """Checkpoints as they would be written with a NaN in a weight; their sums are right."""
    where = RunDirectory(run)
    config = where.read_config()
    state = load_state(where.checkpoints, make_job(config).abstract_state()).state
    norm = state.parameters["final_norm"]["scale"]
    state.parameters["final_norm"]["scale"] = norm.at[0].set(jnp.nan)
    state = jax.block_until_ready(state)
    shutil.rmtree(where.checkpoints)
    with Checkpointer(
        where.checkpoints, config.checkpoint, identity=identity(where, config)
    ) as saver:
        saver.save(STEPS, state, data_state={"step": STEPS})


def two_tokens_of_one_id(run: Path) -> None:
    values = json.loads((run / "tokenizer.json").read_text())
    values["model"]["vocab"]["new"] = 7
    (run / "tokenizer.json").write_text(json.dumps(values))


def a_token_too_many(run: Path) -> None:
    values = json.loads((run / "tokenizer.json").read_text())
    values["model"]["vocab"]["new"] = 300
    (run / "tokenizer.json").write_text(json.dumps(values))


def _nested(depth: int) -> str:
    return '{"model": ' + "[" * depth + "]" * depth + "}"


CONFIG, TOKENS = "config.json", "tokenizer.json"
REFUSED: dict[str, Damage] = {
    "another angle of rotation": edit(CONFIG, '"theta": 10000.0', '"theta": 11000.0'),
    "another norm's epsilon": edit(CONFIG, '"epsilon": 1e-05', '"epsilon": 1e-06'),
    "another dropout": edit(CONFIG, '"dropout_rate": 0.1', '"dropout_rate": 0.2'),
    "more positions": edit(CONFIG, '"max_positions": 2048', '"max_positions": 4096'),
    "another vocabulary": edit(CONFIG, '"vocab_size": 300', '"vocab_size": 301'),
    "another width": edit(CONFIG, '"hidden_dim": 64', '"hidden_dim": 48'),
    "heads of none": edit(CONFIG, '"head_dim": 8', '"head_dim": 0'),
    "a setting of another type": edit(CONFIG, '"steps": 20', '"steps": "20"'),
    "a setting unknown": edit(CONFIG, '"steps": 20', '"steps": 20, "stepz": 3'),
    "a setting not finite": edit(CONFIG, '"learning_rate": 0.004', '"learning_rate": NaN'),
    "a setting beyond numbers": edit(
        CONFIG, '"learning_rate": 0.004', f'"learning_rate": 1{"0" * 400}'
    ),
    "config a list": write(CONFIG, "[]"),
    "config null": write(CONFIG, "null"),
    "config empty": write(CONFIG, ""),
    "config cut": write(CONFIG, '{"model": '),
    "config of another sort": write(CONFIG, '{"model_type": ["llama"]}'),
    "config of brackets": write(CONFIG, _nested(100_000)),
    "config not UTF-8": append(CONFIG, b"\xff"),
    "config twice": edit(CONFIG, "{", '{"model": {}, '),
    "config gone": instead(CONFIG, "nothing"),
    "config a directory": instead(CONFIG, "directory"),
    "config a pipe": instead(CONFIG, "pipe"),
    "config a device": instead(CONFIG, "link"),
    "another token": edit(TOKENS, '"a"', '"\\u00e4"'),
    "tokenizer gone": instead(TOKENS, "nothing"),
    "tokenizer empty": write(TOKENS, ""),
    "tokenizer a list": write(TOKENS, "[]"),
    "tokenizer a pipe": instead(TOKENS, "pipe"),
    "tokenizer a directory": instead(TOKENS, "directory"),
    "two tokens of one id": two_tokens_of_one_id,
    "a token too many": a_token_too_many,
    "tokenizer with a blank more": append(TOKENS, b" "),
    "checkpoints gone": instead("checkpoints", "nothing"),
    "checkpoints a pipe": instead("checkpoints", "pipe"),
    "all checkpoints flipped": of_steps(flip),
    "all checkpoints cut": of_steps(cut),
    "all checkpoints with a file more": of_steps(lambda each: (each / "more").touch()),
    "all checkpoints renamed": of_steps(renamed),
    "no manifests": of_steps(lambda each: (each / "manifest.json").unlink()),
    "manifests elsewhere": of_steps(linked_manifest),
    "manifests pipes": of_steps(instead("manifest.json", "pipe")),
    "metadata of all gone": of_steps(lambda each: (each / "metadata.json").unlink()),
    "weights not finite": not_finite,
}
ACCEPTED: dict[str, Damage] = {
    "nothing": lambda run: None,
    "config in one line": lambda run: (run / CONFIG).write_text(
        json.dumps(json.loads((run / CONFIG).read_text()))
    ),
    "another learning rate": edit(CONFIG, '"learning_rate": 0.004', '"learning_rate": 0.002'),
    "summary cut": write("summary.json", "{"),
    "summary a list": write("summary.json", "[]"),
    "summary gone": instead("summary.json", "nothing"),
    "summary a pipe": instead("summary.json", "pipe"),
    "metrics end in a stray byte": append("metrics.jsonl", b"\xff"),
    "metrics with a spoilt line": edit("metrics.jsonl", "\n", "\nnull\n"),
    "metrics gone": instead("metrics.jsonl", "nothing"),
    "metrics a pipe": instead("metrics.jsonl", "pipe"),
    "incidents spoilt": write("incidents.jsonl", b"\xff\n[]\n"),
    "incidents a pipe": instead("incidents.jsonl", "pipe"),
    "goodput spoilt": write("goodput.jsonl", "[]\n{}\n"),
    "goodput a link": instead("goodput.jsonl", "link"),
    "picture a directory": instead("loss.png", "directory"),
    "events a pipe": instead("tensorboard", "pipe"),
    "recorder gone": instead("recorder", "nothing"),
    "a stray file among the checkpoints": write("checkpoints/step_junk", "x"),
    "an unfinished save": lambda run: (run / "checkpoints" / "step_00000099.partial-ab").mkdir(),
    "newest checkpoint flipped": of_steps(flip, STEPS),
    "newest checkpoint cut": of_steps(cut, STEPS),
    "newest checkpoint gone": of_steps(shutil.rmtree, STEPS),
    "newest checkpoint a pipe's": of_steps(instead("manifest.json", "pipe"), STEPS),
    "oldest checkpoint flipped": lambda run: of_steps(flip, min(checkpoints(run)))(run),
}
LOGS = tuple(
    name
    for name in ACCEPTED
    if name.split()[0] in ("summary", "metrics", "incidents", "goodput", "picture", "events")
)
"""Damages to what only tells what happened: a run that has steps left to do goes on too."""
