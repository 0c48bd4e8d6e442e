"""Checkpoints of several processes at once.

Run as a script, this file is the process under test.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfra.checkpoint.checkpointer import Checkpointer, load_state
from jaxinfra.config.run import CheckpointConfig

CONFIG = CheckpointConfig(keep_last=2, keep_best=0)
ROOT = Path(__file__).parents[2]


def host_state(step: int) -> dict[str, np.ndarray]:
    """What a trainer that never died would hold at a step."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((512, 512)).astype(np.float32),
        "rng": rng.integers(0, 2**32, (8, 2), dtype=np.uint32),
    }


def place(step: int, mesh: Mesh) -> dict[str, jax.Array]:
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    return {
        key: jax.make_array_from_callback(value.shape, sharding, lambda i, value=value: value[i])
        for key, value in host_state(step).items()
    }


def abstract(mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for key, leaf in place(0, mesh).items()
    }


def fsdp_mesh(num_devices: int) -> Mesh:
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)


def assert_is_step(state: dict[str, jax.Array], step: int) -> None:
    for key, want in host_state(step).items():
        for shard in state[key].addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes()


def spawn(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
    )


def one_of_two(directory: Path, process: int, port: str) -> None:
    """Saves, damages the newest from outside, restores, fails to write: all as one of two."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    assert jax.process_count() == 2
    mesh = fsdp_mesh(2)
    with Checkpointer(directory, CONFIG, identity={}) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, place(step, mesh), data_state={"step": step})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
        if process == 0:
            (directory / "step_00000003" / "metadata.json").write_text("{}")
        restored = checkpointer.restore(abstract(mesh))
        assert (restored.step, restored.data_state) == (2, {"step": 2})
        assert [rejected.step for rejected in restored.quarantined] == [3]
        assert_is_step(restored.state, 2)
        checkpointer.save(3, place(3, mesh), data_state={"step": 3})
        checkpointer.wait()
        if process == 1:  # its disk is full: both must learn of it, and neither may hang
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        checkpointer.save(4, place(4, mesh), data_state={"step": 4})
        try:
            checkpointer.wait()
        except Exception as error:
            print(f"failed {error}", flush=True)
        assert checkpointer.steps() == [2, 3]
    jax.distributed.shutdown()


@pytest.mark.slow
def test_two_processes(tmp_path):
    directory = tmp_path / "checkpoints"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = [spawn(str(directory), str(process), port) for process in range(2)]
    try:
        said = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)
    assert re.search(r"failed step 4 was not saved .*processes \[1\] could not write", said[0])
    assert re.search(r"failed step 4 was not saved .*File too large", said[1])
    restored = load_state(directory, abstract(fsdp_mesh(8)))
    assert restored.step == 3
    assert_is_step(restored.state, 3)


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
