"""Recomputation by memory budget, and XLA's options of a run: what is known, named, refused."""

import dataclasses

import pytest

from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.training import xla_options
from jaxinfra.training.describe import describe_job
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.recompute.budget import (
    CHEAPEST_FIRST,
    FREE_SHARE,
    GatherChoice,
    budget_bytes,
    choose_remat,
)
from tests.sharded.cases import llama_like

FAST = "xla_backend_optimization_level=0"  # half of the compile time; no buffer depends on it


def small_run(**training):
    """A step whose intermediates outweigh its state."""
    base = tiny()
    settings = dict(batch_size=4, sequence_length=64, xla_options=(FAST,)) | training
    return dataclasses.replace(
        base,
        model=llama_like(),
        training=dataclasses.replace(base.training, **settings),
    )


@pytest.mark.slow
def test_the_job_takes_the_first_policy_whose_compiled_step_fits():
    assert set(CHEAPEST_FIRST) == set(Remat) - {Remat.AUTO, Remat.OPTIMAL, Remat.CHOSEN}
    keeps_all = step_bytes(lower_step(make_job(small_run(remat=Remat.NONE))).compile())
    config = small_run(remat=Remat.AUTO, memory_budget_gib=(keeps_all - 1) / 2**30)
    job = make_job(config)
    assert job.config.training.remat is Remat.DOTS is job.model.execution.recomputation.remat
    assert job.config == small_run(remat=Remat.DOTS)  # what a resumed run goes on with
    assert job.choice is not None
    assert job.choice.needs[Remat.DOTS] < keeps_all == job.choice.needs[Remat.NONE]
    assert list(job.choice.needs) == [Remat.NONE, Remat.DOTS]
    assert "remat=dots: a step needs" in describe_job(job)


@pytest.mark.slow
def test_gathered_weights_stay_where_the_step_then_fits():
    """The config names neither, so that the run may go on with other devices."""
    job = make_job(over_fsdp(remat=Remat.AUTO, memory_budget_gib=1.0))
    assert job.gathers is not None
    assert job.gathers.keeps
    assert job.model.execution.gather is not None
    assert job.config.sharding.keep_gathered is None
    assert job.config.training.remat is Remat.NONE
    assert "gathered weights stay for the backward pass: a step needs" in describe_job(job)
    assert job.gathers.needs_bytes == step_bytes(lower_step(job).compile())


def over_fsdp(**training):
    return dataclasses.replace(small_run(batch_size=8, **training), mesh=MeshConfig(fsdp=8))


def test_weights_are_gathered_again_where_they_do_not_fit_or_nobody_knows():
    choice = GatherChoice(needs_bytes=2**30 + 1, budget_bytes=2**30)
    assert not choice.keeps
    said = "weights are gathered again: to stay, a step would need 1.00 GiB of a budget of 1.00 GiB"
    assert choice.describe() == said
    job = make_job(over_fsdp())  # no device here says how much memory it has
    assert job.gathers is None
    assert job.model.execution.gather is None


def test_none_fits():
    needs = dict(zip(CHEAPEST_FIRST, (90, 70, 50, 60, 40), strict=True))
    gib = {remat: size * 2**30 for remat, size in needs.items()}
    assert choose_remat(budget_bytes=65 * 2**30, need=gib.__getitem__).remat is Remat.MLP
    with pytest.raises(ConfigError, match=r"needs 40\.00 GiB at least \(remat=full\).*39\.00 GiB"):
        choose_remat(budget_bytes=39 * 2**30, need=gib.__getitem__)


def test_the_budget_is_what_the_device_has_or_what_is_given():
    class Device:
        device_kind = "NVIDIA H200"

        def memory_stats(self):
            return {"bytes_limit": 100 * 2**30}

    assert budget_bytes(None, Device()) == int((1 - FREE_SHARE) * 100 * 2**30)
    assert budget_bytes(1.5, Device()) == 3 * 2**29
    with pytest.raises(ConfigError, match=r"a cpu device does not say .*memory_budget_gib"):
        make_job(small_run(remat=Remat.AUTO))


@pytest.mark.parametrize(("remat", "gib"), [(Remat.DOTS, 10.0), (Remat.AUTO, 0.0)])
def test_a_budget_without_a_use_is_refused(remat, gib):
    with pytest.raises(ConfigError, match=r"only remat=auto and optimal choose by it"):
        small_run(remat=remat, memory_budget_gib=gib)


def test_named_options_reach_the_compiler_and_are_told():
    job = make_job(small_run())
    assert job.options == {"xla_backend_optimization_level": 0}
    assert "XLA options xla_backend_optimization_level=0" in describe_job(job)
    assert make_job(small_run(xla_options=())).options is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("xla_gpu_enable_cudnn_fmha=true", "No such compile option: 'xla_gpu_enable_cudnn_fmha'"),
        ("xla_gpu_enable_triton_gemm=perhaps", "'perhaps' is not a valid bool value"),
        ("xla_gpu_enable_triton_gemm", "another form than name=value"),
    ],
)
def test_options_that_this_xla_does_not_know_are_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        make_job(small_run(xla_options=(option,)))


def test_options_are_set_from_the_command_line():
    config = codec.override(tiny(), ['training.xla_options=["--xla_gpu_autotune_level=3"]'])
    parsed = xla_options.parse_options(config.training.xla_options)
    assert parsed == {"xla_gpu_autotune_level": 3}


def test_permutes_go_by_dma_engines_where_the_step_sends_by_copies():
    options = [
        xla_options.compiler_options(
            small_run(), on_gpu=on_gpu, traceable=False, by_copies=by_copies
        )
        or {}
        for on_gpu, by_copies in ((True, True), (True, False), (False, True))
    ]
    assert ["xla_gpu_collective_permute_mode" in each for each in options] == [True, False, False]


def on_gpu(config, *, traceable=False):
    return (
        xla_options.compiler_options(config, on_gpu=True, traceable=traceable, by_copies=False)
        or {}
    )


@pytest.mark.parametrize(
    ("mesh", "unroll", "large"),
    [
        (MeshConfig(fsdp=8), 2, True),
        (MeshConfig(fsdp=8), 1, False),
        (MeshConfig(), 2, False),
    ],
)
def test_messages_are_large_on_gpu_meshes_without_a_loop(mesh, unroll, large):
    config = dataclasses.replace(small_run(unroll=unroll), mesh=mesh)
    options = on_gpu(config, traceable=True)
    assert ("xla_gpu_all_gather_combine_threshold_bytes" in options) == large
    assert "xla_gpu_enable_command_buffer" in options
    assert "xla_gpu_enable_command_buffer" not in on_gpu(config)


def test_named_options_win_over_defaults():
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    config = dataclasses.replace(
        small_run(unroll=2, xla_options=(f"{name}=7",)), mesh=MeshConfig(fsdp=8)
    )
    assert on_gpu(config)[name] == 7


def test_default_options_are_known_to_this_xla():
    xla_options.require_known(xla_options.LARGE_MESSAGES)
