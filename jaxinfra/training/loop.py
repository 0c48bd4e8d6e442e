"""A run from its config: set-up here, the steps in ``trainer``."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint import layout
from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.checkpoint.restoring import Restored
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.core.errors import CheckpointError, ConfigError, JaxinfraError
from jaxinfra.data.corpus import Corpus, open_corpus
from jaxinfra.data.pipeline import TrainIterator, train_batches
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.training.clock import Clock
from jaxinfra.training.describe import describe_corpus, describe_job, describe_ranking
from jaxinfra.training.job import Job, keep_compiled_programs, make_job
from jaxinfra.training.metrics import MetricsLog
from jaxinfra.training.profile import Profiler, ProfileRange
from jaxinfra.training.progress import Progress
from jaxinfra.training.state import State
from jaxinfra.training.stop import Stopped, stop_on_signals
from jaxinfra.training.trainer import Outcome, Trainer


def train(
    config: RunConfig,
    directory: Path,
    *,
    resume: bool,
    cache_dir: Path,
    profile: ProfileRange | None = None,
) -> Outcome:
    """Trains until ``config.training.steps``, or until SIGINT or SIGTERM asks to stop.

    A new run makes ``directory``; a resumed one continues from its newest good checkpoint with the
    state and data order of a run that never stopped, bit for bit. One that is complete is left as
    it is.

    Args:
        cache_dir: where tokenized corpora and compiled programs are kept between runs.
        profile: steps to trace.

    Raises:
        JaxinfraError: what is wrong with config, data or checkpoints, in one line.
    """
    began = time.perf_counter()
    keep_compiled_programs(cache_dir)
    run = RunDirectory(directory)
    with (
        stop_on_signals() as stop,
        Progress(every=config.training.log_every) as progress,
        contextlib.ExitStack() as resources,
    ):
        if resume and (summary := _final_summary(config, run)) is not None:
            progress.message(
                f"{directory} is complete: all of its {config.training.steps} steps are done; to "
                "train on, raise training.steps"
            )
            return Outcome(summary=summary, step=config.training.steps, was_complete=True)
        try:
            with stop.at_once():
                job = make_job(config, traceable=profile is not None)
                progress.message(describe_job(job))
                if warning := describe_ranking(config.training, config.checkpoint):
                    progress.message(warning)
                set_up = _resumed if resume else _new
                start = set_up(job, run, resources, cache_dir=cache_dir, profile=profile)
                progress.message(describe_corpus(start.corpus))
                if start.saved:
                    progress.message(f"resumed at step {start.batches.step}")
                log = resources.enter_context(
                    MetricsLog(run.metrics_file, run.tensorboard, after_step=start.batches.step)
                )
                profiler = Profiler(profile, run.trace)
                resources.callback(profiler.close)
        except Stopped:
            assert stop.signal is not None
            progress.message(
                f"stopped by {stop.signal.name} during set-up, nothing was lost; continue with "
                f"jaxinfra train --resume {directory}"
            )
            return Outcome(summary=None, step=max(layout.steps(run.checkpoints), default=0))
        return Trainer(
            job=job,
            run=run,
            corpus=start.corpus,
            batches=start.batches,
            state=start.state,
            saved=start.saved,
            saver=start.saver,
            log=log,
            clock=Clock(job, log.records, began=began),
            progress=progress,
            profiler=profiler,
            stop=stop,
        ).run()


def _final_summary(config: RunConfig, run: RunDirectory) -> dict[str, Any] | None:
    """The outcome of a run that has no step left to do; None while there is one."""
    summary, steps = run.read_summary(), config.training.steps
    done = summary is not None and summary["steps"] == steps
    return summary if done and max(layout.steps(run.checkpoints), default=0) == steps else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Start:
    """What a run's steps start from."""

    corpus: Corpus
    batches: TrainIterator  # the next one is of the state's step
    saver: Checkpointer
    state: State
    saved: bool  # whether the state is that of a checkpoint


def _new(
    job: Job,
    run: RunDirectory,
    resources: contextlib.ExitStack,
    *,
    cache_dir: Path,
    profile: ProfileRange | None,
) -> _Start:
    if profile is not None:
        profile.require_within(first=0, steps=job.config.training.steps)
    # Before the corpus is tokenized, which may take long: stopped meanwhile, there is a directory
    # to resume.
    run.create(job.config)
    try:
        corpus, batches = _open_data(job, resources, cache_dir=cache_dir, tokenizer=None)
    except (JaxinfraError, OSError):
        run.discard()
        raise
    corpus.tokenizer.save(run.tokenizer_file)
    saver = _open_checkpoints(job, run, resources)
    return _Start(corpus=corpus, batches=batches, saver=saver, state=job.initialize(), saved=False)


def _resumed(
    job: Job,
    run: RunDirectory,
    resources: contextlib.ExitStack,
    *,
    cache_dir: Path,
    profile: ProfileRange | None,
) -> _Start:
    run.read_config()  # raises where this is no run, before anything is written
    saver = _open_checkpoints(job, run, resources)
    restored = _restore(job, run, saver)
    if profile is not None:
        first = restored.step if restored else 0
        profile.require_within(first=first, steps=job.config.training.steps)
    saved = Tokenizer.load(run.tokenizer_file) if run.tokenizer_file.exists() else None
    corpus, batches = _open_data(job, resources, cache_dir=cache_dir, tokenizer=saved)
    if restored is not None:
        batches.restore(restored.data_state)
    # Only now is it known that the run can go on under this config.
    run.update_config(job.config)
    if saved is None:
        corpus.tokenizer.save(run.tokenizer_file)
    return _Start(
        corpus=corpus,
        batches=batches,
        saver=saver,
        state=job.initialize() if restored is None else restored.state,
        saved=restored is not None,
    )


def _open_data(
    job: Job,
    resources: contextlib.ExitStack,
    *,
    cache_dir: Path,
    tokenizer: Tokenizer | None,
) -> tuple[Corpus, TrainIterator]:
    config = job.config
    corpus = open_corpus(
        config.data,
        vocab_size=config.model.vocab_size,
        cache_dir=cache_dir,
        tokenizer=tokenizer,
    )
    batches = train_batches(
        corpus.train,
        sequence_length=config.training.sequence_length,
        batch_size=config.training.batch_size,
        seed=config.training.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        num_threads=config.data.num_prefetch_threads,
        prefetch=config.data.prefetch_batches,
    )
    resources.callback(batches.close)
    return corpus, batches


def _open_checkpoints(job: Job, run: RunDirectory, resources: contextlib.ExitStack) -> Checkpointer:
    model = codec.to_dict(job.config.model)
    return resources.enter_context(
        Checkpointer(run.checkpoints, job.config.checkpoint, identity={"model": model})
    )


def _restore(job: Job, run: RunDirectory, saver: Checkpointer) -> Restored | None:
    """The newest good checkpoint; None where a run was stopped before it made one."""
    if saver.latest() is None:
        quarantine = run.checkpoints / layout.QUARANTINE
        if quarantine.exists() and any(quarantine.iterdir()):
            raise CheckpointError(
                f"{run.path} has no checkpoint but those set aside as damaged in {quarantine}; "
                "restore one of them from a copy, or start another run"
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
