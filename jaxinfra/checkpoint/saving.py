"""One save: arrays to a partial directory, sums, commit, retention; in a background thread."""

import dataclasses
import errno
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxinfra.checkpoint import arrays, directory_layout, manifest, metadata, processes
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveTarget:
    """Where a save goes and what becomes of older ones."""

    directory: Path
    step: int
    unique: str  # the same on all processes, never used before
    config: CheckpointConfig

    @property
    def partial(self) -> Path:
        """The directory being written."""
        return self.directory / f"{directory_layout.step_name(self.step)}.partial-{self.unique}"

    @property
    def final(self) -> Path:
        """The directory once committed."""
        return self.directory / directory_layout.step_name(self.step)

    def written_marker(self, process: int) -> Path:
        """Exists once a process has written its part; gone before the sums are taken."""
        return self.partial / f"written.{process}"

    def prepare(self) -> None:
        """Makes the empty partial directory; process 0 does it before anyone writes."""
        if self.final.exists():
            raise CheckpointError(
                f"step {self.step} is already saved in {self.final}; a saved step is never "
                "overwritten. Compare with latest() before saving, or set_aside() the old one"
            )
        # A failed save's last threads may have outlived its clean-up.
        directory_layout.sweep(self.directory)
        try:
            (self.partial / directory_layout.ARRAYS).mkdir(parents=True)
        except OSError as error:
            directory_layout.discard(self.partial)
            raise failed(self, error) from error


class Save:
    """A save in flight from the moment it is constructed."""

    def __init__(self, target: SaveTarget, flat: Mapping[str, jax.Array], record: bytes) -> None:
        self._target, self._record = target, record
        self._flat: Mapping[str, jax.Array] | None = flat
        self._copied = threading.Event()
        self.failure: CheckpointError | None = None
        # The whole save runs there, so that no event loop or mesh of the caller gets in its way.
        self._thread = threading.Thread(target=self._run, name=f"save step {target.step}")
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Returns when the arrays are on the host: from then on their buffers may be donated."""
        self._copied.wait()

    def join(self) -> CheckpointError | None:
        """Blocks until committed; returns the failure if it was not."""
        self._thread.join()
        return self.failure

    def _run(self) -> None:
        try:
            self._write_and_commit()
        except Exception as error:  # carried to the main thread, which raises it
            self.failure = failed(self._target, error)
            self.failure.__cause__ = error
            if jax.process_index() == 0:
                directory_layout.discard(self._target.partial)
            else:  # what process 0 raises sends its reader to this process's log
                _log.error("%s", self.failure)
        finally:
            self._copied.set()

    def _write_and_commit(self) -> None:
        target = self._target
        write, own_failure = None, None
        try:
            write = arrays.Write(target.partial / directory_layout.ARRAYS, self._flat or {})
            self._flat = None  # the caller may want the memory back before the files are written
            self._copied.set()
            write.finish()
            target.written_marker(jax.process_index()).touch()
        except Exception as error:  # the other processes wait at the barrier: go there first
            own_failure = error
        self._copied.set()
        processes.barrier(f"checkpoint-written-{target.unique}")
        if own_failure is not None:
            raise own_failure
        if jax.process_index() == 0 and write is not None:
            self._commit(write)

    def _commit(self, write: arrays.Write) -> None:
        target = self._target
        markers = [target.written_marker(process) for process in range(jax.process_count())]
        absent = [process for process, marker in enumerate(markers) if not marker.exists()]
        if absent:
            raise CheckpointError(f"processes {absent} could not write; their logs say why")
        for marker in markers:
            marker.unlink()
        write.merge()
        (target.partial / directory_layout.METADATA).write_bytes(self._record)
        manifest.write(target.partial, step=target.step)
        directory_layout.commit(target.partial, target.final)
        # Only now: until the new one is committed, the newest good one is an older one.
        losses = metadata.heldout_losses(target.directory)
        for step in losses.keys() - directory_layout.retained(losses, target.config):
            directory_layout.delete(target.directory, step)


def failed(target: SaveTarget, error: Exception) -> CheckpointError:
    """What people read when a save fails: step, path, cause, and that nothing older is lost."""
    # TensorStore puts the number among a page of its own state; the exception's cause has it all.
    in_text = re.search(r"os_error_code='(\d+)'", str(error))
    code = error.errno if isinstance(error, OSError) else int(in_text[1]) if in_text else None
    cause = os.strerror(code) if code else re.sub(r" \[\w+='.*", "", str(error), flags=re.DOTALL)
    full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = " Free some space there, or keep fewer checkpoints." if full else ""
    return CheckpointError(
        f"step {target.step} was not saved to {target.final}: {cause.rstrip('. ')}. "
        f"Earlier checkpoints are untouched.{remedy}"
    )
