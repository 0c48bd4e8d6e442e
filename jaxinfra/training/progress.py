"""Progress of a run: its time, throughput and memory, and their display while it trains."""

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, final

import jax
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from jaxinfra.config.mixture import OWN
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.runtime.devices import device_peak
from jaxinfra.training.job import Job


@final
class Clock:
    """Measures a run's wall time over all its sessions, and its step times. Compilation, evaluation
    and saves are not part of a step's time.

    Args:
        records: records of the run so far, without steps that were lost when a session was killed.
        began: ``time.perf_counter()`` at the start of this session.
    """

    def __init__(self, job: Job, records: Sequence[dict[str, Any]], *, began: float):
        training = job.config.training
        self._tokens = training.batch_size * training.sequence_length
        flops = self._tokens * training_flops_per_token(job.model, training.sequence_length)
        peak = device_peak(jax.devices()[0].device_kind)
        devices = job.placement.mesh.size
        self._ideal_s = None if peak is None else flops / (peak.bf16_flops * devices)
        self._before_s = max((record.get("elapsed_s", 0.0) for record in records), default=0.0)
        self._began = began
        self._last: float | None = None  # when the last step was recorded
        self.step_s: float | None = None  # moving average

    def lap(self) -> float | None:
        """Returns the seconds since the previous step was recorded; None for a session's first
        step, whose time includes compilation.
        """
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            return None
        lap = now - last
        self.step_s = lap if self.step_s is None else 0.9 * self.step_s + 0.1 * lap
        return lap

    @contextlib.contextmanager
    def paused(self, *, when: bool = True) -> Iterator[None]:
        """Excludes the time of a ``with`` block from the steps' times, unless ``when`` is false."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if when and self._last is not None:
                self._last += time.perf_counter() - began

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run so far in seconds, its set-up included."""
        return self._before_s + time.perf_counter() - self._began

    def tokens_per_s(self, step_s: float | None) -> float | None:
        """Returns the tokens/s over all devices, for steps of ``step_s`` seconds."""
        return None if step_s is None else self._tokens / step_s

    def rates(self, step_s: float | None) -> dict[str, float | None]:
        """Returns the step time, tokens/s, MFU and peak memory for a step's record."""
        rates = {"tokens_per_s": self.tokens_per_s(step_s), "mfu": self.mfu(step_s)}
        return {"step_s": step_s, **rates, "peak_bytes": peak_bytes()}

    def mfu(self, step_s: float | None) -> float | None:
        """Returns model FLOP/s over the devices' dense bf16 peak; None if either is unknown."""
        return None if self._ideal_s is None or step_s is None else self._ideal_s / step_s


def median_step_s(records: Sequence[dict[str, Any]]) -> float | None:
    """Returns the median seconds per step over all sessions, without each session's first step."""
    laps = [record["step_s"] for record in records if record.get("step_s") is not None]
    return statistics.median(laps) if laps else None


def peak_bytes() -> int:
    """Returns the peak memory in bytes of the first device or, if the device does not report it,
    of this process.
    """
    counters = jax.local_devices()[0].memory_stats() or {}
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(counters.get("peak_bytes_in_use", resident))


def status_cells(
    record: Mapping[str, Any], clock: Clock, *, steps: int, heldout: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Formats what a run's display shows after a step: names and values, in the order shown.

    Args:
        record: the step's record; times are the clock's moving average.
        heldout: the newest record of an evaluation.
    """
    step, step_s = record["step"], clock.step_s
    remaining_s = None if step_s is None else (steps - step) * step_s
    left_out = record.get("layers/dropped", 0.0) + record.get("layers/overflowed", 0.0)
    cells = [
        ("step", f"{step}/{steps}"),
        ("loss", f"{record['loss']:.4f}"),
        ("grad norm", f"{record['gradient_norm']:.3f}"),
        ("lr", f"{record['learning_rate']:.2e}"),
        ("tokens/s", _or_unknown(clock.tokens_per_s(step_s), lambda rate: f"{rate:,.0f}")),
        ("MFU", _or_unknown(clock.mfu(step_s), lambda share: f"{share:.1%}")),
        ("left", _or_unknown(remaining_s, duration)),
    ]
    if record["loss_scale"] != 1.0:
        cells.append(("loss scale", f"{record['loss_scale']:g}"))
    if "preferences/accuracy" in record:  # of pairs in order, or of answers rewarded as they are
        cells.append(("right", f"{record['preferences/accuracy']:.0%}"))
    if "rl/reward" in record:
        cells.append(("reward", f"{record['rl/reward']:.3f}"))
    if "rl/engine_kl" in record:
        cells.append(("engine KL", f"{record['rl/engine_kl']:.1e}"))
    if record["skipped"]:
        cells.append(("skipped", str(record["skipped"])))
    if left_out:  # choices of experts, dropped or without room in the exchange
        cells.append(("choices left out", f"{left_out:,.0f}"))
    if heldout is not None:
        loss = _or_unknown(heldout["heldout_loss"], lambda value: f"{value:.4f}")
        when = "" if heldout["step"] == step else f" (step {heldout['step']})"
        cells.append(("held-out", f"{loss}{when}"))
    return cells


def _or_unknown(value: float | None, show: Callable[[float], str]) -> str:
    return "n/a" if value is None else show(value)


def duration(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds, such as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


_TOLD_EVERY_S = 10.0  # seconds between plain lines of an evaluation


class Progress:
    """The display of a run: a live panel on a terminal, plain lines elsewhere.

    Args:
        every: steps between plain lines; a live panel is refreshed after every step.
        quiet: show nothing; set on all processes but the first.
    """

    def __init__(self, *, every: int, quiet: bool = False):
        self._every = every
        self._quiet = quiet
        self._told_at = time.perf_counter()
        self._status: RenderableType = ""  # of the last step, on the panel
        self._console = Console(file=sys.stdout, highlight=False)
        self._live = (
            Live(console=self._console, refresh_per_second=4)
            if self._console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """Prints a line of text, above the panel if there is one."""
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)
            sys.stdout.flush()

    def evaluating(self, name: str, done: int, total: int | None) -> None:
        """Shows how far an evaluation is: below the panel, or on a line every ten seconds."""
        now = time.perf_counter()
        if done == 0:
            self._told_at = now
        of = "" if total is None else f" of {total}, {done / max(total, 1):.0%}"
        line = f"evaluating{'' if name == OWN else f' {name}'}: {done} batches{of}"
        if self._live is not None:
            self._live.update(Group(self._status, line))
        elif now - self._told_at > _TOLD_EVERY_S:
            self._told_at = now
            self.message(line)

    def show(
        self,
        record: Mapping[str, Any],
        clock: Clock,
        *,
        steps: int,
        heldout: Mapping[str, Any] | None,
    ) -> None:
        """Shows a run's status after a step, as ``status_cells`` formats it."""
        if self._live is None and record["step"] % self._every and record["step"] != steps:
            return
        cells = status_cells(record, clock, steps=steps, heldout=heldout)
        if self._live is not None:
            table = Table.grid(padding=(0, 2))
            table.add_row(*(name for name, _ in cells), style="dim")
            table.add_row(*(value for _, value in cells))
            self._status = table
            self._live.update(table)
        else:
            self.message("  ".join(f"{name} {value}" for name, value in cells))
