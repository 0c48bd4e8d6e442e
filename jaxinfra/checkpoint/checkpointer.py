"""Checkpoints of a run's state: saved asynchronously and atomically, verified before they are read.

A background thread saves: it copies the arrays to the host, writes them to a partial directory,
computes checksums, commits by a rename and deletes old steps. A read takes the newest checkpoint
whose files all match their checksums.
"""

import dataclasses
import errno
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, final

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxinfra.checkpoint import arrays, directory_layout, metadata, processes
from jaxinfra.checkpoint.directory_layout import Rejected
from jaxinfra.checkpoint.finite import require_finite
from jaxinfra.checkpoint.metadata import JSON, Metadata
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

_PARAMETERS = "parameters/"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A restored state, with a list of newer checkpoints that were found damaged."""

    step: int
    state: PyTree[jax.Array]
    data_state: dict[str, JSON]
    heldout_loss: float | None
    settings: dict[str, JSON]  # of the run when it was saved; empty where not known
    quarantined: tuple[Rejected, ...]


def load_state(
    directory: Path,
    abstract_state: PyTree[jax.ShapeDtypeStruct],
    *,
    step: int | None = None,
    identity: dict[str, JSON] | None = None,
    settings: dict[str, JSON] | None = None,
) -> Restored:
    """Reads a state from a run that may still be training: takes no lock, and changes no file.

    ``abstract_state`` may leave out parts of what was saved, such as the optimizer's. Damaged
    checkpoints are skipped with a warning. For the rest see ``Checkpointer.restore``.

    Args:
        settings: the run's settings now; a warning names those that differ from the checkpoint's.
    """
    restored = read_newest(
        directory, abstract_state, step=step, identity=identity, reject=_skip, subset=True
    )
    if settings is not None and restored.settings:
        changes = metadata.setting_changes(restored.settings, settings)
        if changes:
            _log.warning("settings changed since it was saved: %s", "; ".join(changes))
    return restored


type Reject = Callable[[Path, int, list[str]], Rejected]


def _skip(directory: Path, step: int, reasons: list[str]) -> Rejected:
    path = directory / directory_layout.step_name(step)
    rejected = Rejected(step=step, path=path, reasons=tuple(reasons))
    _log.warning("checkpoint skipped: %s, in %s", rejected, path)
    return rejected


def read_newest(
    directory: Path,
    abstract_state: PyTree[jax.ShapeDtypeStruct],
    *,
    step: int | None,
    identity: dict[str, JSON] | None,
    reject: Reject,
    subset: bool,
) -> Restored:
    """Reads the newest verified checkpoint if its tree and identity match; a collective."""
    wanted, treedef = metadata.flatten(abstract_state)
    unplaced = [path for path, leaf in wanted.items() if leaf.sharding is None]
    if unplaced:
        raise CheckpointError(
            f"no sharding for {unplaced[0]} ({len(unplaced)} of {len(wanted)} leaves); restoring "
            "places each array directly: pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    # One process reads all files to verify them; the others would load the disks N times over.
    chosen, rejected = processes.on_first(lambda: _choose(directory, step, reject))
    checkpoint = directory / directory_layout.step_name(chosen)
    saved = metadata.read(checkpoint)
    if identity is not None:
        metadata.require_same_identity(saved.identity, identity, where=checkpoint)
    metadata.require_same_tree(
        saved.tree, metadata.describe(wanted), subset=subset, where=checkpoint
    )
    try:
        # Orbax refuses relative paths.
        flat = arrays.read((checkpoint / directory_layout.ARRAYS).absolute(), wanted)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint} is as it was written, but reading it failed: {error}"
        ) from error
    weights = {path: leaf for path, leaf in flat.items() if path.startswith(_PARAMETERS)}
    require_finite(weights, where=checkpoint)
    return Restored(
        step=saved.step,
        state=jax.tree.unflatten(treedef, [flat[path] for path in wanted]),
        data_state=saved.data_state,
        heldout_loss=saved.heldout_loss,
        settings=saved.settings,
        quarantined=tuple(rejected),
    )


def require_finite_parameters(checkpoint: Path) -> None:
    """Raises CheckpointError if a verified checkpoint's parameters hold a NaN or an infinity.

    It loads one array at a time onto this process's first device, and keeps none.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for path, leaf in metadata.read(checkpoint).tree.items():
        if path.startswith(_PARAMETERS) and jnp.issubdtype(leaf.dtype, jnp.floating):
            wanted = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=device)
            stored = (checkpoint / directory_layout.ARRAYS).absolute()
            require_finite(arrays.read(stored, {path: wanted}), where=checkpoint)


def _choose(directory: Path, step: int | None, reject: Reject) -> tuple[int, list[Rejected]]:
    """The step to read: the one asked for or the newest good one; and those found damaged."""
    available = directory_layout.steps(directory)
    candidates = list(reversed(available)) if step is None else [step]
    rejected: list[Rejected] = []
    for candidate in candidates:
        if candidate not in available:
            continue
        problems = directory_layout.verify(directory, candidate)
        if not problems:
            return candidate, rejected
        if candidate not in directory_layout.steps(directory):
            continue  # a training run that is still going on pruned it meanwhile
        rejected.append(reject(directory, candidate, problems))
    if rejected:
        found = "; ".join(f"{bad}, kept in {bad.path}" for bad in rejected)
        raise CheckpointError(f"no good checkpoint in {directory}: {found}{_others(directory)}")
    asked = "" if step is None else f" of step {step}"
    raise CheckpointError(f"no checkpoint{asked} in {directory}{_others(directory)}")


def _others(directory: Path) -> str:
    others = directory_layout.steps(directory)
    return f". Other steps there: {', '.join(map(str, others))}" if others else ""


class Save:
    """A save in flight: it starts when it is constructed, and a background thread finishes it.

    Constructing it is a collective.

    Args:
        unique: name of the save, the same on all processes and never used before.
        config: the rule for deleting older checkpoints after the commit.
        record: the encoded metadata.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        flat: Mapping[str, jax.Array],
        record: bytes,
        *,
        unique: str,
        config: CheckpointConfig,
    ) -> None:
        self._directory, self._unique, self._config = directory, unique, config
        self._step, self._record = step, record
        self._final = directory / directory_layout.step_name(step)
        self._partial = self._final.with_name(f"{self._final.name}.partial-{unique}")
        self._flat: Mapping[str, jax.Array] | None = flat
        self._copied = threading.Event()
        self.failure: CheckpointError | None = None
        processes.on_first(self._prepare)
        # The whole save runs there, so that no event loop or mesh of the caller gets in its way.
        self._thread = threading.Thread(target=self._run, name=f"save step {step}")
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Blocks until the arrays are copied to the host; then their buffers may be donated."""
        self._copied.wait()

    def join(self) -> CheckpointError | None:
        """Blocks until the save is committed; returns the error if it failed, else None."""
        self._thread.join()
        return self.failure

    def _prepare(self) -> None:
        if self._final.exists():
            raise CheckpointError(
                f"step {self._step} is already saved in {self._final}; a saved step is never "
                "overwritten. Compare with latest() before saving, or set_aside() the old one"
            )
        # A failed save's last threads may have outlived its clean-up.
        directory_layout.sweep(self._directory)
        try:
            (self._partial / directory_layout.ARRAYS).mkdir(parents=True)
        except OSError as error:
            directory_layout.discard(self._partial)
            raise self._failed(error) from error

    def _run(self) -> None:
        try:
            self._write_and_commit()
        except Exception as error:  # carried to the main thread, which raises it
            self.failure = self._failed(error)
            self.failure.__cause__ = error
            if jax.process_index() == 0:
                directory_layout.discard(self._partial)
            else:  # what process 0 raises sends its reader to this process's log
                _log.error("%s", self.failure)
        finally:
            self._copied.set()

    def _write_and_commit(self) -> None:
        write, own_failure = None, None
        try:
            write = arrays.Write(self._partial / directory_layout.ARRAYS, self._flat or {})
            self._flat = None  # the caller may want the memory back before the files are written
            self._copied.set()
            write.finish()
            self._written_marker(jax.process_index()).touch()
        except Exception as error:  # the other processes wait at the barrier: go there first
            own_failure = error
        self._copied.set()
        processes.barrier(f"checkpoint-written-{self._unique}")
        if own_failure is not None:
            raise own_failure
        if jax.process_index() == 0 and write is not None:
            self._commit(write)

    def _written_marker(self, process: int) -> Path:
        """Says that a process has written its part; removed before checksums are computed."""
        return self._partial / f"written.{process}"

    def _commit(self, write: arrays.Write) -> None:
        markers = [self._written_marker(process) for process in range(jax.process_count())]
        absent = [process for process, marker in enumerate(markers) if not marker.exists()]
        if absent:
            raise CheckpointError(f"processes {absent} could not write; their logs say why")
        for marker in markers:
            marker.unlink()
        write.merge()
        (self._partial / directory_layout.METADATA).write_bytes(self._record)
        directory_layout.write_manifest(self._partial, step=self._step)
        directory_layout.commit(self._partial, self._final)
        # Only now: until the new one is committed, the newest good one is an older one.
        losses = metadata.heldout_losses(self._directory)
        for step in losses.keys() - directory_layout.retained(losses, self._config):
            directory_layout.delete(self._directory, step)

    def _failed(self, error: Exception) -> CheckpointError:
        """The error of a failed save: step, path, cause, and that older checkpoints are whole."""
        # TensorStore puts the number among a page of its own state; the exception's cause has it.
        in_text = re.search(r"os_error_code='(\d+)'", str(error))
        code = error.errno if isinstance(error, OSError) else int(in_text[1]) if in_text else None
        text = re.sub(r" \[\w+='.*", "", str(error), flags=re.DOTALL)
        cause = os.strerror(code) if code else text
        full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = " Free some space there, or keep fewer checkpoints." if full else ""
        return CheckpointError(
            f"step {self._step} was not saved to {self._final}: {cause.rstrip('. ')}. "
            f"Earlier checkpoints are untouched.{remedy}"
        )


@final
class Checkpointer:
    """The one writer of a run's ``checkpoints/`` directory: asynchronous, atomic, verified.

    With several processes every method but ``steps`` and ``latest`` is a collective: all processes
    call it, in one order, with one directory that all see. Programs that only read use ``load``.

    Close it, best by ``with``: a program that ends without closing it may lose the save in flight.
    ``last_stall_s`` is how many seconds the last ``save`` blocked its caller.

    Args:
        directory: directory of checkpoints, made if absent; remains of killed saves are removed.
        config: how many checkpoints to keep.
        identity: plain JSON that must match on restore, such as the model's config.
        settings: plain JSON that may change between sessions, stored to report later changes.
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
        """Copies ``state`` to the host and returns; the rest follows in the background.

        The caller may donate the state's buffers as soon as this returns. If the previous save is
        still in flight, this waits for it, so that the host holds at most one copy of the state.

        Leaves are plain jax.Arrays of any numeric dtype; pass ``jax.random.key_data`` of a key. A
        step that is already saved is refused, never overwritten and never silently skipped.

        Raises CheckpointError if this save cannot start. If an earlier one failed in the
        background, its error is raised after this one has started: catch it and nothing is lost.

        Args:
            step: number of optimizer steps done.
            state: pytree of arrays.
            data_state: position in the data as plain JSON, equal on all processes.
            heldout_loss: ``keep_best`` ranks by it; None: the checkpoint is never among the best.
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
        unique = f"{self._unique}{self._num_saves:04d}"
        self._in_flight = Save(
            self._directory, step, flat, record, unique=unique, config=self._config
        )
        self._in_flight.wait_until_copied()

    def wait(self) -> None:
        """Blocks until the save in flight is committed; raises CheckpointError if a save failed."""
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
        """Returns the committed steps, ascending; ``verify`` checks whether files are intact."""
        return directory_layout.steps(self._directory)

    def latest(self) -> int | None:
        """Returns the newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def restore(
        self, abstract_state: PyTree[jax.ShapeDtypeStruct], *, step: int | None = None
    ) -> Restored:
        """Reads the newest checkpoint whose files all match their checksums, or that of ``step``.

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
        """Moves a committed step into ``quarantine/``. A roll-back does so with later steps."""
        self._join()
        processes.on_first(lambda: self._set_aside(step, reason))

    def _set_aside(self, step: int, reason: str) -> None:
        if step not in self.steps():
            raise CheckpointError(
                f"no checkpoint of step {step} in {self._directory}; there are {self.steps()}"
            )
        directory_layout.set_aside(self._directory, step, [reason])

    def close(self) -> None:
        """Waits for the save in flight and unlocks the directory; raises if a save failed."""
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
