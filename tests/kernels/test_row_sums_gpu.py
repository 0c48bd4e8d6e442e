"""Sums of rows over two GPUs, and layers of a step behind them, against formulas in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.decode_layers import decode_rows
from tests.kernels.layer_cases import LayerCase, specs
from tests.kernels.row_sum_cases import AXIS, RowSumCase, bits, mesh_of
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
    """Equal rows, which share pages and write the same token to them."""
    case, mesh = LayerCase(length=300, N=32, K=8, H=128, layers=3, F=2048), mesh_of(2)
    x, layers, pools, table, positions, rope = given = case.arguments()
    config = GroupedAttentionConfig(
        num_q_heads=16, num_kv_heads=4, head_dim=128, rope=RopeConfig(theta=1e4)
    )

    def repeated(a: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(a), rows, axis=0)

    def step(x, layers, pools, tables, positions, rope):
        arrays = {n: p.reshape(-1, *p.shape[2:]) for n, p in zip("kv", pools, strict=True)}
        found = decode_rows(
            x[:, None], layers, Pages(arrays=arrays, tables_BM=tables), config=config,
            positions_BT=positions[:, None], rope=tuple(each[:, None] for each in rope), axis=AXIS,
        )  # fmt: skip
        assert found is not None, "measured"
        y, arrays = found
        return y[:, 0], tuple(
            a.reshape(p.shape) for a, p in zip(arrays.values(), pools, strict=True)
        )

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=specs(AXIS), out_specs=(P(), specs(AXIS)[2]), check_vma=False
        )
    )
    many = repeated(x), layers, pools, repeated(table), repeated(positions)
    spread = case.over(mesh, (*many, tuple(map(repeated, rope))))
    y, after = first = run(*spread)
    for row in (0, rows - 1):
        assert_within_rounding((y[row : row + 1], after), case.exact(given))
    np.testing.assert_array_equal(bits(y), np.broadcast_to(bits(y)[:1], y.shape))
    for _ in range(50):
        for a, b in zip(jax.tree.leaves(run(*spread)), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
