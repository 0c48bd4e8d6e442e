"""A trace is counted moment by moment, each once, under the scopes of the program."""

import json

import jax
import pytest

from jaxinfra.cli.main import main
from jaxinfra.diagnostics.trace import (
    UNKNOWN,
    CollectiveAxes,
    TraceEvent,
    events_by_device,
    kind_of,
    scope_of,
)
from jaxinfra.diagnostics.waterfall import IDLE, draw, explain
from jaxinfra.errors import DataError

MLP = "jit(step)/transpose(jvp(layer))/rematted_computation/mlp/dot"
GEMM = ("nvjet_sm90_128x160", "custom-call.1", MLP)
NORM = ("loop_multiply_fusion", "fusion.7", "jit(step)/attention/mul")
COPY = ("MemcpyD2D", "loop_dynamic_update_slice_fusion.2", "")
REDUCE = ("ncclDevKernel_AllReduce", "all-reduce.1", "jit(step)/optimizer/psum")


def event(what, start, duration) -> TraceEvent:
    kernel, hlo_op, op_name = what
    return TraceEvent(
        kernel=kernel,
        hlo_op=hlo_op,
        op_name=op_name,
        program="jit_step",
        start_ns=start * 1e6,
        duration_ns=duration * 1e6,
    )


def two_steps() -> list[TraceEvent]:
    """Of each step's 10 ms the copy delays 1 and hides 1, the all-reduce delays 2 and hides 1."""
    return [
        event(what, 10 * step + start, duration)
        for step in range(2)
        for what, start, duration in ((GEMM, 0, 4), (COPY, 3, 2), (NORM, 5, 2), (REDUCE, 6, 3))
    ]


def test_every_moment_counts_once():
    found = explain([*two_steps(), event(NORM, 20, 0.5)])
    assert found.steps == 2
    assert found.span_ms == pytest.approx(10.25)
    assert sum(found.exposed_ms.values()) == pytest.approx(found.span_ms)
    by_kind = {"matmul": 4, "copy": 1, "elementwise": 2.25, "collective": 2, IDLE: 1}
    assert found.by_kind() == pytest.approx(by_kind)
    by_scope = {"mlp recomputed": 4, "attention": 2.25, "optimizer": 2, "other": 1}
    assert found.by_scope() == pytest.approx(by_scope)
    assert found.total_ms["collective"] == pytest.approx(3)
    assert found.as_json(top=1)["hidden_ms"]["collective"] == pytest.approx(1)
    assert [kernel.kernel for kernel in found.kernels[:1]] == [GEMM[0]]
    assert found.kernels[0].launches == 2
    assert found.kernels[0].ms == pytest.approx(4)


PROGRAM = [
    {
        "instruction": "all-reduce.1",
        "kind": "all-reduce",
        "scope": "jit(step)/optimizer/psum",
        "axes": ["fsdp", "tensor"],
        "sent_bytes": 3e6,
    },
    {
        "instruction": "all-gather-start.2",
        "kind": "all-gather",
        "scope": "jit(step)/mlp/dot",
        "axes": ["fsdp"],
        "sent_bytes": 8e6,
    },
]
# The program's text names the start of an asynchronous operation, the trace what that wraps.
GATHER = ("ncclDevKernel_AllGather", "all-gather.30.1", "jit(step)/mlp/dot")
SCATTER = {**PROGRAM[1], "kind": "reduce-scatter", "instruction": "reduce-scatter.1"}
STRANGER = ("ncclDevKernel_SendRecv", "collective-permute.3", "jit(other)/ppermute")


def test_communication_is_told_apart_by_axis():
    """A step's gather of 4 ms is hidden but for one."""
    events = [
        event(what, 20 * step + start, duration)
        for step in range(2)
        for what, start, duration in (
            *((GEMM, 0, 4), (GATHER, 1, 4), (NORM, 5, 2), (REDUCE, 6, 3), (STRANGER, 9, 1)),
        )
    ]
    found = explain(events, steps=2, axes=CollectiveAxes(PROGRAM)).by_axis
    assert list(found) == ["fsdp x tensor", "fsdp", UNKNOWN]
    assert found["fsdp"].exposed_ms == pytest.approx(1)
    assert found["fsdp"].hidden_ms == pytest.approx(3)
    assert found["fsdp"].sent_gb_per_s == pytest.approx(2)
    assert found["fsdp x tensor"].exposed_ms == pytest.approx(2)
    assert found[UNKNOWN].sent_bytes is None
    assert not explain(events, steps=2).by_axis


def test_axes_are_by_name_then_by_place_then_by_kind():
    other = {**SCATTER, "scope": "jit(step)/attention/dot", "axes": ["tensor"]}
    nowhere = event(("nccl", "reduce-scatter.7.1", "jit(step)/renamed"), 0, 1)
    assert CollectiveAxes([*PROGRAM, SCATTER]).of(nowhere) == "fsdp"
    assert CollectiveAxes([*PROGRAM, SCATTER, other]).of(nowhere) == UNKNOWN
    placed = event(("nccl", "reduce-scatter.7.1", other["scope"]), 0, 1)
    assert CollectiveAxes([*PROGRAM, SCATTER, other]).of(placed) == "tensor"
    permute = {**SCATTER, "kind": "collective-permute"}
    assert CollectiveAxes([*PROGRAM, permute]).of(event(("MemcpyP2P", "", ""), 0, 1)) == "fsdp"


def test_picture(tmp_path):
    draw(explain(two_steps()), tmp_path / "waterfall.png")
    assert (tmp_path / "waterfall.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (GEMM, "matmul"),
        (("gemm_fusion_dot_8", "gemm_fusion_dot.8", MLP), "matmul"),
        (("body_mosaic_gpu_kernel", "x", "jit(f)/jvp(layer)/attention/core/f"), "attention"),
        (("body_mosaic_gpu_kernel", "x", "jit(f)/jvp(loss)/while/f"), "matmul"),
        (("body_mosaic_gpu_kernel", "x", "jit(f)/jvp(layer)/mlp/experts/body"), "matmul"),
        (("scaled_matmul_mosaic_gpu_kernel", "x", "jit(f)/jvp(layer)/attention/f"), "matmul"),
        (("sum_rows_mosaic_gpu_kernel", "x", "jit(step)/attention/f"), "collective"),
        (("decode_layers_mosaic_gpu_kernel", "x", "jit(step)/f"), "matmul"),
        (("quantize_both_ways_mosaic_gpu_kernel", "x", "jit(f)/attention/f"), "elementwise"),
        (("rms_norm_gradient_mosaic_gpu_kernel", "x", "jit(f)/layer/f"), "reduction"),
        (("cudnn_generated_fort_native_sdpa_sm90", "x", ""), "attention"),
        (("input_reduce_fusion_2", "input_reduce_fusion.2", ""), "reduction"),
        (NORM, "elementwise"),
        (COPY, "copy"),
        (REDUCE, "collective"),
        (("MemcpyP2P", "all-gather.30.1", ""), "collective"),
        (("MemcpyP2P", "", ""), "collective"),
        (("all_reduce_4_0_fusion_1", "all-reduce.4.0-fusion.1", ""), "reduction"),
    ],
)
def test_kind_of(what, kind):
    assert kind_of(event(what, 0, 1)) == kind


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(f)/jvp(layer)/while/body/attention/core/exp", "attention/core"),
        ("jit(f)/transpose(jvp(layer))/while/body/attention/core/exp", "attention/core backward"),
        ("jit(f)/jvp(layer)/mlp/routing/top_k", "routing"),
        ("jit(f)/transpose(jvp(layer))/mlp/shard_map/exchange/all_to_all", "exchange backward"),
        ("jit(f)/jvp(layer)/jit(repetition)/mlp/experts/body", "experts"),
        ("jit(f)/jvp(loss)/dot_general", "loss"),
        ("jit(f)/optimizer/mul", "optimizer"),
        ("jit(f)/attentions/mul", "other"),
    ],
)
def test_scope_of(op_name, scope):
    assert scope_of(op_name) == scope


XSPACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 2000000 duration_ps: 5000000
             stats { metadata_id: 1 str_value: "fusion.7" }
             stats { metadata_id: 2 str_value: "jit(step)/mlp/mul" } }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 5000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_7" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "name" } }
}
"""


def test_the_command_reads_a_profilers_file(tmp_path, capsys):
    serialized = jax.profiler.ProfileData.text_proto_to_serialized_xspace(XSPACE)
    (tmp_path / "host.xplane.pb").write_bytes(serialized)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["communication_by_axis"] == {}
    assert found["by_scope_ms"] == {"mlp": pytest.approx(0.005)}
    assert [kernel["hlo_op"] for kernel in found["kernels"]] == ["fusion.7"]
    assert main(["trace", str(tmp_path), "--device", "1"]) == 1
    assert "no trace of GPU 1 of rank 0; it has rank 0: [0]" in capsys.readouterr().err


HOST = """
planes {
  name: "/host:CPU"
  lines {
    name: "py_xla_execute/1"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000 }
    events { metadata_id: 2 offset_ps: 1500000 duration_ps: 2000000 }
    events { metadata_id: 3 offset_ps: 1600000 duration_ps: 1000000 }
    events { metadata_id: 4 offset_ps: 5000000 duration_ps: 1000000 }
    events { metadata_id: 2 offset_ps: 7000000 duration_ps: 1000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "all-gather-start.2" } }
  event_metadata { key: 2 value { id: 2 name: "all_gather.30.1" } }
  event_metadata { key: 3 value { id: 3 name: "ncclDevKernel_AllGather" } }
  event_metadata { key: 4 value { id: 4 name: "reduce-scatter-start.1" } }
}
"""


def test_an_asynchronous_one_is_known_by_what_started_it(tmp_path):
    """As host threads nest them; what comes after a start, but not in it, is not its."""
    device = XSPACE.replace("fusion.7", "all_gather.30.1").replace("jit(step)/mlp/mul", "renamed")
    serialized = jax.profiler.ProfileData.text_proto_to_serialized_xspace(device + HOST)
    (tmp_path / "host.xplane.pb").write_bytes(serialized)
    (gather,) = events_by_device(tmp_path)[0]
    assert (gather.hlo_op, gather.started_by) == ("all_gather.30.1", "all-gather-start.2")
    other = {**PROGRAM[1], "instruction": "all-gather-start.9", "axes": ["tensor"]}
    assert CollectiveAxes([*PROGRAM, other]).of(gather) == "fsdp"


def test_no_trace(tmp_path):
    with pytest.raises(DataError, match="make one with --profile"):
        events_by_device(tmp_path)[0]
    with pytest.raises(DataError, match="no GPU operation"):
        explain([])
