"""Reading and writing of sharded arrays in files by Orbax; no other module uses Orbax."""

import asyncio
import functools
import logging
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxinfra.errors import CheckpointError

# Zarr 3 is what lets the data be split over files: one file is hashed by one thread only.
_DATA_FILE_BYTES = 256 << 20


def require_savable(flat: Mapping[str, Any]) -> None:
    """Raises CheckpointError that names leaves Orbax cannot save: all but plain, non-empty
    jax.Arrays that were not donated.
    """
    wrong = [f"{path} {reason}" for path, leaf in flat.items() if (reason := _unsavable(leaf))]
    if wrong or not flat:
        found = "; ".join(wrong) or "no leaves"
        raise CheckpointError(
            f"the state cannot be saved: {found}. Every leaf must be a jax.Array of numbers; pass "
            "jax.random.key_data(key) for a key, jnp.asarray(x) for a Python or NumPy value"
        )


def _unsavable(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return f"is a {type(leaf).__name__}"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return f"has the extended dtype {leaf.dtype}"
    if leaf.is_deleted():
        return "was deleted or donated"
    return f"is empty, of shape {leaf.shape}" if leaf.size == 0 else ""


class Write:
    """An asynchronous write of arrays. The caller may donate the arrays once it is constructed."""

    def __init__(self, directory: Path, flat: Mapping[str, jax.Array]) -> None:
        silence_orbax()
        self._directory = epath.Path(directory)
        self._handler = _handler()
        arguments = _orbax().args.PyTreeSave(
            {path: _detached(leaf) for path, leaf in flat.items()},
            ocdbt_target_data_file_size=_DATA_FILE_BYTES,
        )
        # Returns when the data has left the device. Not asyncio.run(): its clean-up races with
        # that of the event loops that Orbax runs in other threads.
        loop = asyncio.new_event_loop()
        try:
            start = self._handler.async_save(self._directory, args=arguments)
            futures = loop.run_until_complete(start)
        finally:
            loop.close()
        self._futures = futures or []

    def finish(self) -> None:
        """Blocks until this process has written its part; raises the error if that failed."""
        for future in self._futures:
            future.result()

    def merge(self) -> None:
        """Joins the parts of all processes; process 0 calls it after all have finished."""
        self._handler.finalize(self._directory)


def read(directory: Path, flat: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the named arrays of a checkpoint into the given shardings, and no other arrays."""
    silence_orbax()
    ocp = _orbax()
    arguments = {
        path: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
        )
        for path, leaf in flat.items()
    }
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat.items()}
    request = ocp.args.PyTreeRestore(item=shapes, restore_args=arguments, partial_restore=True)
    return _handler().restore(epath.Path(directory), args=request)


def _orbax() -> Any:
    """Imports Orbax, which takes its time: processes that serve model files do without it."""
    import orbax.checkpoint

    return orbax.checkpoint


def _handler() -> Any:
    # Not CheckpointManager: after a failed commit its cache of steps lets it skip later saves.
    # Uncompressed: zstd made float32 noise 8% smaller and saving 3 to 13 times slower on 2 cores.
    return _orbax().PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def _detached(leaf: jax.Array) -> jax.Array:
    """An array that shares no memory with one the caller is about to donate.

    On CPU Orbax's host copy is a view of the device buffer. JAX 0.11 does not donate a buffer that
    has a view: the step after a save would hold two states. Nor is it promised to notice the view.
    """
    if any(device.platform == "cpu" for device in leaf.sharding.device_set):
        return jax.block_until_ready(jnp.copy(leaf))
    return leaf


def _is_for_users(record: logging.LogRecord) -> bool:
    """Whether a record is no progress line of Orbax, and no traceback of what we raise."""
    parts = Path(record.pathname).parts
    if "orbax" not in parts:
        return True
    raised_by_result = "futures" in parts and record.exc_info is not None
    return record.levelno >= logging.WARNING and not raised_by_result


def _is_retrieved(record: logging.LogRecord) -> bool:
    """Whether a record is not asyncio's word on further writes of a save whose failure we raise."""
    if "exception was never retrieved" not in record.getMessage() or not record.exc_info:
        return True
    frames = traceback.walk_tb(record.exc_info[2])
    return not any("orbax" in Path(at.f_code.co_filename).parts for at, _ in frames)


@functools.cache  # once in a process
def silence_orbax() -> None:
    """Limits Orbax's log to warnings, without changing other users of absl's logger.

    When one write of a save fails, Orbax raises the error and closes its event loop. TensorStore
    writes that end later call back into the closed loop; their tracebacks are dropped too.
    """
    logging.getLogger("absl").addFilter(_is_for_users)
    logging.getLogger("asyncio").addFilter(_is_retrieved)
    following = sys.unraisablehook

    def unless_late(unraisable: "sys.UnraisableHookArgs") -> None:
        closed = str(unraisable.exc_value) == "Event loop is closed"
        if not (closed and unraisable.exc_type is RuntimeError and unraisable.object is None):
            following(unraisable)

    sys.unraisablehook = unless_late
