"""Grouped products on a CPU: portable forms against float64, gradients, what they refuse.

Dims: M row, T token, J visit of a token, G group, K width in, N width out.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import InputError, combine, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul import xla
from tests.kernels import grouped_oracle
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

K, N = 24, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    sizes: tuple[int, ...]
    num_rows: int
    gathered: bool = False
    listed: bool = False
    dtype: str = "bfloat16"
    K: int = K
    N: int = N


CASES = [
    Case(sizes=(3, 0, 14, 1), num_rows=18),
    Case(sizes=(0, 5, 0, 12, 0), num_rows=30, gathered=True),
    Case(sizes=(9, 6, 20), num_rows=40, gathered=True, listed=True, dtype="float32"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    x: jax.Array
    gate: jax.Array
    up: jax.Array
    sizes: jax.Array
    d: jax.Array
    index: dict[str, jax.Array]


def arrays_of(case):
    rng = np.random.default_rng(seeded(0))
    dtype, num_tokens = jnp.dtype(case.dtype), case.num_rows
    index = {}
    if case.gathered:
        num_tokens = case.num_rows // 2
        # Twice each in an even spread; else some often and some never, and rubbish beyond the rows.
        rows = rng.permutation(np.arange(case.num_rows) % num_tokens)
        if not case.listed:
            rows = rng.integers(0, 4, case.num_rows)
        index["rows"] = jnp.asarray(rows, jnp.int32)
        if case.listed:
            positions = [np.flatnonzero(rows == t) for t in range(num_tokens)]
            index["positions"] = jnp.asarray(np.stack(positions), jnp.int32)
    w = (len(case.sizes), case.K, case.N)
    x, gate, up, d = (
        rng.normal(size=size).astype(dtype)
        for size in ((num_tokens, case.K), w, w, (case.num_rows, case.N))
    )
    if not case.gathered:
        x[sum(case.sizes) :] = np.nan
    # Weights in fp32, of which the product sees the rounded ones: their gradient is not rounded.
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    sizes = np.array(case.sizes, np.int32)
    x, gate, up, sizes, d = map(jnp.asarray, (x, gate, up, sizes, d))
    return Arrays(x=x, gate=gate, up=up, sizes=sizes, d=d, index=index)


def pulled(f, *primals, d):
    """Value and gradients, in one compiled program."""

    def run(*primals):
        value, pull = jax.vjp(f, *primals)
        return value, pull(d)

    return jax.jit(run)(*primals)


def float64(*arrays):
    return (np.asarray(a, np.float64) for a in arrays)


def oracle(case, a, *, gated):
    """(value, gradients) of ``grouped_swiglu``, else of ``grouped_matmul`` by gate."""
    x, gate, up, d = float64(a.x, a.gate, a.up, a.d)
    rows = np.asarray(a.index["rows"]) if case.gathered else np.arange(case.num_rows)
    x_MK = np.nan_to_num(x)[rows]
    gates = grouped_oracle.product(x_MK, gate, case.sizes)
    if gated:
        ups = grouped_oracle.product(x_MK, up, case.sizes)
        value = grouped_oracle.swiglu(gates, ups)
        d_gate, d_up = grouped_oracle.swiglu_gradient(gates, ups, d, a.x.dtype)
        parts = [(d_gate, gate), (d_up, up)]
    else:
        value, parts = gates, [(Rounded(d), gate)]
    d_x = [grouped_oracle.input_gradient(d, w, case.sizes) for d, w in parts]
    d_x = d_x[0] if len(d_x) == 1 else d_x[0] + d_x[1]
    if case.gathered:
        d_x = grouped_oracle.stored(d_x, a.x.dtype)
        d_x = grouped_oracle.scattered(d_x, rows, case.sizes, len(x))
    d_w = [grouped_oracle.weight_gradient(x_MK, d, case.sizes) for d, _ in parts]
    return value, (d_x, *d_w)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_and_gradients(case, implementation):
    a = arrays_of(case)
    f = functools.partial(grouped_matmul, implementation=implementation, **a.index)
    got = pulled(lambda x, w: f(x, w, a.sizes), a.x, a.gate, d=a.d)
    assert_within_rounding(got, oracle(case, a, gated=False))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_product_and_gradients(case, implementation):
    a = arrays_of(case)
    f = functools.partial(grouped_swiglu, implementation=implementation, **a.index)
    got = pulled(lambda x, gate, up: f(x, gate, up, a.sizes), a.x, a.gate, a.up, d=a.d)
    assert_within_rounding(got, oracle(case, a, gated=True))


@pytest.mark.parametrize("form", ["turned round", "inverse given", "a row named often"])
def test_combine_and_gradients(form):
    rng = np.random.default_rng(seeded(1))
    num_rows, num_tokens, num_visits = 11, 5, 2
    positions = rng.permutation(num_rows)[: num_tokens * num_visits].reshape(-1, num_visits)
    positions[1, 0] = num_rows + 3
    if form == "a row named often":
        positions[2:] = 4
    options = {}
    if form == "inverse given":
        inverse = np.full(num_rows, -1)
        here = positions < num_rows
        inverse[positions[here]] = np.arange(positions.size).reshape(positions.shape)[here]
        options["inverse"] = jnp.asarray(inverse, jnp.int32)
    y = jnp.asarray(rng.normal(size=(num_rows, N)), jnp.bfloat16)
    d = jnp.asarray(rng.normal(size=(num_tokens, N)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=positions.shape), jnp.float32)
    positions_TJ = jnp.asarray(positions, jnp.int32)
    got = pulled(lambda y, weights: combine(y, positions_TJ, weights, **options), y, weights, d=d)
    y, d, w = (np.asarray(a, np.float64) for a in (y, d, weights))
    is_at = positions[..., None] == np.arange(num_rows)
    weight_TM = Rounded(np.einsum("TJ,TJM->TM", w, is_at.astype(np.float64)))
    d_weights = np.einsum("TJM,TM->TJ", is_at.astype(np.float64), Rounded(d) @ y.T)
    assert_within_rounding(got, (weight_TM @ y, (weight_TM.T @ d, d_weights)))


def test_devices_with_their_own_rows_share_a_weight():
    """Inside ``shard_map`` with checked axes: the weight's gradient sums the devices' parts."""
    case = Case(sizes=(3, 0, 7), num_rows=12, dtype="float32")
    a = arrays_of(case)
    x, d = jnp.nan_to_num(a.x), a.d
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    data, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(data, whole, data), out_specs=data)
    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes)

    two = (jnp.concatenate([x, x[::-1]]), a.gate, jnp.concatenate([a.sizes, a.sizes[::-1]]))
    got = pulled(lambda x, w: local(x, w, two[2]), *two[:2], d=jnp.concatenate([d, -d]))
    halves = [
        pulled(lambda x, w, s=sizes: grouped_matmul(x, w, s), x, a.gate, d=d)
        for x, sizes, d in ((x, a.sizes, d), (x[::-1], a.sizes[::-1], -d))
    ]
    joined = jnp.concatenate([y for y, _ in halves])
    np.testing.assert_array_equal(got[0], joined)
    np.testing.assert_array_equal(got[1][0], jnp.concatenate([g[0] for _, g in halves]))
    np.testing.assert_allclose(got[1][1], halves[0][1][1] + halves[1][1][1], rtol=1e-5, atol=1e-5)


def test_sizes_beyond_the_rows_are_cut():
    case = Case(sizes=(3, 9, 4), num_rows=8, dtype="float32")
    a = dataclasses.replace(arrays_of(case), sizes=jnp.asarray((3, 9, 4), jnp.int32))
    x = jnp.nan_to_num(a.x)
    got = jax.jit(grouped_matmul)(x, a.gate, a.sizes)
    cut = jax.jit(grouped_matmul)(x, a.gate, jnp.asarray((3, 5, 0), jnp.int32))
    np.testing.assert_array_equal(got, cut)


FAULTS = {
    "a row too many": {"sizes": (4, 0, 13, 1)},
    "a group swapped": {"sizes": (3, 14, 0, 1)},
    "the last row dropped": {"sizes": (3, 0, 14, 0)},
}


@pytest.mark.slow  # of the bound, a program for each
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault):
    case = CASES[0]
    a = arrays_of(case)
    sizes = jnp.asarray(FAULTS[fault]["sizes"], jnp.int32)
    got = pulled(lambda x, w: grouped_matmul(x, w, sizes), a.x, a.gate, d=a.d)
    value, (_, d_w) = oracle(case, a, gated=False)
    for mine, true in ((got[0], value), (got[1][1], d_w)):
        with pytest.raises(AssertionError, match="are rounding"):
            assert_within_rounding(mine, true)


@pytest.mark.parametrize("is_first_of_a_group", [True, False])
def test_a_dropped_block_is_caught(monkeypatch, is_first_of_a_group):
    """As if the loop forgot one: the rows are 0, the weight's gradient lacks them."""
    case = dataclasses.replace(CASES[0], dtype="float32")
    a = arrays_of(case)
    find = xla._Blocks.find
    dropped = 1 if is_first_of_a_group else 2
    monkeypatch.setattr(
        xla._Blocks, "find", lambda self, i: find(self, jnp.where(i == dropped, 0, i))
    )
    got = pulled(lambda x, w: grouped_matmul(x, w, a.sizes), a.x, a.gate, d=a.d)
    value, (_, d_w) = oracle(case, a, gated=False)
    for mine, true in ((got[0], value), (got[1][1], d_w)):
        with pytest.raises(AssertionError, match="are rounding"):
            assert_within_rounding(mine, true)


ARRAYS = {
    "x": jnp.zeros((6, K)),
    "w": jnp.zeros((2, K, N)),
    "group_sizes": jnp.zeros(2, jnp.int32),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((6, K), jnp.int8)}, r"x is int8\[6, 24\]; it must be bfloat16"),
        ({"w": jnp.zeros((2, 25, N))}, r"w is float32\[2, 25, 40\]; x \[6, 24\] asks for"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, r"group_sizes is int32\[3\]; w .* \[2\]"),
        ({"group_sizes": jnp.zeros(2)}, "group_sizes is float32"),
        ({"rows": jnp.zeros(4)}, "rows is float32"),
        ({"positions": jnp.zeros((6, 1), jnp.int32)}, "positions are given without rows"),
        ({"rows": jnp.zeros(4, jnp.int32), "positions": jnp.zeros((4, 1), jnp.int32)}, "where eac"),
        ({"out_dtype": jnp.int32}, "out_dtype=int32 is not a float"),
        ({"implementation": "fast"}, "implementation='fast' is unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses(change, words):
    call = ARRAYS | change
    arrays = (call.pop("x"), call.pop("w"), call.pop("group_sizes"))
    with pytest.raises(InputError, match=words):
        grouped_matmul(*arrays, **call)
