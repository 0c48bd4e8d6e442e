"""Runs on a CPU the instructions that a kernel's threads are given: MLIR and PTX without loops.

A warpgroup's 128 threads go in step, each operation on an array of 128 numbers. Operations are
those that kernels of ours write; another one is a KeyError.
"""

import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

THREADS, WARPS, LANES = 128, 4, 32
_DTYPES = {"i1": np.bool_, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64, "f32": np.float32}


class Memory:
    """Bytes of shared and of global memory, each from address 0 on."""

    def __init__(self, shared: int, out: int = 0):
        self.shared, self.out = np.zeros(shared, np.uint8), np.zeros(out, np.uint8)
        self.active = np.ones(THREADS, np.bool_)  # threads whose condition holds

    def load(self, address: np.ndarray, dtype) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        address = np.where(self.active, address, 0).astype(address.dtype)
        assert not np.any(address % size), "aligned"
        places = address.astype(np.int64)[:, None] + np.arange(size)
        return self.shared[places].view(dtype)[:, 0]

    def store(self, memory: np.ndarray, address: np.ndarray, x: np.ndarray) -> None:
        size, address, x = x.dtype.itemsize, address[self.active], x[self.active]
        places = address.astype(np.int64)[:, None] + np.arange(size)
        memory[places] = x[:, None].view(np.uint8).reshape(len(x), size)


def run(emit: Callable, arguments: list[np.ndarray], memory: Memory) -> list[list[np.ndarray]]:
    """What ``emit`` returns lists of, given its arguments as values of 128 threads."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        kinds = [_kind(x) for x in arguments]
        with ir.InsertionPoint(module.body):
            block = func.FuncOp("body", (kinds, [])).add_entry_block()
            with ir.InsertionPoint(block):
                lists = emit(*block.arguments)
        known = dict(zip(block.arguments, arguments, strict=True))
        with np.errstate(all="ignore"):
            _run_block(block, known, memory)
        return [[known[x] for x in each] for each in lists or ()]


def _run_block(block: ir.Block, known: dict, memory: Memory) -> None:
    for op in block.operations:
        given = [known[x] for x in op.operation.operands]
        if op.operation.name == "scf.if":
            before = memory.active
            memory.active = before & given[0].astype(np.bool_)
            _run_block(op.operation.regions[0].blocks[0], known, memory)
            memory.active = before
        elif op.operation.name != "scf.yield":
            results = _execute(op.operation, given, memory)
            known.update(zip(op.operation.results, results, strict=True))


def _kind(x: np.ndarray) -> ir.Type:
    if x.dtype == np.float32:
        return ir.F32Type.get()
    return ir.IntegerType.get_signless(8 * x.dtype.itemsize)


def _execute(op: ir.Operation, given: list, memory: Memory) -> list:
    match op.name:
        case "arith.constant":
            kind, value = op.results[0].type, op.attributes["value"].value
            bits = None if str(kind) == "f32" else 2 ** ir.IntegerType(kind).width
            dtype = _DTYPES[str(kind)]
            return [np.full(THREADS, value if bits is None else value % bits, dtype)]
        case "arith.extui" | "arith.trunci":
            return [given[0].astype(_DTYPES[str(op.results[0].type)])]
        case "arith.bitcast":
            return [given[0].view(_DTYPES[str(op.results[0].type)])]
        case "arith.cmpi":
            a, b = (x.view(np.int32) if x.dtype == np.uint32 else x for x in given)
            predicates = {2: np.less, 5: np.greater_equal, 6: np.less}
            return [predicates[op.attributes["predicate"].value](a, b)]
        case "arith.cmpf":
            assert op.attributes["predicate"].value == 1, "ordered and equal"
            return [given[0] == given[1]]
        case "arith.select":
            return [np.where(*given)]
        case "llvm.extractvalue":
            return [given[0][next(iter(op.attributes["position"]))]]
        case "llvm.inline_asm":
            return _assembly(op, given, memory)
    return [_ARITHMETIC[op.name](*given)]


_ARITHMETIC = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.shrui": np.right_shift, "arith.shli": np.left_shift,
    "arith.divui": np.floor_divide, "arith.remui": np.remainder,
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply,
}  # fmt: skip


def _assembly(op: ir.Operation, given: list, memory: Memory) -> list:
    text = op.attributes["asm_string"].value
    name = text.split()[0]
    numbers = [int(x, 0) for x in re.findall(r"(?<![\w$.])(0x[0-9a-fA-F]+|\d+)", text)]
    if name.startswith("ld.shared"):
        at = given[0] + np.uint32(numbers[-1])
        if match := re.match(r"ld.shared.v(\d)", name):
            count = int(match[1])
            assert not np.any(at % (4 * count)), "aligned"
            return [[memory.load(at + np.uint32(4 * i), np.uint32) for i in range(count)]]
        kinds = {"b16": np.uint16, "b32": np.uint32, "f32": np.float32}
        return [memory.load(at, kinds[name.split(".")[-1]])]
    if name.startswith("ldmatrix"):
        return [_matrices(given[0] + np.uint32(numbers[-1]), memory)]
    if name == "st.shared.f32":
        memory.store(memory.shared, given[0] + np.uint32(numbers[0]), given[1])
        return []
    if name == "st.global.f32":
        memory.store(memory.out, given[0], given[1])
        return []
    if name.startswith("mma.sync"):
        return [_mma(given[:4], given[4:6], given[6:])]
    if name.startswith("shfl.sync.bfly"):
        return [given[0][np.arange(THREADS) ^ numbers[0]]]
    if name == "prmt.b32":
        return [_permuted(given, numbers)]
    if name == "lop3.b32":
        mask, added, table = numbers
        assert table == 0xEA, "(a and b) or c"
        return [given[0] & np.uint32(mask) | np.uint32(added)]
    return [_FUNCTIONS[name](*given)]


def _permuted(given: list, numbers: list[int]) -> np.ndarray:
    """Four bytes of two registers, the second of which may be a constant."""
    *constant, selection = numbers
    second = np.full(THREADS, constant[0], np.uint32) if constant else given[1]
    both = np.stack([given[0], second], 1).view(np.uint8)
    chosen = [selection >> 4 * i & 7 for i in range(4)]
    return np.ascontiguousarray(both[:, chosen]).view(np.uint32)[:, 0]


def _halves(x: np.ndarray) -> np.ndarray:
    """Two bfloat16 of each register, fp32."""
    return x[:, None].view(jnp.bfloat16).astype(np.float32)


def _joined(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs.astype(jnp.bfloat16)).view(np.uint32)[:, 0]


def _fragment(register: np.ndarray) -> np.ndarray:
    """8 by 8 numbers of each warp: lane 4 g + t has columns 2 t and 2 t + 1 of row g."""
    return _halves(register).reshape(WARPS, 8, 8)


def _mma(a: list, b: list, c: list) -> list[np.ndarray]:
    left = np.block([[_fragment(a[0]), _fragment(a[2])], [_fragment(a[1]), _fragment(a[3])]])
    right = np.concatenate([_fragment(x) for x in b], axis=2)
    product = np.einsum("wmk,wnk->wmn", left.astype(np.float64), right.astype(np.float64))
    found = []
    for i, before in enumerate(c):
        rows = product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2]
        found.append((rows.reshape(THREADS) + before).astype(np.float32))
    return found


def _matrices(places: np.ndarray, memory: Memory) -> list[np.ndarray]:
    """Four matrices of 8 by 8, as ``_fragment`` has one; 8 lanes say where the rows of each are."""
    assert not np.any(places % 16), "aligned"
    lane = np.arange(THREADS) % LANES
    first = np.arange(THREADS) - lane
    rows = (places[first + 8 * i + lane // 4] for i in range(4))
    return [
        memory.load(row + np.uint32(4) * (lane % 4).astype(np.uint32), np.uint32) for row in rows
    ]


def _turned(register: np.ndarray) -> np.ndarray:
    return _joined(_fragment(register).transpose(0, 2, 1).reshape(THREADS, 2))


_FUNCTIONS: dict[str, Callable] = {
    "sub.bf16x2": lambda a, b: _joined(_halves(a) - _halves(b)),
    "mul.bf16x2": lambda a, b: _joined(_halves(a) * _halves(b)),
    "max.f32": np.fmax,
    "add.f32": np.add,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.ftz.f32": np.log2,
    "rcp.approx.ftz.f32": np.reciprocal,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda low, high: _joined(np.stack([low, high], 1)),
    "movmatrix.sync.aligned.m8n8.trans.b16": _turned,
}
