"""Checks of a user's own config for fault injection, made before anything runs."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.precision import LossScaling
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError
from jaxinfra.faults.arena import SETTINGS
from jaxinfra.faults.verdict import FAULTS
from jaxinfra.training.job import make_job

_NOT_FINITE = 11  # the fault that a dynamic loss scale takes for its own doing
_MEMORY = Path("/proc/meminfo")
# fp32 weights, their gradients and two moments, which every process holds whole.
_BYTES_A_PARAMETER = 16
_OURS = {
    "--mesh": "each fault has its own mesh",
    "--run": "runs go to --logs",
    "--cache": "runs go to --logs",
    "--resume": "faults are injected into new runs; give its config.json with --config",
    "--continue": "faults are injected into new runs",
    "--profile": "no run here is traced",
    "--dry-run": "runs here are trained",
    "--steps": "a run here has 12 steps",
    "--evaluate-every": "runs here are evaluated every 6 steps",
    "--checkpoint-every": "runs here are saved every 4 steps",
    "--zero": "each fault has its own mesh",
    "--sequence-parallel": "each fault has its own mesh",
}


def require_options(options: Sequence[str]) -> None:
    """Raises ConfigError for a ``jaxinfra train`` option that ``jaxinfra faults`` sets itself."""
    ours = {setting.partition("=")[0] for setting in SETTINGS}
    for word, following in zip(options, [*options[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in _OURS:
            raise ConfigError(f"{name} is chosen by jaxinfra faults: {_OURS[name]}; leave it out")
        setting = (value or following).partition("=")[0] if name == "--set" else ""
        if setting in ours:
            raise ConfigError(f"--set {setting} is chosen by jaxinfra faults; leave it out")


def require_runnable(config: RunConfig, numbers: Collection[int], *, jobs: int) -> None:
    """Raises ConfigError if the numbered faults cannot run on this config or machine.

    Args:
        jobs: number of faults that run at a time.
    """
    config = codec.override(config, SETTINGS)
    for devices in sorted({2, *(FAULTS[number].devices for number in numbers)}):
        try:
            validate(dataclasses.replace(config, mesh=MeshConfig(replica=devices)))
        except ConfigError as error:
            wanted = [number for number in sorted(numbers) if FAULTS[number].devices >= devices]
            raise ConfigError(f"faults {wanted} cannot run on it: {error}") from error
    if _NOT_FINITE in numbers and config.precision.loss_scaling is LossScaling.DYNAMIC:
        raise ConfigError(
            f"fault {_NOT_FINITE} on precision.loss_scaling=dynamic: a step that is not finite is "
            "how the scale is found; leave that fault out, or give --policy bf16 and "
            "--set precision.loss_scaling=none"
        )
    _require_memory(config, max(FAULTS[number].devices for number in numbers), jobs=jobs)


def _require_memory(config: RunConfig, devices: int, *, jobs: int) -> None:
    alone = dataclasses.replace(config, mesh=MeshConfig())
    count = make_job(alone).model.num_parameters
    # The largest job, while the others have two processes; and a state that is being compared.
    states = devices + 2 * (jobs - 1) + 1
    needed, free = states * _BYTES_A_PARAMETER * count, _free_bytes()
    if needed > free:
        raise ConfigError(
            f"{count:,} parameters need {needed / 2**30:.1f} GiB in {states} copies of the state "
            f"(activations apart), and {free / 2**30:.1f} GiB are free here; make the model "
            "smaller, as with --set model.stacks.0.repeats=2"
            + (", or --jobs less" if jobs > 1 else "")
        )


def _free_bytes() -> int:
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    raise ConfigError(f"{_MEMORY} does not say how much memory is free")
