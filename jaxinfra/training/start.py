"""What a run starts from: random numbers, or another model's weights, straight onto the mesh.

What a run that goes on takes from its newest good checkpoint.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint import directory_layout, metadata
from jaxinfra.checkpoint.checkpointer import Checkpointer, Restored
from jaxinfra.checkpoint.initial import InitialModel, kept_files, place_initial
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.presets import runs
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.runtime.files import require_type
from jaxinfra.training.job import Job
from jaxinfra.training.state import State


def with_frozen(job: Job) -> Job:
    """The job with the parameters that it does not train, if there are such; a collective."""
    if job.config.lora is None:
        return job
    assert job.config.init is not None, "validate"
    base = define_model(job.config.model, job.model.execution)
    kept = job.config.lora.base
    return job.with_frozen(place_initial(job.config.init, base, job.frozen_shardings, kept=kept))


def first_state(job: Job) -> State:
    """The state of step 0; a collective.

    Parameters that a run starts from are read, and random ones drawn for none of them. Adapters are
    drawn; the state of the model that they adapt is read.
    """
    init, model = job.config.init, job.model
    if init is None:
        return job.initialize()
    if job.config.lora is None:
        return job.start_from(place_initial(init, model, job.shardings.tree))
    state = job.initialize()
    if not model.state_shapes:
        return state
    model_state = place_initial(init, model, job.shardings.model_state)
    return dataclasses.replace(state, model_state=model_state)


def kept_from_start(config: RunConfig) -> dict[str, bytes]:
    """The files that a new run keeps of the model it starts from and of its chat template's."""
    files: dict[str, bytes] = {}
    if config.data.chat_template is not None:
        files |= kept_files(Path(config.data.chat_template).expanduser())
    if config.init is not None:
        files |= kept_files(Path(config.init.path))
    return files


def finetuning_config(
    start: InitialModel,
    *,
    lora: LoraConfig | None,
    chat: bool,
    preferences: PreferenceConfig | None = None,
) -> RunConfig:
    """The config of a run that trains this model further, to be changed by options."""
    return runs.finetuning(
        start.config,
        init=start.init,
        policy=start.policy,
        lora=lora,
        chat=chat,
        preferences=preferences,
    )


def require_same_start(config: RunConfig, start: RunConfig) -> None:
    """Raises ConfigError naming a setting changed since that the weights or tokens depend on.

    Rotary embedding, context length and dropout are not part of the weights.
    """
    before, now = (_flat(json.loads(codec.to_json(each))) for each in (start, config))
    free = ("model.dropout_rate", "model.init_std")
    for key in {**before, **now}:
        if before.get(key) == now.get(key) or key in free or ".rope." in key:
            continue
        if key == "model.max_positions" and not config.model.learned_positions:
            continue
        if key.startswith(("model.", "data.tokenizer.", "init.")):
            assert start.init is not None
            raise ConfigError(
                f"{key}={now.get(key)!r}: the model in {start.init.path} has "
                f"{before.get(key)!r}, and its weights and tokens mean nothing else; leave it out"
            )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = ((str(i), value) for i, value in enumerate(values))
    else:
        return {prefix.removesuffix("."): values}
    flat: dict[str, Any] = {}
    for name, value in items:
        flat |= _flat(value, f"{prefix}{name}.")
    return flat


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
