"""Columns of a product that several blocks have parts of, as one thread reads them."""

import dataclasses
import functools
from typing import Any

from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith
from pallas_kernels.hopper.threads import constant, global_place, loaded, total

from .config import Share

QUAD = 4
"""Neighboring numbers that a thread takes at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Of an earlier product of this launch."""

    share: Share

    def asked(self, parts, column) -> list[list[Any]]:
        """Every part of columns ``column`` to ``column + 3``, of a multiple of four."""
        return [
            asked_quad(parts, total(column, constant(part * self.share.N)))
            for part in range(self.share.parts)
        ]


def added(quads: list[list[Any]]) -> list[Any]:
    """Sums of quads, in their order."""
    return functools.reduce(
        lambda xs, ys: [arith.addf(x, y) for x, y in zip(xs, ys, strict=True)], quads
    )


def asked_quad(ref, at) -> list[Any]:
    """Four fp32 numbers, from number ``at`` on, of an array that blocks write."""
    words = loaded("ld.relaxed.gpu.global.v4.b32", global_place(ref, at, 4), QUAD, kind="l")
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]
