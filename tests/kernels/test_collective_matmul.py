"""Collective matmuls: values, gradients, choice of an implementation, refusals, lowering."""

import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.launch_context import LaunchContext
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError
from pallas_kernels.collective_matmul import dispatch
from pallas_kernels.collective_matmul.hopper import (
    all_gather_kernel,
    kernel,
    reduce_scatter_kernel,
)
from pallas_kernels.collective_matmul.hopper.config import CollectiveConfig
from pallas_kernels.collective_matmul.hopper.reduce_scatter_kernel import ReduceScatterKernel
from pallas_kernels.common import device
from pallas_kernels.grouped_matmul.hopper.config import GroupedConfig
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

SMALL = CollectiveCase(B=2, M=8, K=12, N=(4, 8))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_values_and_gradients_are_those_of_whole_arrays(sizes, gathers, transposed):
    case = CollectiveCase(B=2, M=8, K=12, N=(4, 8), transposed=transposed)
    given = case.draw(gathers=gathers)
    got = with_gradients(case, mesh(*sizes), "xla", gathers)(*given)
    assert_within_rounding(got, case.exact(*given, gathers=gathers, devices=sizes[1]))


@pytest.mark.parametrize("gathers", [False, True])
def test_a_cpu_multiplies_by_xla_unless_the_kernel_is_named(gathers):
    given = SMALL.draw(gathers=gathers)[:2]
    by_name, auto = (
        jax.jit(SMALL.run(mesh(), name, gathers=gathers))(*given) for name in ("xla", "auto")
    )
    jax.tree.map(np.testing.assert_array_equal, by_name, auto)
    with pytest.raises(UnsupportedError, match="cpu is not a Hopper GPU"):
        SMALL.run(mesh(), "hopper", gathers=gathers)(*given)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(M=256), "128 positions"),
        (dict(K=320), "a width of 320"),
        (dict(N=(528,)), "a width of 264"),
        (dict(dtype=jnp.float32), "operands are float32"),
    ],
)
def test_sizes_that_the_kernel_lacks_are_refused_by_name(changed, reason):
    case = CollectiveCase(**(dict(B=1, M=512, K=512, N=(512,)) | changed))
    with (
        device.compiling_for(device.H200),
        pytest.raises(UnsupportedError, match=f"hopper.*{reason}.*xla"),
    ):
        jax.eval_shape(case.run(mesh(), "hopper", gathers=True), *case.draw(gathers=True)[:2])


def test_the_kernels_are_refused_on_meshes_on_which_none_was_run():
    case = CollectiveCase(B=2, M=512, K=512, N=(512,))
    with device.compiling_for(device.H200):
        for gathers in (False, True):
            given = case.draw(gathers=gathers)[:2]
            with pytest.raises(UnsupportedError, match=r"hopper.*a mesh of 4 devices.*xla"):
                jax.eval_shape(case.run(mesh(2, 2), "hopper", gathers=gathers), *given)
            jax.eval_shape(case.run(mesh(2, 2), "auto", gathers=gathers), *given)


def test_shapes_that_disagree_are_refused():
    (x,), weights, _ = SMALL.draw(gathers=True)
    with pytest.raises(InputError, match=r"they are .B, M, K. and .K, N."):
        SMALL.run(mesh(), "xla", gathers=True)([x], [w.T for w in weights])
    with pytest.raises(InputError, match="no weight"):
        SMALL.run(mesh(), "xla", gathers=True)([x], [])
    odd = CollectiveCase(B=1, M=7, K=4, N=(4,))
    with pytest.raises(InputError, match="7 positions do not divide over tensor=2"):
        jax.eval_shape(odd.run(mesh(), "xla", gathers=False), *odd.draw(gathers=False)[:2])


@pytest.mark.parametrize(
    ("devices", "lead", "tiles"), [(2, 3, 5), (2, 264, 8), (3, 5, 7), (4, 0, 3)]
)
def test_each_tile_is_multiplied_once_and_a_peer_sends_before_it_is_waited_for(
    devices, lead, tiles
):
    kernel = ReduceScatterKernel(
        c=GroupedConfig(), options=CollectiveConfig(lead=lead), dtype=jnp.bfloat16,
        out_dtype=jnp.bfloat16, num_rows=128 * tiles, num_groups=0, axis="tensor",
        num_devices=devices, length=128 * tiles, depths=(256,), num_columns=256, transposed=False,
    )  # fmt: skip
    order = [kernel.tile_at(jnp.int32(i)) for i in range(devices * tiles)]
    order = [(int(tile), int(peer)) for tile, peer in order]
    assert sorted(order) == [(tile, peer) for tile in range(tiles) for peer in range(devices)]
    for tile in range(tiles):
        own = order.index((tile, 0))
        assert all(order.index((tile, peer)) < own for peer in range(1, devices))
    assert int(kernel.tile_at(jnp.int32(devices * tiles))[0]) >= tiles


def test_auto_follows_the_measured_table(tmp_path, monkeypatch):
    call = dispatch.CollectiveCall(
        dtypes=frozenset({"bfloat16"}), axis="tensor", devices=2, positions=4096, rows=8192,
        depths=(4096,), columns=(7168,), sent_width=4096,
    )  # fmt: skip
    case = dict(op="all_gather_matmul", devices=2, rows=8192, depth=4096, columns=7168)
    rows = [
        dict(case=case, choice={"implementation": name}, ms=ms)
        for name, ms in (("hopper", 1.0), ("xla", 1.3))
    ]
    (tmp_path / "dispatch-nvidia-h200.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(dispatch, "TUNED", tmp_path)
    with device.compiling_for(device.H200):
        assert dispatch.fastest("all_gather_matmul", call) == "hopper"
        assert dispatch.fastest("matmul_reduce_scatter", call) == "xla", "not measured"


@pytest.mark.slow  # lowering takes seconds
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_the_kernels_lower_without_multicast_and_without_descriptors_of_peers_arrays(
    monkeypatch, gathers, transposed
):
    """A descriptor of a peer's array is made on the host, from the host's table of addresses."""
    monkeypatch.setattr(dispatch, "MOST_DEVICES", 4)
    monkeypatch.setattr(LaunchContext, "host_collective_metadata", property(_unread))
    case = CollectiveCase(B=2, M=1024, K=512, N=(768, 512), transposed=transposed)
    run = with_gradients(case, mesh(2, 2), "hopper", gathers)
    with device.compiling_for(device.H200):
        traced = run.trace(*case.draw(gathers=gathers))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2, "one forward, one backward"
    assert text.count("uses_xla_collective_metadata = true") == 2
    assert "symmetric_memory_parameters" not in text, "multicast, which shared hosts forbid"


def _unread(_):
    raise AssertionError("a peer's address was read on the host")


class _Unread:
    """Counters that nothing waits for, as the interpreter has none."""

    at = property(lambda self: self)

    def __getitem__(self, _):
        return self


def _copy(source, target, far):
    del far
    plgpu.copy_smem_to_gmem(source, target, commit_group=False)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [GatherFromItself, ScatterToItself])
def test_a_block_alone_computes_all_tiles_in_the_interpreter(
    interpreter, monkeypatch, kind, transposed
):
    """A block's own messages arrive before it reads them, so that no counter is needed."""
    ring = importlib.import_module("pallas_kernels.grouped_matmul.hopper.ring")
    monkeypatch.setattr(ring, "NUM_PROCESSORS", 1)
    for module in (all_gather_kernel, reduce_scatter_kernel):
        monkeypatch.setattr(module, "wait_for_peer", lambda flag, count: None)
        monkeypatch.setattr(module, "send", _copy)
    monkeypatch.setattr(kernel, "distance", lambda ref, other: None)
    monkeypatch.setattr(kind, "flags", lambda self, count: _Unread())
    monkeypatch.setattr(kind, "signal", lambda self, flag, peer: None)
    rng = np.random.default_rng(5)
    gathers = kind is GatherFromItself
    K = 512  # eight chunks are pushed, through four slots
    x = rng.normal(size=(1, 256 if gathers else 512, K)).astype(jnp.bfloat16)
    weight = (rng.normal(size=(320, K) if transposed else (K, 320)) / 22).astype(jnp.bfloat16)
    run = functools.partial(
        looped, kind, transposed=transposed, lead=2, num_pushers=1, in_any_order=False
    )
    found = jax.jit(run)(x, weight)
    assert_within_rounding(
        found["out"], by_itself(x, weight, gathers=gathers, transposed=transposed)
    )
    if gathers:
        np.testing.assert_array_equal(np.asarray(found["gathered"]), x)
