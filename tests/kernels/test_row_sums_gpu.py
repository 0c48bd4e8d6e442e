"""Sums of rows over two GPUs, and layers of a step behind them, against formulas in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.layer_cases import LayerCase
from tests.kernels.row_sum_cases import EqualRows, RowSumCase, bits, mesh_of
from tests.tolerance import assert_within_rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs that reach each other"),
]
CASES = {
    "1 row": RowSumCase(rows=1, width=4096, scale_dtype=jnp.float32),
    "64 rows": RowSumCase(rows=64, width=4096, calls=7),
    "fp16": RowSumCase(rows=200, width=2048, dtype=jnp.float16, scale_dtype=jnp.float16),
    "odd": RowSumCase(rows=33, width=5120),
    "most rows": RowSumCase(rows=256, width=8192),
    "wide": RowSumCase(rows=2, width=16_384),
}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", list(CASES))
def test_sums_are_right_and_gpus_agree_bit_for_bit(name, graphs):
    case, mesh = CASES[name], mesh_of(2)
    given = case.arguments(mesh)
    options = {} if graphs else {"xla_gpu_enable_command_buffer": ""}
    got = jax.jit(case.program(mesh, "hopper"), compiler_options=options)(*given)
    for each in got:
        np.testing.assert_array_equal(bits(each)[0], bits(each)[1])
    assert_within_rounding(tuple(each[0] for each in got), case.exact(given, got))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_a_thousand_runs_have_the_same_bits_wherever_arrays_are(graphs):
    case, mesh = CASES["64 rows"], mesh_of(2)
    given = case.arguments(mesh)
    options = {} if graphs else {"xla_gpu_enable_command_buffer": ""}
    f = jax.jit(case.program(mesh, "hopper"), compiler_options=options)
    first, held = [bits(each) for each in f(*given)], {}
    same = jax.jit(lambda xs, ys: jnp.array([jnp.all(x == y) for x, y in zip(xs, ys, strict=True)]))
    want = f(*given)
    for each, true in zip(want, first, strict=True):
        np.testing.assert_array_equal(bits(each), true)
    equal = []
    for i in range(1000):
        again = f(*given)
        equal.append(same(again, want))
        # Arrays on one GPU alone, so that later ones of the two GPUs have unlike addresses.
        alone = jax.device_put(np.zeros(1024 * (i % 5 + 1), np.float32), jax.devices()[i % 2])
        held[i % 3] = (again, alone) if i % 4 else None
    assert np.all([np.asarray(each) for each in equal])


@pytest.mark.parametrize("rows", [2, 64])
def test_layers_of_several_rows_are_right_and_repeat_bit_for_bit(rows):
    layers = EqualRows(case=LayerCase(length=300, N=32, K=8, H=128, layers=3, F=2048), rows=rows)
    spread = layers.arguments(mesh_of(2))
    run = jax.jit(layers.step(mesh_of(2)))
    first = run(*spread)
    layers.assert_right(*first)
    for _ in range(50):
        for a, b in zip(jax.tree.leaves(run(*spread)), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
