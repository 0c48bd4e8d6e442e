"""Chunks of rows stored from registers, thread by thread: what no interpreter runs."""

import contextlib
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import threads
from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.rows import edges, flat_copies, flat_registers
from pallas_kernels.rows.flat_copies import FlatCopies
from tests.kernels.thread_stand_in import Warpgroup

WARPS, LANES, TILE = 4, 32, 256
SENTINEL = 0x5A


class _Typed(np.ndarray):
    """An address of each thread."""

    type = None


def _added(a, b):
    found = np.asarray(a, np.int64) + np.asarray(b, np.int64)
    return np.atleast_1d(found).view(_Typed)


class Vector(types.SimpleNamespace):
    """What each thread has in a register: ``values`` [threads, elements]."""

    @property
    def type(self):
        width = 8 * self.values.itemsize
        element = types.SimpleNamespace(width=width)
        return types.SimpleNamespace(shape=self.values.shape[1:], element_type=element)


class _Stores(Warpgroup):
    """Threads of a warpgroup that store, some of them, vectors whole, in words, or elements."""

    def __init__(self):
        super().__init__(jnp.bfloat16)
        self.memory[:] = SENTINEL

    def inline_asm(self, result, operands, text, *_, **__):
        del result
        place, holds, *words = operands
        assert text.startswith("@$1 st.global"), text
        offset = int(text.partition("[$0+")[2].partition("]")[0])
        with self.when(np.broadcast_to(holds, self.count)):
            self.store(np.stack(words, axis=1), np.asarray(place) + offset)

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
            more = {"addi": _added, "minsi": np.minimum}
            predicates = {**vars(arith.CmpIPredicate), "slt": np.less}
            more["CmpIPredicate"] = types.SimpleNamespace(**predicates)
            for name, stand_in in more.items():
                patch.setattr(arith, name, stand_in, raising=False)
            vectors = types.SimpleNamespace(
                bitcast=lambda _, x: x.values.view(np.uint32),
                extract=lambda x, static_position, **_: (
                    x.values if isinstance(x, Vector) else x
                )[:, static_position[0]],
            )  # fmt: skip
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
            ir = types.SimpleNamespace(VectorType=kind)
            for module in (edges, flat_copies, flat_registers):
                patch.setattr(module, "arith", arith)
                patch.setattr(module, "mgpu_utils", utils)
                patch.setattr(module, "plgpu", plgpu)
            for name, stand_in in (("llvm", llvm), ("vectors", vectors), ("ir", ir)):
                patch.setattr(edges, name, stand_in)
            patch.setattr(edges, "i32", lambda: None)
            patch.setattr(flat_registers, "mgpu", utils)
            for module in (edges, flat_registers):
                patch.setattr(module, "tile_layout", lambda _: None)
            yield


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    ("by_warps", "vector", "dtype"),
    [(False, 8, np.uint16), (False, 4, np.uint16), (False, 2, np.uint16), (True, 8, np.uint16),
     (False, 4, np.float32), (False, 8, np.float32)],
)  # fmt: skip
@pytest.mark.parametrize("columns", [301, 895, 1025, 1920])
def test_a_row_is_stored_and_nothing_of_its_neighbors(columns, by_warps, vector, dtype, branches):
    """Chunk by chunk, of two warpgroups or of warps; fp32 as sums are."""
    members, num_rows, spacing = 1 if by_warps else 2, 9, 2
    piece = 1024 if by_warps else WARPS * TILE
    width = piece if by_warps else TILE
    chunks, word = -(-(columns + 7) // (members * piece)), 8
    copies = FlatCopies(
        num_rows=num_rows, columns=columns, piece=piece, itemsize=2, by_warps=by_warps,
        unit=word if by_warps else vector, spacing=spacing,
    )  # fmt: skip
    world, rng = _Stores(), np.random.default_rng(0)
    target = world.put(np.full(num_rows * columns + 64, SENTINEL, np.uint8).astype(dtype))
    size = np.dtype(dtype).itemsize
    world.memory[:] = SENTINEL
    lane, warp = np.arange(WARPGROUP) % LANES, np.arange(WARPGROUP) // LANES
    want = rng.integers(1, 2**14, (num_rows, columns)).astype(dtype)
    row = 4
    rows = {row + w * spacing for w in range(WARPS)} if by_warps else {row}
    for member in range(members):
        for chunk in range(chunks):
            column = (member * chunks + chunk) * piece
            mine = row + warp * spacing if by_warps else np.full(WARPGROUP, row)
            shift = mine * columns % copies.unit
            first = lane * vector + (0 if by_warps else warp * width) + column - shift
            registers = []
            for k in range(width // (LANES * vector)):
                at = (first + k * LANES * vector)[:, None] + np.arange(vector)
                known = want[np.minimum(mine, num_rows - 1)[:, None], np.clip(at, 0, columns - 1)]
                registers.append(Vector(values=known))
            held = np.empty(len(registers), object)
            held[:] = registers
            x = types.SimpleNamespace(
                shape=(WARPS, width), dtype=np.dtype(dtype),
                registers=types.SimpleNamespace(flat=held),
            )  # fmt: skip
            sure = max(0, min(piece, columns - ((members - 1) * chunks + chunk) * piece))
            number = lambda n: types.SimpleNamespace(  # noqa: E731
                registers=types.SimpleNamespace(flat=[np.int64(n)])
            )
            with world.writing():
                flat_registers.write(
                    copies, x, target, row=number(row), column=number(column), vector=vector,
                    sure=sure, branches=branches,
                )  # fmt: skip
    begin, end = target.base, target.base + num_rows * columns * size
    found = world.memory[begin:end].view(dtype).reshape(num_rows, columns)
    untouched = np.full(size, SENTINEL, np.uint8).view(dtype)[0]
    for r in range(num_rows):
        expected = want[r] if r in rows else np.full(columns, untouched, dtype)
        np.testing.assert_array_equal(found[r].view(np.uint8), expected.view(np.uint8), str(r))
    assert (world.memory[:begin] == SENTINEL).all()
    assert (world.memory[end:] == SENTINEL).all(), "behind the array"
