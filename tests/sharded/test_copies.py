"""Gathers and sums by copies between two devices: what NCCL's give, and as many bytes."""

import functools
import math
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.hlo.program import collectives
from jaxinfra.parallel import copies
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.training.job import make_job
from tests.sharded.cases import COMPILER_OPTIONS, llama_like, packed_batch
from tests.sharded.two_steps import Case, assert_near, first_state, two_steps

BLOCK = (6, 8, 4)


@pytest.fixture
def on_gpus(monkeypatch):
    """Devices of this machine count as GPUs of this process."""
    monkeypatch.setattr(copies, "_are_measured", lambda mesh: True)


def on_devices(function, num: int, *, into: PartitionSpec, out: PartitionSpec):
    mesh = jax.make_mesh((num,), ("fsdp",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


def sent(run, *args) -> tuple[set[str], float]:
    found = [each for each in collectives(run.lower(*args).compile()) if each.shape]
    return {each.kind for each in found}, sum(each.sent_bytes for each in found)


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_gather_by_copies_is_an_all_gather(num, dim):
    whole = np.random.default_rng(0).normal(size=BLOCK).repeat(2, axis=0).astype(np.float32)
    sharded = PartitionSpec(*(None,) * dim, "fsdp")
    gather = functools.partial(copies.gather_by_copies, axis="fsdp", dim=dim)
    run = on_devices(gather, num, into=sharded, out=PartitionSpec())
    assert np.array_equal(run(whole), whole)
    assert sent(run, whole) == ({"collective-permute"}, whole.nbytes * (num - 1) / num)


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_sum_by_copies_is_a_reduce_scatter(num, dim):
    """Whole numbers, whose sums are exact in any order."""
    block = (*BLOCK[:dim], 4 * num, *BLOCK[dim + 1 :])
    summands = np.random.default_rng(0).integers(-50, 50, (num, *block)).astype(np.float32)

    def local(x):
        return copies.scatter_sum_by_copies(x[0], "fsdp", dim=dim)

    sharded = PartitionSpec(*(None,) * dim, "fsdp")
    run = on_devices(local, num, into=PartitionSpec("fsdp"), out=sharded)
    assert np.array_equal(run(summands), summands.sum(0))
    expected = sent_bytes("reduce-scatter", 4 * math.prod(block), num)
    assert sent(run, summands) == ({"collective-permute"}, expected)


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (MeshConfig(fsdp=2), "fsdp"),
        (MeshConfig(fsdp=2, expert=2), None),
        (MeshConfig(fsdp=4), None),
        (MeshConfig(fsdp=2, tensor=2), None),
        (MeshConfig(replica=2), None),
        (MeshConfig(), None),
    ],
)
def test_two_gpus_of_one_axis_send_by_copies(mesh, axis, on_gpus):
    devices = jax.devices()[: mesh.num_devices]
    assert copies.copying_axis(Placement(mesh=make_mesh(mesh, devices=devices))) == axis


@pytest.mark.parametrize(
    ("kind", "processes", "copied"),
    [
        ("NVIDIA H200", (0, 0), True),
        ("NVIDIA H200", (0, 1), False),
        ("NVIDIA H100 80GB HBM3", (0, 0), False),
        ("cpu", (0, 0), False),
    ],
)
def test_gpus_count_by_their_kind_and_process(kind, processes, copied):
    devices = [SimpleNamespace(device_kind=kind, process_index=index) for index in processes]
    mesh = SimpleNamespace(devices=np.array(devices))
    assert copies._are_measured(cast(Mesh, mesh)) == copied


def test_cpus_and_meshes_without_devices_do_not(monkeypatch):
    mesh = make_mesh(MeshConfig(fsdp=2), devices=jax.devices()[:2])
    assert copies.copying_axis(Placement(mesh=mesh)) is None
    monkeypatch.setattr(copies, "_are_measured", lambda mesh: True)
    assert copies.copying_axis(Placement(mesh=mesh.abstract_mesh)) is None


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_step_by_copies_is_that_of_one_device(unroll, on_gpus):
    """Every matrix is gathered and its gradient summed by permutes."""
    kept = ShardingConfig(keep_gathered=True)
    case = Case(mesh=MeshConfig(fsdp=2), sharding=kept, unroll=unroll)
    config, one = (each.config(llama_like()) for each in (case, Case()))
    job = make_job(config, devices=jax.devices()[:2])
    compiled = job.train_step.lower(job.abstract_state(), packed_batch()).compile()
    found = [each for each in collectives(compiled) if len(each.shape) > 1]
    assert "reduce-scatter" not in {each.kind for each in found}
    assert sum(each.kind == "collective-permute" for each in found) >= 12
    start = first_state(one)
    got, wanted = two_steps(config, start), two_steps(one, start)
    for name in ("loss", "gradients", "parameters"):
        assert_near(got[name], wanted[name], units=512, what=name)


@pytest.mark.slow
def test_a_block_at_the_wrong_place_is_seen(on_gpus, monkeypatch):
    kept = ShardingConfig(keep_gathered=True)
    config = Case(mesh=MeshConfig(fsdp=2), sharding=kept).config(llama_like())
    one = Case().config(llama_like())
    start = first_state(one)
    monkeypatch.setattr(copies, "rank", lambda axis: 1 - jax.lax.axis_index(axis))
    got, wanted = two_steps(config, start), two_steps(one, start)
    with pytest.raises(AssertionError):
        assert_near(got["loss"], wanted["loss"], units=512, what="loss")
