"""Short convolutions of one token of each row from inputs in slots, in place.

A warp computes a head of 128 channels, of which a thread has four: their sums of taps, SiLU, the
vector's length, and the inputs that the next token's sums read.

Dims: B batch, C channel of all convolutions, N heads, H head width, W tap, S slot.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.common import device
from pallas_kernels.hopper.launch import launch, references
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import (
    assembly,
    constant,
    from_lane_xor,
    fused,
    global_place,
    global_words,
    loaded,
    number,
    packed_pair,
    swiglu,
    thread,
    total,
    widened_pair,
)

_WIDTH, _TAPS = 128, 4
_FOUR = 4  # channels of a thread, in two words
_WORDS = 2
_BF16 = jnp.dtype(jnp.bfloat16)
_SIZE = 2  # bytes of a bf16


def unsupported(
    x_BC: jax.Array, weights: Sequence[jax.Array], tails: Sequence[jax.Array]
) -> str | None:
    """Returns why the kernel cannot compute this call; None if it can."""
    if reason := device.why_not_one_hopper():
        return reason
    kinds = {x.dtype.name for x in (x_BC, *weights, *tails)}
    if kinds != {"bfloat16"}:
        return f"arrays are {', '.join(sorted(kinds))}; the kernel's are bfloat16"
    if x_BC.shape[1] % _FOUR:
        return f"x has {x_BC.shape[1]} channels; the kernel needs a multiple of {_FOUR}"
    for heads, width, taps in (x.shape for x in weights):
        if (width, taps) != (_WIDTH, _TAPS) or heads % WARPS:
            return (
                f"a weight is {(heads, width, taps)}; the kernel has multiples of {WARPS} heads "
                f"of {_WIDTH} channels, and {_TAPS} taps"
            )
    return None


def convolutions(
    x_BC: jax.Array,
    weights: Sequence[jax.Array],
    tails: Sequence[jax.Array],
    *,
    lengths: Sequence[float | None],
    epsilon: float,
    read_B: jax.Array,
    written_B: jax.Array,
    counted_B: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes ``short_convolutions_in_slots``, for a call that ``unsupported`` accepts."""
    batch, first, parts = len(x_BC), 0, []
    for weight, length in zip(weights, lengths, strict=True):
        parts.append(_Part(first=first, heads=len(weight), length=length, epsilon=epsilon))
        first += len(weight)
    numbers = {"read": read_B, "written": written_B, "counted": counted_B}
    refs = references(list(tails))
    found = launch(
        functools.partial(_run, parts),
        name="short_convolutions_in_slots",
        operands={
            "x": x_BC,
            **{name: each.astype(jnp.int32) for name, each in numbers.items()},
            "weights": list(weights),
            "tails": refs,
        },
        results={"out": [jax.ShapeDtypeStruct((batch, *x.shape[:2]), x_BC.dtype) for x in weights]},
        scratch={},
        grid=(batch, first // WARPS),
        grid_names=("row", "heads"),
        num_threads=1,
    )
    return list(found["out"]), [jax.freeze(ref) for ref in refs]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A convolution of the call."""

    first: int  # head of all convolutions
    heads: int
    length: float | None
    epsilon: float

    @property
    def channels(self) -> int:
        return self.heads * _WIDTH

    def step(self, arrays: list[Any], numbers: list[Any]) -> None:
        """Computes four channels of a row.

        Args:
            arrays: x, weight, tails and the result.
            numbers: row, four of the call's heads, slots read and written, and whether it counts.
        """
        x, weight, tails, out = arrays
        row, four, read, written, counted = numbers
        warp, lane = (f(thread(), constant(LANES)) for f in (arith.divui, arith.remui))
        head = total((four, WARPS), warp, constant(-self.first))
        channel = total((head, _WIDTH), (lane, _FOUR))
        at = total((row, x.type.shape[1]), channel, constant(self.first * _WIDTH))
        newest = loaded("ld.global.nc.v2.b32", global_place(x, at, _SIZE), _WORDS, kind="l")
        taps = []
        for i in range(0, _FOUR * _TAPS // 2, 4):
            taps += global_words(weight, total((channel, _TAPS // 2), constant(i)), 4)
        size = constant((_TAPS - 1) * self.channels)
        places = [constant(i * self.channels) for i in range(_TAPS - 1)]

        def tail(slot: Any, place: Any) -> Any:
            at = total(arith.muli(slot, size), channel, place)
            return global_place(tails, at, _SIZE)

        seen = [loaded("ld.global.v2.b32", tail(read, x), _WORDS, kind="l") for x in places]
        seen.append(newest)
        is_counted = arith.cmpi(arith.CmpIPredicate.ne, counted, constant(0))
        y = [arith.select(is_counted, x, number(0.0)) for x in self.numbers(seen, taps)]
        words = [packed_pair(y[i : i + 2], _BF16) for i in (0, 2)]
        _store(global_place(out, total((row, self.channels), channel), _SIZE), words)
        is_kept = arith.cmpi(arith.CmpIPredicate.ult, written, constant(tails.type.shape[0]))
        with mgpu_utils.when(is_kept):
            for place, old, new in zip(places, seen[:-1], seen[1:], strict=True):
                pairs = zip(new, old, strict=True)
                _store(tail(written, place), [arith.select(is_counted, *pair) for pair in pairs])

    def numbers(self, seen: list[list[Any]], taps: list[Any]) -> list[Any]:
        """Computes a thread's channels: of inputs in words by age, and words of taps by channel."""
        inputs = [[x for word in words for x in widened_pair(word, _BF16)] for words in seen]
        weights = [x for word in taps for x in widened_pair(word, _BF16)]
        found = []
        for i in range(_FOUR):
            sum_ = number(0.0)
            for tap, values in enumerate(inputs):
                sum_ = fused(values[i], weights[_TAPS * i + tap], sum_)
            found.append(swiglu(sum_, number(1.0)))
        if self.length is None:
            return found
        squares = functools.reduce(lambda sum_, x: fused(x, x, sum_), found, number(0.0))
        distance = 1
        while distance < LANES:
            squares = arith.addf(squares, from_lane_xor(squares, distance))
            distance *= 2
        squares = arith.addf(squares, number(self.epsilon))
        f32 = ir.F32Type.get()
        scale = assembly(f32, [squares], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
        scale = arith.mulf(scale, number(self.length))
        return [arith.mulf(x, scale) for x in found]


def _run(parts: list[_Part], gmem, smem) -> None:
    """Runs one block: four heads of a row."""
    del smem
    row, four = (lax.axis_index(name) for name in ("row", "heads"))
    numbers = (row, four, *(getattr(gmem, n)[row] for n in ("read", "written", "counted")))
    refs, scalars = [plgpu.RefType()] * 4, [plgpu.Layout.WG_SPLAT(())] * len(numbers)
    for i, part in enumerate(parts):
        head = four * WARPS

        @pl.when((head >= part.first) & (head < part.first + part.heads))
        def _(i=i, part=part):
            @plgpu.inline_mgpu(arg_types=(*refs, *scalars))
            def step(_, *given):
                part.step(list(given[:4]), [x.registers.flat[0] for x in given[4:]])

            arrays = gmem.x, gmem.weights[i], gmem.tails[i], gmem.out[i]
            step(*arrays, *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), ()) for x in numbers))


def _store(place: Any, words: list[Any]) -> None:
    """Stores two words in global memory."""
    assembly(
        None, [place, *words], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r,~{memory}", pure=False
    )
