"""Copies, stores and exchanges of the kernel over rows, thread by thread, without interpreter."""

import collections
import contextlib
import functools
import itertools
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import threads
from pallas_kernels.hopper.machine import LANES, WARPGROUP, WARPS
from pallas_kernels.rows import copies, exchange, registers
from pallas_kernels.rows.config import BARRIER_BYTES, TURNS, RowConfig
from pallas_kernels.rows.copies import Copies
from pallas_kernels.rows.registers import Cut
from tests.kernels.thread_stand_in import Ref, Warpgroup

NUMBERS, BARRIERS = 4096, 512  # where they lie in each block's shared memory
SENTINEL = 0x5A


class Cluster(Warpgroup):
    """The threads of one warpgroup at a time, and what all blocks' memory and barriers count."""

    def __init__(self, num_numbers: int, num_parts: int):
        super().__init__(jnp.bfloat16)
        self.shape = (TURNS, num_numbers, num_parts)
        self.blocks: dict = collections.defaultdict(lambda: np.full(self.shape, np.nan, np.float32))
        self.expected: dict = collections.Counter()
        self.arrived: dict = collections.Counter()
        self.came: dict = collections.Counter()

    def inline_asm(self, result, operands, text, *_, **__):
        del result
        operands = [np.broadcast_to(x, self.count) for x in operands]
        if "expect_tx" in text:
            place, num_bytes, one = operands
            assert one.sum() == 1
            (i,) = np.flatnonzero(one)
            self.expected[self.rank, int(place[i])] += int(num_bytes[i])
            self.arrived[self.rank, int(place[i])] += 1
            return
        assert "st.async" in text, text
        most = int(re.findall(r"active, \$3, (\d+)", text)[0])
        for place, barrier, number, block in zip(*operands, strict=True):
            if block < most:
                at = np.unravel_index((int(place) - NUMBERS) // 4, self.shape)
                self.blocks[int(block)][at] = number
                self.came[int(block), int(barrier)] += 4

    def send(self, c, *, turn: int, rank: int, wg: int, numbers: list[np.ndarray]) -> None:
        """One warpgroup's exchange; numbers [warps] each."""
        self.rank = rank
        array = lambda x: types.SimpleNamespace(registers=np.array([x], object))  # noqa: E731
        first = rank * (self.shape[-1] // c.cluster) + wg * WARPS
        smem = types.SimpleNamespace(numbers=Ref(NUMBERS), exchanged=Ref(BARRIERS))
        smem.numbers.shape = self.shape
        each = []
        for x in numbers:  # every lane of a warp has its number
            held = np.empty(1, object)
            held[0] = np.repeat(x, 32)
            each.append(types.SimpleNamespace(registers=held))
        splat = lambda layout: types.SimpleNamespace(reduce=lambda _: layout)  # noqa: E731
        with self.running(), pytest.MonkeyPatch.context() as patch:
            utils = types.SimpleNamespace(
                ThreadSubset=types.SimpleNamespace(WARPGROUP=128),
                single_thread_predicate=lambda _: np.arange(self.count) == 0,
            )
            plgpu = types.SimpleNamespace(
                inline_mgpu=lambda **_: lambda f: lambda *args: f(None, *args),
                Layout=types.SimpleNamespace(WG_SPLAT=lambda _: None),
                RefType=lambda: None,
                layout_cast=lambda x, _: x,
            )
            places = {
                "arith": threads.arith, "mgpu_utils": utils, "plgpu": plgpu, "tile_layout": splat,
                "vectors": types.SimpleNamespace(extract=lambda x, **_: x),
            }  # fmt: skip
            for name, stand_in in places.items():
                patch.setattr(exchange, name, stand_in)
            exchange._to_cluster(c, smem, array(turn), array(first), tuple(each))


@pytest.mark.parametrize(("cluster", "group"), [(2, 4), (4, 2), (8, 1), (8, 4)])
@pytest.mark.parametrize("num_numbers", [1, 4])
def test_every_block_gets_all_numbers_and_waits_for_their_bytes(cluster, group, num_numbers):
    """More exchanges than turns."""
    c = RowConfig(cluster=cluster, group=group, vector=4)
    blocks, rng = Cluster(num_numbers, c.num_parts), np.random.default_rng(0)
    for i in range(TURNS + 3):
        turn = i % TURNS
        want = rng.standard_normal((num_numbers, c.num_parts)).astype(np.float32)
        parts = want.reshape(num_numbers, cluster, group, WARPS)
        for counter in (blocks.expected, blocks.arrived, blocks.came):
            counter.clear()
        for rank, wg in np.ndindex(cluster, group):
            blocks.send(c, turn=turn, rank=rank, wg=wg, numbers=list(parts[:, rank, wg]))
        barrier = BARRIERS + BARRIER_BYTES * turn
        every = {(rank, barrier) for rank in range(cluster)}
        assert set(blocks.came) == set(blocks.expected) == every, "at the turn's barrier alone"
        assert blocks.came == blocks.expected, "a barrier would wait for ever, or not at all"
        assert set(blocks.arrived.values()) == {group}, "as many as the barrier is made for"
        for rank in range(cluster):
            np.testing.assert_array_equal(blocks.blocks[rank][turn], want)


class Threads(Warpgroup):
    """Threads of a warpgroup, and a copy engine that is done at once and counts its bytes."""

    def __init__(self, made: Copies):
        super().__init__(jnp.bfloat16)
        self.made = made
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
        raise AssertionError(text)

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
            arith.andi, arith.extsi = np.bitwise_and, lambda _, x: x
            utils = types.SimpleNamespace(
                **vars(threads.mgpu_utils),
                ThreadSubset=types.SimpleNamespace(WARP=32, WARPGROUP=128),
                single_thread_predicate=lambda subset: thread % subset == 0,
                BarrierRef=lambda *_: types.SimpleNamespace(arrive_expect_tx=arrive),
            )
            plgpu = types.SimpleNamespace(
                inline_mgpu=lambda **_: lambda f: functools.partial(f, None),
                Layout=types.SimpleNamespace(WG_SPLAT=lambda _: None),
                RefType=lambda: None,
                commit_smem=lambda: None,
            )
            patch.setattr(threads, "mgpu_utils", utils)
            patch.setattr(copies, "arith", arith)
            patch.setattr(copies, "plgpu", plgpu)
            patch.setattr(copies, "mgpu", types.SimpleNamespace(c=lambda x, _: np.int64(x)))
            patch.setattr(copies, "ir", threads.ir)
            patch.setattr(registers, "arith", arith)
            yield

    def run(self, name: str, *refs, **numbers) -> None:
        """One of the copies' methods, by all threads."""
        value = lambda x: types.SimpleNamespace(flat=[np.int64(x)])  # noqa: E731
        numbers = {k: types.SimpleNamespace(registers=value(x)) for k, x in numbers.items()}
        with self.working():
            getattr(self.made, name)(*refs, **numbers)


@pytest.mark.parametrize("vector", [8, 4, 2])
@pytest.mark.parametrize("columns", [301, 514, 896, 1025, 1920, 2048])
def test_what_is_a_neighbors_is_told(columns, vector):
    """Of each register of each thread of two warpgroups that share rows, chunk by chunk."""
    c = RowConfig(group=2, tile=256, chunks=-(-(columns + 7) // 2048), vector=vector)
    made = Copies(
        num_rows=12, columns=columns, piece=c.piece, word=8, itemsizes=(2,), width=columns
    )
    thread, told = np.arange(WARPGROUP), 0
    first = thread % LANES * vector + thread // LANES * c.tile
    for row, (chunk, member) in itertools.product(range(12), np.ndindex(c.chunks, c.group)):
        begin, column = row * columns % 8, (chunk * c.group + member) * c.piece
        sure = max(0, min(c.piece, columns - ((chunk + 1) * c.group - 1) * c.piece))
        cut = Cut(sure=sure, begins=columns % 8 > 0 and chunk == 0)
        with Threads(made).working():
            _, *bounds = made.bounds(np.int64(row), np.int64(column))
            found = registers.partly_valid(made, c, bounds, cut)
        for k in range(c.tile // (LANES * vector)):
            at = (first + k * LANES * vector)[:, None] + np.arange(vector) + column
            mine = (at >= begin) & (at < begin + columns)
            holds = [np.broadcast_to(x, WARPGROUP) for x in found.get(k, [])]
            holds *= vector if len(holds) == 1 else 1
            want = np.stack(holds, axis=1) if holds else np.ones_like(mine)
            assert (want == mine).all(), (row, member, chunk, k)
            told += len(holds)
    assert told or columns == 2048


@pytest.mark.parametrize("itemsizes", [(2,), (4, 4), (2, 1)], ids=str)
@pytest.mark.parametrize("columns", [299, 300, 512, 528])
def test_copies_bring_a_row_to_where_it_is_read(columns, itemsizes):
    """Eight rows by chunks into slots, from arrays whose end is known; masks of whole words."""
    if 1 in itemsizes and columns % 16:
        pytest.skip("a mask's rows begin with a word")
    dtypes = [{1: np.uint8, 2: np.uint16, 4: np.uint32}[size] for size in itemsizes]
    num_rows, piece, word = 8, 256, 16 // itemsizes[0]
    rng = np.random.default_rng(0)
    xs = [rng.integers(1, 100, num_rows * columns).astype(dtype) for dtype in dtypes]
    made = Copies(
        num_rows=num_rows, columns=columns, piece=piece, word=word, itemsizes=itemsizes,
        width=columns,
    )  # fmt: skip
    world = Threads(made)
    sources = [world.put(np.concatenate([x, np.full(64, 0x77, x.dtype)])) for x in xs]
    slots = [world.put(np.zeros(piece + word, dtype)) for dtype in dtypes]
    for row in range(num_rows):
        for column in range(0, columns + word - 1, piece):
            world.run("load", sources, slots, Ref(0), row=row, column=column, wanted=1)
            assert world.expected == world.copied, "the barrier would wait for ever, or not"
            begin = row * columns
            shift = begin % word
            first, last = max(column - shift, 0), column - shift + piece
            for x, slot, dtype in zip(xs, slots, dtypes, strict=True):
                seen = world.read(slot, (piece + word,), dtype)
                assert not (seen == 0x77).any(), "read behind the array"
                assert not seen[piece:].any(), "written behind the slot"
                part = x[begin + first : begin + min(last, columns)]
                at = max(shift - column, 0)
                assert (seen[at : at + len(part)] == part).all(), (row, column)


class Typed(np.ndarray):
    """An address of each thread."""

    type = None


def _added(a, b):
    found = np.asarray(a, np.int64) + np.asarray(b, np.int64)
    return np.atleast_1d(found).view(Typed)


class Vector(types.SimpleNamespace):
    """What each thread has in a register: ``values`` [threads, elements]."""

    @property
    def type(self):
        width = 8 * self.values.itemsize
        element = types.SimpleNamespace(width=width)
        return types.SimpleNamespace(shape=self.values.shape[1:], element_type=element)


class Stores(Warpgroup):
    """Threads of a warpgroup that store, some of them, whole vectors or elements."""

    def __init__(self):
        super().__init__(jnp.bfloat16)
        self.memory[:] = SENTINEL

    def store(self, x, place) -> None:
        """Of each thread [threads, elements], or one element [threads]."""
        size = x[0].nbytes
        at = self._bytes(place, size)
        self.memory[at[self.mask]] = (
            np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)[self.mask]
        )

    @contextlib.contextmanager
    def writing(self):
        """In the place of MLIR."""
        with self.running(), pytest.MonkeyPatch.context() as patch:
            arith = threads.arith
            more = {"addi": _added, "minsi": np.minimum, "extsi": lambda _, x: x}
            predicates = {**vars(arith.CmpIPredicate), "slt": np.less}
            more["CmpIPredicate"] = types.SimpleNamespace(**predicates)
            for name, stand_in in more.items():
                patch.setattr(arith, name, stand_in, raising=False)
            vectors = types.SimpleNamespace(
                extract=lambda x, static_position, **_: x.values[:, static_position[0]]
            )
            plgpu = types.SimpleNamespace(
                inline_mgpu=lambda **_: lambda f: functools.partial(f, None),
                Layout=types.SimpleNamespace(WG_SPLAT=lambda _: None), RefType=lambda: None,
            )  # fmt: skip
            kind = types.SimpleNamespace(get=lambda *_: None, get_signless=lambda _: None)
            llvm = types.SimpleNamespace(
                store=lambda x, place: self.store(getattr(x, "values", x), place),
                inttoptr=lambda _, place: place, PointerType=kind,
            )  # fmt: skip
            utils = types.SimpleNamespace(when=self.when, c=lambda x, _: np.int64(x))
            for module in (copies, registers):
                patch.setattr(module, "arith", arith)
                patch.setattr(module, "plgpu", plgpu)
                patch.setattr(module, "mgpu", utils)
                patch.setattr(module, "ir", threads.ir)
            patch.setattr(registers, "mgpu_utils", utils)
            patch.setattr(registers, "llvm", llvm)
            patch.setattr(registers, "vectors", vectors)
            patch.setattr(registers, "tile_layout", lambda _: None)
            yield


@pytest.mark.parametrize(
    ("vector", "dtype"), [(8, np.uint16), (2, np.uint16), (4, np.float32), (8, np.float32)]
)
@pytest.mark.parametrize("columns", [301, 896, 1025, 1920])
def test_a_row_is_stored_and_nothing_of_its_neighbors(columns, vector, dtype):
    """Chunk by chunk, of two warpgroups; fp32 as sums are."""
    num_rows, row = 9, 4
    c = RowConfig(group=2, tile=256, chunks=-(-(columns + 7) // 2048), vector=vector)
    made = Copies(
        num_rows=num_rows, columns=columns, piece=c.piece, word=8, itemsizes=(2,), width=columns
    )
    world, size = Stores(), np.dtype(dtype).itemsize
    target = world.put(np.full(num_rows * columns + 64, SENTINEL, np.uint8).astype(dtype))
    world.memory[:] = SENTINEL
    lane, warp = np.arange(WARPGROUP) % LANES, np.arange(WARPGROUP) // LANES
    want = np.random.default_rng(0).integers(1, 2**14, columns).astype(dtype)
    for chunk, member in np.ndindex(c.chunks, c.group):
        column = (chunk * c.group + member) * c.piece
        first = lane * vector + warp * c.tile + column - row * columns % 8
        held = np.empty(c.tile // (LANES * vector), object)
        for k in range(len(held)):
            at = (first + k * LANES * vector)[:, None] + np.arange(vector)
            held[k] = Vector(values=want[np.clip(at, 0, columns - 1)])
        x = types.SimpleNamespace(
            shape=c.shape, dtype=np.dtype(dtype), registers=types.SimpleNamespace(flat=held)
        )
        sure = max(0, min(c.piece, columns - ((chunk + 1) * c.group - 1) * c.piece))
        begins = columns % 8 > 0 and chunk == 0
        cut = Cut(sure=sure, begins=begins) if begins or sure < c.piece else None
        number = lambda n: types.SimpleNamespace(  # noqa: E731
            registers=types.SimpleNamespace(flat=[np.int64(n)])
        )
        with world.writing():
            registers.write(made, c, x, target, row=number(row), column=number(column), cut=cut)
    begin, end = target.base, target.base + num_rows * columns * size
    found = world.memory[begin:end].view(dtype).reshape(num_rows, columns)
    np.testing.assert_array_equal(found[row].view(np.uint8), want.view(np.uint8))
    assert (np.delete(found, row, axis=0).view(np.uint8) == SENTINEL).all(), "a neighbor's"
    assert (world.memory[:begin] == SENTINEL).all()
    assert (world.memory[end:] == SENTINEL).all(), "behind the array"
