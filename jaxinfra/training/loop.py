"""The impure loop: data, signals, checkpoints, metrics and display around the pure step."""

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.checkpoint.metadata import JSON
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.core.errors import CheckpointError, JaxinfraError
from jaxinfra.data.baseline import compressed_bits_per_byte
from jaxinfra.data.corpus import Corpus, open_corpus
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.pipeline import TrainIterator, train_batches
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.training.clock import Clock, peak_bytes
from jaxinfra.training.describe import describe_corpus, describe_job
from jaxinfra.training.evaluation import Evaluation, Interrupted, evaluate
from jaxinfra.training.job import Job, make_job
from jaxinfra.training.metrics import MetricsLog
from jaxinfra.training.picture import draw_loss
from jaxinfra.training.profile import Profiler, ProfileRange
from jaxinfra.training.progress import Progress, Status
from jaxinfra.training.run_directory import RunDirectory
from jaxinfra.training.state import State
from jaxinfra.training.step import StepMetrics
from jaxinfra.training.stop import StopRequest, stop_on_signals


class DivergedError(JaxinfraError):
    """Too many steps in a row were not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call of ``train`` ended."""

    summary: dict[str, Any] | None  # None where it was asked to stop before the end
    step: int


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
    state and data order of a run that never stopped, bit for bit.

    Args:
        cache_dir: where tokenized corpora and compiled programs are kept between runs.
        profile: steps to trace.

    Raises:
        JaxinfraError: what is wrong with config, data or checkpoints, in one line.
    """
    # A second start of the same program on the same device reads it instead of compiling it.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "xla"))
    with stop_on_signals() as stop:
        job = make_job(config)
        run = RunDirectory(directory)
        if resume:
            run.update_config(config)
        saved = Tokenizer.load(run.tokenizer_file) if run.tokenizer_file.exists() else None
        with Progress(every=config.training.log_every) as progress:
            progress.message(describe_job(job))
            corpus = open_corpus(
                config.data,
                vocab_size=config.model.vocab_size,
                cache_dir=cache_dir,
                tokenizer=saved if resume else None,
            )
            progress.message(describe_corpus(corpus))
            if not resume:
                run.create(config)
            if saved is None or not resume:
                corpus.tokenizer.save(run.tokenizer_file)
            identity: dict[str, JSON] = {"model": codec.to_dict(config.model)}
            with Checkpointer(run.checkpoints, config.checkpoint, identity=identity) as saver:
                loop = _Loop(job, run, corpus, saver, progress, stop)
                return loop.run(resume=resume, profile=profile)


class _Loop:
    """One call of ``train``, past its set-up."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        corpus: Corpus,
        saver: Checkpointer,
        progress: Progress,
        stop: StopRequest,
    ):
        self.job = job
        self.run_directory = run
        self.corpus = corpus
        self.saver = saver
        self.progress = progress
        self.stop = stop
        self.training = job.config.training
        self.heldout: tuple[int, Evaluation] | None = None  # of which step

    def run(self, *, resume: bool, profile: ProfileRange | None) -> Outcome:
        state, batches, step = self._start(resume)
        profiler = Profiler(profile, self.run_directory.trace)
        with MetricsLog(
            self.run_directory.metrics_file, self.run_directory.tensorboard, after_step=step
        ) as log:
            try:
                return self._steps(state, batches, step, log, profiler)
            finally:
                profiler.close()
                batches.close()

    def _start(self, resume: bool) -> tuple[State, TrainIterator, int]:
        data = self.job.config.data
        batches = train_batches(
            self.corpus.train,
            sequence_length=self.training.sequence_length,
            batch_size=self.training.batch_size,
            seed=self.training.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            num_threads=data.num_prefetch_threads,
            prefetch=data.prefetch_batches,
        )
        # A run that was stopped before its first checkpoint starts again from its seed.
        if not resume or self.saver.latest() is None:
            return self.job.initialize(), batches, 0
        restored = self.saver.restore(self.job.abstract_state())
        batches.restore(restored.data_state)
        for bad in restored.quarantined:
            self.progress.message(f"set aside: {bad}")
        self.progress.message(f"resumed at step {restored.step}")
        return restored.state, batches, restored.step

    def _steps(
        self,
        state: State,
        batches: TrainIterator,
        step: int,
        log: MetricsLog,
        profiler: Profiler,
    ) -> Outcome:
        config, steps = self.job.config, self.training.steps
        clock = Clock(self.job, log.records)
        pending: collections.deque[tuple[int, StepMetrics]] = collections.deque()
        compiled_s = time.perf_counter()
        train_step = self.job.train_step
        while step < steps and not self.stop:
            profiler.before_step(step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = train_step(state, self.job.put(next(batches)))
            profiler.after_step(step, metrics.loss)
            step += 1
            if clock.first:
                jax.block_until_ready(metrics.loss)
                self.progress.message(f"compiled in {time.perf_counter() - compiled_s:.1f} s")
                clock.start()
            pending.append((step, metrics))
            if len(pending) > 1:  # the device works on this step while the host reads the last
                self._record(*pending.popleft(), log, clock)
            due = _due(step, self.training.evaluate_every) or step == steps
            save = _due(step, config.checkpoint.every) or step == steps
            if due or save:
                while pending:
                    self._record(*pending.popleft(), log, clock)
                if due:
                    self._evaluate(state, step, log, clock)
                if save and not self.stop:
                    self._save(state, batches, step)
        while pending:
            self._record(*pending.popleft(), log, clock)
        if self.stop and step not in self.saver.steps():
            self._save(state, batches, step)
        self.saver.wait()
        if log.records:
            draw_loss(log.records, self.run_directory.picture_file)
        if step < steps or self.heldout is None or self.heldout[0] != step:
            assert self.stop.signal is not None
            self.progress.message(
                f"stopped by {self.stop.signal.name} at step {step}, saved; continue with "
                f"jaxinfra train --resume {self.run_directory.path}"
            )
            return Outcome(summary=None, step=step)
        return Outcome(summary=self._summarize(step, log, clock), step=step)

    def _record(self, step: int, metrics: StepMetrics, log: MetricsLog, clock: Clock) -> None:
        values = jax.device_get(metrics)
        elapsed_s, step_s = clock.lap()
        record = {
            "step": step,
            "loss": float(values.loss),
            "gradient_norm": float(values.gradient_norm),
            "learning_rate": float(values.learning_rate),
            "loss_scale": float(values.loss_scale),
            "tokens": int(values.tokens),
            "skipped": int(values.skipped),
            "step_s": step_s,
            "elapsed_s": elapsed_s,
        }
        log.write(record)
        self.progress.show(
            Status(
                step=step,
                steps=self.training.steps,
                loss=record["loss"],
                gradient_norm=record["gradient_norm"],
                learning_rate=record["learning_rate"],
                tokens_per_s=clock.tokens_per_s,
                mfu=clock.mfu,
                loss_scale=record["loss_scale"],
                skipped=record["skipped"],
                heldout_loss=self.heldout[1].loss if self.heldout else None,
                remaining_s=(self.training.steps - step) * clock.step_s,
            )
        )
        if int(values.skipped_in_a_row) >= self.training.max_bad_steps:
            raise DivergedError(
                f"step {step}: {int(values.skipped_in_a_row)} steps in a row had a loss or a "
                f"gradient that is not finite (max_bad_steps={self.training.max_bad_steps}); lower "
                "the learning rate, or resume from an earlier checkpoint"
            )

    def _evaluate(self, state: State, step: int, log: MetricsLog, clock: Clock) -> None:
        arrays = self.corpus.heldout
        batches = heldout_batches(
            arrays,
            sequence_length=self.training.sequence_length,
            batch_size=self.training.batch_size // self.training.accumulation,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        with clock.paused():
            try:
                result = evaluate(
                    self.job.evaluation_step,
                    state.parameters,
                    batches,
                    arrays,
                    put=self.job.put,
                    stop=lambda: bool(self.stop),
                )
            except Interrupted:
                return
        self.heldout = (step, result)
        log.write(
            {
                "step": step,
                "heldout_loss": result.loss,
                "heldout_bits_per_byte": result.bits_per_byte,
            }
        )
        self.progress.message(
            f"step {step}: held-out loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
            f"{result.bits_per_byte:.4f} bits per byte"
        )

    def _save(self, state: State, batches: TrainIterator, step: int) -> None:
        loss = self.heldout[1].loss if self.heldout and self.heldout[0] == step else None
        try:
            self.saver.save(step, state, data_state=batches.state(), heldout_loss=loss)
        except CheckpointError as error:
            # An earlier save's failure: training goes on, the last good checkpoint is kept.
            self.progress.message(f"WARNING: {error}")

    def _summarize(self, step: int, log: MetricsLog, clock: Clock) -> dict[str, Any]:
        assert self.heldout is not None
        result = self.heldout[1]
        baseline = compressed_bits_per_byte(self.corpus.heldout_documents())
        losses = [record["loss"] for record in log.records if "loss" in record]
        summary = {
            "final_loss": losses[-1],
            "heldout_loss": result.loss,
            "heldout_perplexity": result.perplexity,
            "heldout_bits_per_byte": result.bits_per_byte,
            "heldout_bytes": result.num_bytes,
            "gzip_bits_per_byte": baseline.gzip_each,
            "xz_bits_per_byte": baseline.xz_all,
            "tokens_per_s": clock.median_tokens_per_s(log.records),
            "mfu": clock.mfu,
            "steps": step,
            "skipped": log.records[-1].get("skipped", 0),
            "wall_s": clock.elapsed_s,
            "peak_bytes": peak_bytes(),
            "num_parameters": self.job.model.num_parameters,
        }
        self.run_directory.write_summary(summary)
        return summary


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
