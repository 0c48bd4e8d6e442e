"""Full disks, failing disks, dead writers: the error surfaces, the last good one stays."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

CONFIG = CheckpointConfig(keep_last=2, keep_best=0)


def state_at(step: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    return {f"w{i}": jnp.asarray(rng.standard_normal(1 << 16, np.float32)) for i in range(4)}


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0)
)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@contextlib.contextmanager
def small_files():
    """The kernel refuses to let a file grow past 64 KiB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(name, error, path_contains=""):
    """An os-level function that fails as a disk does."""
    real = getattr(os, name)

    def fail(target, *args, **kwargs):
        if path_contains in str(target):
            raise OSError(error, os.strerror(error), str(target))
        return real(target, *args, **kwargs)

    return fail


def assert_recovers(checkpointer, directory, failed_step):
    assert checkpointer.steps() == [1]
    assert verify(directory, 1) == []
    checkpointer.save(failed_step, state_at(failed_step), data_state={})
    restored = checkpointer.restore(ABSTRACT)
    assert restored.step == failed_step
    for key, want in state_at(failed_step).items():
        assert np.asarray(restored.state[key]).tobytes() == np.asarray(want).tobytes()
    names = {path.name for path in directory.iterdir()}
    assert names == {".lock", "step_00000001", f"step_{failed_step:08d}"}


# Orbax closes its event loop at the first failed write; the other writes then find it closed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
def test_write_that_fails(directory, caplog):
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        checkpointer.save(1, state_at(1), data_state={})
        checkpointer.wait()
        with small_files():
            checkpointer.save(2, state_at(2), data_state={})
            with pytest.raises(CheckpointError) as caught:
                checkpointer.wait()
        message = str(caught.value)
        assert "step 2 was not saved to" in message
        assert str(directory / "step_00000002") in message
        assert "File too large" in message
        assert len(message) < 400, "one line, without the writer's internals"
        assert caplog.records == [], "said once, by whoever catches it"
        checkpointer.wait()  # raised once, not for ever
        assert_recovers(checkpointer, directory, 2)


@pytest.mark.parametrize(
    ("function", "error"), [("fsync", errno.EIO), ("rename", errno.ENOSPC), ("open", errno.ENOSPC)]
)
def test_commit_that_fails(directory, monkeypatch, function, error):
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        checkpointer.save(1, state_at(1), data_state={})
        checkpointer.wait()
        with monkeypatch.context() as patch:
            if function == "fsync":
                patch.setattr(os, "fsync", failing("fsync", error))
            elif function == "rename":
                patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(error, "")))
            else:
                patch.setattr(os, "open", failing("open", error, path_contains="manifest.json"))
            checkpointer.save(2, state_at(2), data_state={})
            with pytest.raises(CheckpointError, match=os.strerror(error)):
                checkpointer.wait()
        assert_recovers(checkpointer, directory, 2)


def test_failure_surfaces_at_the_next_save_which_still_runs(directory, monkeypatch):
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing("fsync", errno.ENOSPC))
            checkpointer.save(1, state_at(1), data_state={})
            with pytest.raises(CheckpointError, match="step 1 was not saved"):
                checkpointer.save(2, state_at(2), data_state={})  # this one fails as well
            with pytest.raises(CheckpointError, match="step 2 was not saved"):
                checkpointer.wait()
            checkpointer.save(3, state_at(3), data_state={})
            checkpointer._join()
        with pytest.raises(CheckpointError, match="step 3 was not saved"):
            checkpointer.save(4, state_at(4), data_state={})
        checkpointer.wait()
        assert checkpointer.steps() == [4], "caught, and nothing lost"


def test_close_raises_but_never_hides_another_error(directory, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing("fsync", errno.EIO))
    checkpointer = Checkpointer(directory, CONFIG, identity={})
    checkpointer.save(1, state_at(1), data_state={})
    with pytest.raises(CheckpointError, match="step 1"):
        checkpointer.close()
    with pytest.raises(KeyboardInterrupt):
        interrupted_save(directory)


def interrupted_save(directory):
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        checkpointer.save(1, state_at(1), data_state={})
        raise KeyboardInterrupt


def test_directory_that_cannot_be_made(directory):
    directory.write_text("a file")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints: File exists"):
        Checkpointer(directory, CONFIG, identity={})


def test_leftovers_are_ignored_then_removed(directory, caplog):
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        checkpointer.save(1, state_at(1), data_state={})
    # As a kill leaves them: between the last byte and the rename, and half-way through a deletion.
    for name in ("step_00000002.partial-ab120001", "step_00000000.deleted-cd34"):
        source = directory / "step_00000001"
        subprocess.run(["cp", "-r", str(source), str(directory / name)], check=True)
    unrelated = directory / "step_5_notes"
    unrelated.mkdir()
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        assert "removing step_00000002.partial-ab120001" in caplog.text
        assert "removing step_00000000.deleted-cd34" in caplog.text
        assert checkpointer.restore(ABSTRACT).step == 1
    assert {path.name for path in directory.iterdir()} == {".lock", "step_00000001", "step_5_notes"}


def test_one_writer_at_a_time(directory):
    directory.mkdir()
    hold = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('process', os.getpid(), 'on elsewhere', file=file, flush=True)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(directory / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=rf"in use by another writer \(process {other.pid}"
        ):
            Checkpointer(directory, CONFIG, identity={})
        other.kill()  # a killed holder holds nothing
        other.wait()
    Checkpointer(directory, CONFIG, identity={}).close()
