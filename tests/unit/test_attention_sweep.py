"""The shapes that attention is swept over, and what is said of their times."""

import pytest

from experiments.bench.kernels import attention_sweep as sweep
from experiments.bench.kernels import attention_table
from pallas_kernels.common import device
from pallas_kernels.flash_attention import dispatch

ROW = {
    "name": "b1 s4096 h8/2 d128/128 causal", "B": 1, "T": 4096, "N": 8, "K": 2, "H": 128,
    "Hv": 128, "mask": "causal", "window": None,
    "auto": {"fwd": "hopper", "fwd+bwd": "hopper"},
    "ms": {"fwd": {"hopper": 1.0, "cudnn": 1.2}, "fwd+bwd": {"hopper": 4.0, "cudnn": 3.0}},
}  # fmt: skip


def test_drawn_shapes_repeat_and_stay_within_bounds():
    shapes = sweep.draw(1, 200)
    assert shapes[:50] == sweep.draw(1, 50)
    assert shapes != sweep.draw(2, 200)
    assert {(shape.H, shape.Hv) for shape in shapes} == set(sweep.WIDTHS)
    assert {shape.mask for shape in shapes} == {"full", "causal", "window"}
    for shape in shapes:
        assert shape.flop <= sweep.LARGEST_FLOP, shape.name
        assert shape.size <= sweep.POOL, shape.name
        assert 128 <= shape.T <= 32768, shape.name
        assert shape.N % shape.K == 0, shape.name
        assert (shape.window or 0) < shape.T


def test_a_row_is_its_shape_again_and_a_case_of_the_table():
    shape = sweep.Shape.of(ROW)
    assert shape.name == ROW["name"]
    run = {
        "device": device.H200.kind, "clocks": None, "command": "python -m x", "date": "2026-01-01",
        "versions": {"jax": "0.11.2"},
    }  # fmt: skip
    table = attention_table.table_of({"runs": [run], "rows": [ROW]})
    assert len(table.rows) == 4
    both = dispatch.case_of(shape.call(), gradient=True)
    assert dispatch.rank(table.rows, both) == ["cudnn", "hopper"]
    assert dispatch.rank(table.rows, both | {"gradient": False}) == ["hopper", "cudnn"]
    # Left out, nothing is known, and cuDNN is tried before others.
    left = attention_table.left_out(table, [ROW])
    assert left["fwd+bwd"]["mean"] == 1.0
    assert left["fwd"]["mean"] == round(1 / 1.2, 4)
    like = {**ROW, "T": 2048, "ms": {"fwd": {}, "fwd+bwd": {"hopper": 1.0, "cudnn": 2.0}}}
    more = attention_table.table_of({"runs": [run], "rows": [ROW, like]})
    assert attention_table.left_out(more, [ROW])["fwd+bwd"]["least"] == 0.75
    other = {"runs": [run | {"device": "NVIDIA H100"}], "rows": []}
    with pytest.raises(ValueError, match="differ in device"):
        attention_table.table_of({"runs": [run], "rows": [ROW]}, other)
