"""Saving and restoring: bitwise, on any mesh, refusing what does not match."""

import asyncio
import dataclasses
import gc
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxinfra.checkpoint.arrays import silence_orbax
from jaxinfra.checkpoint.checkpointer import Checkpointer, load_state
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

KEEP_ALL = CheckpointConfig(keep_last=100, keep_best=0)
IDENTITY = {"model": {"embed_dim": 64, "blocks": [{"window": None}]}}
SPECS = {"embedding": PartitionSpec("fsdp", "tensor"), "kernel": PartitionSpec("tensor", "fsdp")}


def host_state(seed: int = 0) -> dict:
    """Bit patterns rather than numbers, so NaN payloads, -0 and denormals are among them."""
    rng = np.random.default_rng(seed)

    def bits(shape, dtype):
        dtype = jnp.dtype(dtype)
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)

    return {
        "params": {"embedding": bits((64, 16), "float32"), "kernel": bits((16, 48), "bfloat16")},
        "moments": ({"kernel": bits((16, 48), "float16")}, None, bits((3,), "float8_e4m3fn")),
        "rng": bits((2,), "uint32"),
        "step": bits((), "int32"),
        "mask": rng.integers(0, 2, (5,)).astype(bool),
    }


def mesh_of(fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh(
        (fsdp, tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def shardings(state, mesh):
    def sharding(path, _):
        spec = SPECS.get(str(getattr(path[-1], "key", "")), PartitionSpec())
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def placed(state, mesh):
    return jax.tree.map(jax.device_put, state, shardings(state, mesh))


def abstract(state, mesh=None):
    places = jax.tree.map(lambda x: x.sharding, state) if mesh is None else shardings(state, mesh)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
    )


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpointer(directory):
    with Checkpointer(directory, KEEP_ALL, identity=IDENTITY) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (8, 1)])
def test_round_trip_is_bitwise(checkpointer, fsdp, tensor):
    state = placed(host_state(), mesh_of(fsdp, tensor))
    data_state = {"epoch": 1, "shards": [{"file": "ä.py", "offset": 2**53}]}
    checkpointer.save(100, state, data_state=data_state, heldout_loss=0.1)
    restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.heldout_loss, restored.quarantined) == (100, 0.1, ())
    assert restored.data_state == data_state
    assert_bitwise(restored.state, host_state())
    same = jax.tree.map(lambda got, want: got.sharding == want.sharding, restored.state, state)
    assert all(jax.tree.leaves(same))


def test_restores_on_other_meshes(checkpointer):
    state = placed(host_state(), mesh_of(8, 1))
    for step, (fsdp, tensor) in enumerate([(2, 4), (1, 1), (4, 2)]):
        checkpointer.save(step, state, data_state={})
        wanted = abstract(host_state(), mesh_of(fsdp, tensor))
        state = checkpointer.restore(wanted).state
        assert_bitwise(state, host_state())
        assert state["params"]["kernel"].sharding == wanted["params"]["kernel"].sharding


def test_buffers_may_be_donated_once_save_returns(checkpointer):
    mesh = mesh_of(8, 1)
    overwrite = jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)
    for step in range(3):
        want = {"w": np.random.default_rng(step).standard_normal((1024, 512)).astype(np.float32)}
        state = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))), want
        )
        state = jax.tree.map(jnp.copy, state)  # device_put may alias the NumPy array
        wanted = abstract(state)
        checkpointer.save(step, state, data_state={})
        overwritten = overwrite(state)
        # Overwritten in place: had the save held a view of it, JAX would not have donated it.
        assert state["w"].is_deleted()
        jax.block_until_ready(overwritten)
        assert_bitwise(checkpointer.restore(wanted).state, want)


def test_stall_is_measured(checkpointer):
    state = placed(host_state(), mesh_of(1, 1))
    started = time.perf_counter()
    checkpointer.save(1, state, data_state={})
    assert 0 < checkpointer.last_stall_s <= time.perf_counter() - started


def test_a_relative_directory_is_read(checkpointer, directory, monkeypatch):
    state = placed(host_state(), mesh_of(1, 1))
    checkpointer.save(3, state, data_state={})
    checkpointer.wait()
    monkeypatch.chdir(directory.parent)
    restored = load_state(
        directory.relative_to(directory.parent), abstract(state), identity=IDENTITY
    )
    assert_bitwise(restored.state, state)


def test_subset_reads_part_of_a_state(checkpointer, directory):
    state = placed(host_state(), mesh_of(8, 1))
    checkpointer.save(3, state, data_state={})
    checkpointer.wait()
    params = {"params": state["params"]}
    restored = load_state(directory, abstract(params), identity=IDENTITY)
    assert_bitwise(restored.state, params)
    with pytest.raises(CheckpointError, match=r"moments/0/kernel: saved float16\[16, 48\], wanted"):
        checkpointer.restore(abstract(params))
    with pytest.raises(CheckpointError, match=r"other: saved nothing, wanted uint32\[2\]"):
        load_state(directory, abstract({"other": state["rng"]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.update(shape=(16, 47)),
            r"saved bfloat16\[16, 48\], wanted bfloat16\[16, 47\]",
        ),
        (
            lambda x: x.update(dtype=jnp.float32),
            r"saved bfloat16\[16, 48\], wanted float32\[16, 48\]",
        ),
    ],
)
def test_another_shape_or_dtype_is_refused(checkpointer, change, message):
    state = placed(host_state(), mesh_of(1, 1))
    checkpointer.save(1, state, data_state={})
    wanted, leaf = abstract(state), {"shape": (16, 48), "dtype": jnp.bfloat16}
    change(leaf)
    place = state["params"]["kernel"].sharding
    wanted["params"]["kernel"] = jax.ShapeDtypeStruct(**leaf, sharding=place)
    with pytest.raises(CheckpointError, match="params/kernel: " + message):
        checkpointer.restore(wanted)


def test_another_identity_is_refused(checkpointer, directory):
    state = placed(host_state(), mesh_of(1, 1))
    checkpointer.save(1, state, data_state={})
    checkpointer.close()
    other = {"model": {"embed_dim": 32, "blocks": [{"window": None}], "tied": True}}
    with Checkpointer(directory, KEEP_ALL, identity=other) as second:
        with pytest.raises(CheckpointError) as caught:
            second.restore(abstract(state))
        assert "model.embed_dim: saved 64, now 32" in str(caught.value)
        assert "model.tied: saved 'nothing', now True" in str(caught.value)
        assert "window" not in str(caught.value)
        assert second.steps() == [1], "a mismatch is no damage: nothing moves"


def test_restoring_needs_shardings(checkpointer):
    with pytest.raises(CheckpointError, match="no sharding for w"):
        checkpointer.restore({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: jax.random.key(0), "extra/leaf has the extended dtype"),
        (lambda: 3, "extra/leaf is a int"),
        (lambda: np.ones(3), "extra/leaf is a ndarray"),
        (lambda: jnp.zeros((0, 4)), r"extra/leaf is empty, of shape \(0, 4\)"),
    ],
)
def test_other_leaves_are_refused_by_name(checkpointer, leaf, message):
    with pytest.raises(CheckpointError, match=message):
        checkpointer.save(1, {"extra": {"leaf": leaf()}}, data_state={})
    assert checkpointer.steps() == []


def test_donated_leaves_are_refused(checkpointer):
    state = {"w": jnp.ones(3)}
    state["w"].delete()
    with pytest.raises(CheckpointError, match="w was deleted or donated"):
        checkpointer.save(1, state, data_state={})


@pytest.mark.parametrize("data_state", [{1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": b"x"}])
def test_data_state_that_json_would_change_is_refused(checkpointer, data_state):
    with pytest.raises(CheckpointError, match="data_state"):
        checkpointer.save(1, {"w": jnp.ones(3)}, data_state=data_state)


def test_saved_step_is_refused_even_while_in_flight(checkpointer):
    state = {"w": jnp.ones(3)}
    checkpointer.save(5, state, data_state={})
    with pytest.raises(CheckpointError, match="step 5 is already saved"):
        checkpointer.save(5, state, data_state={})
    assert checkpointer.latest() == 5
    checkpointer.set_aside(5, "rolled back past a loss spike")
    assert checkpointer.latest() is None
    checkpointer.save(5, state, data_state={})
    checkpointer.wait()
    assert checkpointer.steps() == [5]


def test_nothing_saved_yet(checkpointer, directory):
    assert checkpointer.latest() is None
    state = abstract({"w": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpointer.restore(state)
    checkpointer.save(7, {"w": jnp.ones(3)}, data_state={})
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of step 6 in .* Other steps there: 7"
    ):
        checkpointer.restore(state, step=6)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_state(directory.with_name("absent"), state)


def test_restores_the_step_asked_for(checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": jnp.full(3, step)}, data_state={"step": step})
    restored = checkpointer.restore(abstract({"w": jnp.full(3, 0)}), step=2)
    assert (restored.step, restored.data_state) == (2, {"step": 2})
    assert_bitwise(restored.state, {"w": np.full(3, 2, np.int32)})


def test_keeps_the_newest_and_the_best(directory):
    config = CheckpointConfig(keep_last=2, keep_best=2)
    losses = {1: 5.0, 2: 1.0, 3: None, 4: float("nan"), 5: 2.0, 6: 3.0, 7: None, 8: float("-inf")}
    with Checkpointer(directory, config, identity={}) as checkpointer:
        for step, loss in losses.items():
            before = checkpointer.latest()
            checkpointer.save(step, {"w": jnp.ones(3)}, data_state={}, heldout_loss=loss)
            assert before is None or before in checkpointer.steps()
        checkpointer.wait()
        assert checkpointer.steps() == [2, 5, 7, 8]
        assert [verify(directory, step) for step in checkpointer.steps()] == [[]] * 4
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == [
        f"step_{step:08d}" for step in (2, 5, 7, 8)
    ]
    with Checkpointer(directory, dataclasses.replace(config, keep_best=0), identity={}) as second:
        second.save(9, {"w": jnp.ones(3)}, data_state={})
        second.wait()
        assert second.steps() == [8, 9]


def test_orbax_is_quiet(checkpointer, caplog):
    with caplog.at_level(logging.INFO):
        checkpointer.save(1, {"w": jnp.ones(3)}, data_state={})
        checkpointer.restore(abstract({"w": jnp.ones(3)}))
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(("file", "told"), [("/lib/orbax/write.py", 0), ("/lib/other.py", 1)])
def test_further_failures_of_one_save_are_not_told(caplog, file, told):
    """We raise the first; asyncio would print a traceback for each of the others."""
    silence_orbax()
    found: dict[str, Any] = {}
    exec(compile("async def fail():\n    raise OSError(28, 'full')", file, "exec"), found)
    loop = asyncio.new_event_loop()
    task = loop.create_task(found["fail"]())
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    del task
    gc.collect(1)  # it is young
    assert len([record for record in caplog.records if record.name == "asyncio"]) == told


@pytest.mark.gpu
@pytest.mark.xdist_group("several GB")
def test_donation_on_a_gpu(checkpointer):
    """The copy to pinned host memory has ended when save returns, and leaves donation alone."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("gpu")[0])
    want = {"w": np.random.default_rng(0).standard_normal((1 << 14, 1 << 14), np.float32)}
    overwrite = jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)
    jax.block_until_ready(overwrite(jax.device_put(want, sharding)))  # compiled before the race
    state = jax.device_put(want, sharding)
    wanted = abstract(state)
    checkpointer.save(1, state, data_state={})
    overwritten = jax.block_until_ready(overwrite(state))
    assert state["w"].is_deleted()
    del overwritten
    print(f"stall for 1 GiB: {checkpointer.last_stall_s:.3f} s")
    assert_bitwise(checkpointer.restore(wanted).state, want)
