"""The kernel over rows: its tiles fit a GPU, its clusters take each row once, its forms lower."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.config import NUM_CLUSTERS, RowConfig, blocks_fit
from pallas_kernels.rows.dispatch import DTYPES
from pallas_kernels.rows.kernel import _Plan, apply_rows
from tests.kernels.row_cases import SHAPES, call, formulas, num_kernels, operands

SLOW = pytest.mark.slow
LENGTHS = (32, 64, 96, 256, 1000, 1032, 1216, 3105, 8192, 10240, 27167, 50257, 100422, 131072)


@pytest.mark.slow_cases("float16")  # as wide as bfloat16
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_tiles_fit_and_cover_rows(dtype):
    """Of chosen and random lengths; what is refused has sums that no registers hold."""
    rng = np.random.default_rng(0)
    for columns in (*LENGTHS, *rng.integers(256, 262144, 12).tolist(), 262144):
        for name in formulas(columns):
            if name == "masked_softmax" and columns % 16:
                continue
            what = call(name, columns, dtype)
            try:
                c = config_for(4096, what)
            except UnsupportedError:
                assert what.num_sums or what.num_inputs > 1 or what.num_vectors > 1
                assert columns > (32768 if dtype == jnp.float32 else 131072), (name, columns)
                continue
            assert blocks_fit(1, c, what), (name, columns, c)
            assert c.tile % (32 * c.vector) == 0, (name, columns, c)
            _Plan(f=formulas(columns)[name][0], c=c, call=what, num_rows=4096)  # covers a row


@pytest.mark.parametrize("name", ["softmax", "softmax_gradient", "rms_norm"])
def test_blocks_leave_room_for_others(name):
    """What their reads and exchanges hide behind, unless rows fill all blocks of a cluster."""
    for columns in (2048, 8193, 50257, 131072):
        what = call(name, columns)
        c = config_for(4096, what)
        assert blocks_fit(2, c, what), (columns, c)
        assert c.turns == (1 if name != "rms_norm" else 4 if c.cluster > 1 else 2)


@pytest.mark.parametrize("columns", [1001, 5001, 17706, 27164, 12496])
@pytest.mark.parametrize("rows", [8, 131, 300, 1031])
def test_each_row_is_taken_once_by_a_cluster_of_its_shift(rows, columns):
    """So that what belongs to columns lies in the same place of all rows of a cluster."""
    what = call("layer_norm", columns)
    ways = [{"turns": n} for n in (1, 2, 8)] + [{"turns": 0, "workers": n} for n in (9, 15, 528)]
    for cluster, way in itertools.product(NUM_CLUSTERS, ways):
        c = RowConfig(cluster=cluster, group=4, tile=2048, chunks=4, slots=8, **way)
        plan = _Plan(f=formulas(columns)["layer_norm"][0], c=c, call=what, num_rows=rows)
        taken, shifts = collections.Counter(), collections.defaultdict(set)
        for worker in range(plan.num_workers):
            mine = range(worker, rows, plan.num_workers)
            assert 0 < len(mine) <= (c.turns or rows)
            taken.update(mine)
            shifts[worker] = {row * columns % what.word for row in mine}
            assert shifts[worker] == {worker % plan.period * columns % what.word}
        assert taken == collections.Counter(range(rows))
        assert c.turns or plan.num_workers <= c.workers


@pytest.fixture
def asked(monkeypatch):
    """Bytes of shared memory of every kernel that is lowered."""
    asked, count = [], mosaic._smem_tree_size

    def counted(buffers):
        asked.append(count(buffers))
        return asked[-1]

    monkeypatch.setattr(mosaic, "_smem_tree_size", counted)
    return asked


# Each way through the kernel; together all formulas, lengths and dtypes.
LOWERED = [
    ("softmax", 128, jnp.bfloat16),
    ("layer_norm_gradient", 128, jnp.float16),
    ("softmax_gradient", 4096, jnp.bfloat16),
    ("masked_softmax", 32768, jnp.bfloat16),
    ("log_softmax", 102440, jnp.bfloat16),
    ("log_softmax_gradient", 214129, jnp.bfloat16),
    ("logsumexp", 151936, jnp.float32),
    ("rms_norm", 80098, jnp.bfloat16),
    ("rms_norm+residual", 131072, jnp.float32),
    ("layer_norm", 48739, jnp.bfloat16),
    ("layer_norm+residual", 3105, jnp.float32),
    ("rms_norm_gradient", 12496, jnp.bfloat16),
    ("layer_norm_gradient", 131072, jnp.bfloat16),
    ("layer_norm+residual_gradient", 100423, jnp.bfloat16),
    ("rms_norm+residual_gradient", 32768, jnp.float32),
]


@pytest.mark.slow_cases(
    "softmax_gradient-4096-bfloat16",
    "layer_norm_gradient-128-float16",
    "log_softmax-102440-bfloat16",
    "log_softmax_gradient-214129-bfloat16",
    "logsumexp-151936-float32",
    "rms_norm-80098-bfloat16",
    "layer_norm-48739-bfloat16",
    "layer_norm_gradient-131072-bfloat16",
    "rms_norm+residual_gradient-32768-float32",
    "layer_norm+residual_gradient-100423-bfloat16",
    "masked_softmax-32768-bfloat16",
    "rms_norm+residual-131072-float32",
)
@pytest.mark.parametrize(("name", "columns", "dtype"), LOWERED)
def test_the_real_form_lowers_within_the_memory_that_was_counted(asked, name, columns, dtype):
    inputs, vectors = operands(name, 1048, columns, dtype)
    formula = formulas(columns, dtype)[name][0]
    assert num_kernels(lambda x, v: apply_rows(formula, x, vectors_C=v), inputs, vectors) == 1
    what = call(name, columns, dtype)
    c = config_for(1048, what)
    assert max(asked) <= SMEM_BYTES
    blocks = max(n for n in range(1, 33) if blocks_fit(n, c, what))
    assert (max(asked) + 1024) * blocks <= 228 * 1024, "more blocks were counted than fit"
    assert (max(asked) + 4096) * (blocks + 1) > 228 * 1024, "far more was counted than is asked for"


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in formulas(4096)])
def test_measured_shapes_lower(name):
    for columns, rows in SHAPES.items():
        kernel = functools.partial(apply_rows, formulas(columns)[name][0])
        inputs, vectors = operands(name, rows, columns)
        assert num_kernels(lambda x, v, f=kernel: f(x, vectors_C=v), inputs, vectors) == 1


def test_rows_of_a_batch_must_divide_all_rows():
    x = jax.ShapeDtypeStruct((12, 64), jnp.bfloat16)
    c = RowConfig(rows_per_warp=2, tile=64, vector=2)
    with pytest.raises(AssertionError, match="12"):
        jax.eval_shape(lambda x: apply_rows(formulas(64)["softmax"][0], [x], config=c), x)
    jax.eval_shape(
        lambda x: apply_rows(
            formulas(64)["softmax"][0], [x], config=dataclasses.replace(c, rows_per_warp=1)
        ), x,
    )  # fmt: skip
