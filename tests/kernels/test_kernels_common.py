"""What all ops share: products, device facts, tables of measurements, timing."""

import dataclasses
import json
import pathlib
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from experiments.bench import timing, tuned_table
from pallas_kernels.common import device, tables
from pallas_kernels.common.dot import einsum_f32
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_accumulate_in_float32(dtype):
    rng = np.random.default_rng(seeded(0))
    # 4096 equal signs: a 16-bit accumulator would stop growing at 256 or 2048.
    a, b = (jnp.asarray(1 + rng.random((3, 4096)), dtype) for _ in range(2))
    exact = np.einsum("ij,kj->ik", *(Rounded(np.asarray(x, np.float64)) for x in (a, b)))
    got = jax.jit(einsum_f32, static_argnums=0)("ij,kj->ik", a, b)
    assert got.dtype == jnp.float32
    assert_within_rounding(got, exact)


def test_the_accumulator_is_in_the_gpu_program():
    """In fp16 by its preset; in bf16, whose preset costs copies on CUDA, by its fp32 result."""
    for dtype, kind in (("bfloat16", "bf16"), ("float16", "f16")):
        x = jax.ShapeDtypeStruct((8, 8), dtype)
        traced = jax.jit(einsum_f32, static_argnums=0).trace("ij,kj->ik", x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("accumulation_type = f32" in text) == (kind == "f16")
        operand = f"tensor<8x8x{kind}>"
        assert f"({operand}, {operand}) -> tensor<8x8xf32>" in text


def a_device(**changes):
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    facts = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": "9.0"}
    return types.SimpleNamespace(**(facts | {"client": client} | changes))


def test_device_facts():
    assert device.facts_of(a_device()) == device.H200
    assert device.H200.slug == "nvidia-h200"
    assert device.target() == device.Facts(kind="cpu", is_gpu=False)
    with jax.default_device(jax.devices()[3]):
        assert device.target().kind == "cpu"
    with device.compiling_for(device.H200):
        assert device.target() == device.H200
    assert not device.target().is_gpu


@pytest.mark.parametrize(
    ("version", "refused"),
    [(12060, False), (12080, True), (12090, True), (12091, False), (None, False)],
)
def test_compilers_that_miscompile_are_refused(version, refused):
    with device.compiling_for(dataclasses.replace(device.H200, cuda=version)):
        assert (device.miscompiled(device.CAUSAL_ATTENTION) is not None) == refused


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-9, 9), st.text(max_size=5))
names = st.text("abcdef", min_size=1, max_size=4)
rows = st.builds(
    tables.Row.of,
    case=st.dictionaries(names, values, max_size=3),
    choice=st.dictionaries(names, values, max_size=3),
    ms=st.floats(1e-6, 1e6),
)


@hypothesis.given(
    st.lists(rows, max_size=5, unique_by=lambda row: json.dumps([row.case, row.choice]))
)
@hypothesis.settings(
    max_examples=5,  # each writes three files to the disk
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_tables_survive_a_file(tmp_path, some_rows):
    table = tuned_table.Table(
        op="norm",
        question="forward",
        device_kind="NVIDIA H200",
        environment={"jax": "0.11.2"},
        rows=(),
    ).with_rows(some_rows)
    path = tmp_path / "deep" / "table.json"
    tuned_table.save(table, path)
    loaded = tuned_table.load(path)
    tables.read.cache_clear()
    assert set(loaded.rows) == set(table.rows) == set(tables.read(path))
    assert loaded.environment == table.environment
    text = path.read_text()
    tuned_table.save(loaded, path)
    assert path.read_text() == text


def test_shipped_tables_have_what_the_kernels_read():
    for path in pathlib.Path(pallas_kernels.__path__[0]).glob("*/tuned/*.json"):
        rows = tables.read(path)
        assert len({(row.case, row.choice) for row in rows}) == len(rows) > 0
        assert len({tuple(dict(row.case)) for row in rows}) == 1
        assert all(row.ms > 0 for row in rows)
        assert path.name.endswith(
            f"-{device.Facts(kind=tuned_table.load(path).device_kind, is_gpu=True).slug}.json"
        )
    assert tables.read(pathlib.Path("none.json")) == ()


def test_candidates_take_turns():
    turns = []

    def recorder(name):
        def function(x):
            jax.debug.callback(lambda: turns.append(name))
            return x

        return jax.jit(function)

    x = jnp.ones(3)
    found = timing.measure({name: (recorder(name), (x,)) for name in "ab"}, rounds=2, iterations=2)
    jax.effects_barrier()
    assert "".join(turns) == "ab" + "aabb" * 2
    assert {name: len(taken.times_ms) for name, taken in found.items()} == {"a": 4, "b": 4}
    assert found["a"].clock == "wall"
    assert timing.Timing(times_ms=(1.0, 9.0, 2.0), clock="wall").median_ms == 2.0
