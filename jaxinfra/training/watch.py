"""What the loop tells the recorder, and what it learns from the other processes."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.reliability import ReliabilityConfig
from jaxinfra.runtime.goodput import Goodput, read_sessions, sum_causes
from jaxinfra.runtime.host_exchange import ProcessRow, ProcessTable
from jaxinfra.runtime.incidents import RECOMPILED, excluded_steps, record_incident
from jaxinfra.runtime.recorder import BUSY_READERS, READY_BATCHES, Recorder
from jaxinfra.runtime.stragglers import Stragglers
from jaxinfra.runtime.text import whole_number
from jaxinfra.training.fp8_watch import Fp8Watch
from jaxinfra.training.guards import is_due
from jaxinfra.training.progress import Progress
from jaxinfra.training.stop import Agreement


@final
class Watch:
    """A rank's recorder, its word with the others, and the run's ledgers, which process 0 writes.

    Args:
        began: wall time of the session's start.
        lost_s: compute that the session before did and this one does again.
        excluded: steps whose batches a checkpoint says are left out.
    """

    def __init__(
        self,
        *,
        run: RunDirectory,
        recorder: Recorder,
        stop: Agreement,
        config: ReliabilityConfig,
        progress: Progress,
        began: float,
        lost_s: float,
        excluded: Iterable[int] = (),
    ):
        self._run = run
        self._recorder = recorder
        self._stop = stop
        self._config = config
        self._progress = progress
        self._is_first = jax.process_index() == 0
        self._goodput = Goodput(run.goodput_file, run.prometheus_file, began=began, lost_s=lost_s)
        # A CPU is shared with all else that runs there: a few milliseconds say nothing of it.
        is_shared = jax.default_backend() == "cpu"
        self._stragglers = Stragglers(probe_margin_s=0.05 if is_shared else 0.001)
        self._fp8 = Fp8Watch()
        self._probe = DeviceProbe() if jax.process_count() > 1 else None
        self._probe_s = 0.0
        self._shapes: dict[str, str] = {}  # of the last batch
        self.excluded = {*config.exclude_steps, *excluded, *excluded_steps(run.incidents_file)}

    def phase(self, name: str, step: int) -> float:
        """Begins a phase; returns the seconds of the one before."""
        return self._recorder.phase(name, step=step)

    def begin_input(self, step: int, *, num_ready: int, busy_readers: float) -> None:
        """Begins the wait for a batch, of which so many are ready.

        Args:
            busy_readers: share of their time in which those who make batches computed.
        """
        self.phase("input", step)
        self._recorder.event(READY_BATCHES, step=step, value=num_ready)
        if not num_ready:
            self._recorder.event(BUSY_READERS, step=step, value=busy_readers)

    def note_shapes(self, batch: Any, step: int) -> None:
        """Records which arrays of a batch have another shape than before: the step recompiles."""
        shapes = {
            jax.tree_util.keystr(path, simple=True): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        before, self._shapes = self._shapes, shapes
        changed = [
            f"batch.{name} was {before[name]} and is {shape}"
            for name, shape in shapes.items()
            if name in before and before[name] != shape
        ]
        if changed:
            self.incident(RECOMPILED, step=step, text="; ".join(changed))

    def program(self, fingerprint: str) -> None:
        """Records which program of the training step this is."""
        self._recorder.event(f"program {fingerprint}", step=self._recorder.step)

    def send(self, *, input_s: float, host_s: float, rows_sum: int) -> ProcessTable | None:
        """Tells the others what this process spent alone, and what it read; a collective."""
        row = ProcessRow(input_s=input_s, host_s=host_s, probe_s=self._probe_s, rows_sum=rows_sum)
        self._probe_s = 0.0
        return self._stop.start(row)

    def read(self, table: ProcessTable | None) -> list[ProcessRow]:
        """What all sent with a step, by process; whether to stop is known from now on."""
        return self._stop.read(table)

    def look_for_slow(self, rows: Sequence[ProcessRow], *, step: int, step_s: float | None) -> None:
        """Names the ranks that the others wait for."""
        for rank, cause, text in self._stragglers.add(rows, step_s=step_s):
            self.incident("slow rank", step=step, text=text, rank=rank, cause=cause)

    def probe_is_due(self, step: int) -> bool:
        """Whether to time this process's own devices before a step."""
        return self._probe is not None and is_due(step, self._config.probe_every)

    def probe(self, step: int) -> None:
        """Times them; the devices must be idle."""
        assert self._probe is not None
        self.phase("probe", step)
        self._probe_s = self._probe.seconds()
        self._recorder.event("probe_s", step=step, value=self._probe_s)

    def incident(self, kind: str, *, step: int, text: str, **details: Any) -> None:
        """Says and records something that went wrong, the same on all processes."""
        self._recorder.event(kind, step=step)
        self._progress.message(f"{kind.upper()}: step {step}: {text}")
        if self._is_first:
            record_incident(self._run.incidents_file, kind, step=step, text=text, **details)

    def look_for_divergence(self, emitted: dict[str, Any], *, step: int) -> None:
        """Names 8-bit matmuls whose operands outgrow their format."""
        for text in self._fp8.add(emitted):
            self.incident("fp8 diverges", step=step, text=text)

    def undone(self, records: Sequence[dict[str, Any]]) -> None:
        """These steps are done again."""
        self._goodput.lost_s += compute_s(records)

    def snapshot(
        self, *, step: int, record: dict[str, Any] | None = None, now: bool = False
    ) -> None:
        """Writes the goodput ledger, every two seconds or ``now``."""
        if self._is_first:
            gauges = {
                name: float(record[name])
                for name in ("loss", "gradient_norm", "step_s", "skipped")
                if record and record.get(name) is not None
            }
            self._goodput.snapshot(self._recorder.seconds(), step=step, gauges=gauges, now=now)

    def totals(self, *, step: int) -> dict[str, float]:
        """Seconds by cause over all sessions, up to now."""
        self.snapshot(step=step, now=True)
        return sum_causes(read_sessions(self._run.goodput_file))


def compute_s(records: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps of these records."""
    return sum(record.get("step_s") or 0.0 for record in records)


@final
class DeviceProbe:
    """A matmul on each local device, a few milliseconds long: what a device alone can do."""

    def __init__(self) -> None:
        size = 256 if jax.default_backend() == "cpu" else 4096
        self._inputs = [
            jax.device_put(jnp.full((size, size), 1.0 / size), device)
            for device in jax.local_devices()
        ]
        self._work = jax.jit(lambda x: x @ x @ x @ x)
        self.seconds()  # compiles

    def seconds(self) -> float:
        """Seconds that all local devices take together; they must be idle."""
        jax.block_until_ready(self._inputs)
        began = time.perf_counter()
        jax.block_until_ready([self._work(x) for x in self._inputs])
        return time.perf_counter() - began


def attempt(environment: Any = os.environ) -> int:
    """Which start of its job this is, from 0, as its launcher says."""
    return whole_number(environment.get("JAXINFRA_ATTEMPT", "0")) or 0
