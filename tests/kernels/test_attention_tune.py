"""Tiles: what the tuner tries, and how kernels refuse what does not fit."""

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.kernels import attention_tune as tune
from pallas_kernels import InputError, UnsupportedError, flash_attention
from pallas_kernels.common import device
from pallas_kernels.flash_attention.hopper.config import SHIPPED, BackwardConfig, ForwardConfig
from pallas_kernels.hopper.machine import SMEM_BYTES


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


def test_tiles_that_exceed_shared_memory_are_refused_before_the_compiler(monkeypatch):
    large = ForwardConfig(block_kv=128, num_stages=6)
    monkeypatch.setitem(SHIPPED, ("forward", "128/128"), large)
    q = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    message = r"num_stages=6.*bytes of shared memory"
    with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(lambda q: flash_attention(q, q, q, implementation="hopper"), q)


def test_tuning_needs_the_gpu():
    cpu = device.Facts(kind="cpu", is_gpu=False)
    with device.compiling_for(cpu), pytest.raises(UnsupportedError, match="not cpu"):
        tune.main(["--widths", "64/64"])
