"""Rows whose parts have unequal numbers of columns: these, place by place, and LayerNorm."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_norm
from pallas_kernels.norm import formulas
from pallas_kernels.norm.formulas import NormForm, backward, forward
from pallas_kernels.rows import apply, flat_columns
from pallas_kernels.rows.config import Flat, Odd
from pallas_kernels.rows.counts import (
    Counted,
    flat_bounds,
    odd_bounds,
    of_tiles,
    share,
    within,
)
from pallas_kernels.rows.formula import Parts
from tests.kernels import test_norm as norms
from tests.kernels.row_cases import interpreted_hopper, num_kernels
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding

SLOW = pytest.mark.slow
WARPS = 4
shared = functools.partial(Flat, group=2, tile=64, chunks=2, slots=4, interpretable=True)
ROWS = {  # and their columns; the interpreter has no clusters
    "ahead": (shared(ahead=True), 705),
    "a loop of chunks": (shared(group=1, tile=32, chunks=6, slots=7, in_memory=6, vector=1), 701),
    "four warpgroups": (shared(group=4, tile=32, slots=5, vector=1, ahead=True), 821),
    "whole words": (shared(ahead=True), 704),
    "teams": (shared(group=1, teams=2, chunks=3, slots=5, in_memory=2), 701),
    "far shorter": (shared(group=4, tile=256, slots=3, in_memory=2), 300),
    "warps": (shared(group=0, tile=256, chunks=3), 701),
}
FORMS = [
    pytest.param(name, marks=[SLOW] * (name not in ("ahead", "a loop of chunks"))) for name in ROWS
]
CLUSTERS = {
    "a block": Flat(group=4, tile=32, chunks=1),
    "two blocks": Flat(cluster=2, group=1, tile=64, chunks=3),
    "four blocks": Flat(cluster=4, group=2, tile=32, chunks=5),
}


def _check_parts(tile, counts_KP, seen_by, whole):
    """Against places that are marked: ``seen_by[k][p]`` of each part and tile."""
    for k, tile_of in enumerate(seen_by):
        np.testing.assert_array_equal(counts_KP[k], tile_of)
        assert not whole[k] or (counts_KP[k] == tile).all(), "not all of a whole tile count"
    if all(whole):
        assert (np.sum(seen_by, axis=0) == tile * len(whole)).all()
        return
    total = of_tiles(tile, whole, lambda k: jnp.asarray(counts_KP[k]))
    np.testing.assert_array_equal(total, np.sum(seen_by, axis=0))


@pytest.mark.parametrize("shift", [0, 1, 3, 7])
@pytest.mark.parametrize("c", CLUSTERS.values(), ids=CLUSTERS)
def test_counts_of_chunks_are_those_of_marked_places(c, shift):
    for columns in (1, 33, 300, c.columns // 2, c.columns - 129, c.columns - 8, c.columns - shift):
        marked = np.zeros(c.columns)
        marked[shift : shift + columns] = 1
        places = marked.reshape(c.cluster * c.group, c.chunks, WARPS, c.tile).sum(-1)
        part_P = np.arange(c.cluster * c.group * WARPS)
        counts, whole = [], []
        for chunk in range(c.chunks):
            bounds = flat_bounds(c, columns, shift, part_P // WARPS, chunk)
            counts.append(np.asarray(within(part_P % WARPS * c.tile, c.tile, bounds)))
            whole.append((places[:, chunk] == c.tile).all())
        _check_parts(c.tile, counts, [places[:, k].ravel() for k in range(c.chunks)], whole)
        assert sum(map(np.sum, counts)) == columns


@pytest.mark.parametrize(
    ("c", "columns"),
    [(Odd(warpgroups=2, tile=64, tiles=2), 701), (Odd(warpgroups=1, tile=32, tiles=6), 701),
     (Odd(warpgroups=1, tile=128, tiles=2, vector=4), 701), (Odd(tile=32, vector=8), 128),
     (Odd(warpgroups=4, tile=32, tiles=2, vector=8), 901)],
    ids=str,
)  # fmt: skip
def test_columns_that_tiles_share_count_once(c, columns):
    """The last tile begins before the one before ends."""
    part_P = np.arange(c.warpgroups * WARPS)
    for shift in range(c.vector if columns % c.vector else 1):
        taken = np.zeros(c.window(columns), bool)
        counts, marked = [], []
        for i in range(c.tiles):
            marked.append(np.zeros(len(part_P)))
            for member, warp in itertools.product(range(c.warpgroups), range(WARPS)):
                start, _ = odd_bounds(c, columns, shift, member, i)
                at = int(start) + warp * c.tile + np.arange(c.tile)
                wanted = (i * c.warpgroups + member) * c.columns
                mine = at[(at >= max(wanted, shift)) & (at < shift + columns)]
                assert not taken[mine].any()
                taken[mine] = True
                marked[i][member * WARPS + warp] = len(mine)
            _, bounds = odd_bounds(c, columns, shift, part_P // WARPS, i)
            counts.append(np.asarray(within(part_P % WARPS * c.tile, c.tile, bounds)))
        assert taken.sum() == columns
        _check_parts(c.tile, counts, marked, [(n == c.tile).all() for n in marked])


def test_nothing_is_a_share_of_nothing():
    assert share(64, 192) == 0.25
    found = share(jnp.array([0.0, 0.0, 3.0]), jnp.array([0.0, 5.0, 0.0]))
    np.testing.assert_array_equal(found, [0.0, 0.0, 1.0])


def _evaluate(monkeypatch, name, case):
    """LayerNorm and, where rows are not warps', its gradient."""
    c = ROWS[name][0]
    monkeypatch.setattr(apply, "config_for", lambda *_: c)
    monkeypatch.setattr(Flat, "num_clusters", 3)
    with interpreted_hopper():
        if c.by_warps:
            (x, _), vectors, _ = case
            return layer_norm(x, *vectors, epsilon=norms.EPSILON, implementation="hopper")
        return norms.evaluate(*case, f=layer_norm, implementation="hopper")


def _oracle(name, case):
    exact = norms.exact(*case, f=layer_norm)
    return exact[0][0] if ROWS[name][0].by_warps else exact


@pytest.mark.slow_cases("ahead-0.0")
@pytest.mark.parametrize("offset", [0.0, pytest.param(100.0, marks=SLOW)])
@pytest.mark.parametrize("name", FORMS)
def test_layer_norm_is_no_worse_than_the_plain_form(monkeypatch, name, offset):
    """Several rows of a block, and a mean that is far larger than what rows vary by."""
    case = norms.inputs((7, ROWS[name][1]), offset=offset)
    assert_within_rounding(_evaluate(monkeypatch, name, case), _oracle(name, case))


def _totals(formula, c, columns, shift, arrays, *, more=0, near=False):
    """A formula's of one row, as all blocks of a cluster fold and join it, beside neighbors of NaN.

    Args:
        arrays: inputs and then vectors, [C] each.
        more: columns too many, of each part that has any.
        near: whether sums are taken against the mean of some columns, and of some part.
    """
    begin, members = np.arange(WARPS) * c.tile, c.cluster * c.group
    padded = np.full((len(arrays), c.columns), np.nan, np.float32)
    padded[:, shift : shift + columns] = arrays
    padded[2:][np.isnan(padded[2:])] = 0  # vectors
    places = jnp.asarray(padded.reshape(len(arrays), members, c.chunks, WARPS, c.tile))

    def off(count):
        return jnp.where(count > 0, count + more, count)

    def first(x, bounds, mine):
        count = jnp.maximum(within(begin, c.vector, bounds), 1.0)
        mean_A = jnp.where(mine, x, 0.0)[:, : c.vector].sum(axis=1) / count
        return mean_A, jnp.broadcast_to(mean_A[:, None], x.shape)

    def fold(member, chunk):
        bounds = flat_bounds(c, columns, shift, member, chunk)
        at = begin[:, None] + np.arange(c.tile)
        mine = (at >= bounds[0]) & (at < bounds[1])
        counted = Counted(
            columns=off(within(begin, c.tile, bounds)),
            own=lambda x, fill=0.0: jnp.where(mine, x, fill),
            near=(lambda x: first(x, bounds, mine)) if near else None,
        )
        load = lambda j: places[j, member, chunk]  # noqa: E731
        return counted.columns, formula.fold_cut(load, lambda j: load(j + 2), counted)

    def merge(found, one):
        return found[0] + one[0], formula.merge(found[0], one[0], found[1], one[1])

    folds = [
        functools.reduce(merge, [fold(member, k) for k in range(c.chunks)])[1]
        for member in range(members)
    ]
    part_P = np.arange(members * WARPS)

    def count(chunk):
        bounds = flat_bounds(c, columns, shift, part_P // WARPS, chunk)
        return off(within(part_P % WARPS * c.tile, c.tile, bounds))

    parts = Parts(
        whole=False,
        counts=of_tiles(c.tile, [False] * c.chunks, count),
        near=(lambda x: (x[0], jnp.full_like(x, x[0]))) if near else None,
    )
    return formula.join(parts, *(jnp.concatenate(x) for x in zip(*folds, strict=True)))


@pytest.mark.parametrize("c", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(("mean", "more"), [(0.0, 0), (100.0, 0), (100.0, 1)])
@pytest.mark.parametrize("near", [False, True])
def test_totals_of_a_cluster_are_those_of_the_row(mean, c, more, near):
    """A row that fills its parts, and one far shorter; a column too many would show."""
    rng = np.random.default_rng(0)
    for columns in (c.columns - 9, c.tile // 2, c.columns // 2 + 5):
        norm = NormForm(columns=columns, epsilon=1e-6, centered=True, biased=True)
        x = (mean + rng.standard_normal(columns)).astype(jnp.bfloat16).astype(np.float64)
        d_y, scale = rng.uniform(0.5, 1.5, (2, columns)).astype(np.float32)
        got = _totals(backward(norm), c, columns, 3, [x, d_y, scale], more=more, near=near)
        y = Rounded(x) - Rounded(x).mean(axis=-1, keepdims=True)
        root = 1 / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-6)
        g = Rounded(d_y.astype(np.float64)) * scale.astype(np.float64) * root
        want = root[0], (g * y).mean(axis=-1) * root[0] * root[0], g.mean(axis=-1)
        if more:
            with pytest.raises(AssertionError, match="times"):
                assert_within_rounding(got[1:], want)
        else:
            assert_within_rounding(got[1:], want)


@pytest.mark.parametrize("first", [0.0, 1e4])
def test_first_columns_far_from_the_others_cost_what_cancels(first):
    """At most as often the variance's roundoff as a part has columns for each that is counted."""
    c, columns = CLUSTERS["two blocks"], 1500
    x = np.random.default_rng(0).standard_normal(columns).astype(np.float32)
    x[:9] += first
    norm = NormForm(columns=columns, epsilon=0.0, centered=True)
    arrays = [x, np.ones_like(x), np.ones_like(x)]
    _, root = _totals(forward(norm), c, columns, 3, arrays, near=True)
    variance = x.astype(np.float64).var()
    most = (c.tile / c.vector + c.cluster * c.group * WARPS) * np.sqrt(columns) * 2.0**-24
    assert abs(float(root) ** -2 / variance - 1) < most


def test_a_mean_that_is_not_put_right_is_caught(monkeypatch):
    c = next(iter(CLUSTERS.values()))
    monkeypatch.setattr(formulas, "_about", lambda middle, off, step, sums: (middle, *sums))
    with pytest.raises(AssertionError, match="times"):
        test_totals_of_a_cluster_are_those_of_the_row(100.0, c, 0, near=True)


@pytest.mark.parametrize("name", ["ahead", pytest.param("four warpgroups", marks=SLOW)])
def test_neighbors_that_are_no_numbers_change_nothing(monkeypatch, name):
    (x, _), vectors, ds = norms.inputs((5, ROWS[name][1]))
    alone = (x[::2].copy(),) * 2, vectors, tuple(d[::2].copy() for d in ds)
    x[1], x[3] = np.nan, np.inf
    (y,), ((d_x,), _) = _evaluate(monkeypatch, name, ((x, x), vectors, ds))
    (exact_y,), ((exact_d_x,), _) = norms.exact(*alone, f=layer_norm)
    assert_within_rounding((y[::2], d_x[::2]), (exact_y, exact_d_x))


@pytest.mark.slow_cases("of a chunk")
@pytest.mark.parametrize("fault", ["of a chunk", "of a row"])
def test_a_count_that_is_off_by_a_column_is_caught(monkeypatch, fault):
    """All parts but the first of a warpgroup have one more."""
    name = "ahead"

    def off(begin, size, bounds):
        found = within(begin, size, bounds)
        of_row = found.shape != (WARPS,)
        return jnp.where(begin > 0, found + 1, found) if of_row == (fault == "of a row") else found

    monkeypatch.setattr(flat_columns, "within", off)
    case = norms.inputs((3, ROWS[name][1]), offset=5.0)
    found = _evaluate(monkeypatch, name, case)
    with pytest.raises(AssertionError, match="times"):
        assert_within_rounding(found, _oracle(name, case))


LOWERED = {
    "warps": (1001, Flat(group=0, teams=4, tile=1024, slots=6, vector=4, in_memory=1)),
    "warps, three chunks": (1001, Flat(group=0, tile=384, chunks=3, vector=4, in_memory=3)),
    "ahead": (48739, Flat(cluster=2, chunks=3, slots=9, vector=4, in_memory=1, ahead=True)),
    "teams of blocks": (
        100423,
        Flat(cluster=8, group=2, teams=2, tile=832, chunks=2, slots=6, vector=2, in_memory=1),
    ),
    "no column too many": (10240, Flat(tile=640, slots=4, vector=4, in_memory=1)),
    "gradient": (48739, Flat(cluster=4, tile=768, slots=3, vector=4, in_memory=1)),
    "a loop of chunks": (
        40001, Flat(cluster=2, tile=256, chunks=5, slots=11, vector=4, in_memory=5, ahead=True)
    ),
}  # fmt: skip


@pytest.mark.slow_cases("ahead")
@pytest.mark.parametrize("name", LOWERED)
def test_the_real_form_lowers(name):
    columns, config = LOWERED[name]
    biased = name != "a loop of chunks"  # a bias in memory leaves no room
    norm = NormForm(columns=columns, epsilon=1e-6, centered=True, biased=biased)
    x = jax.ShapeDtypeStruct((9, columns), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((columns,), jnp.float32)
    if name in ("gradient", "no column too many"):
        formula, xs, vectors = backward(norm), [x] * 2, [vector]
    else:
        formula, xs, vectors = forward(norm), [x], [vector] * (1 + biased)

    def run(xs, vectors):
        return apply.apply_rows(formula, xs, vectors_C=vectors, config=config)

    assert num_kernels(run, xs, vectors) == 1
