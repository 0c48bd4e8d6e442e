"""Threads of a warpgroup or of a block in NumPy, for bodies of ``plgpu.inline_mgpu``, which no
interpreter knows.

Values are arrays with an element for each thread; every instruction is executed by all of them
before the next, so that barriers have nothing to do. Instructions are told by their text.
"""

import contextlib
import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.decode_layer import (
    attention,
    attention_threads,
    inputs,
    per_thread,
    stream,
)
from pallas_kernels.hopper import (
    arrivals,
    cluster_sums,
    each_thread,
    grid,
    resident_rows,
    slots,
    threads,
)
from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.row_sums import hopper as row_sums

_BLOCK = 1 << 24  # bytes of addresses that a block of a cluster has
_I32, _F32, _F64 = np.uint32, np.float32, np.float64
_MODULES = (
    threads, each_thread, resident_rows, cluster_sums, grid, slots,
    attention, attention_threads, inputs, per_thread, stream, arrivals, row_sums,
)  # fmt: skip
"""Whose instructions these threads execute."""


@dataclasses.dataclass
class Ref:
    """An array in memory: of one block's shared memory, or in global memory."""

    base: int


class Warpgroup:
    """The threads of one warpgroup of a cluster's block, or several, and all memory."""

    def __init__(self, dtype: Any, *, count: int = WARPGROUP):
        self.dtype, self.count = dtype, count
        self.memory = np.zeros(4 * _BLOCK, np.uint8)
        self.used = 1024
        self.rank, self.mask = 0, np.ones(count, bool)
        self.asm: list[tuple[str, Callable[..., Any]]] = [
            (r"ld\.(?:global\.nc|shared|relaxed\.(?:gpu|sys)\.global)\.v\d", self._load_several),
            (r"ld\.shared\.f32", lambda place, _: self._load(place, _F32)),
            (
                r"st\.(?:shared|global|relaxed\.sys\.global)\.(?:v\d\.)?(?:b32|f32)",
                self._store_words,
            ),
            (r"ld\.global\.nc\.b64", lambda place, _: self._load(place, np.int64)),
            (r"trap", lambda _: self._fail()),
            # Words of other GPUs are there when a thread loads them.
            (r"\{\n\.reg \.pred late", lambda _, *rest: self._arrived(rest[:-1])),
            (r"bar\.(?:warp\.)?sync", lambda _: None),
            (r"mov\.u32 \$0, %tid\.x", lambda _: np.arange(self.count)),
            (r"ld\.global\.nc\.b32", lambda place, _: self._load(place, np.int32)),
            # Tiles are there when they are waited for, and copies take no time.
            (r"\s*\{|mbarrier\.|cp\.async\.mbarrier", lambda *_: None),
            (r"cp\.async\.cg", self._copy),
            (r"fma\.rn", lambda a, b, c, _: (_F64(a) * b + c).astype(_F32)),
            (r"ld\.global\.nc\.b16", lambda place, _: self._load(place, np.uint16)),
            (r"ld\.shared::cluster\.f32", lambda place, _: self._load(place, _F32)),
            (r"mapa", lambda place, block, _: place % _BLOCK + block * _BLOCK),
            (r"shfl\.sync\.bfly", self._shuffle),
            (r"rsqrt", lambda x, _: 1 / np.sqrt(x)),
            (r"ex2", lambda x, _: np.exp2(x)),
            (r"div\.approx", lambda a, b, _: a / b),
            (r"cvt\.f32\.f16", lambda x, _: x.astype(np.uint16).view(np.float16).astype(_F32)),
            (r"cvt\.rn\.(?:bf16|f16)x2", self._pack),
        ]

    def put(self, array: np.ndarray, *, rank: int = 0) -> Ref:
        """The array in memory."""
        self.used = -(-self.used // 1024) * 1024
        base = rank * _BLOCK + self.used
        self.memory[base : base + array.nbytes] = np.ravel(array).view(np.uint8)
        self.used += array.nbytes
        return Ref(base)

    def read(self, ref: Ref, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """What lies there."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[ref.base : ref.base + size].view(dtype).reshape(shape)

    def _bytes(self, place: Any, size: int) -> np.ndarray:
        """Indices of each thread's bytes, [threads, size]."""
        place = np.broadcast_to(np.asarray(place, np.int64), self.count)
        assert (place[self.mask] % size == 0).all(), "misaligned"
        return place[:, None] + np.arange(size)

    def _load(self, place: Any, dtype: Any, *, offset: int = 0) -> np.ndarray:
        at = self._bytes(np.asarray(place, np.int64) + offset, np.dtype(dtype).itemsize)
        return self.memory[np.where(self.mask[:, None], at, 0)].view(dtype)[:, 0]

    def _load_several(self, place: Any, text: str) -> list[np.ndarray]:
        count = int(re.findall(r"\.v(\d)", text)[0])
        self._bytes(place, 4 * count)
        kind = _F32 if "f32" in text else _I32
        return [self._load(place, kind, offset=4 * i) for i in range(count)]

    def _store_words(self, place: Any, *rest: Any) -> None:
        *words, _ = rest
        self._bytes(place, 4 * len(words))
        for i, word in enumerate(words):
            at = self._bytes(np.asarray(place, np.int64) + 4 * i, 4)[self.mask]
            kind = _F32 if np.asarray(word).dtype == _F32 else _I32
            found = np.broadcast_to(np.asarray(word, kind), self.count)[self.mask]
            self.memory[at] = np.ascontiguousarray(found)[:, None].view(np.uint8)

    def _copy(self, target: Any, source: Any, _: str) -> None:
        at, what = (self._bytes(place, 16)[self.mask] for place in (target, source))
        self.memory[at] = self.memory[what]

    def _shuffle(self, x: np.ndarray, text: str) -> np.ndarray:
        distance = int(re.findall(r"\$1, (\d+)", text)[0])
        return np.broadcast_to(x, self.count)[np.arange(self.count) ^ distance]

    def _pack(self, low: Any, high: Any, _: str) -> np.ndarray:
        halves = [np.asarray(x, _F32).astype(self.dtype).view(np.uint16) for x in (low, high)]
        return halves[0].astype(_I32) | halves[1].astype(_I32) << 16

    def _fail(self) -> None:
        assert not self.mask.any(), "the launch fails"

    def _arrived(self, words: tuple[Any, ...]) -> list[Any]:
        assert all((np.asarray(word, _I32) != _I32(2**32 - 1)).all() for word in words), "late"
        return list(words)

    def inline_asm(self, result: Any, operands: list[Any], text: str, *_: Any, **__: Any) -> Any:
        """One instruction."""
        del result
        offset = re.search(r"\[\$\d+\+(\d+)\]", text)
        if offset:
            at = len(operands) - 1 if text.startswith("ld") else 0
            operands = [
                np.asarray(x, np.int64) + int(offset[1]) if i == at else x
                for i, x in enumerate(operands)
            ]
        for pattern, run in self.asm:
            if re.match(pattern, text):
                return run(*operands, text)
        raise AssertionError(f"no stand-in for {text}")

    @contextlib.contextmanager
    def when(self, mask: np.ndarray) -> Iterator[None]:
        """Only these threads."""
        before = self.mask
        self.mask = before & np.asarray(mask, bool)
        yield
        self.mask = before

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """These threads in the place of MLIR."""

        def integer(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *xs: f(*(np.asarray(x, np.int64) for x in xs))

        def bitcast(_: Any, x: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(x).astype(_I32), self.count).copy().view(_F32)

        def unlike(a: Any, b: Any) -> np.ndarray:
            return np.asarray(a, np.int64).astype(_I32) != np.asarray(b, np.int64).astype(_I32)

        arith = types.SimpleNamespace(
            addi=integer(np.add), muli=integer(np.multiply), divui=integer(np.floor_divide),
            remui=integer(np.remainder), andi=integer(np.bitwise_and), xori=integer(np.bitwise_xor),
            shrui=integer(np.right_shift), shli=integer(np.left_shift), minui=integer(np.minimum),
            extui=lambda _, x: x, trunci=lambda _, x: np.asarray(x) & 0xFFFF, bitcast=bitcast,
            index_cast=lambda _, x: x, select=np.where, maxsi=integer(np.maximum),
            subi=integer(np.subtract), maxui=integer(np.maximum), maximumf=np.maximum,
            subf=lambda a, b: np.subtract(a, b, dtype=_F32),
            divf=lambda a, b: np.divide(a, b, dtype=_F32),
            cmpf=lambda predicate, a, b: predicate(a, b),
            CmpFPredicate=types.SimpleNamespace(OEQ=np.equal),
            addf=lambda a, b: np.add(a, b, dtype=_F32),
            mulf=lambda a, b: np.multiply(a, b, dtype=_F32),
            CmpIPredicate=types.SimpleNamespace(
                ult=np.less, eq=np.equal, sge=np.greater_equal, ne=unlike
            ),
            cmpi=lambda predicate, a, b: predicate(a, b),
        )  # fmt: skip
        llvm = types.SimpleNamespace(
            inline_asm=self.inline_asm,
            ptrtoint=lambda _, x: x,
            extractvalue=lambda _, x, at: x[at[0]],
            StructType=types.SimpleNamespace(get_literal=lambda _: None),
        )
        utils = types.SimpleNamespace(
            memref_ptr=lambda ref: ref.base,
            thread_idx=lambda: np.arange(self.count),
            cluster_idx=lambda: self.rank,
            when=self.when,
        )
        mgpu = types.SimpleNamespace(
            c=lambda x, _: _F32(x) if isinstance(x, float) else np.int64(x),
            warpgroup_barrier=lambda: None,
        )
        kind = types.SimpleNamespace(get=lambda: None, get_signless=lambda _: None)
        ir = types.SimpleNamespace(F32Type=kind, IntegerType=kind)
        places = {"arith": arith, "llvm": llvm, "mgpu_utils": utils, "mgpu": mgpu, "ir": ir}
        with pytest.MonkeyPatch.context() as patch:
            for module in _MODULES:
                for name, stand_in in places.items():
                    patch.setattr(module, name, stand_in, raising=False)
            yield


def bfloat16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers."""
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16)
