"""Commands that other commands print are accepted as printed, for meshes and shapes of any size.

Those of ``plan`` with and without a mesh are also in ``test_first_use.py``, those of ``doctor`` in
``e2e/test_run_identity.py``, those of an engine's memory in ``test_serving_memory.py``.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys

import pytest

from jaxinfra.cli import train
from jaxinfra.cli.main import main
from jaxinfra.config.validate import validate
from jaxinfra.diagnostics.memory import remedies

SMALL = ["--set=model.stacks.0.repeats=1", "--set=model.vocab_size=256"]
SHAPES = {
    "fsdp=3": ["--batch-size", "9", "--sequence-length", "40"],
    "fsdp=3,tensor=2": ["--batch-size", "15", "--sequence-length", "24", "--zero", "1"],
    "replica=7": ["--batch-size", "7", "--sequence-length", "33"],
    "replica=5": ["--batch-size", "20", "--sequence-length", "17", "--accumulation", "2"],
}


def options_of(module, words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("mesh", SHAPES)
def test_remedies_of_memory_are_options_of_training(mesh, monkeypatch):
    """Each gives the config that was compiled, beside whatever the command named before."""
    monkeypatch.setattr(remedies, "compiled_bytes", lambda config: validate(config) or 1)
    words = ["tiny", "--mesh", mesh, *SHAPES[mesh]]
    config = train.config_of(options_of(train, words))
    found = remedies.find_remedies(config, limit_bytes=0, price=lambda config: None)
    assert found
    for each in found:
        taken = train.config_of(options_of(train, [*words, *each.options]))
        assert taken == each.case
        validate(taken)


def said_with(devices, *words):
    """What a command prints in a process with this number of devices, and its exit status."""
    program = f"import sys; from jaxinfra.cli.main import main; sys.exit(main({[*words]!r}))"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=3,tensor=2"])
def test_what_memory_prints_trains(mesh):
    words = ["tiny", "--mesh", mesh, *SHAPES[mesh], *SMALL]
    devices = train.config_of(options_of(train, words)).mesh.num_devices
    said, code = said_with(devices, "memory", *words, "--limit", "0.0001")
    assert code == 1, said
    printed = re.findall(r"^remedy: (.*?): ", said, re.MULTILINE)
    assert printed
    for each in printed:
        changed = [*words, *shlex.split(each)]
        devices = train.config_of(options_of(train, changed)).mesh.num_devices
        said, code = said_with(devices, "train", *changed, "--dry-run")
        assert code == 0, said


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
@pytest.mark.parametrize("shape", [(41, 3), (100, 2)])
def test_what_plan_prints_trains(devices, shape, capsys):
    length, factor = shape
    batch = str(devices * factor)
    words = ["--devices", str(devices), "--batch", batch, "--length", str(length)]
    assert main(["plan", "llama32_1b", *words, "--brief"]) == 0
    printed = re.findall(r"jaxinfra train (.*)", capsys.readouterr().out)
    assert printed
    for each in printed:
        config = train.config_of(options_of(train, shlex.split(each)))
        validate(config)
        assert config.mesh.num_devices == devices
        assert config.training.sequence_length == length


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 6, 7])
def test_what_plan_prints_is_shown(devices, capsys):
    """The dry run counts every tensor's bytes on the planned mesh."""
    words = ["--devices", str(devices), "--batch", str(2 * devices), "--length", "128"]
    assert main(["plan", "small", *words, "--brief"]) == 0
    (printed,) = re.findall(r"jaxinfra train (.*)", capsys.readouterr().out)
    said, code = said_with(devices, "train", *shlex.split(printed), "--dry-run")
    assert code == 0, said
