"""Kernels of a trace find their scope through the program's text."""

import pytest

from jaxinfra.diagnostics.trace import KernelTime, op_names, scope_of, time_by_scope

HLO = """
%dynamic_slice_fusion.2 (p0: bf16[4,8], p1: bf16[2,8,8]) -> bf16[2,4,8] {
  %custom-call.1 = (bf16[4,8]{1,0}, s8[64]{0}) custom-call(%p0, %p1), custom_call_target="lt"
  ROOT %dynamic_update_slice = bf16[2,4,8]{2,1,0} dynamic-update-slice(%p1, %custom-call.1)
}

ENTRY %main.1 (x: bf16[4,8]) -> bf16[2,4,8] {
  %dot.3 = bf16[4,8]{1,0} fusion(%x), calls=%other, metadata={op_name="jit(step)/attention/dot"}
  ROOT %fusion.9 = bf16[2,4,8]{2,1,0} fusion(%dot.3), calls=%dynamic_slice_fusion.2, \
metadata={op_name="jit(step)/transpose(jvp(layer))/rematted_computation/mlp/dot"}
}
"""


def test_an_unnamed_instruction_has_the_name_of_its_fusion():
    names = op_names(HLO)
    assert names["dot.3"] == "jit(step)/attention/dot"
    assert names["custom-call.1"] == names["fusion.9"]


def test_time_is_summed_by_scope():
    kernels = [
        KernelTime(hlo_op=op, kernel="gemm", launches=2, total_ms=ms)
        for op, ms in (("custom-call.1", 3.0), ("dot.3", 2.0), ("memset", 1.0), ("dot.3", 0.5))
    ]
    found = time_by_scope(kernels, op_names(HLO))
    assert found == {"mlp recomputed": 3.0, "attention": 2.5, "other": 1.0}


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(f)/jvp(layer)/while/body/attention/core/exp", "attention/core"),
        ("jit(f)/transpose(jvp(layer))/while/body/attention/core/exp", "attention/core backward"),
        ("jit(f)/jvp(loss)/dot_general", "loss"),
        ("jit(f)/optimizer/mul", "optimizer"),
        ("jit(f)/attentions/mul", "other"),
    ],
)
def test_scope_of(op_name, scope):
    assert scope_of(op_name) == scope
