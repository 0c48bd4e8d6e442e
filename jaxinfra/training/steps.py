"""The training step for a loop of your own: (state, batch) -> (state, metrics)."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import final

from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import validate, with_warmup
from jaxinfra.data.batch import Batch
from jaxinfra.data.corpora import Corpora
from jaxinfra.errors import ConfigError
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.gradients import Gradients
from jaxinfra.runtime.files import user_cache
from jaxinfra.training.job import make_job
from jaxinfra.training.run_data import batches_of, open_data
from jaxinfra.training.start import first_state, open_checkpoints, restored_state, with_frozen
from jaxinfra.training.state import State
from jaxinfra.training.step import StepMetrics


@final
class Steps:
    """A run's compiled training step on its mesh, for a loop of your own.

    Args:
        config: config of the run; only ``batches`` reads its ``data``.

    Raises:
        ConfigError: the config cannot run on the devices that are here.

    Examples:
        >>> steps = jaxinfra.Steps(jaxinfra.read_run_config("mine.toml"))
        >>> state = steps.initial_state()
        >>> for _, batch in zip(range(2), steps.batches()):
        ...     state, metrics = steps(state, batch)
        >>> steps.save(state, "runs/loop")
        >>> int(state.step), int(metrics.tokens)
        (2, 64)
    """

    def __init__(self, config: RunConfig):
        self._job = with_frozen(make_job(with_warmup(codec.normalized(config, RunConfig))))
        self._corpora: Corpora | None = None

    @property
    def config(self) -> RunConfig:
        """The run's config, with the values chosen for its "auto" settings."""
        return self._job.config

    def initial_state(self) -> State:
        """Returns the state of step 0 on the mesh: parameters initialized by ``training.seed`` or
        read from ``init``.
        """
        return first_state(self._job)

    def __call__(self, state: State, batch: Batch) -> tuple[State, StepMetrics]:
        """Runs one step. The passed state is donated, so continue with the returned state. Reading
        a metric, such as ``float(metrics.loss)``, waits for the devices.

        Args:
            batch: arrays [B, T], as ``batches`` yields or ``batch_of`` makes. B and T may differ
                from the config's; new sizes compile the step again.

        Raises:
            ConfigError: the batch does not divide over the mesh, or the state is consumed already.
        """
        self._check(batch, parts=self.config.training.accumulation)
        _require_whole(state)
        return self._job.train_step(state, self._job.put(batch))

    def gradients(self, state: State, batch: Batch) -> Gradients:
        """Computes what a step would learn from a batch; the state is not changed or consumed.

        Returns:
            ``gradients``, a tree like ``state.parameters``, on the mesh, before any clipping, zero
            where frozen; ``loss`` in nats per counted target; ``sums``, what layers emit.

        Raises:
            ConfigError: the batch does not divide over the mesh, or the state is consumed.
        """
        self._check(batch, parts=self.config.training.accumulation)
        _require_whole(state)
        return self._job.gradient_step(state, self._job.put(batch))

    def loss(self, state: State, batch: Batch) -> float:
        """Computes the mean cross entropy of a batch in nats per counted target, without
        training.
        """
        self._check(batch, parts=1)
        _require_whole(state)
        nll, count = self._job.evaluation_step(state.evaluated, self._job.put(batch))
        return float(nll) / float(count)

    def model(self, state: State) -> Decoder:
        """Returns the model with the parameters of a state: ``model(token_ids)`` gives logits."""
        _require_whole(state)
        return self._job.model.bind(state.evaluated)

    def batches(self, *, first: int = 0, cache_dir: Path | None = None) -> Iterator[Batch]:
        """Iterates without end over batches of the config's data, in the order in which ``train``
        reads them.

        Args:
            first: step whose batch comes first.
            cache_dir: where tokenized text is kept; the user's cache by default.
        """
        batches = batches_of(self._job, self._open(cache_dir))
        if first:
            batches.restore(batches.state(first))
        return batches

    def save(self, state: State, directory: str | Path) -> None:
        """Writes a checkpoint of the state into a run directory, which is made if it does not
        exist.

        ``jaxinfra.load``, ``generate`` and ``evaluate`` can read it if ``batches`` was called or
        the directory has a tokenizer.json.
        """
        _require_whole(state)
        run = RunDirectory(Path(directory))
        if not run.config_file.exists():
            run.create(self.config)
        if self._corpora is not None and not run.tokenizer_file.exists():
            self._corpora.tokenizer.save(run.tokenizer_file)
        with open_checkpoints(self._job, run) as saver:
            step = int(state.step)
            saver.save(step, state, data_state={"step": step})

    def restore(self, directory: str | Path, *, step: int | None = None) -> State:
        """Restores the state of a checkpoint onto this mesh, whatever mesh it was saved from.

        Args:
            step: step of the checkpoint; the newest good one by default.

        Raises:
            CheckpointError: there is no checkpoint, or it is of another model.
        """
        run = RunDirectory(Path(directory))
        restored = load_state(
            run.checkpoints,
            self._job.abstract_state(),
            step=step,
            identity=identity(run, self.config),
        )
        return restored_state(self._job, restored)

    def _open(self, cache_dir: Path | None) -> Corpora:
        if self._corpora is None:
            self._corpora = open_data(
                self._job, cache_dir=cache_dir or user_cache(), initial=self.initial_state
            )
        return self._corpora

    def _check(self, batch: Batch, *, parts: int) -> None:
        """Raises ConfigError for rows that a run of their number and length could not have."""
        _, processes = self._job.process_share()
        rows, length = batch.tokens.shape
        training = dataclasses.replace(
            self.config.training,
            batch_size=rows * processes,
            sequence_length=length,
            accumulation=parts,
        )
        validate(dataclasses.replace(self.config, training=training))


def _require_whole(state: State) -> None:
    """Raises ConfigError for a state whose memory a step has taken over."""
    if state.step.is_deleted():
        raise ConfigError(
            "this state was consumed by a step that it was given to; go on with the state that the "
            "step returned: state, metrics = steps(state, batch)"
        )
