"""Saving and restoring a run's state so that nothing is lost."""

import logging
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self, final

import jax
from jaxtyping import PyTree

from jaxinfra.checkpoint import arrays, directory_layout, metadata, processes
from jaxinfra.checkpoint.metadata import JSON, Metadata
from jaxinfra.checkpoint.restoring import Restored, read_newest
from jaxinfra.checkpoint.saving import Save, SaveTarget
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

_log = logging.getLogger(__name__)


@final
class Checkpointer:
    """The one writer of a run's ``checkpoints/`` directory: asynchronous, atomic, verified.

    With several processes every method but ``steps`` and ``latest`` is a collective: all call it,
    in the same order, with one directory that all see. Readers use ``load``.

    Close it, best with ``with``: a program that ends without may lose the save in flight, as if
    killed. ``last_stall_s`` is how long the last ``save`` kept its caller waiting.

    Args:
        directory: made if absent. What killed saves left there is removed, with a warning.
        config: how many checkpoints to keep.
        identity: plain JSON that must match on restore, such as the model's config.
        settings: plain JSON that may change, kept with each checkpoint to say what has.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        identity: dict[str, JSON],
        settings: dict[str, JSON] | None = None,
    ) -> None:
        self._directory, self._config = directory.absolute(), config
        self.identity, self._settings = identity, settings or {}
        self._lock = None
        self._in_flight: Save | None = None
        self._failure: CheckpointError | None = None
        self._num_saves = 0
        self._unique = processes.on_first(self._open)
        self.last_stall_s = 0.0

    def _open(self) -> str:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = directory_layout.lock(self._directory)
            directory_layout.sweep(self._directory)
        except OSError as error:
            raise CheckpointError(
                f"{self._directory} cannot hold checkpoints: {error.strerror}. Choose a writable "
                "run directory"
            ) from error
        return secrets.token_hex(4)

    def save(
        self,
        step: int,
        state: PyTree[jax.Array],
        *,
        data_state: dict[str, JSON],
        heldout_loss: float | None = None,
    ) -> None:
        """Copies ``state`` to the host and returns; writing, hashing, commit follow meanwhile.

        The caller may donate the state's buffers as soon as this returns. If the save before is
        still in flight, this waits for it first: two copies on the host are one too many.

        Leaves are plain jax.Arrays of any numeric dtype; pass ``jax.random.key_data`` of a key. A
        step that is already saved is refused, never overwritten and never silently skipped.

        Raises CheckpointError if this save cannot start. If an earlier one failed in the
        background, its error is raised after this one has started: catch it and nothing is lost.

        Args:
            step: optimizer steps done.
            state: arrays, in any pytree.
            data_state: position in the data, the same on all processes, as plain JSON.
            heldout_loss: ranks the checkpoint for ``keep_best``; None: never among the best.
        """
        started = time.perf_counter()
        try:
            self._join()
            self._start(step, state, data_state=data_state, heldout_loss=heldout_loss)
            self._raise_failure()
        finally:
            self.last_stall_s = time.perf_counter() - started

    def _start(
        self,
        step: int,
        state: PyTree[jax.Array],
        *,
        data_state: dict[str, JSON],
        heldout_loss: float | None,
    ) -> None:
        if step < 0:
            raise CheckpointError(f"step={step} must not be negative")
        flat, _ = metadata.flatten(state)
        arrays.require_savable(flat)
        record = Metadata(
            step=step,
            data_state=data_state,
            heldout_loss=None if heldout_loss is None else float(heldout_loss),
            identity=self.identity,
            settings=self._settings,
            tree=metadata.describe(flat),
        ).encode()
        self._num_saves += 1
        target = SaveTarget(
            directory=self._directory,
            step=step,
            unique=f"{self._unique}{self._num_saves:04d}",
            config=self._config,
        )
        processes.on_first(target.prepare)
        self._in_flight = Save(target, flat, record)
        self._in_flight.wait_until_copied()

    def wait(self) -> None:
        """Blocks until the save in flight is committed; raises CheckpointError if one failed."""
        self._join()
        self._raise_failure()

    def _join(self) -> None:
        """Waits for the save in flight and keeps its failure, process 0's if this one has none."""
        if self._in_flight is None:
            return
        own = self._in_flight.join()
        self._in_flight = None
        at_first = processes.on_first(lambda: None if own is None else str(own))
        if own is not None or at_first is not None:
            self._failure = own or CheckpointError(at_first)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def steps(self) -> list[int]:
        """Committed steps, ascending. Whether their files are intact, ``verify`` says."""
        return directory_layout.steps(self._directory)

    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps(), default=None)

    def restore(
        self, abstract_state: PyTree[jax.ShapeDtypeStruct], *, step: int | None = None
    ) -> Restored:
        """Reads the newest checkpoint whose every file is as it was written, or the step asked for.

        Each array goes directly to its leaf's sharding, whatever mesh it was saved from. Damaged
        checkpoints are moved to ``quarantine/`` with a reason file, logged, and returned in
        ``Restored.quarantined``; nothing is deleted. Newer steps than the one asked for stay where
        they are: ``set_aside`` them before saving those steps again.

        Raises CheckpointError if no checkpoint is good (with what was wrong with each), or if it is
        of another state or identity (with the first differences, both values).
        """
        self._join()
        return read_newest(
            self._directory,
            abstract_state,
            step=step,
            identity=self.identity,
            reject=directory_layout.set_aside,
            subset=False,
        )

    def set_aside(self, step: int, reason: str) -> None:
        """Moves a committed step into ``quarantine/``: a rollback does so with what it undoes."""
        self._join()
        processes.on_first(lambda: self._set_aside(step, reason))

    def _set_aside(self, step: int, reason: str) -> None:
        if step not in self.steps():
            raise CheckpointError(
                f"no checkpoint of step {step} in {self._directory}; there are {self.steps()}"
            )
        directory_layout.set_aside(self._directory, step, [reason])

    def close(self) -> None:
        """Waits for the save in flight, frees the directory; raises if a save failed."""
        self._release()
        self._raise_failure()

    def _release(self) -> None:
        self._join()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and jax.process_count() > 1:
            return  # the others may be elsewhere: waiting for them could take for ever
        self._release()
        if error is None:
            self._raise_failure()
        elif self._failure is not None:  # that error matters more
            _log.error("%s", self._failure)
