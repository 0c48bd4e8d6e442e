"""Recorded causes are named first by the command that looks at them; healthy records are not."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from causes.cause_list import all_causes, all_healthy
from causes.causes import check_health, judge_cause
from causes.recordings import changed, healthy_step, slower, write_trace

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.presets.models import llama32_1b
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.diagnostics.delays import straggler_delays
from jaxinfra.diagnostics.traced_run import read_traced_run
from jaxinfra.faults.arena import Arena
from jaxinfra.hlo.program import matmul_shapes

CAUSES, HEALTHY = all_causes(), all_healthy()
RECORDED = sorted(name for name, each in CAUSES.items() if not each.runs)


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    return Arena(tmp_path_factory.mktemp("causes"), options=(), processes=2)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_cause_is_named_first(name, arena):
    found = judge_cause(name, arena)
    assert found.named, found
    assert found.remedy


@pytest.mark.parametrize("name", sorted(name for name, each in HEALTHY.items() if not each.runs))
def test_no_alarm_on_a_healthy_record(name, arena):
    assert check_health(name, arena) == ""


def test_there_are_enough_of_them():
    assert len(CAUSES) >= 20
    assert len(HEALTHY) >= 20
    assert not set(CAUSES) & set(HEALTHY)


def test_the_page_lists_them():
    page = (Path(__file__).parents[2] / "docs/causes.md").read_text()
    listed = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert listed - {"cause"} == set(CAUSES)


def test_a_product_that_finds_nothing_is_found_out(arena, monkeypatch):
    monkeypatch.setattr("jaxinfra.diagnostics.delays.device_delays", lambda *_: [])
    assert not judge_cause("stacked-copies", arena).named


def test_the_commands_say_it_in_their_first_line(tmp_path, capsys):
    """What is judged here is what ``trace`` prints, of ranks of one host and of two devices."""
    good = healthy_step()
    write_trace(tmp_path, good, slower(good, 1.01))
    write_trace(tmp_path, changed(good, "copy.1", ms=40.0), good, rank=1)
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A step takes 253.2 ms, and nothing that could be avoided delays it.")
    assert "rank 1 GPU 1" in said
    assert main(["trace", str(tmp_path), "--rank", "1"]) == 0
    assert "(14%) to copies" in capsys.readouterr().out.splitlines()[0]
    assert main(["trace", str(tmp_path), "--rank", "2"]) == 1
    assert "has no trace of GPU 0 of rank 2; it has rank 0: [0, 1]" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [each["name"] for each in devices] == [
        "rank 0 GPU 0", "rank 0 GPU 1", "rank 1 GPU 0", "rank 1 GPU 1",
    ]  # fmt: skip


def test_parts_are_predicted_beside_what_they_took(tmp_path, capsys):
    """The made-up step is of 1.2B parameters, and so is the config beside it."""
    settings = ["training.steps=10", "training.batch_size=4", "training.sequence_length=4096"]
    config = codec.override(pretraining(llama32_1b()), [*settings, "training.accumulation=1"])
    (tmp_path / "config.json").write_text(codec.to_json(config))
    write_trace(tmp_path / "trace", healthy_step())
    assert main(["trace", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = found["parts_ms"]
    assert sum(measured for _, measured in parts.values()) == pytest.approx(found["span_ms"])
    assert parts["matmul"][0] == pytest.approx(parts["matmul"][1], rel=0.2)
    assert parts["attention"][1] == pytest.approx(31)
    assert {"optimizer", "loss and embedding", "memory passes", "idle", "copy"} <= parts.keys()
    assert main(["trace", str(tmp_path)]) == 0
    assert "ms predicted" in capsys.readouterr().out


def test_devices_that_nobody_waits_for_are_no_stragglers(tmp_path):
    """One that computes longer beside others that do not wait, as in another pipeline stage."""
    good = healthy_step()
    write_trace(tmp_path, good, slower(good, 1.3))
    assert straggler_delays(read_traced_run(tmp_path).by_device) == []


CUBLAS = """HloModule counted

%fused_computation (p0: f8e4m3fn[64,96], p1: f8e4m3fn[96,32]) -> bf16[64,32] {
  %p0 = f8e4m3fn[64,96]{1,0} parameter(0)
  %p1 = f8e4m3fn[96,32]{1,0} parameter(1)
  ROOT %dot.7 = bf16[64,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (lhs: bf16[768,2304], rhs: bf16[8192,768]) -> bf16[2304,8192] {
  %lhs = bf16[768,2304]{1,0} parameter(0)
  %rhs = bf16[8192,768]{1,0} parameter(1)
  %a = f8e4m3fn[64,96]{1,0} custom-call(), custom_call_target="a"
  %b = f8e4m3fn[96,32]{1,0} custom-call(), custom_call_target="b"
  %gemm_fusion_dot.1 = bf16[64,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_computation
  ROOT %gemm.4 = (bf16[2304,8192]{1,0}, s8[4194304]{0}) custom-call(%lhs, %rhs), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
}
"""  # noqa: E501


def test_shapes_of_a_librarys_matmuls_and_of_fused_ones():
    compiled = types.SimpleNamespace(as_text=lambda: CUBLAS)
    fused, library = matmul_shapes(compiled)
    assert library == {
        "instruction": "gemm.4",
        "dtype": "bf16",
        "batch": 1,
        "rows": 2304,
        "depth": 768,
        "columns": 8192,
        "flops": 2.0 * 2304 * 768 * 8192,
        "bytes": 2.0 * (768 * 2304 + 8192 * 768 + 2304 * 8192),
    }
    assert (fused["instruction"], fused["dtype"]) == ("gemm_fusion_dot.1", "f8e4m3fn")
    assert (fused["rows"], fused["depth"], fused["columns"]) == (64, 96, 32)
    assert fused["bytes"] == 64 * 96 + 96 * 32 + 2 * 64 * 32


def test_shapes_of_a_compiled_programs_matmuls():
    """Batched, and with the contracted dim in other places."""

    def function(x, w, v):
        return jnp.einsum("bij,bjk->bik", x, w), jnp.einsum("bij,il->bjl", x, v)

    shapes = ((3, 8, 16), (3, 16, 32), (8, 24))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found = matmul_shapes(jax.jit(function).lower(*arrays).compile())
    assert {each["flops"] for each in found} == {2.0 * 3 * 8 * 16 * 32, 2.0 * 3 * 8 * 16 * 24}
    (batched,) = [each for each in found if each["batch"] == 3]
    assert (batched["rows"], batched["depth"], batched["columns"]) == (8, 16, 32)
