"""What a run that goes on takes from its newest good checkpoint."""

from typing import Any

from jaxinfra.checkpoint import directory_layout, metadata
from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.checkpoint.restoring import Restored
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.files import require_type
from jaxinfra.training.job import Job


def restore_newest(job: Job, run: RunDirectory, saver: Checkpointer) -> Restored | None:
    """The newest good checkpoint; None where a run was stopped before it made one."""
    if saver.latest() is None:
        quarantine = run.checkpoints / directory_layout.QUARANTINE
        if quarantine.exists() and any(quarantine.iterdir()):
            raise CheckpointError(
                f"{run.path} has no checkpoint but those set aside as damaged in {quarantine}; "
                "restore one of them from a copy, or start another run"
            )
        if run.read_summary() is not None:
            raise CheckpointError(
                f"{run.path} was complete, and its checkpoints are gone; restore them from a copy, "
                "or start another run"
            )
        return None
    restored = saver.restore(job.abstract_state())
    steps = job.config.training.steps
    if restored.step > steps:
        raise ConfigError(
            f"{run.path} is at step {restored.step}, past training.steps={steps}; raise it to "
            "train on, or start another run"
        )
    return restored


def changed_settings(restored: Restored | None, config: RunConfig) -> tuple[str, ...]:
    """The settings that are others than when a checkpoint was saved, with both values."""
    if restored is None or not restored.settings:
        return ()
    return tuple(metadata.setting_changes(restored.settings, codec.to_dict(config)))


def excluded_batches(restored: Restored | None) -> frozenset[int]:
    """Steps whose batches were out of the data's order when a checkpoint was saved."""
    steps: Any = restored.data_state.get("excluded", []) if restored else []
    require_type(steps, list[int], where="the saved data order, excluded", error=CheckpointError)
    return frozenset(steps)
