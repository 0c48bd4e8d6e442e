"""Starts of runs: random parameters, another model's weights, or the run's newest good checkpoint,
read directly onto the mesh.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.checkpoint import directory_layout, metadata, processes
from jaxinfra.checkpoint.checkpointer import Checkpointer, Restored
from jaxinfra.checkpoint.initial import initial_head, kept_files, place_initial
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config import codec
from jaxinfra.config.finetune import InitConfig
from jaxinfra.config.kinds import Head
from jaxinfra.config.run import RunConfig
from jaxinfra.data.chat_template import TEMPLATE_FILES, read_templates
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import CheckpointError, ConfigError, JaxinfraError
from jaxinfra.model.definition import Parameters, define_model, merged, only, without
from jaxinfra.numerics.loss_scale import initial_loss_scale
from jaxinfra.runtime.files import require_type
from jaxinfra.training.job import Job
from jaxinfra.training.own_data import Batches, OwnData, PolicyData, Texts
from jaxinfra.training.profile import ProfileRange
from jaxinfra.training.run_data import batches_of, open_data
from jaxinfra.training.state import State


def with_frozen(job: Job) -> Job:
    """Reads the frozen parameters of a job, if it has any, and returns the job with them bound. A
    collective.
    """
    if job.config.lora is None:
        return job
    assert job.config.init is not None, "validate"
    base = define_model(job.config.model, job.model.execution)
    kept = job.config.lora.base
    return job.with_frozen(place_initial(job.config.init, base, job.frozen_shardings, kept=kept))


def first_state(job: Job) -> State:
    """Makes the training state of step 0; a collective.

    If the run starts from another model, that model's parameters and model state are read. LoRA
    adapters and records of 8-bit matmuls are always initialized. The head of a reward model that
    starts from a language model is zero, so all first scores are.
    """
    init, model = job.config.init, job.model
    if init is None:
        return job.initialize()
    if job.config.lora is None:
        return job.start_from(_initial_tree(job, init))
    state = job.initialize()
    shardings = only(job.shardings.model_state, model.unquantized.arrays)
    if not shardings:
        return state
    model_state = merged(state.model_state, place_initial(init, model, shardings))
    return dataclasses.replace(state, model_state=model_state)


def _initial_tree(job: Job, init: InitConfig) -> Parameters:
    shardings, wanted = (
        only(job.shardings.tree, job.model.unquantized.arrays),
        job.config.model.head,
    )
    if initial_head(init) is wanted:
        return place_initial(init, job.model, shardings)
    head = {_HEAD: shardings[_HEAD]}
    read = define_model(
        dataclasses.replace(job.model.config, head=Head.LOGITS), job.model.execution
    )
    tree = place_initial(init, read, without(shardings, head))
    zeros = jax.jit(
        lambda: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), job.model.shapes[_HEAD]
        ),
        out_shardings=head[_HEAD],
    )
    return merged(tree, {_HEAD: zeros()})


_HEAD = "unembedding"


def kept_from_start(config: RunConfig) -> dict[str, bytes]:
    """Returns the files that a new run copies from its start model and its chat template.

    Raises:
        ConfigError: the directory of the chat template has none.
    """
    model = None if config.init is None else Path(config.init.path)
    files = {} if model is None else kept_files(model)
    if config.data.chat_template is None:
        return files
    directory = Path(config.data.chat_template).expanduser()
    templates = read_templates(directory)
    if model is None:
        return kept_files(directory)
    if directory != model:
        for name, file in TEMPLATE_FILES.items():
            files.pop(file, None)  # the model's own, which would be rendered in its place
            if name in templates:
                files[file] = templates[name].encode()
    return files


def require_same_start(config: RunConfig, start: RunConfig) -> None:
    """Raises ConfigError if a setting that weights or tokens depend on differs from that of the
    start model.

    Rotary embedding, context length and dropout may differ.
    """
    before, now = (codec.flattened(json.loads(codec.to_json(each))) for each in (start, config))
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


def restore_newest(job: Job, run: RunDirectory, saver: Checkpointer) -> Restored | None:
    """Restores the newest good checkpoint; returns None if the run stopped before its first."""
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
    """Lists the settings that have changed since a checkpoint was saved, with old and new
    values.
    """
    if restored is None or not restored.settings:
        return ()
    return tuple(metadata.setting_changes(restored.settings, codec.to_dict(config)))


def restored_state(job: Job, restored: Restored) -> State:
    """Returns a checkpoint's state. If settings of the loss scale have changed since it was saved,
    the scale begins anew, as at step 0.
    """
    changes = changed_settings(restored, job.config)
    if not any(change.startswith(_OF_LOSS_SCALE) for change in changes):
        return restored.state
    begin = functools.partial(initial_loss_scale, job.config.precision)
    scale = jax.jit(begin, out_shardings=job.shardings.loss_scale)()
    return dataclasses.replace(restored.state, loss_scale=scale)


_OF_LOSS_SCALE = ("precision.loss_scaling:", "precision.initial_loss_scale:")


def excluded_batches(restored: Restored | None) -> frozenset[int]:
    """Returns the steps whose batches were already excluded when the checkpoint was saved."""
    steps: Any = restored.data_state.get("excluded", []) if restored else []
    require_type(steps, list[int], where="the saved data order, excluded", error=CheckpointError)
    return frozenset(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Everything a run's first step needs: its data, its checkpointer and its state."""

    corpora: Texts
    batches: Batches  # its next batch is the one that the state's next step trains on
    saver: Checkpointer
    state: State
    saved: bool  # whether the state is that of a checkpoint
    changes: tuple[str, ...] = ()  # settings that changed since that checkpoint
    excluded: frozenset[int] = frozenset()  # steps whose batches are left out


def _texts_and_batches(
    job: Job,
    run: RunDirectory,
    own: OwnData | PolicyData | None,
    *,
    cache_dir: Path,
    initial: Callable[[], State],
    say: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> tuple[Texts, Batches]:
    """Opens the texts and the batches of a run from step 0, of its config or of a script."""
    if own is not None and own.makes_batches:
        return own.texts(job.config, tokenizer), own.batches(job, run, say)
    corpora = open_data(
        job,
        cache_dir=cache_dir,
        initial=initial,
        run=run,
        tokenizer=tokenizer,
        heldout_tokens=job.config.training.evaluate_tokens,
    )
    batches = batches_of(job, corpora)
    return corpora if own is None else own.texts(job.config, corpora.tokenizer), batches


def new_start(
    job: Job,
    run: RunDirectory,
    resources: contextlib.ExitStack,
    *,
    cache_dir: Path,
    own: OwnData | PolicyData | None,
    say: Callable[[str], None],
) -> Start:
    """Prepares a run at step 0. If its data or weights cannot be used, removes the new run
    directory again."""
    try:
        initial = functools.cache(lambda: first_state(job))
        corpora, batches = _texts_and_batches(
            job, run, own, cache_dir=cache_dir, initial=initial, say=say
        )
        resources.callback(batches.close)
        state = initial()
    except (JaxinfraError, OSError):
        if jax.process_index() == 0:
            run.discard()
        raise
    processes.on_first(lambda: corpora.tokenizer.save(run.tokenizer_file))
    saver = resources.enter_context(open_checkpoints(job, run))
    return Start(corpora=corpora, batches=batches, saver=saver, state=state, saved=False)


def resumed_start(
    job: Job,
    run: RunDirectory,
    resources: contextlib.ExitStack,
    *,
    cache_dir: Path,
    own: OwnData | PolicyData | None,
    say: Callable[[str], None],
    profile: ProfileRange | None,
) -> Start:
    """Prepares a run at its newest good checkpoint, or at step 0 if it has none yet."""
    saver = resources.enter_context(open_checkpoints(job, run))
    if saver.latest() is not None and not run.tokenizer_file.exists():
        raise ConfigError(
            f"{run.path} has no tokenizer.json; restore the one that the run was trained with"
        )
    restored = restore_newest(job, run, saver)
    if profile is not None:
        first = restored.step if restored else 0
        profile.require_within(first=first, steps=job.config.training.steps)
    saved = Tokenizer.load(run.tokenizer_file) if run.tokenizer_file.exists() else None
    corpora, batches = _texts_and_batches(
        job,
        run,
        own,
        cache_dir=cache_dir,
        initial=lambda: first_state(job),
        say=say,
        tokenizer=saved,
    )
    resources.callback(batches.close)
    if restored is not None:
        batches.restore(restored.data_state)
    # Only now is it known that the run can go on under this config.
    processes.on_first(lambda: run.update_config(job.config))
    if saved is None:
        processes.on_first(lambda: corpora.tokenizer.save(run.tokenizer_file))
        saver.identity = identity(run, job.config)
    return Start(
        corpora=corpora,
        batches=batches,
        saver=saver,
        state=first_state(job) if restored is None else restored_state(job, restored),
        saved=restored is not None,
        changes=changed_settings(restored, job.config),
        excluded=excluded_batches(restored),
    )


def open_checkpoints(job: Job, run: RunDirectory) -> Checkpointer:
    """Opens the checkpoints of a run directory for saves of this job's states; close it after."""
    return Checkpointer(
        run.checkpoints,
        job.config.checkpoint,
        identity=identity(run, job.config),
        settings=codec.to_dict(job.config),
    )
