"""The impure loop: what happens between the pure steps of a run that is set up."""

import collections
import dataclasses
import time
from typing import Any, final

import jax

from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.core.errors import CheckpointError, JaxinfraError
from jaxinfra.data.corpus import Corpus
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.pipeline import TrainIterator
from jaxinfra.training.clock import Clock
from jaxinfra.training.evaluation import Interrupted, evaluate
from jaxinfra.training.job import Job
from jaxinfra.training.metrics import MetricsLog
from jaxinfra.training.picture import draw_loss
from jaxinfra.training.profile import Profiler
from jaxinfra.training.progress import Progress, Status
from jaxinfra.training.state import State
from jaxinfra.training.step import StepMetrics
from jaxinfra.training.stop import StopRequest
from jaxinfra.training.summary import summarize


class DivergedError(JaxinfraError):
    """Too many steps in a row were not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call of ``train`` ended."""

    summary: dict[str, Any] | None  # None where it was asked to stop before the end
    step: int
    was_complete: bool = False  # before the call, which did nothing


@final
class Trainer:
    """Runs the steps that remain; evaluates, saves and records what is due after each.

    Args:
        state: after ``batches.step`` steps.
        saved: whether that state is on disk.
    """

    def __init__(
        self,
        *,
        job: Job,
        run: RunDirectory,
        corpus: Corpus,
        batches: TrainIterator,
        state: State,
        saved: bool,
        saver: Checkpointer,
        log: MetricsLog,
        clock: Clock,
        progress: Progress,
        profiler: Profiler,
        stop: StopRequest,
    ):
        self._job = job
        self._training = job.config.training
        self._run = run
        self._corpus = corpus
        self._batches = batches
        self._state = state
        self._step = batches.step
        self._saved_step = batches.step if saved else None
        self._saver = saver
        self._log = log
        self._clock = clock
        self._progress = progress
        self._profiler = profiler
        self._stop = stop
        heldout = log.find("heldout_loss")
        self._heldout_loss: float | None = heldout["heldout_loss"] if heldout else None
        self._stall_s = 0.0  # of a save since the last step recorded
        self._pending: collections.deque[tuple[int, StepMetrics]] = collections.deque()

    def run(self) -> Outcome:
        """To the end, or until asked to stop; raises where the last state cannot be saved."""
        try:
            self._steps()
        except DivergedError:
            draw_loss(self._log.records, self._run.picture_file)
            raise
        if self._log.records:
            draw_loss(self._log.records, self._run.picture_file)
        if self._step < self._training.steps or not self._is_evaluated():
            assert self._stop.signal is not None
            self._progress.message(
                f"stopped by {self._stop.signal.name} at step {self._step}, saved; continue with "
                f"jaxinfra train --resume {self._run.path}"
            )
            return Outcome(summary=None, step=self._step)
        summary = summarize(self._job, self._corpus, self._log, self._clock)
        self._run.write_summary(summary)
        return Outcome(summary=summary, step=self._step)

    def _steps(self) -> None:
        self._evaluate_and_save()  # what a stop or a kill left undone
        began = time.perf_counter()
        compiling = True
        while self._step < self._training.steps and not self._stop:
            self._pending.append((self._step + 1, self._next()))
            self._step += 1
            if compiling:
                jax.block_until_ready(self._pending[-1][1])
                self._progress.message(f"compiled in {time.perf_counter() - began:.1f} s")
                self._record(keep=0)
                compiling = False
            self._record(keep=1)  # the device works on this step while the host reads the last
            self._evaluate_and_save()
        self._record(keep=0)
        self._secure()

    def _next(self) -> StepMetrics:
        step = self._step
        self._profiler.before_step(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            batch = self._job.put(next(self._batches))
            self._state, metrics = self._job.train_step(self._state, batch)
        self._profiler.after_step(step, metrics.loss)
        return metrics

    def _record(self, *, keep: int) -> None:
        """Writes and shows finished steps, up to ``keep`` that the device may still work on."""
        while len(self._pending) > keep:
            step, metrics = self._pending.popleft()
            values = jax.device_get(metrics)
            step_s = self._clock.lap()
            record = {
                "step": step,
                "loss": float(values.loss),
                "gradient_norm": float(values.gradient_norm),
                "learning_rate": float(values.learning_rate),
                "loss_scale": float(values.loss_scale),
                "tokens": int(values.tokens),
                "skipped": int(values.skipped),
                "step_s": step_s,
                "stall_s": self._stall_s,
                "elapsed_s": self._clock.elapsed_s,
            }
            self._stall_s = 0.0
            self._log.write(record)
            self._show(record)
            self._require_progress(step, int(values.skipped_in_a_row))

    def _show(self, record: dict[str, Any]) -> None:
        average_s = self._clock.step_s
        steps = self._training.steps
        self._progress.show(
            Status(
                step=record["step"],
                steps=steps,
                loss=record["loss"],
                gradient_norm=record["gradient_norm"],
                learning_rate=record["learning_rate"],
                tokens_per_s=self._clock.tokens_per_s(average_s),
                mfu=self._clock.mfu(average_s),
                loss_scale=record["loss_scale"],
                skipped=record["skipped"],
                heldout_loss=self._heldout_loss,
                remaining_s=None if average_s is None else (steps - record["step"]) * average_s,
            )
        )

    def _require_progress(self, step: int, skipped_in_a_row: int) -> None:
        limit = self._training.max_bad_steps
        if skipped_in_a_row >= limit:
            raise DivergedError(
                f"step {step}: {skipped_in_a_row} steps in a row had a loss or a gradient that is "
                f"not finite (max_bad_steps={limit}); lower optimizer.learning_rate in a new run, "
                f"or from the last checkpoint with --resume {self._run.path}"
            )

    def _evaluate_and_save(self) -> None:
        """What is due after the newest step."""
        step, last = self._step, self._step == self._training.steps
        evaluation_is_due = last or _due(step, self._training.evaluate_every)
        save_is_due = last or _due(step, self._job.config.checkpoint.every)
        if not (evaluation_is_due or save_is_due):
            return
        self._record(keep=0)
        with self._clock.paused():
            if evaluation_is_due and not self._is_evaluated():
                self._evaluate()
            if save_is_due and self._saved_step != step and not self._stop:
                try:
                    self._save()
                except CheckpointError as error:
                    # Training goes on, the last good checkpoint is kept, the next save tries again.
                    self._progress.message(f"WARNING: {error}")

    def _is_evaluated(self) -> bool:
        return self._log.find("heldout_loss", step=self._step) is not None

    def _evaluate(self) -> None:
        arrays = self._corpus.heldout
        batches = heldout_batches(
            arrays,
            sequence_length=self._training.sequence_length,
            batch_size=self._training.batch_size // self._training.accumulation,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        try:
            result = evaluate(
                self._job.evaluation_step,
                self._state.parameters,
                batches,
                arrays,
                put=self._job.put,
                stop=lambda: bool(self._stop),
            )
        except Interrupted:
            return
        self._heldout_loss = result.loss
        self._log.write(
            {
                "step": self._step,
                "heldout_loss": result.loss,
                "heldout_bits_per_byte": result.bits_per_byte,
            }
        )
        self._progress.message(
            f"step {self._step}: held-out loss {result.loss:.4f}, perplexity "
            f"{result.perplexity:.2f}, {result.bits_per_byte:.4f} bits per byte"
        )

    def _save(self) -> None:
        """Starts a save of the newest state; raises CheckpointError for it or the one before."""
        self._log.sync()
        heldout = self._log.find("heldout_loss", step=self._step)
        self._saved_step = self._step
        try:
            self._saver.save(
                self._step,
                self._state,
                data_state=self._batches.state(),
                heldout_loss=heldout["heldout_loss"] if heldout else None,
            )
        finally:
            self._stall_s += self._saver.last_stall_s

    def _secure(self) -> None:
        """Leaves the newest state on disk, or raises CheckpointError."""
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._progress.message(f"WARNING: {error}")
        if self._step not in self._saver.steps():
            self._save()
            self._saver.wait()


def _due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0
