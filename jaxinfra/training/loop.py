"""The training loop and its side effects: logging, evaluation and saves between the pure steps."""

import collections
import dataclasses
import functools
import shlex
import time
from typing import Any, final

import jax

from jaxinfra.checkpoint import processes
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.precision import LossScaling
from jaxinfra.data.batch import batch_checksum, rows_checksum
from jaxinfra.errors import CheckpointError
from jaxinfra.runtime.host_exchange import ProcessTable
from jaxinfra.runtime.recorder import EXCLUDED
from jaxinfra.training.evaluation import Between, Interrupted, evaluate_sets
from jaxinfra.training.examine import explain_spike, locate_nonfinite
from jaxinfra.training.job import Job, StepPrograms
from jaxinfra.training.metrics import MetricsLog
from jaxinfra.training.own_data import PolicyBatches
from jaxinfra.training.profile import Profiler
from jaxinfra.training.progress import Clock, Progress
from jaxinfra.training.start import Start, first_state, restored_state
from jaxinfra.training.step import StepMetrics, step_record
from jaxinfra.training.summary import Outcome, draw_run, summarize
from jaxinfra.training.watch import (
    DivergedError,
    Guards,
    Stopped,
    SuspectStep,
    Watch,
    is_due,
    loss_verdict,
    require_applied,
    require_progress,
    same_program,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A step that the devices may still work on."""

    step: int
    metrics: StepMetrics | None  # None: its batch is not trained on
    samples: tuple[int, int]  # the first and the last of its batch
    rows_checksum: int  # of the rows that this process has read
    table: ProcessTable | None


@final
class Trainer:
    """The loop over a run's remaining steps. It also evaluates, saves checkpoints and logs metrics
    at their configured intervals.
    """

    def __init__(
        self,
        *,
        job: Job,
        run: RunDirectory,
        start: Start,
        log: MetricsLog,
        clock: Clock,
        progress: Progress,
        profiler: Profiler,
        watch: Watch,
    ):
        self._job = job
        self._training = job.config.training
        self._run = run
        self._corpora, self._batches, self._saver = start.corpora, start.batches, start.saver
        self._state = start.state
        self._step = start.batches.step
        self._saved_step = self._step if start.saved else None
        self._log, self._clock, self._progress, self._profiler = log, clock, progress, profiler
        self._watch, self._stop = watch, watch.stop
        self._guards = Guards(job.config.reliability, job.abstract_state())
        self._doubt: SuspectStep | None = None  # being replayed
        self._share = job.process_share()  # which part of a batch this process reads, of how many
        self.has_trained = False  # whether a step of this session is done
        self._programs = StepPrograms(job)
        self._stall_s = 0.0  # of a save since the last step recorded
        self._pending: collections.deque[_Pending] = collections.deque()

    def run(self) -> Outcome:
        """Trains to the last step, or until asked to stop; raises if the last state cannot be
        saved.
        """
        try:
            self._steps()
        except DivergedError:
            self._draw()
            raise
        self._stop.defer_signals()  # what is left takes a moment
        self._watch.phase("finish", self._step)
        self._draw()
        self._watch.snapshot(step=self._step, now=True)
        if self._step < self._training.steps or not self._is_evaluated():
            why = f" ({self._log.stopped})" if self._log.stopped and str(self._log.stopped) else ""
            self._progress.message(
                f"stopped by {self._stop.cause}{why} at step {self._step}, saved; continue with "
                f"jaxinfra {self._job.config.command} --resume "
                f"{shlex.quote(str(self._run.path))}"
            )
            return Outcome(summary=None, step=self._step)
        require_applied(self._log.find("skipped"), steps=self._training.steps)
        return Outcome(summary=processes.on_first(self._summarize), step=self._step)

    def _draw(self) -> None:
        if self._log.records and jax.process_index() == 0:
            draw_run(self._log.records, self._run)

    def _summarize(self) -> dict[str, Any]:
        spent = {"causes": self._watch.totals(step=self._step), "stall_s": self._stall_s}
        summary = summarize(self._job, self._corpora, self._log, self._clock, **spent)
        self._run.write_summary(summary)
        return summary

    def _steps(self) -> None:
        while True:
            try:
                self._evaluate_and_save()  # what a stop or a kill left undone
                while self._step < self._training.steps and not self._stop:
                    self._advance()
                self._record(keep=0)
                self._secure()
                return
            except SuspectStep as doubt:
                self._go_back(doubt)
            except Stopped:
                if not self.has_trained:
                    raise  # this session has done nothing yet
                # What is done is recorded and saved in the next turn.

    def _advance(self) -> None:
        """One step, and what is due after it."""
        if self._watch.probe_is_due(self._step):
            self._record(keep=0)
            self._watch.probe(self._step)
        began = time.perf_counter()
        self._pending.append(self._next())
        if not self.has_trained:
            jax.block_until_ready(self._pending[-1].metrics)
        self._step += 1
        if not self.has_trained and self._pending[-1].metrics is not None:
            self._progress.message(f"compiled in {time.perf_counter() - began:.1f} s")
            self._record(keep=0)
            self.has_trained = True
            self._stop.defer_signals()
        self._record(keep=1)  # the device works on this step while the host reads the last
        self._watch_copies()
        self._evaluate_and_save()

    def _next(self) -> _Pending:
        step = self._step
        self._profiler.before_step(step)
        batches = self._batches
        self._watch.begin_input(
            step + 1, num_ready=batches.num_ready, busy_readers=batches.busy_fraction
        )
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            if isinstance(batches, PolicyBatches):
                batches.follow(self._state)
            batch = self._stop.wait_for(functools.partial(next, batches))
            input_s = self._watch.phase("place", step + 1)
            samples = self._batches.sample_ids(self._batches.step - 1)
            read = rows_checksum(batch.tokens, first=self._share[0] * len(batch.tokens))
            metrics = None
            if step + 1 in self._watch.excluded:
                explain_spike(
                    self._job,
                    self._state,
                    self._batches,
                    self._corpora.tokenizer,
                    run=self._run,
                    watch=self._watch,
                    step=step + 1,
                )
                self._state = self._job.pass_over(self._state)
                host_s = self._watch.phase("step", step + 1)
            else:
                placed = self._job.put(batch)
                self._watch.note_shapes(placed, step + 1)
                phase = self._programs.phase(step + 1)
                host_s = self._watch.phase(phase, step + 1)
                if not self.has_trained:
                    self._programs.plain = same_program(
                        self._job, self._state, placed, record=self._watch.program
                    )
                    self._profiler.describe(self._job, self._state, placed)
                with self._clock.paused(when=phase == "compile"):
                    self._state, metrics = self._programs(step + 1, self._state, placed)
            table = self._watch.send(input_s=input_s, host_s=host_s, rows_checksum=read)
        if metrics is not None:
            self._profiler.after_step(step, metrics.loss)
        return _Pending(
            step=step + 1,
            metrics=metrics,
            samples=(int(samples[0]), int(samples[-1])),
            rows_checksum=read,
            table=table,
        )

    def _record(self, *, keep: int) -> None:
        """Writes and shows finished steps, up to ``keep`` that the device may still work on."""
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            step = pending.step
            if self.has_trained:
                self._watch.phase("wait", step)
            values = jax.device_get(pending.metrics)
            record = {"step": step, **step_record(values)}
            if values is not None:
                self._require_undoubted(step, record["loss"])
            step_s = self._clock.lap()
            rows = self._stop.read(pending.table)
            sums = [row.rows_checksum for row in rows] or [pending.rows_checksum]
            copies = len(sums) // self._share[1]
            record |= {"samples": pending.samples, "batch": batch_checksum(sums, copies=copies)}
            record |= self._batches.read(step)
            record |= {**self._clock.rates(step_s), "stall_s": self._stall_s}
            record["elapsed_s"] = self._clock.elapsed_s
            self._stall_s = 0.0
            self._watch.phase("host", step)  # callbacks are called, and may take long
            self._log.write(record)
            self._heed_callbacks()
            self._watch.report_stragglers(rows, step=step, step_s=step_s)
            self._watch.snapshot(step=step, record=record)
            if values is not None:
                heldout = self._log.find("heldout_loss")
                self._progress.show(
                    record, self._clock, steps=self._training.steps, heldout=heldout
                )
                if int(values.skipped_in_a_row) == 1:
                    self._explain_skip(step, values)
                self._watch.report_fp8_overflow(values.fp8, step=step)
                require_progress(self._job.config, values, step=step, path=self._run.path)

    def _heed_callbacks(self) -> None:
        """Asks all processes to stop if a callback has asked to."""
        if self._log.stopped is not None:
            self._stop.request_stop()

    def _require_undoubted(self, step: int, loss: float) -> None:
        """Checks a repeated step; raises SuspectStep where its batch, or this loss, is bad."""
        if self._doubt is None or self._doubt.loss is None or self._doubt.step != step:
            self._guards.check_loss(self._log.records, step=step, loss=loss)
            return
        judged, self._doubt = loss_verdict(self._doubt, loss), None
        if judged.kind == "transient fault":
            self._watch.incident(judged.kind, step=step, text=judged.text)
            return
        ids = self._batches.sample_ids(step - 1)
        self._watch.incident(
            EXCLUDED, step=step, text=judged.text, samples=[int(ids[0]), int(ids[-1])]
        )
        self._watch.excluded.add(step)
        raise SuspectStep(step=step, text="its batch is left out from now on")

    def _explain_skip(self, step: int, values: StepMetrics) -> None:
        """A step that was not applied because something in it was not finite: what, and where."""
        is_dynamic = self._job.config.precision.loss_scaling is LossScaling.DYNAMIC
        if is_dynamic and float(values.loss_scale) > 1.0:
            return  # too large a loss scale: found by trying, and no fault
        found = locate_nonfinite(self._job, self._state, self._batches, step=step)
        self._watch.incident("not finite", step=step, **found)

    def _watch_copies(self) -> None:
        """Compares replicated state where that is due, or where a replay has come to judge it."""
        step, doubt = self._step, self._doubt
        if doubt is not None and doubt.hashes is not None and step == doubt.seen_at:
            self._record(keep=0)
            judged, self._doubt = self._guards.state_verdict(self._state, doubt), None
            self._watch.incident(judged.kind, step=step, text=judged.text, ranks=judged.ranks)
        elif self._guards.hash_is_due(step):
            self._record(keep=0)
            self._guards.check_state(self._state, step=step)

    def _go_back(self, doubt: SuspectStep) -> None:
        """Restores the newest checkpoint from before a suspect step; the steps since then run
        again.
        """
        self._watch.phase("rollback", doubt.seen_at)
        self._pending.clear()
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._progress.message(f"WARNING: {error}")
        saved = processes.on_first(self._saver.steps)
        for step in saved:
            if step >= doubt.step:
                self._saver.set_aside(step, f"from after step {doubt.step}: {doubt.text}")
        good = [step for step in saved if step < doubt.step]
        if good:
            restored = self._saver.restore(self._job.abstract_state(), step=max(good))
            target, self._state = restored.step, restored_state(self._job, restored)
            self._batches.restore(restored.data_state)
        else:
            target, self._state = 0, first_state(self._job)
            self._batches.restore(self._batches.state(0))
        self._watch.undone(self._log.rewind(target))
        self._step, self._saved_step = target, max(good, default=None)
        self._guards.went_back_to(target)
        self._watch.incident(
            "went back", step=doubt.seen_at, text=f"{doubt.text}; to step {target}"
        )
        if doubt.loss is not None or doubt.hashes is not None:
            self._doubt = doubt

    def _evaluate_and_save(self) -> None:
        """Runs the evaluation and saves the checkpoint that are due after the newest step."""
        step, last = self._step, self._step == self._training.steps
        evaluation_is_due = last or is_due(step, self._training.evaluate_every)
        save_is_due = last or is_due(step, self._job.config.checkpoint.every)
        if not (evaluation_is_due or save_is_due):
            return
        self._record(keep=0)
        with self._clock.paused():
            if evaluation_is_due and not self._is_evaluated():
                self._evaluate()
            if save_is_due and self._saved_step != step and not self._stop:
                self._require_equal_copies()
                try:
                    self._save()
                except CheckpointError as error:
                    # Training goes on, the last good checkpoint is kept, the next save tries again.
                    self._watch.incident("not saved", step=step, text=str(error))
        self._watch.phase("host", step)
        self._watch.snapshot(step=step, now=True)

    def _require_equal_copies(self) -> None:
        """Checks the copies before a save, so that corrupt state never becomes the last good
        checkpoint.
        """
        if self._guards.hashes_before_saves:
            self._guards.check_state(self._state, step=self._step)

    def _is_evaluated(self) -> bool:
        """Whether the newest step has its evaluation, if the run has texts to evaluate on."""
        return (
            not self._corpora.heldout or self._log.find("heldout_loss", step=self._step) is not None
        )

    def _evaluate(self) -> None:
        try:
            result = evaluate_sets(
                self._job,
                self._state.evaluated,
                self._corpora,
                between=Between(stop=self._is_to_stop_evaluating, told=self._progress.evaluating),
            )
        except Interrupted:
            return
        self._log.write({"step": self._step, **result.record()})
        self._heed_callbacks()
        self._progress.message(f"step {self._step}: {result.describe()}")

    def _is_to_stop_evaluating(self) -> bool:
        self._watch.phase("evaluate", self._step)  # each batch has the bound of a step
        return self._stop.all_agree()

    def _save(self) -> None:
        """Starts a save of the newest state; raises CheckpointError for it or the one before."""
        self._watch.phase("save", self._step)
        self._log.sync()
        heldout = self._log.find("heldout_loss", step=self._step)
        self._saved_step = self._step
        try:
            self._saver.save(
                self._step,
                self._state,
                # A stop may come as the next batch does; the step counts, not the batch.
                data_state=self._batches.state(self._step)
                | {"excluded": [*sorted(self._watch.excluded)]},
                heldout_loss=heldout["heldout_loss"] if heldout else None,
            )
        finally:
            self._stall_s += self._saver.last_stall_s
        self._log.report_save(self._step)
        self._heed_callbacks()
        self._progress.message(
            f"step {self._step}: saving; training stood still for {self._saver.last_stall_s:.3f} s"
        )

    def _secure(self) -> None:
        """Leaves the newest state on disk, or raises CheckpointError."""
        self._watch.phase("save", self._step)
        try:
            self._saver.wait()
        except CheckpointError as error:
            if self._saved_step != self._step:  # else it is tried again, and says so itself
                self._progress.message(f"WARNING: {error}")
        if not processes.on_first(lambda: self._step in self._saver.steps()):
            self._require_equal_copies()
            self._save()
            self._saver.wait()
