"""Columns of a product that several blocks have parts of, as one thread reads them."""

import dataclasses
from typing import Any

from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith
from pallas_kernels.hopper.threads import constant, global_place, loaded, number, total

from .config import WIDTH, Share
from .per_thread import below

QUAD = 4
"""Neighboring numbers that a thread takes at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Of an earlier product of this launch."""

    share: Share

    def asked(self, parts, column) -> list[list[Any]]:
        """Every part of columns ``column`` to ``column + 3``, of a multiple of four."""
        return [
            loaded(
                "ld.relaxed.gpu.global.v4.b32",
                global_place(parts, total(column, constant(part * self.share.N)), 4),
                QUAD,
                kind="l",
            )
            for part in range(self.share.parts)
        ]

    def added(self, asked: list[list[Any]], column) -> list[Any]:
        """Their sums, in the order of blocks; where there are fewer, memory holds nothing."""
        tile = arith.divui(column, constant(WIDTH))
        count = arith.subi(
            total(_last_block(tile, self.share), constant(1)), first_block(tile, self.share)
        )
        sums = [number(0.0)] * QUAD
        for part, words in enumerate(asked):
            there = below(constant(part), count)
            for i, word in enumerate(words):
                found = arith.bitcast(ir.F32Type.get(), word)
                sums[i] = arith.addf(sums[i], arith.select(there, found, number(0.0)))
        return sums


def first_block(column, share: Share) -> Any:
    """``Share.first_block`` of a number in a register."""
    last = total((column, share.down * share.blocks), constant(share.blocks - 1))
    return arith.divui(last, constant(share.line))


def _last_block(column, share: Share) -> Any:
    last = total((column, share.down * share.blocks), constant(share.down * share.blocks - 1))
    return arith.divui(last, constant(share.line))
