"""No damage goes unnoticed; the damaged one is kept in quarantine and the one before it used."""

import json
import logging
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.checkpoint.checkpointer import Checkpointer, load_state
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

KEEP_ALL = CheckpointConfig(keep_last=100, keep_best=0)
SEED = 20240607
STEPS = (1, 2, 3)


def state_at(step: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    return {
        "w": jnp.asarray(rng.standard_normal((64, 64)).astype(np.float32)),
        "b": jnp.asarray(rng.standard_normal(64).astype(np.float32)).astype(jnp.bfloat16),
        "step": jnp.int32(step),
    }


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0)
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine")
    with Checkpointer(directory, KEEP_ALL, identity={}) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state_at(step), data_state={"step": step}, heldout_loss=1.0)
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "checkpoints")


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def largest(checkpoint):
    return max(files_of(checkpoint), key=lambda path: path.stat().st_size)


def truncate(checkpoint):
    path = largest(checkpoint)
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "flip in the data": (lambda c: flip(largest(c), 1000), "content"),
    "flip in the metadata": (lambda c: flip(c / "metadata.json", 99), "content"),
    "flip in the manifest": (lambda c: flip(c / "manifest.json", 99), "manifest"),
    "truncated": (truncate, "size"),
    "empty metadata": (lambda c: (c / "metadata.json").write_text(""), "size"),
    "missing data": (lambda c: largest(c).unlink(), "missing"),
    "missing metadata": (lambda c: (c / "metadata.json").unlink(), "missing"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), "unreadable"),
    "empty manifest": (lambda c: (c / "manifest.json").write_text(""), "manifest"),
    "extra file": (lambda c: (c / "arrays" / "extra").touch(), "extra"),
    "missing arrays": (lambda c: shutil.rmtree(c / "arrays"), "missing"),
    "manifest of another step": (
        lambda c: shutil.copy(c.with_name("step_00000001") / "manifest.json", c),
        "manifest",
    ),
    "link": (lambda c: (c / "link").symlink_to("metadata.json"), "extra"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_quarantined_and_the_one_before_used(directory, name, caplog):
    damage, fault = DAMAGE[name]
    checkpoint = directory / "step_00000003"
    damage(checkpoint)
    damaged = {path.name: path.read_bytes() for path in files_of(checkpoint)}
    problems = verify(directory, 3)
    assert fault in {problem.split(": ")[1] for problem in problems}
    with Checkpointer(directory, KEEP_ALL, identity={}) as checkpointer:
        with caplog.at_level(logging.WARNING):
            restored = checkpointer.restore(ABSTRACT)
        assert "checkpoint set aside: step 3" in caplog.text
        assert (restored.step, restored.data_state) == (2, {"step": 2})
        assert np.asarray(restored.state["w"]).tobytes() == np.asarray(state_at(2)["w"]).tobytes()
        (rejected,) = restored.quarantined
        assert rejected.step == 3
        assert rejected.path.parent == directory / "quarantine"
        assert {path.name: path.read_bytes() for path in files_of(rejected.path)} == damaged
        reasons = json.loads(rejected.path.with_suffix(".json").read_text())["reasons"]
        assert reasons == problems == list(rejected.reasons)
        # The step can be saved again, and is: nothing remembers that it once existed.
        checkpointer.save(3, state_at(3), data_state={"step": 3})
        assert checkpointer.restore(ABSTRACT).step == 3


def test_random_flips_never_load(directory):
    """Sixty single-bit flips over all files: those of a small checkpoint each have several."""
    rng = random.Random(SEED)
    checkpoint = directory / "step_00000003"
    files = files_of(checkpoint)
    assert {"manifest.json", "metadata.json", "_METADATA"} <= {path.name for path in files}
    for trial in range(60):
        path = files[trial % len(files)]
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        with pytest.raises(CheckpointError, match="no good checkpoint"):
            load_state(directory, ABSTRACT, step=3)
        flip(path, bit)
    assert load_state(directory, ABSTRACT).step == 3


def test_none_good_lists_what_was_wrong_with_each(directory):
    for step in STEPS:
        flip(largest(directory / f"step_{step:08d}"), 8 * step)
    with Checkpointer(directory, KEEP_ALL, identity={}) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(ABSTRACT)
        message = str(caught.value)
        assert all(f"step {step} (arrays/" in message for step in STEPS)
        assert "\n" not in message
        assert checkpointer.steps() == []
    assert len([path for path in (directory / "quarantine").iterdir() if path.is_dir()]) == 3


def test_damaged_step_asked_for_is_not_replaced_by_another(directory):
    truncate(directory / "step_00000002")
    with (
        Checkpointer(directory, KEEP_ALL, identity={}) as checkpointer,
        pytest.raises(CheckpointError, match=r"step 2 .*Other steps there: 1, 3"),
    ):
        checkpointer.restore(ABSTRACT, step=2)


def test_reader_moves_nothing(directory, caplog):
    truncate(directory / "step_00000003")
    restored = load_state(directory, ABSTRACT)
    assert restored.step == 2
    assert [rejected.path for rejected in restored.quarantined] == [directory / "step_00000003"]
    assert "checkpoint skipped: step 3" in caplog.text
    assert not (directory / "quarantine").exists()


def test_damage_that_cannot_be_moved_is_still_not_used(directory, monkeypatch):
    truncate(directory / "step_00000003")
    (directory / "quarantine").touch()  # not a directory: nothing can be moved there
    with Checkpointer(directory, KEEP_ALL, identity={}) as checkpointer:
        restored = checkpointer.restore(ABSTRACT)
    assert restored.step == 2
    assert restored.quarantined[0].path == directory / "step_00000003"


def test_old_damage_does_not_stop_saving(directory):
    """Retention reads old metadata; a damaged one must neither fail a save nor be kept for ever."""
    (directory / "step_00000001" / "metadata.json").write_text("{")
    with Checkpointer(directory, CheckpointConfig(keep_last=2), identity={}) as checkpointer:
        checkpointer.save(4, state_at(4), data_state={}, heldout_loss=0.5)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
