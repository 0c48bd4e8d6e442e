"""Rows that nothing divides: the kernels in the interpreter, against float64, and their tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.kernels import memory_random
from pallas_kernels import layer_norm, rms_norm, softmax
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.norm.formulas import NormForm
from pallas_kernels.norm.hopper import norm
from pallas_kernels.rows import apply
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.config import Flat, Odd
from pallas_kernels.rows.odd import _whole
from pallas_kernels.rows.smem import REDUCTION_BYTES, smem_bytes
from tests.kernels import test_norm as norms
from tests.kernels.row_cases import interpreted_hopper, num_chosen, num_kernels
from tests.kernels.test_rows_choice import calls
from tests.kernels.test_softmax import check_softmaxes, inputs
from tests.tolerance import assert_within_rounding

COLUMNS = 701
FORMS = {
    "registers": Odd(warpgroups=2, tile=64, tiles=2, most_workers=2, interpretable=True),
    "memory": Odd(warpgroups=2, tile=32, tiles=3, in_memory=3, interpretable=True),
    "read again": Odd(warpgroups=1, tile=32, tiles=6, in_memory=2, interpretable=True),
}
WINDOWS = {  # of four rows, of which each begins at another column of a vector
    "registers": Odd(warpgroups=1, tile=128, tiles=2, vector=4, interpretable=True),
    "memory": Odd(warpgroups=1, tile=128, tiles=2, vector=4, in_memory=1, interpretable=True),
}
SLOW = pytest.mark.slow


@pytest.mark.slow_cases("read again")
@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=name, marks=[SLOW] * (name != "read again")) for name, c in FORMS.items()],
)
def test_softmaxes_are_no_worse_than_the_plain_form(config):
    x, d_y = inputs((3, COLUMNS))
    x[1, :400] = -np.inf
    check_softmaxes(x, d_y, config)


@pytest.mark.parametrize("name", [pytest.param("registers", marks=SLOW), "memory"])
def test_softmaxes_of_windows_are_no_worse_than_the_plain_form(name):
    """Neighbors' columns would count: theirs are far larger or -inf."""
    x, d_y = inputs((4, COLUMNS))
    x[1, :400], x[2] = -np.inf, x[2] + 80
    check_softmaxes(x, d_y, WINDOWS[name])


@SLOW  # a second of the interpreter; the softmax above has windows and bounds alike
def test_norms_of_windows_read_the_scale_of_their_columns():
    """Layer norm, which also counts how many columns are not a neighbor's."""
    (x, _), (scale, bias), ds = norms.inputs((4, COLUMNS), offset=5.0)
    form = NormForm(columns=COLUMNS, epsilon=norms.EPSILON, centered=True, biased=True)
    with interpreted_hopper():
        got = norm(form, [x], [scale, bias], config=WINDOWS["registers"])
    exact = norms.exact((x, x), (scale, bias), ds, f=layer_norm)
    assert_within_rounding(got, exact[0])


@pytest.mark.parametrize(
    "form",
    [
        {"f": layer_norm},
        pytest.param({"f": rms_norm}, marks=SLOW),
        pytest.param({"f": rms_norm, "residual": True}, marks=SLOW),
        pytest.param({"f": layer_norm, "residual": True}, marks=SLOW),
    ],
    ids=["layer_norm", "rms_norm", "rms_norm+residual", "layer_norm+residual"],
)
def test_norms_are_no_worse_than_the_plain_form(monkeypatch, form):
    """Two blocks for three rows: sums go from row to row, and from tile to column."""
    monkeypatch.setattr(apply, "config_for", lambda *_: FORMS["registers"])
    case = norms.inputs((3, COLUMNS))
    with interpreted_hopper():
        got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [128, 701, 1024, 1025])
def test_sums_of_tiles_become_those_of_columns(columns):
    """The last of 128 columns a tile overlaps: its first sums are 0, as the kernel leaves them."""
    tiles = -(-columns // 128)
    begin = [min(128 * i, columns - 128) for i in range(tiles)]
    sums = np.zeros((2, tiles + 1, 1, 4, 32), np.float32)
    for i, start in enumerate(begin):
        value = np.arange(start, start + 128.0)
        sums[:, i] = np.where(value >= 128 * i, value, 0.0).reshape(4, 32)
    assert (np.asarray(_whole(jnp.asarray(sums), columns)) == np.arange(columns)).all()


def test_every_odd_length_fits():
    """A form for each call that can leave columns out, within shared memory."""
    rng = np.random.default_rng(0)
    lengths = (128, 129, 1000, 8193, 50257, 262143, *rng.integers(128, 262144, 10).tolist())
    for columns in lengths:
        for name, call in calls(columns).items():
            try:
                config = config_for(4096, call, form="windows")
            except UnsupportedError:
                lacks = call.num_masks or not call.over_inputs or not call.may_cut
                assert call.num_sums or lacks, (columns, name)
                continue
            if isinstance(config, Odd):
                assert smem_bytes(config, call) + REDUCTION_BYTES <= SMEM_BYTES, (columns, name)
                reach = config.tiles * config.warpgroups * config.columns
                assert config.columns <= columns <= reach, (columns, name)
                assert config.window(columns) <= reach, (columns, name)
                assert (columns if call.num_sums else 4096) % config.vector == 0


def test_more_elements_than_an_int32_counts_are_refused():
    """Their places would overflow, and the kernel read elsewhere."""
    rows, call = 2**31 // 50257, calls(50257)["softmax"]
    for form, kind in (("flat", Flat), ("columns", Odd)):
        assert isinstance(config_for(rows, call, form=form), kind)
        with pytest.raises(UnsupportedError, match="more than 2147483647 elements"):
            config_for(rows + 1, call, form=form)
    x = jax.ShapeDtypeStruct((rows + 1, 50257), jnp.bfloat16)
    assert num_chosen(softmax, x) == 0


@pytest.mark.parametrize("columns", [5001, pytest.param(100003, marks=SLOW)])
def test_the_real_form_lowers(columns):
    x = jax.ShapeDtypeStruct((8, columns), jnp.bfloat16)
    assert num_kernels(functools.partial(softmax, implementation="hopper"), x) == 1


def test_random_shapes_and_their_summary():
    shapes = memory_random.drawn(40, 1)
    assert shapes == memory_random.drawn(40, 1)
    assert {name for _, names in shapes for name in names} == set(memory_random.MEASURED)
    for workload, _ in shapes:
        assert memory_random.SHORTEST <= workload.columns <= memory_random.LONGEST
        size = 2 * workload.rows * workload.columns
        assert 0.9 * memory_random.SMALLEST < size < 1.1 * memory_random.LARGEST
    rows = [
        {"name": "softmax 8x1001 hopper", "ms": 1.0, "of_copy": 0.9},
        {"name": "softmax 8x1001 xla", "ms": 2.0, "of_copy": 0.45},
        {"name": "rms_norm 8x1001 hopper", "ms": 1.0, "of_copy": 0.6},
        {"name": "rms_norm 8x1001 xla", "ms": 1.02, "of_copy": 0.5},
    ]
    found = memory_random.summary(rows)
    assert found["cases"]["softmax 8x1001"] == {"auto": "hopper", "of_copy": 0.9, "xla": 0.45}
    assert found["cases"]["rms_norm 8x1001"]["auto"] == "xla"  # less than 1.03 times as fast
    assert (found["held"], found["of"]) == (1, 2)
