"""Tiles: what the tuner tries, what it keeps, and how kernels find and refuse it."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.kernels import attention_tune as tune
from pallas_kernels import InputError, UnsupportedError, flash_attention
from pallas_kernels.common import device, tables
from pallas_kernels.flash_attention.hopper import config as tiles
from pallas_kernels.flash_attention.hopper.config import SHIPPED, BackwardConfig
from pallas_kernels.hopper.machine import SMEM_BYTES

LOGGER = "pallas_kernels.flash_attention.hopper.config"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.USER_FOLDER_VARIABLE, str(tmp_path))
    tiles._announce.cache_clear()
    with device.compiling_for(device.H200):
        yield tmp_path / "flash_attention" / "tiles-nvidia-h200.json"
    tables._find.cache_clear()


@pytest.mark.parametrize(
    ("direction", "key"),
    [("forward", "64/64"), ("forward", "256/256"), ("forward", "192/128"), ("backward", "64/64"),
     ("backward", "128/128 ungrouped"), ("backward", "96/96")],
)  # fmt: skip
def test_candidates_fit_and_begin_with_the_shipped(direction, key):
    found = tune.candidates(direction, key)
    shipped = SHIPPED.get((direction, key))
    assert found[0] == (shipped or BackwardConfig())
    assert len(set(found)) == len(found)
    assert len(found) > 1 or max(tune.widths(key)) > 64  # wide backwards have one form
    for config in found:
        assert config.smem_bytes(*tune.widths(key)) <= SMEM_BYTES


@pytest.mark.parametrize("key", ["256/256", "60/60", "128", "wide/wide"])
def test_widths_without_tiles_are_refused(key):
    with pytest.raises(InputError, match=f"--widths {key}"):
        tune.candidates("backward", key)


def fastest(wanted):
    """Times in which one candidate is the fastest and one is wrong, so that it has none."""

    def times(configs):
        assert wanted in configs
        return {c: 1.0 if c == wanted else 2.0 + i for i, c in enumerate(configs) if i != 1}

    return times


def test_kernels_take_what_was_fastest_here_and_say_so(own_folder, caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    before = tiles.forward_config(128, 128)
    wanted = {
        "forward": tune.candidates("forward", "128/128")[-1],
        "backward": tune.candidates("backward", "64/64 ungrouped")[-1],
    }
    assert before != wanted["forward"]
    assert not caplog.records
    for direction, config in wanted.items():
        key = "64/64 ungrouped" if direction == "backward" else "128/128"
        rows = tune.tune(direction, key, fastest(config))
        assert len(rows) == len(tune.candidates(direction, key)) - 1
        tune.keep(rows)
        assert own_folder.exists()
    tables._find.cache_clear()
    for _ in range(2):
        assert tiles.forward_config(128, 128) == wanted["forward"]
    assert tiles.backward_config(64, 64, 1) == wanted["backward"]
    # Others, and other devices, keep the shipped ones.
    assert tiles.forward_config(64, 64) == SHIPPED["forward", "64/64"]
    assert tiles.backward_config(64, 64, 4) == SHIPPED["backward", "64/64"]
    other = device.Facts(kind="NVIDIA H100", is_gpu=True, capability=(9, 0))
    with device.compiling_for(other):
        assert tiles.forward_config(128, 128) == before
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert str(own_folder) in lines[0]
    assert f"forward 128/128: {wanted['forward']}" in lines[0]


def test_tuning_again_replaces_the_case(own_folder):
    first, second = tune.candidates("forward", "64/64")[2:4]
    for config in (first, second):
        tune.keep(tune.tune("forward", "64/64", fastest(config)))
    other = tune.candidates("backward", "64/64")[0]
    tune.keep(tune.tune("backward", "64/64", fastest(other)))
    tables._find.cache_clear()
    assert tiles.forward_config(64, 64) == second
    assert {dict(row.case)["direction"] for row in tables.load(own_folder).rows} == {
        "forward", "backward",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"case": {"direction": "sideways", "key": "64/64"}}, "'sideways'.*forward, backward"),
        ({"case": {"key": "64/64"}}, "a direction of"),
        ({"choice": {"block_q": 64}}, "forward 64/64 has block_q=64.*ForwardConfig has block_kv"),
        ({"choice": {"block_kv": "128"}}, "block_kv='128'"),
        ({"choice": {"block_kv": True}}, "block_kv=True"),
        ({"ms": -1.0}, "ms=-1.0"),
    ],
)
def test_a_file_that_no_kernel_understands_is_refused_by_name(own_folder, change, words):
    row = {"case": {"direction": "forward", "key": "64/64"}, "choice": {"block_kv": 64}, "ms": 1.0}
    document = {
        "schema": 1, "op": "flash_attention", "question": "tiles", "device_kind": "NVIDIA H200",
        "environment": {}, "rows": [row | change],
    }  # fmt: skip
    own_folder.parent.mkdir()
    own_folder.write_text(json.dumps(document))
    with pytest.raises(tables.TableError, match=words) as caught:
        tiles.forward_config(64, 64)
    assert str(own_folder) in str(caught.value)
    own_folder.write_text("{")
    tables._find.cache_clear()
    with pytest.raises(tables.TableError, match="is not JSON"):
        tiles.forward_config(64, 64)


def test_tiles_that_exceed_shared_memory_are_refused_before_the_compiler(own_folder):
    row = tables.Row.of(
        case={"direction": "forward", "key": "128/128"},
        choice={"block_kv": 128, "num_stages": 6},
        ms=1.0,
    )
    tune.keep([row])
    q = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"num_stages=6.*bytes of shared memory"):
        jax.eval_shape(lambda q: flash_attention(q, q, q, implementation="hopper"), q)


def test_tuning_needs_the_gpu():
    cpu = device.Facts(kind="cpu", is_gpu=False)
    with device.compiling_for(cpu), pytest.raises(UnsupportedError, match="not cpu"):
        tune.main(["--widths", "64/64"])
