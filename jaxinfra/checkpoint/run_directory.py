"""The layout of a run directory: its files and folders (``RunDirectory``).

JSON files are written whole or not at all (``write_atomically``).
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from jaxinfra.checkpoint.model_directory import TOKENIZER_FILES
from jaxinfra.config import codec
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_bytes, read_json

_log = logging.getLogger(__name__)
_RECORDERS = 3  # of earlier sessions
_LATER_OF_LORA = ("kind", "scaling", "base")  # settings that first checkpoints of this format lack


@final
class _Place:
    """The path of a file or folder of a run directory; a class attribute that is read of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: type["RunDirectory"]) -> Path:
        return run.path / self._name


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths in a run directory, with functions to read and write its small JSON files."""

    path: Path

    # What the run computes; with it alone the run can be repeated.
    config_file = _Place("config.json")
    # The tokenizer of its tokens; beside it, files of the model it started from: chat template,
    # separators, and that model's Hugging Face config, if it had one.
    tokenizer_file = _Place("tokenizer.json")
    hf_config_file = _Place("hf_config.json")
    metrics_file = _Place("metrics.jsonl")  # one line per step
    tensorboard = _Place("tensorboard")  # the same curves as events
    summary_file = _Place("summary.json")  # the outcome
    picture_file = _Place("loss.png")  # training and held-out loss
    loads_picture_file = _Place("loads.png")  # how evenly tokens are routed to experts, if any
    # What recomputation costs by memory budget, of a run with remat=optimal.
    recomputation_picture_file = _Place("recomputation.png")
    checkpoints = _Place("checkpoints")  # verified ones (``checkpointer.py``)
    trace = _Place("trace")  # profiler traces, where asked for
    reference = _Place("reference")  # the reference model's log probabilities of answers
    samples = _Place("samples")  # completions of rollouts with their rewards, to read
    incidents_file = _Place("incidents.jsonl")  # what went wrong and what was done
    environments_file = _Place("environments.jsonl")  # that each session's steps were computed in
    goodput_file = _Place("goodput.jsonl")  # where the wall time went, by session and cause
    prometheus_file = _Place("metrics.prom")  # the same as a Prometheus text file
    # Every rank's flight recorder and, after a hang, all stacks and a report.
    recorder = _Place("recorder")

    def spike_file(self, step: int) -> Path:
        """Returns the path of the report on why the loss of this step was far above the others."""
        return self.path / "spikes" / f"step-{step:08d}.json"

    def set_aside_odd_logs(self) -> None:
        """Renames logs that are not plain files: a pipe could block, and a link could point to any
        file.
        """
        files = (
            *(self.metrics_file, self.incidents_file, self.goodput_file, self.prometheus_file),
            self.environments_file,
            *(self.picture_file, self.loads_picture_file, self.recomputation_picture_file),
            self.summary_file,
        )
        odd = [each for each in files if _exists(each) and not _is_plain(each)]
        directories = (self.tensorboard, self.recorder)
        odd += [each for each in directories if _exists(each) and not each.is_dir()]
        for path in odd:
            number = 1
            while _exists(aside := path.with_name(f"{path.name}.odd-{number}")):
                number += 1
            path.rename(aside)
            _log.warning("%s is no log of ours, and is now %s", path, aside.name)

    def new_recorder(self) -> None:
        """Makes an empty recorder directory; earlier ones become recorder.1, .2, ..."""
        for number in range(_RECORDERS, 0, -1):
            older = self.path / f"recorder.{number}"
            newer = self.path / f"recorder.{number - 1}" if number > 1 else self.recorder
            if newer.exists():
                shutil.rmtree(older, ignore_errors=True)
                newer.rename(older)
        self.recorder.mkdir()

    def create(self, config: RunConfig, files: Mapping[str, bytes] | None = None) -> None:
        """Makes the run directory and writes the config; raises if the directory is not empty.

        Args:
            files: files copied from the start model, by name.
        """
        # A start that was killed may have left the beginnings of a config: not worth keeping.
        ours = {_partial(self.config_file)}
        if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - ours):
            raise ConfigError(
                f"{self.path} exists and is not an empty directory; a new run overwrites nothing: "
                f"name another, or continue this one with --resume {self.path}"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        for name, contents in (files or {}).items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_bytes(contents)
        write_atomically(self.config_file, codec.to_json(config))

    def discard(self) -> None:
        """Removes the files of a run that could not begin, so that its directory is free again."""
        for name in TOKENIZER_FILES:
            (self.path / name).unlink(missing_ok=True)
        for file in (self.config_file, self.hf_config_file):
            file.unlink(missing_ok=True)
        beside = {(self.path / name).parent for name in TOKENIZER_FILES} - {self.path}
        for directory in (self.recorder, self.reference, *beside):
            shutil.rmtree(directory, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def read_config(self) -> RunConfig:
        """Reads the run's config; raises ConfigError if it is missing or invalid."""
        if not self.config_file.is_file():
            found = "is not a directory" if self.path.exists() else "does not exist"
            found = "has no config.json" if self.path.is_dir() else found
            raise ConfigError(
                f"{self.path} is no run directory: it {found}; name one that `jaxinfra train` has "
                "made, or one with a Hugging Face model where a model is meant"
            )
        return read_config(self.config_file)

    def read_hf_config(self) -> dict[str, Any] | None:
        """Reads the Hugging Face config of the run's start model; None if there is none."""
        file = self.hf_config_file
        return read_json(file) if file.exists() else None

    def update_config(self, config: RunConfig) -> None:
        """Replaces the config of a run that continues with other settings; keeps the old one."""
        if self.read_config() == config:
            return
        number = 1 + len(list(self.path.glob("config.before-*.json")))
        self.config_file.rename(self.path / f"config.before-{number}.json")
        write_atomically(self.config_file, codec.to_json(config))

    def read_summary(self) -> dict[str, Any] | None:
        """Reads the run's summary.json; None if missing or damaged, as it can be computed again."""
        try:
            return read_json(self.summary_file) if self.summary_file.exists() else None
        except ConfigError:
            return None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes the run's summary.json."""
        write_atomically(self.summary_file, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def read_config(file: Path) -> RunConfig:
    """Reads a config file such as a run's config.json; raises ConfigError or OSError."""
    if file.is_dir():
        raise ConfigError(f"{file} is a directory, a config is a file: name {file / 'config.json'}")
    values = read_json(file)
    if "model_type" in values:
        raise ConfigError(f"{file} is of a Hugging Face model, not of a run; name a run directory")
    try:
        return codec.from_dict(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(
            f"{file} is no config of this version: {error}; use the version that wrote it, or "
            "correct it"
        ) from error


def identity(run: RunDirectory, config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a run's checkpoints must match: model, adapters and tokenizer."""
    values: dict[str, Any] = {"model": codec.to_dict(config.model)}
    if run.tokenizer_file.exists():
        data = read_bytes(run.tokenizer_file)
        values["tokenizer"] = hashlib.sha256(data).hexdigest()
    if config.init is not None:  # how its texts begin, end and are asked for
        names = {*TOKENIZER_FILES, run.hf_config_file.name} - {run.tokenizer_file.name}
        there = sorted(name for name in names if (run.path / name).is_file())
        values["kept"] = {
            name: hashlib.sha256(read_bytes(run.path / name)).hexdigest() for name in there
        }
    if config.lora is not None:
        assert config.init is not None, "validate"
        lora = codec.to_dict(config.lora)
        before = codec.to_dict(LoraConfig())
        for name in _LATER_OF_LORA:  # as it was written when there was no choice
            if lora[name] == before[name]:
                del lora[name]
        values |= {"lora": lora, "base": config.init.sha256}
    return values


def write_atomically(path: Path, text: str) -> None:
    """Writes a text to a temporary file and renames it, so that a reader never sees half a file."""
    partial = _partial(path)
    partial.unlink(missing_ok=True)  # written through, a link would lead elsewhere
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
