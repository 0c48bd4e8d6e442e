"""A few tokens of each row from states in slots, which are read and written once, in place.

A block has 64 columns of a value head's state, all of them in registers: a thread has four columns
of a few neighboring keys. A token needs two sums over the keys, of the state that enters it:

    held = S' (decay k),   read = S' (decay q),   new = beta (v - held), or v without a beta,
    out = read + (q . k) new,   S <- decay S + k new',

and both are found at once: by shuffles within a warp, then in shared memory.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, S slot.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.common import device
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.launch import launch, references
from pallas_kernels.hopper.machine import LANES, WARPGROUP, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.thread_registers import ThreadRegisters
from pallas_kernels.hopper.threads import (
    Address,
    address,
    assembly,
    constant,
    from_lane_xor,
    fused,
    global_number,
    global_place,
    loaded,
    packed_pair,
    thread,
    total,
    widened_pair,
)

MOST_TOKENS = 16
"""Most tokens of a call: their arithmetic is still hidden behind the copies of the states."""

_COLUMNS = 64  # of a block
_FOUR = 4  # columns of a thread
_SIZE = 4  # bytes of an fp32
_BF16 = jnp.dtype(jnp.bfloat16)
_WIDTHS = (32, 64, 128, 256)  # of keys: a thread has a multiple of four of them


def unsupported(
    q_BTNH: jax.Array, v_BTMV: jax.Array, states_SMHV: jax.Array, rates_MH: jax.Array | None
) -> str | None:
    """Returns why the kernel cannot compute this call; None if it can."""
    if reason := device.why_not_one_hopper():
        return reason
    if rates_MH is not None:
        return "log_decay has rates; the kernel takes decays as they are"
    if q_BTNH.shape[1] > MOST_TOKENS:
        return f"{q_BTNH.shape[1]} tokens of a row; the kernel takes {MOST_TOKENS}"
    if states_SMHV.dtype not in (jnp.float32, jnp.bfloat16):
        return f"states are {states_SMHV.dtype}; the kernel's are float32 or bfloat16"
    if q_BTNH.shape[3] not in _WIDTHS or v_BTMV.shape[3] % _COLUMNS:
        return (
            f"heads of {q_BTNH.shape[3]} and {v_BTMV.shape[3]}; the kernel has keys of "
            f"{', '.join(map(str, _WIDTHS))} and values of multiples of {_COLUMNS}"
        )
    return None


def in_slots(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay: jax.Array,
    beta_BTM: jax.Array | None,
    states_SMHV: jax.Array,
    read_B: jax.Array,
    written_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``linear_attention_in_slots``, for a call that ``unsupported`` accepts."""
    batch, length, num_keys, width = q_BTNH.shape
    num_values, value_width = v_BTMV.shape[2:]
    kernel = _InSlots(
        num_keys=num_keys, num_values=num_values, width=width, value_width=value_width,
        length=length, has_beta=beta_BTM is not None, by_channel=log_decay.ndim == 4,
        is_bf16=v_BTMV.dtype == jnp.bfloat16,
        size=states_SMHV.dtype.itemsize,
    )  # fmt: skip
    operands = {"q": q_BTNH, "k": k_BTNH, "v": v_BTMV}
    if not kernel.is_bf16:
        operands = {name: x.astype(jnp.float32) for name, x in operands.items()}
    decay = jnp.exp(log_decay.astype(jnp.float32))
    beta = [] if beta_BTM is None else [beta_BTM.astype(jnp.float32).ravel()]
    # In one array, which XLA computes by one launch.
    operands["numbers"] = jnp.concatenate([decay.ravel(), *beta])
    slots = {"read": read_B} | ({} if written_B is None else {"written": written_B})
    (ref,) = references([states_SMHV])
    found = launch(
        kernel.run,
        name="linear_attention_in_slots",
        operands=operands
        | {name: x.astype(jnp.int32) for name, x in slots.items()}
        | {"states": ref},
        results={"out": jax.ShapeDtypeStruct(v_BTMV.shape, jnp.float32)},
        scratch={"sums": plgpu.SMEM((2, WARPS, kernel.numbers), jnp.float32)},
        grid=(batch, num_values, value_width // _COLUMNS),
        grid_names=("row", "head", "part"),
        num_threads=1,
    )
    return found["out"].astype(v_BTMV.dtype), jax.freeze(ref)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _InSlots:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    width: int
    value_width: int
    length: int
    has_beta: bool
    by_channel: bool
    is_bf16: bool  # q, k and v
    size: int  # bytes of a state's number: of fp32, or of bf16

    @property
    def keys(self) -> int:
        """Number of a thread's keys."""
        return self.width * _COLUMNS // _FOUR // WARPGROUP

    @property
    def numbers(self) -> int:
        """Size of a warp's sums: two per column, and that of q . k."""
        return 2 * _COLUMNS + _FOUR

    @property
    def state(self) -> ThreadRegisters:
        """A thread's part of the state."""
        return ThreadRegisters(count=self.keys * _FOUR, dtype=jnp.dtype(jnp.float32))

    def run(self, gmem, smem) -> None:
        """Runs one block: all tokens of a row, for 64 columns of a head."""
        b, m, part = (lax.axis_index(name) for name in ("row", "head", "part"))

        def tile(slot: Any) -> jax.Array:
            """Number of the tile of a slot's head."""
            return slot * self.num_values + m

        state = self.load(gmem.states, tile(gmem.read[b]), part)
        step = functools.partial(self.token, gmem, smem, b, m, part)
        if self.length == 1:
            state = step(jnp.int32(0), state)
        else:
            state = lax.fori_loop(0, self.length, step, state)
        if hasattr(gmem, "written"):
            slot = gmem.written[b]

            @pl.when(slot < gmem.states.shape[0])
            def _():
                self.store(state, gmem.states, tile(slot), part)

    def places(self, states: Any, tile: Any, part: Any) -> list[Any]:
        """Addresses of a thread's four columns of each of its keys."""
        group, column = self.group()
        start = global_place(states, tile, self.width * self.value_width * self.size)
        at = total((group, self.keys * self.value_width), (part, _COLUMNS), (column, _FOUR))
        first = global_place(Address(start), at, self.size)
        offsets = [constant(key * self.value_width) for key in range(self.keys)]
        return [global_place(Address(first), each, self.size) for each in offsets]

    def group(self) -> tuple[Any, Any]:
        """A thread's group of keys, and its place among the threads that share the columns."""
        lanes = constant(_COLUMNS // _FOUR)
        return arith.divui(thread(), lanes), arith.remui(thread(), lanes)

    def load(self, states, tile, part) -> jax.Array:
        """Loads a thread's part of a state."""

        count = self.size  # words of four numbers
        instruction = f"ld.global.L1::no_allocate.v{count}.b32"

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *_splats(2)), return_type=self.state.array)
        def read(_, states, *at):
            found = []
            for place in self.places(states, *map(_scalar, at)):
                for word in loaded(instruction, place, count, kind="l"):
                    found += [_as_number(word)] if count == _FOUR else widened_pair(word, _BF16)
            return self.state.wrap(found)

        return read(states, *map(_splat, (tile, part)))

    def store(self, state, states, tile, part) -> None:
        """Stores a thread's part of a state."""

        @plgpu.inline_mgpu(arg_types=(self.state.layout, plgpu.RefType(), *_splats(2)))
        def write(_, state, states, *at):
            numbers = self.state.registers(state)
            for i, place in enumerate(self.places(states, *map(_scalar, at))):
                store = _store_four if self.size == _SIZE else _store_halves
                store("st.global", place, numbers[_FOUR * i : _FOUR * (i + 1)])

        write(state, states, *map(_splat, (tile, part)))

    def token(self, gmem, smem, b, m, part, t, state) -> jax.Array:
        """Returns the state after a token, and writes the token's output."""
        names = ("q", "k", "v", "numbers", "out")
        refs = [getattr(gmem, name) for name in names]

        @plgpu.inline_mgpu(
            arg_types=(
                self.state.layout,
                plgpu.RefType(),
                *_splats(4),
                *[plgpu.RefType()] * len(refs),
            ),
            return_type=self.state.array,
        )
        def advance(_, state, sums, token, m, part, odd, *refs):
            given = dict(zip(names, refs, strict=True))
            at = tuple(map(_scalar, (token, m, part, odd)))
            return self.state.wrap(self.advanced(self.state.registers(state), sums, at, given))

        token = b * self.length + t
        at = map(_splat, (token, m, part, lax.rem(t, jnp.int32(2))))
        return advance(state, smem.sums, *at, *refs)

    def advanced(
        self, state: list[Any], sums: Any, at: tuple[Any, Any, Any, Any], given: dict[str, Any]
    ) -> list[Any]:
        """Computes a thread's part of the state after a token.

        Args:
            at: the token's number in the batch, the value head, the block's columns, and which of
                two buffers of ``sums`` to use.
        """
        token, m, part, odd = at
        group, column = self.group()
        head = total((token, self.num_values), m)
        n = arith.divui(m, constant(self.num_values // self.num_keys))
        key_head = total((token, self.num_keys), n)
        q, k = (self.of_keys(self.four, given[name], key_head, group) for name in "qk")
        first = total((part, _COLUMNS), (column, _FOUR))
        v = self.four(given["v"], total((head, self.value_width), first))
        if self.by_channel:
            decay = self.of_keys(_four, given["numbers"], head, group)
        else:
            decay = [_one(given["numbers"], head)] * self.keys
        columns = [state[i::_FOUR] for i in range(_FOUR)]
        decayed = [[_times(d, x) for d, x in zip(decay, xs, strict=True)] for xs in columns]
        found = [_dot(k, xs) for xs in decayed] + [_dot(q, xs) for xs in decayed] + [_dot(q, k)]
        *held_read, qk = self.summed(found, sums, odd)
        held, read = held_read[:_FOUR], held_read[_FOUR:]
        new = v
        if self.has_beta:
            heads = math.prod(given["out"].type.shape[:-1])
            num_decays = heads * (self.width if self.by_channel else 1)
            beta = _one(given["numbers"], total(head, constant(num_decays)))
            new = [_times(beta, arith.subf(x, y)) for x, y in zip(v, held, strict=True)]
        out = [fused(qk, x, y) for x, y in zip(new, read, strict=True)]
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, group, constant(0))):
            place = global_place(given["out"], total((head, self.value_width), first), _SIZE)
            _store_four("st.global", place, out)
        return [fused(k[i], new[c], decayed[c][i]) for i in range(self.keys) for c in range(_FOUR)]

    def of_keys(self, four: Callable, ref: Any, head: Any, group: Any) -> list[Any]:
        """Loads the numbers of a thread's keys, as ``four`` loads four of them."""
        first = total((head, self.width), (group, self.keys))
        return [x for i in range(0, self.keys, _FOUR) for x in four(ref, total(first, constant(i)))]

    def four(self, ref: Any, at: Any) -> list[Any]:
        """Loads four numbers of q, k or v, from number ``at`` on."""
        if not self.is_bf16:
            return _four(ref, at)
        words = loaded("ld.global.nc.v2.b32", global_place(ref, at, 2), 2, kind="l")
        return [x for word in words for x in widened_pair(word, _BF16)]

    def summed(self, found: list[Any], sums: Any, odd: Any) -> list[Any]:
        """Adds numbers of the threads that share columns."""
        lanes = _COLUMNS // _FOUR
        distance = lanes
        while distance < LANES:
            found = [arith.addf(x, from_lane_xor(x, distance)) for x in found]
            distance *= 2
        warp, lane = (f(thread(), constant(LANES)) for f in (arith.divui, arith.remui))
        _, column = self.group()
        size = self.numbers * _SIZE
        start = total(address(sums), (odd, WARPS * size))
        own = total(start, (warp, size), (column, _FOUR * _SIZE))
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, constant(lanes))):
            _store_four("st.shared", own, found[:_FOUR], kind="r")
            _store_four("st.shared", own, found[_FOUR:-1], kind="r", offset=_COLUMNS * _SIZE)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            end = total(start, (warp, size), constant(2 * _COLUMNS * _SIZE))
            assembly(None, [end, found[-1]], "st.shared.f32 [$0], $1;", "r,f,~{memory}", pure=False)
        meet_in_block(WARPGROUP)
        parts = []
        for w in range(WARPS):
            line = total(start, constant(w * size))
            mine = total(line, (column, _FOUR * _SIZE))
            words = [
                word
                for offset in (0, _COLUMNS * _SIZE)
                for word in loaded("ld.shared.v4.b32", mine, _FOUR, kind="r", offset=offset)
            ]
            words += loaded("ld.shared.v2.b32", line, 2, kind="r", offset=2 * _COLUMNS * _SIZE)[:1]
            parts.append([_as_number(x) for x in words])
        return [functools.reduce(arith.addf, each) for each in zip(*parts, strict=True)]


def _splats(count: int) -> list[Any]:
    """Argument types of scalars."""
    return [plgpu.Layout.WG_SPLAT(())] * count


def _splat(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), ())


def _scalar(x: Any) -> Any:
    return x.registers.flat[0]


def _as_number(word: Any) -> Any:
    return arith.bitcast(ir.F32Type.get(), word)


def _times(x: Any, y: Any) -> Any:
    return arith.mulf(x, y)


def _dot(xs: list[Any], ys: list[Any]) -> Any:
    """Sum of products of two lists of fp32 numbers."""
    pairs = list(zip(xs, ys, strict=True))
    return functools.reduce(lambda sum_, pair: fused(*pair, sum_), pairs[1:], _times(*pairs[0]))


def _four(ref: Any, at: Any) -> list[Any]:
    """Loads four numbers that the kernel does not write, from number ``at`` on."""
    place = global_place(ref, at, _SIZE)
    return [_as_number(x) for x in loaded("ld.global.nc.v4.b32", place, _FOUR, kind="l")]


def _one(ref: Any, at: Any) -> Any:
    return global_number(ref, at, 0, jnp.dtype(jnp.float32))


def _store_four(
    instruction: str, place: Any, numbers: list[Any], *, kind: str = "l", offset: int = 0
) -> None:
    """Stores four numbers; ``kind`` is that of the address, as in ``loaded``."""
    text = f"{instruction}.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};"
    assembly(None, [place, *numbers], text, f"{kind},f,f,f,f,~{{memory}}", pure=False)


def _store_halves(instruction: str, place: Any, numbers: list[Any]) -> None:
    """Stores four numbers as bf16, rounded to nearest."""
    words = [packed_pair(numbers[at : at + 2], _BF16) for at in (0, 2)]
    text = f"{instruction}.v2.b32 [$0], {{$1,$2}};"
    assembly(None, [place, *words], text, "l,r,r,~{memory}", pure=False)
