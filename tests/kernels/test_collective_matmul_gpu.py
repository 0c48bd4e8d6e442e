"""Collective matmuls by the Hopper kernels over two GPUs, and on one that is its own peer."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.collective_cases import (
    CollectiveCase,
    GatherFromItself,
    ScatterToItself,
    by_itself,
    looped,
    mesh,
    with_gradients,
)
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

CASES = {
    "one tile": CollectiveCase(B=1, M=512, K=512, N=(512,)),
    "rows of a batch": CollectiveCase(B=3, M=1024, K=1024, N=(1280, 640)),
    "transposed": CollectiveCase(B=2, M=2048, K=1536, N=(1024, 512), transposed=True),
    "many tiles": CollectiveCase(B=1, M=8192, K=1024, N=(4096,)),
}
REPEATS = {"many tiles": 200}


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs that reach each other")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_right_and_repeat_bit_for_bit(name, gathers, graphs):
    """Results of some runs stay, and one device alone has other arrays, so that addresses change on
    one device and not on the other. XLA records programs of five kernels in CUDA graphs.
    """
    case, options = CASES[name], () if graphs else (("xla_gpu_enable_command_buffer", ""),)
    given = case.on(mesh(), gathers=gathers)
    run = with_gradients(case, mesh(), "hopper", gathers, options)
    first = run(*given)
    assert_within_rounding(first, case.exact(*given, gathers=gathers, devices=2))
    held: list = [None] * 3
    for i in range(REPEATS.get(name, 100)):
        blocks = [jnp.copy(shard.data) for shard in _shards(first)[i % 2 :: 2]]
        again = run(*given)
        same = [_equal(a.data, b.data) for a, b in zip(_shards(again), _shards(first), strict=True)]
        assert all(jax.device_get(same)), f"repeat {i}"
        held[i % 3] = (again, blocks) if i % 5 else None


def _shards(tree):
    return [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


@jax.jit
def _equal(a, b):
    kind = f"uint{8 * a.dtype.itemsize}"
    return jnp.array_equal(
        jax.lax.bitcast_convert_type(a, kind), jax.lax.bitcast_convert_type(b, kind)
    )


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [GatherFromItself, ScatterToItself])
@pytest.mark.parametrize(("B", "M", "K", "N"), [(1, 256, 256, 320), (2, 1024, 512, 2112)])
def test_a_gpu_is_its_own_peer(hopper_gpu, B, M, K, N, kind, transposed):
    rng = np.random.default_rng(5)
    gathers = kind is GatherFromItself
    x = rng.normal(size=(B, M if gathers else 2 * M, K)).astype(jnp.bfloat16)
    weight = (rng.normal(size=(K, N)) * K**-0.5).astype(jnp.bfloat16)
    weight = weight.T.copy() if transposed else weight
    run = jax.jit(functools.partial(looped, kind, transposed=transposed, lead=5))
    first = run(x, weight)
    want = by_itself(x, weight, gathers=gathers, transposed=transposed)
    assert_within_rounding(first["out"], want)
    if gathers:
        np.testing.assert_array_equal(_bits(first["gathered"]), x.view(np.uint16))
    for _ in range(100):
        np.testing.assert_array_equal(_bits(run(x, weight)["out"]), _bits(first["out"]))


RUN = """
import jax.numpy as jnp
from pallas_kernels.collective_matmul.hopper import kernel
from tests.kernels import collective_cases
kernel.SECONDS = 2
x, weight = jnp.ones((1, 512, 256), jnp.bfloat16), jnp.ones((256, 256), jnp.bfloat16)
kind = collective_cases.{kind}
collective_cases.looped(kind, x, weight, transposed=False)["out"].block_until_ready()
"""


def test_a_peer_that_is_silent_ends_the_process_and_the_next_one_runs(hopper_gpu):
    """The wait lasts 2 s here instead of 20."""
    for kind, ends in (("GatherFromNobody", True), ("GatherFromItself", False)):
        command = [sys.executable, "-c", RUN.format(kind=kind)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40)
        assert (done.returncode != 0) == ends, done.stderr
        assert ("CUDA_ERROR_LAUNCH_FAILED" in done.stderr) == ends, done.stderr
