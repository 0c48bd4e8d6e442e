"""Rows as they lie between words: the kernels in the interpreter, and copies thread by thread."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_norm, rms_norm, softmax
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper import threads
from pallas_kernels.hopper.machine import SMEM_BYTES, WARPGROUP
from pallas_kernels.rows import apply, dispatch, flat_copies, flat_registers
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.config import NUM_CLUSTERS, Flat
from pallas_kernels.rows.flat_choice import SHORTEST, flat_for
from pallas_kernels.rows.flat_copies import FlatCopies
from pallas_kernels.rows.flat_order import Order, period_of, reach_of, unit_of
from pallas_kernels.rows.smem import smem_bytes
from pallas_kernels.softmax import hopper as softmaxes
from tests.kernels import test_norm as norms
from tests.kernels.row_cases import interpreted_hopper, num_kernels
from tests.kernels.test_rows_choice import calls
from tests.kernels.test_softmax import check_softmaxes, inputs
from tests.kernels.thread_stand_in import Ref, Warpgroup
from tests.tolerance import assert_within_rounding

COLUMNS = 701
SLOW = pytest.mark.slow
shared = functools.partial(Flat, group=2, tile=64, chunks=2, slots=4, interpretable=True)
WORDS = {
    "warpgroups": shared(),
    "teams": Flat(group=1, teams=2, tile=64, chunks=3, slots=5, interpretable=True),
    "warps": Flat(group=0, teams=2, tile=384, chunks=2, slots=3, interpretable=True),
    "a row a block": shared(slots=2, most_turns=1),
    "a row a warp": Flat(group=0, tile=384, chunks=2, slots=2, most_turns=1, interpretable=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows that something of columns belongs to, and blocks that take several of them."""

    config: Flat
    rows: int
    columns: int = COLUMNS
    num_clusters: int  # that could run; as many take part as the period divides


COLUMN_CASES = {
    "period of 8": Case(config=shared(), rows=17, num_clusters=9),
    "period of 4": Case(
        config=Flat(group=1, tile=64, chunks=3, slots=5, in_memory=1, vector=4, interpretable=True),
        rows=9, num_clusters=7,
    ),
    "of 4 by 2 mod 4": Case(config=shared(), rows=6, columns=COLUMNS + 1, num_clusters=5),
    "of 2 by 4 mod 8": Case(
        config=shared(in_memory=2), rows=5, columns=COLUMNS - 1, num_clusters=3
    ),
    "of 2 by pairs": Case(config=shared(vector=2), rows=5, num_clusters=3),
    "teams": Case(
        config=Flat(
            group=1, teams=2, tile=64, chunks=3, slots=5, in_memory=2, vector=2, interpretable=True
        ),
        rows=7, num_clusters=3,
    ),
    "few rows of teams": Case(
        config=Flat(group=1, teams=2, tile=64, chunks=3, slots=5, interpretable=True),
        rows=3, num_clusters=9,
    ),
    "one row each": Case(config=shared(), rows=5, num_clusters=6),
    "two rows a block": Case(config=shared(slots=2, most_turns=2), rows=11, num_clusters=1),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["warpgroups", "a row a warp", *[pytest.param(name, marks=SLOW) for name in WORDS
                                     if name not in ("warpgroups", "a row a warp")]],
)  # fmt: skip
def test_softmaxes_are_no_worse_than_the_plain_form(name):
    """Neighbors' elements would count: theirs are far larger or -inf."""
    x, d_y = inputs((3, COLUMNS))
    x[1, :400], x[2] = -np.inf, x[2] + 80
    check_softmaxes(x, d_y, WORDS[name])


@pytest.mark.parametrize("name", [pytest.param("warpgroups", marks=SLOW), "warps"])
def test_neighbors_that_are_no_numbers_change_nothing(name):
    """Five rows: of the second four warps' three have none."""
    x, _ = inputs((5, COLUMNS))
    alone = np.array(x[::2])
    x[1], x[3] = np.nan, np.inf
    with interpreted_hopper():
        got = softmaxes.softmax(x, config=WORDS[name])[::2]
    assert np.isfinite(got.astype(np.float32)).all()
    want = jax.nn.softmax(alone.astype(np.float32), axis=-1)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-7)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (layer_norm, "period of 4"),
        (rms_norm, "of 2 by pairs"),
        (rms_norm, "two rows a block"),
        (layer_norm, "teams"),
        *[pytest.param(layer_norm, name, marks=SLOW) for name in COLUMN_CASES
          if name not in ("period of 4", "teams")],
        pytest.param(rms_norm, "period of 8", marks=SLOW),
    ],
)  # fmt: skip
def test_norms_are_no_worse_than_the_plain_form(monkeypatch, f, name):
    """Scales, and sums over several rows of a team, behind each shift: no two columns are alike."""
    case = COLUMN_CASES[name]
    monkeypatch.setattr(apply, "config_for", lambda *_: case.config)
    monkeypatch.setattr(Flat, "num_clusters", case.num_clusters)
    arrays = norms.inputs((case.rows, case.columns))
    with interpreted_hopper():
        got = norms.evaluate(*arrays, f=f, implementation="hopper")
    assert_within_rounding(got, norms.exact(*arrays, f=f))


@pytest.mark.parametrize("f", [layer_norm, pytest.param(rms_norm, marks=SLOW)])
def test_norms_of_warps_rows_have_one_shift(monkeypatch, f):
    """35 rows: three turns of a second round, in which one warp has a row."""
    monkeypatch.setattr(apply, "config_for", lambda *_: WORDS["warps"])
    monkeypatch.setattr(Flat, "num_clusters", 9)
    (x, _), vectors, _ = arrays = norms.inputs((35, COLUMNS))
    vectors = vectors if f is layer_norm else vectors[:1]
    with interpreted_hopper():
        got = f(x, *vectors, epsilon=norms.EPSILON, implementation="hopper")
    assert_within_rounding(got, norms.exact(*arrays, f=f)[0][0])


@pytest.mark.parametrize("name", ["of 2 by pairs", pytest.param("period of 8", marks=SLOW)])
def test_neighbors_that_are_no_numbers_leave_norms_alone(monkeypatch, name):
    """Rows between such as are no numbers, and their gradients."""
    case = COLUMN_CASES[name]
    monkeypatch.setattr(apply, "config_for", lambda *_: case.config)
    monkeypatch.setattr(Flat, "num_clusters", case.num_clusters)
    (x, _), (scale, _), (d_y, _) = norms.inputs((case.rows, case.columns))
    x[1::2] = np.nan
    with interpreted_hopper():
        y, vjp = jax.vjp(
            functools.partial(rms_norm, epsilon=1e-6, implementation="hopper"), x, scale
        )
        d_x, _ = vjp(d_y)
    for found in (y, d_x):
        assert np.isfinite(found[::2].astype(np.float32)).all()
        assert np.isnan(found[1::2].astype(np.float32)).all()


@pytest.mark.slow_cases("1031-5001", "1031-12496", "1031-27164")
@pytest.mark.parametrize("columns", [1001, 5001, 17706, 27164, 12496])
@pytest.mark.parametrize("rows", [1, 3, 8, 131, 133, 300, 1031])
def test_each_row_is_taken_once_by_a_block_of_its_shift(rows, columns):
    """In every number of blocks, teams and elements of a unit."""
    call = calls(columns)["layer_norm"]
    ways = [(1, 0, 4), (1, 1, 4)]
    ways += [(cluster, *way) for cluster in NUM_CLUSTERS for way in ((2, 2), (4, 1))]
    made = [
        Flat(cluster=cluster, group=group, teams=teams, vector=vector)
        for (cluster, group, teams), vector in itertools.product(ways, (8, 4, 2))
    ]
    made += [
        dataclasses.replace(c, teams=1, most_turns=turns)
        for c, turns in itertools.product(made, (1, 2))
    ]
    for c in made:
        order = Order(config=c, num_rows=rows, period=period_of(c, call))
        shifts, taken = collections.defaultdict(set), []
        for team, worker in itertools.product(range(c.teams), range(order.num_workers)):
            first = team * order.num_workers + worker
            turns = range(first, order.num_turns, order.stride)
            assert len(turns) <= (c.most_turns or rows), c
            if not turns:
                continue
            of_warps = np.arange(4 if c.by_warps else 1) * order.period
            found = (np.asarray(order.row(np.array(turns)))[:, None] + of_warps).ravel()
            found = found[found < rows]
            taken += found.tolist()
            shifts[worker] |= set((found * columns % unit_of(c, call)).tolist())
            assert shifts[worker] <= {worker % order.period * columns % unit_of(c, call)}, c
        assert sorted(taken) == list(range(rows)), c
        assert all(len(found) == 1 for found in shifts.values()), c
        assert c.most_turns or order.num_workers <= c.num_clusters, c
        assert c.teams > 1 or len(shifts) == order.num_workers, f"idle blocks would wait: {c}"


@SLOW
def test_rows_of_whole_words_have_scales_without_columns_of_their_own(monkeypatch):
    monkeypatch.setattr(apply, "config_for", lambda *_: WORDS["warpgroups"])
    case = norms.inputs((3, COLUMNS + 3))
    with interpreted_hopper():
        got = norms.evaluate(*case, f=layer_norm, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, f=layer_norm))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_choice_fits(dtype):
    """Of any length: within shared memory, and a row within its chunks."""
    rng = np.random.default_rng(0)
    lengths = (SHORTEST, 257, 1000, 8193, 50257, *rng.integers(SHORTEST, 262144, 6).tolist())
    for columns in lengths:
        for name, call in calls(columns, dtype).items():
            c = flat_for(call)
            if c is None:
                lacks = call.num_masks or not call.over_inputs or not call.may_cut
                full = call.num_sums or call.num_inputs * call.num_vectors > 2
                assert full or lacks or dtype == jnp.float32, (columns, name)
                continue
            what = f"{name} of {columns}: {c}"
            assert smem_bytes(c, call) <= SMEM_BYTES, what
            assert c.tile % (32 * c.vector) == 0, what
            assert c.slots >= c.chunks * (1 + c.ahead), what
            assert c.columns >= reach_of(c, call), what


def test_what_was_timed_is_taken():
    """bf16 of 1,000 columns on."""
    timed = {"softmax", "softmax_gradient", "log_softmax_gradient"}
    timed |= {norm + way for norm in ("rms_norm", "layer_norm") for way in ("", "_gradient")}
    for columns in (5001, 11008, 126976, 100003, 999):
        names = timed if columns > 999 else set()
        for name, call in calls(columns).items():
            try:
                taken = isinstance(config_for(8, call), Flat)
            except UnsupportedError:
                taken = False
            assert taken == (name in names), (columns, name)
    assert not isinstance(config_for(8, calls(5001, jnp.float32)["softmax"]), Flat)


@pytest.mark.slow_cases("rms_norm-1001")
@pytest.mark.parametrize(
    "columns", [1001, *[pytest.param(n, marks=SLOW) for n in (5001, 17706, 48739, 100422)]]
)
@pytest.mark.parametrize("f", [softmax, rms_norm, layer_norm])
def test_the_real_form_lowers(monkeypatch, f, columns):
    """Both directions, so copies in and out of every kind."""
    for module in (apply, dispatch):
        monkeypatch.setattr(module, "config_for", lambda rows, call: flat_for(call))
    x = jax.ShapeDtypeStruct((9, columns), jnp.bfloat16)
    num_vectors = {softmax: 0, rms_norm: 1, layer_norm: 2}[f]
    vectors = (jax.ShapeDtypeStruct((columns,), jnp.float32),) * num_vectors
    options = {} if f is softmax else {"epsilon": 1e-6}

    def both(x, vectors, d_y):
        y, vjp = jax.vjp(functools.partial(f, implementation="hopper", **options), x, *vectors)
        return y, vjp(d_y)

    assert num_kernels(both, x, vectors, x) == 2


class _Threads(Warpgroup):
    """Threads of a warpgroup, and a copy engine that is done at once and counts its bytes."""

    def __init__(self, copies: FlatCopies):
        super().__init__(jnp.bfloat16)
        self.copies = copies
        self.copied = self.expected = 0

    def inline_asm(self, result, operands, text, *_, **__):
        del result
        *operands, holds = (np.broadcast_to(x, WARPGROUP).astype(np.int64) for x in operands)
        if "cp.async.bulk" in text:
            for target, source, size in np.stack(operands[:3], axis=1)[holds > 0]:
                assert target % 16 == source % 16 == size % 16 == 0, "no words"
                assert size > 0
                self.memory[target : target + size] = self.memory[source : source + size].copy()
                self.copied += size
            return
        target, source = operands
        size = self.copies.itemsize
        for at, to in np.stack([source, target], axis=1)[holds > 0]:
            self.memory[to : to + size] = self.memory[at : at + size].copy()

    @contextlib.contextmanager
    def working(self):
        """In the place of MLIR, with what copies need beside other kernels."""
        thread = np.arange(WARPGROUP)

        def arrive(num_bytes, predicate):
            self.expected += int(np.sum(np.where(predicate, num_bytes, 0)))

        with self.running(), pytest.MonkeyPatch.context() as patch:
            arith = threads.arith
            arith.subi, arith.minsi, arith.maxsi = np.subtract, np.minimum, np.maximum
            arith.CmpIPredicate.slt, arith.CmpIPredicate.sge = np.less, np.greater_equal
            arith.andi = np.bitwise_and
            utils = types.SimpleNamespace(
                ThreadSubset=types.SimpleNamespace(WARP=32, WARPGROUP=128),
                single_thread_predicate=lambda subset: thread % subset == 0,
                memref_ptr=lambda ref: ref.base,
                BarrierRef=lambda *_: types.SimpleNamespace(arrive_expect_tx=arrive),
            )
            plgpu = types.SimpleNamespace(
                inline_mgpu=lambda **_: lambda f: functools.partial(f, None),
                Layout=types.SimpleNamespace(WG_SPLAT=lambda _: None),
                RefType=lambda: None,
                commit_smem=lambda: None,
            )
            places = {"arith": arith, "mgpu_utils": utils, "plgpu": plgpu}
            for module, stand_in in places.items():
                patch.setattr(flat_copies, module, stand_in)
            patch.setattr(flat_registers, "arith", arith)
            yield

    def run(self, name: str, *refs, **numbers) -> None:
        """One of the copies' methods, by all threads."""
        value = lambda x: types.SimpleNamespace(flat=[np.int64(x)])  # noqa: E731
        numbers = {k: types.SimpleNamespace(registers=value(x)) for k, x in numbers.items()}
        with self.working():
            getattr(self.copies, name)(*refs, **numbers)


@pytest.mark.parametrize(
    ("by_warps", "vector", "unit"),
    [(False, 8, 8), (False, 4, 8), (False, 4, 4), (False, 2, 2), (True, 8, 8), (True, 4, 8)],
)
@pytest.mark.parametrize("columns", [301, 514, 895, 1025, 1920, 2048])
def test_what_is_a_neighbors_is_told(columns, by_warps, vector, unit):
    """Of each register of each thread of two warpgroups that share rows, chunk by chunk."""
    members = 1 if by_warps else 2
    pieces = 128 * 8 if by_warps else 4 * 256
    chunks = -(-(columns + 7) // (members * pieces))
    width, num_rows, spacing = pieces if by_warps else 256, 12, 2
    copies = FlatCopies(
        num_rows=num_rows, columns=columns, piece=pieces, itemsize=2, by_warps=by_warps,
        unit=unit, spacing=spacing,
    )  # fmt: skip
    thread = np.arange(WARPGROUP)
    first = thread % 32 * vector + (0 if by_warps else thread // 32 * width)
    told = 0
    for row in range(num_rows):
        rows = row + (thread // 32 * spacing if by_warps else 0 * thread)
        begin = rows * columns % unit
        for member in range(members):
            for chunk in range(chunks):
                sure = max(0, min(pieces, columns - ((members - 1) * chunks + chunk) * pieces))
                column = (member * chunks + chunk) * pieces
                with _Threads(copies).working():
                    found = flat_registers.doubtful(copies, (row, column), width, vector, sure)
                for k in range(width // (32 * vector)):
                    at = (first + k * 32 * vector)[:, None] + np.arange(vector) + column
                    mine = (at >= np.reshape(begin, (-1, 1))) & (
                        at < np.reshape(begin, (-1, 1)) + columns
                    )
                    holds = [np.broadcast_to(x, WARPGROUP) for x in found.get(k, [])]
                    if len(holds) == 1:
                        holds *= vector
                    want = np.stack(holds, axis=1) if holds else np.ones_like(mine)
                    assert (want == mine).all(), (row, member, chunk, k)
                    told += len(holds)
    assert told or columns == 2048


@pytest.mark.parametrize(
    ("by_warps", "itemsize", "unit"),
    [(False, 2, 8), (False, 2, 4), (False, 2, 2), (False, 4, 4), (False, 4, 2), (True, 2, 8),
     (True, 4, 4)],
)  # fmt: skip
@pytest.mark.parametrize("columns", [299, 300, 514, 520])
def test_copies_bring_a_row_to_where_it_is_read(columns, itemsize, by_warps, unit):
    """Seven rows by chunks into a slot, from an array whose end is known."""
    dtype, num_rows, spacing = {2: np.uint16, 4: np.uint32}[itemsize], 7, 2
    x = np.random.default_rng(0).integers(1, 2**14, num_rows * columns).astype(dtype)
    piece, word = 256, 16 // itemsize
    copies = FlatCopies(
        num_rows=num_rows, columns=columns, piece=piece, itemsize=itemsize, by_warps=by_warps,
        unit=unit, spacing=spacing,
    )  # fmt: skip
    world = _Threads(copies)
    source = world.put(np.concatenate([x, np.full(64, 0x7777, dtype)]))
    slot_size = 4 * piece if by_warps else piece + word * (unit < word)
    slot = world.put(np.zeros(slot_size + word, dtype))
    for row in range(num_rows):
        for column in range(0, columns + unit - 1, piece):
            world.run("load", [source], [slot], Ref(0), row=row, column=column, wanted=1)
            assert world.expected == world.copied, "the barrier would wait for ever, or not"
            if copies.odd_end:
                world.run("complete", [source], [slot], row=row, column=column)
            seen = world.read(slot, (slot_size + word,), dtype)
            assert not (seen == 0x7777).any(), "read behind the array"
            assert not seen[slot_size:].any(), "written behind the slot"
            for warp in range(4 if by_warps else 1):
                mine = row + warp * spacing
                if mine >= num_rows:
                    continue
                begin = mine * columns
                first, last = max(column - begin % unit, 0), column - begin % unit + piece
                part = x[begin + first : begin + min(last, columns)]
                # As ``flat_registers.read`` and ``doubtful`` say, or from a warp's piece on.
                at = warp * piece + begin % word - begin % unit + max(begin % unit - column, 0)
                assert (seen[at : at + len(part)] == part).all(), (row, warp, column)
