"""From measured rows to the table that "auto" follows."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import pytest

from experiments.bench.kernels import attention, attention_table
from experiments.bench.tuned_table import load, save
from pallas_kernels.common import device, tables
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.flash_attention import dispatch
from pallas_kernels.flash_attention.spec import AttentionCall, AttentionMasks

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"
CASE = attention.Case(B=2, T=1024, N=8, K=2, H=64, Hv=64, causal=True)
PACKED = dataclasses.replace(CASE, packed=True)
TIMES = {
    (CASE, "fwd+bwd", "hopper"): 2.0,
    (CASE, "fwd+bwd", "cudnn"): 1.0,
    (CASE, "fwd", "hopper"): 0.1,
    (CASE, "fwd", "cudnn"): 0.2,
    (PACKED, "fwd+bwd", "hopper"): 0.5,
    (PACKED, "fwd+bwd", "xla"): 0.25,
}


@pytest.fixture
def result():
    rows = [
        {"case": case.name, "direction": direction, "implementation": name,
         "fields": case.fields(direction), "ms": ms, "tflops": 1.0}
        for (case, direction, name), ms in TIMES.items()
    ]  # fmt: skip
    rows.append({"case": CASE.name, "direction": "fwd+bwd", "implementation": "xla",
                 "refused": "takes 2.0 s"})  # fmt: skip
    environment = {"device": device.H200.kind, "clocks": None, "command": "python -m x",
                   "date": "2026-01-01", "versions": {"jax": "0.11.2"}}  # fmt: skip
    return {"environment": environment, "rows": rows, "failures": []}


def chosen(case, *, gradient=True, facts=device.H200, implementation="auto"):
    q, k, v, _ = jax.eval_shape(case.arrays)
    ids: Any = jax.ShapeDtypeStruct((case.B, case.T), "int32") if case.packed else None
    masks = AttentionMasks(q_segment_ids=ids, kv_segment_ids=ids)
    call = AttentionCall(spec=case.spec, masks=masks, q=q, k=k, v=v, return_residual=False)
    with device.compiling_for(facts):
        return dispatch.choose(implementation, call, gradient=gradient)


def test_auto_follows_the_table(result, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "TUNED", tmp_path)
    table = attention_table.table_of(result)
    assert len(table.rows) == 6
    save(table, tmp_path / f"dispatch-{device.H200.slug}.json")
    loaded = load(tmp_path / f"dispatch-{device.H200.slug}.json")
    assert set(loaded.rows) == set(table.rows)
    tables.read.cache_clear()
    assert chosen(CASE) == "cudnn"
    assert chosen(CASE, gradient=False) == "hopper"
    assert chosen(PACKED) == "xla"
    times = {"cudnn": "hopper", "hopper": "cudnn", "xla": "xla"}
    for row in result["rows"]:
        row["implementation"] = times[row["implementation"]]
    save(attention_table.table_of(result), tmp_path / f"dispatch-{device.H200.slug}.json")
    tables.read.cache_clear()
    assert chosen(CASE) == "hopper"
    assert chosen(CASE, gradient=False) == "cudnn"
    tables.read.cache_clear()


def test_cudnn_is_only_for_a_gpu_that_is_there():
    absent = dataclasses.replace(device.H200, is_absent=True)
    assert chosen(CASE, implementation="cudnn") == "cudnn"
    assert chosen(CASE, facts=absent) == "hopper"
    with pytest.raises(UnsupportedError, match="only on a machine with the GPU"):
        chosen(CASE, facts=absent, implementation="cudnn")


@pytest.mark.slow
def test_the_shipped_table_is_what_was_measured():
    files = (RESULTS / f"attention-{name}h200.json" for name in ("", "sweep-"))
    made = attention_table.table_of(*(json.loads(path.read_text()) for path in files))
    shipped = load(dispatch.TUNED / f"dispatch-{device.H200.slug}.json")
    assert set(made.rows) == set(shipped.rows)
    assert made.environment == shipped.environment


def test_a_partial_measurement_makes_no_table(result):
    with pytest.raises(ValueError, match="measure again"):
        attention_table.table_of({**result, "failures": ["b1: not done after 10 s"]})


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, PACKED], ids=lambda case: case.name)
def test_the_programs_that_are_timed_lower(case):
    for (_, name), (f, shapes) in attention.programs(case).items():
        if name == "cudnn":  # JAX traces it only where the library is
            continue
        with device.compiling_for(device.H200):
            text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == (name == "hopper")
