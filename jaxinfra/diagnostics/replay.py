"""Replay of one training step of a run, from the last checkpoint before it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint import directory_layout
from jaxinfra.checkpoint.checkpointer import Restored, load_state
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config.data import OWN_SOURCE
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.pipeline import PipelineConfig
from jaxinfra.config.run import ContextMethod, RunConfig
from jaxinfra.data.batch import Batch, batch_checksum, rows_checksum
from jaxinfra.data.corpora import Corpora, open_corpora
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.compile_cache import cache_for_stages, keep_compiled_programs
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.recorder import excluded_steps
from jaxinfra.training.describe import Environment, environment_of
from jaxinfra.training.job import Job, StepPrograms, make_job
from jaxinfra.training.start import excluded_batches, first_state, with_frozen
from jaxinfra.training.state import State
from jaxinfra.training.step import step_record

COMPARED = ("loss", "gradient_norm")
_TWINS = 2
_MARGIN = 8.0
"""Times the distance of the farthest twin: how far apart two orders of rounding may be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """One training step computed again, beside the values that the run recorded for it."""

    job: Job
    corpora: Corpora
    batches: TrainIterator
    step: int
    first: int  # step of the checkpoint that it was replayed from; 0: from the start
    state: State  # before the step
    batch: Batch  # of it, on the devices
    record: dict[str, Any]  # of the step, as computed here
    recorded: dict[str, Any] | None  # by the run; None: it recorded no such step
    is_excluded: bool  # the run left the step's batch out
    data_differ: bool  # the replayed batch has other tokens than the run's batch had
    differences: tuple[str, ...]  # between environments; ("",) if the run's is not known
    tolerances: Mapping[str, float]  # by compared value; 0 where equal bits are required

    @property
    def reproduces(self) -> bool | None:
        """Tells whether the replay matches the recorded values; None if nothing can be compared."""
        if self.recorded is None or self.data_differ or self.is_excluded:
            return None
        return all(self._agrees(name) for name in COMPARED)

    @property
    def is_equal(self) -> bool:
        """Tells whether the replay equals the recorded values to the last bit."""
        recorded = self.recorded or {}
        return all(_same(self.record[name], recorded.get(name)) for name in COMPARED)

    def verdict(self) -> str:
        """Returns one sentence on whether the replay reproduces the recorded step."""
        done = self.step - self.first
        began = f"the checkpoint of step {self.first}" if self.first else "the run's start"
        how = f"replayed from {began}, {done} step{'s' * (done > 1)}"
        if self.recorded is None:
            return f"{how}: the run has recorded no such step, so there is nothing to compare"
        if self.data_differ:
            return f"{how}: not comparable, the data are no longer those that the step read"
        if self.is_excluded:
            return f"{how}: not comparable, the run left this step's batch out"
        if self.is_equal:
            return f"{how}: reproduces, equal to the last bit"
        named = [each for each in self.differences if each]
        reach = ", ".join(f"{name} {self.tolerances[name]:.2g}" for name in COMPARED)
        if self.reproduces:
            why = "; ".join(named) or "the run did not record what it ran on"
            return f"{how}: reproduces, within what rounding may change ({reach}): {why}"
        asked = f"beyond what rounding may change ({reach})" if self.differences else "bit for bit"
        return (
            f"{how}: does not reproduce, {asked}: suspect hardware; run jaxinfra doctor on the "
            "hosts that computed it, and take the one out that fails"
        )

    @property
    def is_finite(self) -> bool:
        """Tells whether the replayed step's loss and gradient are finite."""
        return all(math.isfinite(self.record[name]) for name in COMPARED)

    def _agrees(self, name: str) -> bool:
        assert self.recorded is not None
        mine, theirs = self.record[name], self.recorded.get(name)
        if _same(mine, theirs):
            return True
        if theirs is None or not math.isfinite(mine):
            return False
        return abs(mine - theirs) <= self.tolerances[name]


def _same(mine: float, recorded: float | None) -> bool:
    """Tells whether two values have equal bits; values that are not finite are recorded as null."""
    return mine == recorded if recorded is not None else not math.isfinite(mine)


def _recorded(job: Job, run: RunDirectory, step: int) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns a step's recorded values, and how its environment differs from this one."""
    lines, _ = read_log(run.metrics_file, holds=dict[str, Any])
    recorded = next((r for r in lines if r.get("step") == step and "batch" in r), None)
    environment = environment_of(run.environments_file, step=step)
    if environment is None:
        return recorded, [""]
    return recorded, Environment.of(job).differences(environment)


def replay_step(directory: Path, *, step: int, cache_dir: Path, on_mesh: bool = False) -> Replayed:
    """Computes a run's step again, from the newest good checkpoint before it.

    Nothing in the run's directory is changed, and the run may still be training. If the replay
    runs on other devices or sums in another order than the run, its results may differ by rounding.
    The tolerance is then measured by ``_TWINS`` further replays. They start from weights moved by
    half a unit in the last place of the matmuls' format.

    Args:
        step: number of the step, counted from 1 as in ``metrics.jsonl``.
        on_mesh: whether to run on the run's own mesh instead of one device.

    Raises:
        ConfigError: the run has no such step, or cannot be computed here.
        CheckpointError: the checkpoints are of another model.
    """
    run = RunDirectory(directory)
    config = run.read_config()
    if not 1 <= step <= config.training.steps:
        raise ConfigError(
            f"step {step}: {directory} has steps 1 to {config.training.steps}; name one of them"
        )
    if config.data.source == OWN_SOURCE:
        raise ConfigError(
            f"{directory}: a script gave the batches (jaxinfra.train(..., data=...)), or jaxinfra "
            "rl sampled them; only steps on texts that the config names can be replayed"
        )
    keep_compiled_programs(cache_dir)
    job = with_frozen(make_job(config if on_mesh else _alone(config)))
    with cache_for_stages(job.config.mesh.pipe):
        return _replayed(job, run, step=step, cache_dir=cache_dir)


def _replayed(job: Job, run: RunDirectory, *, step: int, cache_dir: Path) -> Replayed:
    """Computes the step, and where it differs from the record its twins."""
    corpora, batches = _open_data(job, run, cache_dir)
    restored = _before(job, run, step)
    first = 0 if restored is None else restored.step
    excluded = (
        {*job.config.reliability.exclude_steps, *excluded_steps(run.incidents_file)}
        | excluded_batches(restored)
    )  # fmt: skip
    if restored is not None and restored.data_state.keys() != {"step"}:  # kept by ``train``
        batches.restore(restored.data_state)
    recorded, differences = _recorded(job, run, step)

    def start() -> State:
        return first_state(job) if restored is None else jax.tree.map(jnp.copy, restored.state)

    todo = functools.partial(_steps, job, batches, first=first, last=step, excluded=excluded)
    before, batch, record = todo(start())
    sums = rows_checksum(batches.batch(step - 1).tokens, first=0)
    replayed = Replayed(
        job=job,
        corpora=corpora,
        batches=batches,
        step=step,
        first=first,
        state=before,
        batch=batch,
        record=record,
        recorded=recorded,
        is_excluded=step in excluded,
        data_differ=recorded is not None and recorded["batch"] != batch_checksum([sums], copies=1),
        differences=tuple(differences),
        tolerances=dict.fromkeys(COMPARED, 0.0),
    )
    if not differences or replayed.reproduces is not False or not replayed.is_finite:
        return replayed
    twins = [todo(_moved(job, start(), seed=number))[2] for number in range(_TWINS)]
    return dataclasses.replace(replayed, tolerances=_tolerances(record, twins))


def _alone(config: RunConfig) -> RunConfig:
    """Returns the same computation on one device."""
    return dataclasses.replace(
        config,
        mesh=MeshConfig(),
        sharding=ShardingConfig(),
        pipeline=PipelineConfig(),
        exchange=ExchangeConfig(),
        training=dataclasses.replace(config.training, context_method=ContextMethod.AUTO),
    )


def _open_data(job: Job, run: RunDirectory, cache_dir: Path) -> tuple[Corpora, TrainIterator]:
    if not run.tokenizer_file.exists():
        raise ConfigError(f"{run.path} has no tokenizer.json: the run was stopped before it began")
    training = job.config.training
    corpora = open_corpora(
        job.config.data,
        vocab_size=job.config.model.vocab_size,
        cache_dir=cache_dir,
        tokenizer=Tokenizer.load(run.tokenizer_file),
        template_directory=run.path,
    )
    batches = TrainIterator(
        corpora.train_source(training),
        sequence_length=training.sequence_length,
        batch_size=training.batch_size,
        seed=training.seed,
        num_threads=0,
        prefetch=0,
    )
    return corpora, batches


def _before(job: Job, run: RunDirectory, step: int) -> Restored | None:
    """Returns the newest good checkpoint before a step; None if there is none."""
    for saved in reversed(directory_layout.steps(run.checkpoints)):
        if saved >= step:
            continue
        try:
            return load_state(
                run.checkpoints,
                job.abstract_state(),
                step=saved,
                identity=identity(run, job.config),
            )
        except CheckpointError as error:
            if "no good checkpoint" not in str(error):
                raise
    return None


def _steps(
    job: Job,
    batches: TrainIterator,
    state: State,
    *,
    first: int,
    last: int,
    excluded: set[int],
) -> tuple[State, Batch, dict[str, Any]]:
    """Returns the state before the last step, that step's batch, and its metrics."""
    programs = StepPrograms(job)
    for step in range(first + 1, last):
        if step in excluded:
            state = job.pass_over(state)
        else:
            state, _ = programs(step, state, job.put(batches.batch(step - 1)))
    batch = job.put(batches.batch(last - 1))
    before = jax.tree.map(jnp.copy, state)  # the step takes its own
    _, metrics = programs(last, state, batch)
    return before, batch, step_record(jax.device_get(metrics))


def _moved(job: Job, state: State, *, seed: int) -> State:
    """Returns the state with each weight moved by half a unit in the last place, up or down."""
    unit = float(jnp.finfo(job.model.execution.policy.compute).eps) / 2
    leaves, structure = jax.tree.flatten(state.parameters)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def moved(leaf: jax.Array, key: jax.Array) -> jax.Array:
        return leaf + leaf * unit * jax.random.rademacher(key, leaf.shape, dtype=leaf.dtype)

    parameters = structure.unflatten(map(moved, leaves, keys))
    return dataclasses.replace(state, parameters=parameters)


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def _tolerances(record: dict[str, Any], twins: list[dict[str, Any]]) -> dict[str, float]:
    """Returns by metric how far rounding alone may move a value from its record."""
    unit = float(np.finfo(np.float32).eps)

    def reach(name: str) -> float:
        value = record[name]
        return _MARGIN * max(unit * abs(value), *(_apart(twin[name], value) for twin in twins))

    return {name: reach(name) for name in COMPARED}
