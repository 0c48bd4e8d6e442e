"""What makes a run doubt a step: its loss, or copies of its state that differ."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jaxinfra.config import codec
from jaxinfra.config.reliability import ReliabilityConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import JaxinfraError
from jaxinfra.runtime.fingerprint import require_same
from jaxinfra.runtime.hashes import Mismatch, StateHash
from jaxinfra.training.job import Job
from jaxinfra.training.state import State
from jaxinfra.training.step import StepMetrics


class PersistentFaultError(JaxinfraError):
    """A device computes wrongly, again and again: no restart on it would help."""


class DivergedError(JaxinfraError):
    """Too many steps in a row were not finite."""


class Doubt(Exception):
    """A step whose result must not be kept; the trainer goes back to before it.

    Args:
        step: the first that is in doubt.
        text: what was seen.
        loss: of that step, where the loss is what is doubted.
        hashes: of the state after it, where copies differ.
        ranks: whose copies are not what most are.
    """

    def __init__(
        self,
        *,
        step: int,
        text: str,
        loss: float | None = None,
        hashes: np.ndarray | None = None,
        seen_at: int | None = None,
        ranks: tuple[int, ...] = (),
    ):
        super().__init__(text)
        self.step, self.text, self.loss, self.hashes = step, text, loss, hashes
        self.ranks = ranks
        self.seen_at = step if seen_at is None else seen_at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What a replay has shown about a doubt."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


@final
class Guards:
    """Looks at every step's loss, and now and then at the copies of the state.

    All processes see the same numbers, so all doubt alike.

    Args:
        abstract: the state's shapes and shardings.
    """

    def __init__(self, config: ReliabilityConfig, abstract: Any):
        self._config = config
        self._hash = StateHash(abstract)
        self._agreed_at = 0  # the newest step after which all copies were equal

    def check_loss(self, records: Sequence[dict[str, Any]], *, step: int, loss: float) -> None:
        """Raises Doubt where a loss is far above those of the steps before it."""
        factor, window = self._config.spike_factor, self._config.spike_window
        if factor is None or not math.isfinite(loss):
            return
        before: list[float] = []
        for record in reversed(records):
            value = record.get("loss")
            if record["step"] < step and value is not None:
                before.append(value)
                if len(before) == window:
                    break
        if len(before) < window:
            return
        usual = statistics.median(before)
        if loss > factor * usual:
            raise Doubt(
                step=step,
                loss=loss,
                text=f"loss {loss:.4f} is {loss / usual:.2f} times the recent median {usual:.4f}",
            )

    def hash_is_due(self, step: int) -> bool:
        """Whether to compare copies after a step, where there are any."""
        return self._hash.compares and is_due(step, self._config.hash_every)

    @property
    def hashes_before_saves(self) -> bool:
        """Whether a state is compared before it is saved."""
        return self._hash.compares and self._config.hash_every is not None

    def check_state(self, state: State, *, step: int) -> None:
        """Raises Doubt where copies of the state after a step differ; waits for the devices."""
        table = np.asarray(self._hash(state).addressable_data(0))
        if found := self._hash.compare(table):
            raise Doubt(
                step=self._agreed_at + 1,
                hashes=table,
                ranks=self._voted_out(found),
                seen_at=step,
                text=f"after step {step} {self._describe(found)}; before step "
                f"{self._agreed_at + 1} all were equal",
            )
        self._agreed_at = step

    def went_back_to(self, step: int) -> None:
        """The state is that of a step again, from a file."""
        self._agreed_at = step

    def judge_state(self, state: State, doubt: Doubt) -> Judged:
        """What a replay up to the step where copies differed shows.

        Raises PersistentFaultError where they differ again.
        """
        assert doubt.hashes is not None
        table = np.asarray(self._hash(state).addressable_data(0))
        if again := self._hash.compare(table):
            raise PersistentFaultError(
                f"step {doubt.seen_at}, done again from a good checkpoint: "
                f"{self._describe(again)}, again: the fault is persistent; take that device's "
                "host out of the job, then continue with --resume"
            )
        self._agreed_at = doubt.seen_at
        ranks = doubt.ranks
        if not ranks:  # two copies: the one that the replay agrees with was right
            wrong = np.nonzero((table != doubt.hashes).any(axis=1))[0]
            ranks = tuple(self._hash.processes([int(row) for row in wrong]))
        named = ", ".join(map(str, ranks))
        whose = f"rank {named}" if len(ranks) == 1 else f"one of ranks {named}"
        return Judged(
            kind="transient fault",
            ranks=ranks,
            text=f"done again, all copies are equal: a bit had flipped in the memory of {whose}",
        )

    def _voted_out(self, found: Sequence[Mismatch]) -> tuple[int, ...]:
        rows = sorted({row for mismatch in found if not mismatch.is_tie for row in mismatch.odd})
        return tuple(self._hash.processes(rows))

    def _describe(self, found: Sequence[Mismatch]) -> str:
        first = found[0]
        ranks = ", ".join(map(str, self._hash.processes(first.odd)))
        devices = ", ".join(str(self._hash.devices[row]) for row in first.odd)
        more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
        if first.is_tie:
            return f"{first.tensor}{more} is not the same on {devices} (ranks {ranks})"
        return f"{first.tensor}{more} on {devices} (rank {ranks}) is not what the other copies are"


def is_due(step: int, every: int | None) -> bool:
    """Whether what is done every so many steps is to be done after this one."""
    return every is not None and step > 0 and step % every == 0


def judge_loss(doubt: Doubt, loss: float) -> Judged:
    """What a replay of a step whose loss was doubted shows."""
    if loss != doubt.loss:
        return Judged(
            kind="transient fault",
            text=f"done again, the loss is {loss:.6g} and not {doubt.loss:.6g}: the batch is good, "
            "and a fault that passed had spoilt the step",
        )
    return Judged(
        kind="bad batch",
        text=f"done again, the loss is {loss:.6g} again: the batch is bad",
    )


def require_progress(config: RunConfig, values: StepMetrics, *, step: int, path: Path) -> None:
    """Raises DivergedError where too many steps in a row could not be applied."""
    limit = config.training.max_bad_steps
    if int(values.skipped_in_a_row) >= limit:
        raise DivergedError(
            f"step {step}: {int(values.skipped_in_a_row)} steps in a row had a loss or a gradient "
            f"that is not finite (max_bad_steps={limit}); lower optimizer.learning_rate in a new "
            f"run, or from the last checkpoint with --resume {path}"
        )


def require_applied(last: dict[str, Any] | None, *, steps: int) -> None:
    """Raises DivergedError where no step of a run, whose last record this is, changed anything."""
    if last is not None and last["skipped"] >= steps:
        raise DivergedError(
            f"none of {steps} steps was applied: each had a loss or a gradient that is not finite; "
            "see what it starts from, optimizer.learning_rate and the data"
        )


def same_program(
    job: Job, state: State, batch: Batch, *, record: Callable[[str], None]
) -> Callable[..., Any]:
    """The compiled step. Processes that would run different programs are refused before they do.

    Args:
        record: is told the program's fingerprint, where there is anybody to compare it with.

    Raises ConfigError naming the ranks that differ.
    """
    if jax.process_count() == 1:
        return job.train_step
    lowered = job.train_step.lower(state, batch)
    program = "program of the training step"
    prints = require_same(
        {
            "version of jax": jax.__version__,
            "config": codec.to_json(job.config),
            program: lowered.as_text(),
        }
    )
    record(prints[program])
    return lowered.compile()
