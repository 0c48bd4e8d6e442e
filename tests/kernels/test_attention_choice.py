"""Who computes a call on a Hopper GPU, and that its program can be made without one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import UnsupportedError, flash_attention
from pallas_kernels.common import device
from pallas_kernels.flash_attention import (
    AttentionMasks,
    AttentionSpec,
    dispatch,
)
from pallas_kernels.flash_attention.hopper import config
from pallas_kernels.flash_attention.spec import AttentionCall
from tests.kernels.attention_workloads import WORKLOADS, AttentionWorkload

BY_NAME = {workload.name: workload for workload in WORKLOADS}
PLAIN = BY_NAME["llama-3-8b"]
PACKED = BY_NAME["packed 8 x 1024 b4"]


def shapes(workload: AttentionWorkload, dtype="bfloat16"):
    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays = jax.eval_shape(workload.arrays, key)
    return {
        name: jax.ShapeDtypeStruct(x.shape, dtype if x.ndim == 4 else x.dtype)
        for name, x in arrays.items()
    }


def chosen(workload: AttentionWorkload, *, dtype="bfloat16", facts=device.H200, **options) -> str:
    arrays = shapes(workload, dtype)
    call = AttentionCall(
        spec=AttentionSpec(
            scale=0.1, right=0 if workload.causal else None, logit_soft_cap=workload.soft_cap
        ),
        masks=AttentionMasks(
            q_segment_ids=arrays.get("q_segment_ids"), kv_segment_ids=arrays.get("kv_segment_ids")
        ),
        q=arrays["query"],
        k=arrays["key"],
        v=arrays["value"],
        return_residual=options.get("return_residual", False),
    )
    with device.compiling_for(facts):
        return dispatch.choose(options.get("implementation", "auto"), call)


HOPPER_FIRST = ("hopper", "cudnn", "xla")
"""As a table that found the Hopper kernels fastest everywhere would rank."""


def test_auto_on_hopper(monkeypatch):
    assert chosen(PLAIN) == "hopper"  # as measured
    assert chosen(BY_NAME["d128 full b4 s4096 h32/8"]) == "cudnn"  # the other way there
    phi = BY_NAME["phi-2"]
    assert chosen(phi) == "hopper"  # as measured
    assert chosen(dataclasses.replace(phi, causal=False)) == "hopper"  # by rows of other widths
    assert chosen(PACKED) == "hopper"
    assert chosen(BY_NAME["gemma-2-9b, local"]) == "hopper"  # a soft cap is beyond cuDNN
    monkeypatch.setattr(dispatch, "UNMEASURED", HOPPER_FIRST)
    assert chosen(PLAIN) == "hopper"
    assert chosen(PACKED) == "hopper"
    assert chosen(PLAIN, dtype="float32") == "xla"


def test_auto_on_other_gpus():
    ampere = device.Facts(kind="NVIDIA A100", is_gpu=True, capability=(8, 0), cuda=13000)
    assert chosen(PLAIN, facts=ampere) == "cudnn"
    assert chosen(PLAIN, facts=ampere, return_residual=True) == "xla"
    assert chosen(PACKED, facts=ampere) == "xla"
    assert chosen(BY_NAME["d256 full b4 s4096 h16/4"], facts=ampere) == "xla"
    turing = device.Facts(kind="Tesla T4", is_gpu=True, capability=(7, 5), cuda=13000)
    assert chosen(PLAIN, facts=turing) == "xla"
    other = device.Facts(kind="another vendor's", is_gpu=True)
    assert chosen(PLAIN, facts=other) == "xla"


def test_a_compiler_that_miscompiles_is_refused():
    broken = device.Facts(kind="NVIDIA H100", is_gpu=True, capability=(9, 0), cuda=12080)
    assert chosen(PLAIN, facts=broken) == "cudnn"
    with pytest.raises(UnsupportedError, match="ptxas of CUDA 12080 miscompiles causal"):
        chosen(PLAIN, facts=broken, implementation="hopper")
    full = BY_NAME["d128 full b1 s16384 h32/8"]
    assert chosen(full, facts=broken, implementation="hopper") == "hopper"


def test_hopper_kernels_are_refused_elsewhere():
    with pytest.raises(UnsupportedError, match=r"9\.0 \(Hopper\), not cpu.*These can: xla, ref"):
        chosen(PLAIN, facts=device.target(), implementation="hopper")


def lower(workload: AttentionWorkload, *, gradient: bool):
    """The call's program for CUDA, made on this machine."""
    arrays = shapes(workload)
    floats = {name: x for name, x in arrays.items() if not name.endswith("ids")}
    rest = {name: x for name, x in arrays.items() if name.endswith("ids")}

    def loss(floats, rest):
        attention = functools.partial(flash_attention, implementation="hopper")
        out = attention(**floats, **rest, **workload.options())
        return jnp.sum(out.astype(jnp.float32))

    function = jax.grad(loss) if gradient else loss
    with device.compiling_for(device.H200):
        return jax.jit(function).trace(floats, rest).lower(lowering_platforms=("cuda",))


@pytest.mark.slow_cases("d256 full b8 s2048 h16/4")
@pytest.mark.parametrize("name", ["d64 full b8 s2048 h32/8", "d256 full b8 s2048 h16/4"])
def test_a_kernel_lowers_to_cuda(name):
    text = lower(BY_NAME[name], gradient=False).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_lowers_to_cuda(workload):
    lower(workload, gradient=False)
    lower(workload, gradient=True)


@pytest.mark.parametrize(
    ("S", "causal", "options", "wanted"),
    [
        (512, True, {}, [" short causal", " short"]),
        (1024, False, {}, [" short"]),
        (2048, True, {}, [" short"]),
        (2048, False, {}, []),
        (4096, True, {}, []),
        (512, True, {"left": 100}, []),  # a window: not measured
        (500, True, {}, []),
        (512, True, {"logit_soft_cap": 5.0}, []),
    ],
)
def test_short_sequences_have_tiles_of_their_own(S, causal, options, wanted):
    spec = AttentionSpec(scale=0.1, right=0 if causal else None, **options)
    endings = config.short_endings(spec, AttentionMasks(), S, S)
    assert endings == wanted
    assert config.short_endings(spec, AttentionMasks(), 128, S) == []  # of a prefix's keys
    packed = AttentionMasks(q_segment_ids=jnp.zeros((1, S)), kv_segment_ids=jnp.zeros((1, S)))
    assert config.short_endings(spec, packed, S, S) == []
    found = config.forward_config(64, 64, endings)
    assert found.persistent == bool(wanted)
    assert config.forward_config(256, 256, endings) == config.forward_config(256, 256)
