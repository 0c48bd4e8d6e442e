"""Set-up of a training session from its config; the steps themselves are in ``loop``."""

import contextlib
import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint import directory_layout, processes
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import describe_warmup, with_warmup
from jaxinfra.data.corpora import require_sources
from jaxinfra.errors import (
    ConfigError,
    DeviceMemoryError,
    LostPeerError,
    is_out_of_memory,
)
from jaxinfra.runtime import injected_faults as faults
from jaxinfra.runtime.cluster import LAUNCHER, attempt
from jaxinfra.runtime.compile_cache import cache_for_stages, keep_compiled_programs
from jaxinfra.runtime.files import local_path, user_cache
from jaxinfra.runtime.host_exchange import RowAllGather
from jaxinfra.runtime.recorder import Recorder
from jaxinfra.runtime.rendezvous import connect
from jaxinfra.runtime.signals import StopRequest, noted_signals
from jaxinfra.runtime.watchdog import Watchdog, launcher_of
from jaxinfra.training.describe import (
    describe_job,
    describe_ranking,
    describe_texts,
    record_environment,
)
from jaxinfra.training.job import Job, make_job
from jaxinfra.training.loop import Trainer
from jaxinfra.training.metrics import Callback, MetricsLog
from jaxinfra.training.own_data import OwnData, PolicyData
from jaxinfra.training.profile import Profiler, ProfileRange
from jaxinfra.training.progress import Clock, Progress
from jaxinfra.training.recompute.optimal import draw_choice
from jaxinfra.training.start import (
    Start,
    kept_from_start,
    new_start,
    resumed_start,
    with_frozen,
)
from jaxinfra.training.summary import Outcome, final_summary
from jaxinfra.training.watch import Agreement, Stopped, Watch, compute_s


def train(
    config: RunConfig,
    directory: str | Path,
    *,
    resume: bool = False,
    cache_dir: Path | None = None,
    profile: ProfileRange | None = None,
    callbacks: Sequence[Callback] = (),
    data: Iterable[Any] | PolicyData | None = None,
    validation: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
) -> Outcome:
    """Trains until ``config.training.steps``, or until SIGINT or SIGTERM asks to stop.

    A new run makes ``directory``; a resumed one continues from its newest good checkpoint with the
    state and data order of a run that never stopped, bit for bit. A complete run is left unchanged.
    All processes of a job must call it with equal arguments, and all stop at one step.

    Args:
        config: model, data, optimizer and length of the run.
        directory: the run's directory; it must be new unless ``resume`` is true.
        resume: continue the run in ``directory``; ``config`` may differ from the run's last one.
        cache_dir: for tokenized corpora and compiled programs; the user's cache by default.
        profile: range of steps to trace.
        callbacks: hooks around steps, such as loggers; called on the first process.
        data: whole batches of token ids [B, T + 1] in place of the config's texts (docs/python.md).
        validation: batches to evaluate on, which can be read again, or several sets by name.

    Raises:
        LostPeerError: another process is gone; all processes have to be started again.
        JaxinfraError: config, data or a checkpoint is wrong; the message says what.

    Examples:
        >>> outcome = jaxinfra.train(jaxinfra.read_run_config("mine.toml"), "runs/new")
        7,152 parameters, fp32 on cpu (one device); 4 steps of 2 x 32 tokens
        ...
    """
    began = time.perf_counter()
    with noted_signals() as stop, contextlib.ExitStack() as resources:
        own, given = OwnData.of(data, validation), codec.normalized(config, RunConfig)
        run, cache_dir = RunDirectory(local_path(directory)), cache_dir or user_cache()
        stop.words, cluster = functools.partial(_nothing_lost, run, given.command), connect()
        rank = 0 if cluster is None else cluster.process_id
        faults.arm(os.environ, rank=rank, attempt=attempt())
        keep_compiled_programs(cache_dir)
        progress = resources.enter_context(Progress(every=given.training.log_every, quiet=rank > 0))
        session = _Session(
            config=_fitting(given, own, progress),
            own=own,
            run=run,
            resume=resume,
            cache_dir=cache_dir,
            profile=profile,
            stop=stop,
            progress=progress,
            resources=resources,
            began=began,
            callbacks=tuple(callbacks) if rank == 0 else (),
            is_alone=cluster is None,
        )
        return session.outcome()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Session:
    """One call of ``train``, once its process knows the others."""

    config: RunConfig
    own: OwnData | PolicyData | None  # of the script that called
    run: RunDirectory
    resume: bool
    cache_dir: Path
    profile: ProfileRange | None
    stop: StopRequest
    progress: Progress
    resources: contextlib.ExitStack
    began: float
    callbacks: tuple[Callback, ...]
    is_alone: bool  # whether no other process is part of the job

    def outcome(self) -> Outcome:
        """Sets up and trains."""
        config, run, progress = self.config, self.run, self.progress
        trainer = None
        try:
            if self.resume and (summary := final_summary(config, run)) is not None:
                steps = config.training.steps
                progress.message(
                    f"{run.path} is complete: all of its {steps} steps are done; to train on, "
                    "raise training.steps"
                )
                return Outcome(summary=summary, step=steps, was_complete=True, together=True)
            self.resources.enter_context(cache_for_stages(config.mesh.pipe))
            trainer = self._set_up()
            done = dataclasses.replace(trainer.run(), together=True)
            for callback in self.callbacks:
                callback.on_end(done.summary)
            return done
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error) and (trainer is None or not trainer.has_trained):
                raise DeviceMemoryError(
                    f"rank {jax.process_index()}: the first step does not fit into a device's "
                    f"memory ({str(error).splitlines()[0]}); more --accumulation, another --remat, "
                    "a smaller --batch-size or more sharding need less: jaxinfra plan says what "
                    "fits"
                ) from error
            if self.is_alone:
                raise
            raise LostPeerError(
                f"rank {jax.process_index()}: a collective or a device failed: "
                f"{str(error).splitlines()[0]}"
            ) from error
        except Stopped:
            assert self.stop.asked is not None
            progress.message(
                f"stopped by {self.stop.asked.name}{_nothing_lost(run, config.command)}"
            )
            step = max(directory_layout.steps(run.checkpoints), default=0)
            return Outcome(summary=None, step=step)

    def _set_up(self) -> Trainer:
        config, run, progress = self.config, self.run, self.progress
        profile, resources = self.profile, self.resources
        _require_all_devices(config)
        # On one device a trace finds its operations under CUDA graphs (diagnostics/launch_names).
        job = make_job(config, traceable=profile is not None and config.mesh.num_devices > 1)
        require_sources(config.data)  # so that a name that is wrong is the first thing said
        progress.message(describe_job(job))
        if warning := describe_ranking(config.training, config.checkpoint):
            progress.message(warning)
        job = with_frozen(job)
        if self.resume:
            run.read_config()  # raises where this is no run, before anything is written
            processes.on_first(run.set_aside_odd_logs)
            prepare = functools.partial(resumed_start, profile=profile)
        else:
            if profile is not None:
                profile.require_within(first=0, steps=config.training.steps)
            # Before the corpus is tokenized, which may take long: stopped meanwhile, there is a
            # directory to resume.
            processes.on_first(lambda: run.create(job.config, kept_from_start(config)))
            processes.on_first(lambda: draw_choice(job.choice, run.recomputation_picture_file))
            prepare = new_start
        given = {"cache_dir": self.cache_dir, "own": self.own, "say": progress.message}
        set_up = functools.partial(prepare, job, run, resources, **given)
        if jax.process_count() > 1:
            recorder, start = _record_and_watch(config, run, resources), set_up()
        else:  # alone there is nobody to wait for, and a refused resumption leaves all as it was
            start, recorder = set_up(), _record_and_watch(config, run, resources)
        recorder.spent["setup"] += recorder.began - self.began
        progress.message(describe_texts(start.corpora, job.config))
        if start.saved:
            progress.message(f"resumed at step {start.batches.step}")
        if start.changes:
            progress.message(f"settings changed since it was saved: {'; '.join(start.changes)}")
        return self._trainer(job, start, recorder)

    def _trainer(self, job: Job, start: Start, recorder: Recorder) -> Trainer:
        """Opens what the steps to come are recorded and shown in."""
        run, resources, step = self.run, self.resources, start.batches.step
        log = resources.enter_context(
            MetricsLog(
                run.metrics_file,
                run.tensorboard,
                after_step=step,
                writes=jax.process_index() == 0,
                callbacks=self.callbacks,
            )
        )
        record_environment(run.environments_file, job, step=step)
        for callback in self.callbacks:
            callback.on_begin(run.path, job.config)
        profiler = Profiler(self.profile, run.trace)
        resources.callback(profiler.close)
        watch = Watch(
            run=run,
            recorder=recorder,
            stop=Agreement(self.stop, RowAllGather() if jax.process_count() > 1 else None),
            config=self.config.reliability,
            progress=self.progress,
            began=time.time() - (time.perf_counter() - self.began),
            lost_s=compute_s(log.undone),
            excluded=start.excluded,
        )
        return Trainer(
            job=job,
            run=run,
            start=start,
            log=log,
            clock=Clock(job, log.records, began=self.began),
            progress=self.progress,
            profiler=profiler,
            watch=watch,
        )


def _fitting(config: RunConfig, own: OwnData | PolicyData | None, progress: Progress) -> RunConfig:
    """The config with the source of a script's data, and a warm-up no longer than the run, which is
    said where it changes.
    """
    if (config.rl is not None) != isinstance(own, PolicyData):
        raise ConfigError(
            f"a config {'without' if config.rl is None else 'with'} rl: `jaxinfra rl` and "
            "jaxinfra.rl are for runs that have it, `jaxinfra train` and jaxinfra.train for others"
        )
    config = config if own is None else own.named_in(config)
    fitting = with_warmup(config)
    if fitting is not config:
        progress.message(describe_warmup(config, fitting))
    return fitting


def _nothing_lost(run: RunDirectory, command: str) -> str:
    how = (
        f"continue with jaxinfra {command} --resume {shlex.quote(str(run.path))}"
        if run.config_file.is_file()
        else "start it again"
    )
    return f" before a step was done, nothing was lost; {how}"


def _require_all_devices(config: RunConfig) -> None:
    if jax.process_count() > 1 and config.mesh.num_devices != jax.device_count():
        raise ConfigError(
            f"the mesh has {config.mesh.num_devices} devices, and the job's {jax.process_count()} "
            f"processes {jax.device_count()}; give a mesh of all of them, such as --mesh "
            f"fsdp={jax.device_count()}"
        )


def _record_and_watch(
    config: RunConfig, run: RunDirectory, resources: contextlib.ExitStack
) -> Recorder:
    """Starts this rank's flight recorder and watchdog."""
    processes.on_first(run.new_recorder)
    recorder = Recorder(run.recorder, jax.process_index())
    resources.enter_context(
        Watchdog(
            recorder,
            run.recorder,
            num_ranks=jax.process_count(),
            hang_s=config.reliability.hang_s,
            heartbeat_s=config.reliability.heartbeat_s,
            launcher=launcher_of(os.environ, LAUNCHER),
        )
    )
    resources.callback(lambda: recorder.phase("done", step=recorder.step))
    return recorder
