"""Which rows the teams of a ``flat`` kernel take, so that columns keep their places in registers.

Row r begins (r columns) elements behind a multiple of a unit's elements, modulo these. That repeats
after a period of 1, 2, 4 or 8 rows, so rows that are a multiple of the period apart have one shift.
"""

import dataclasses
import math

import jax
from jax import lax

from pallas_kernels.hopper.machine import WARPS

from .config import Flat
from .formula import RowCall


def unit_of(c: Flat, call: RowCall) -> int:
    """Elements that rows begin behind a multiple of: a word's, or fewer for a shorter period.

    What belongs to columns then has the same shift in all of a team's rows.
    """
    word = 16 // call.itemsize
    matters = call.has_columns and call.columns % word > 0 and not c.by_warps
    return c.vector if matters else word


def period_of(c: Flat, call: RowCall) -> int:
    """Rows after which shifts repeat; 1 where they do not matter."""
    unit = unit_of(c, call)
    return unit // math.gcd(call.columns, unit) if call.has_columns else 1


def reach_of(c: Flat, call: RowCall) -> int:
    """Elements from the first unit of a row to its end, at most."""
    unit = unit_of(c, call)
    return call.columns + unit - math.gcd(call.columns, unit)


def in_periods(clusters: int, period: int) -> int:
    """Of so many clusters those that work where a team has several rows: a period's or more."""
    return max(1, clusters // period) * period


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What teams take is a stride apart: turns of one row, or of one for each warp."""

    config: Flat
    num_rows: int
    period: int

    @property
    def num_turns(self) -> int:
        """Turns that have a row. A turn's rows are a period apart."""
        if not self.config.by_warps:
            return self.num_rows
        rounds, left = divmod(self.num_rows, WARPS * self.period)
        return rounds * self.period + min(left, self.period)

    @property
    def num_workers(self) -> int:
        """Clusters. All rows of one have one shift; a team may have no row."""
        c, turns = self.config, self.num_turns
        if c.most_turns:
            most = -(-turns // (c.teams * c.most_turns))
            return min(turns, -(-most // self.period) * self.period)
        most = min(c.num_clusters, -(-turns // c.teams))
        if turns <= most:  # none has a second row
            return turns
        return min(turns, in_periods(most, self.period))

    @property
    def stride(self) -> int:
        """Turns from one of a team's to its next."""
        return self.num_workers * self.config.teams

    def row(self, turn: jax.Array) -> jax.Array:
        """A turn's row, or its first warp's."""
        if not self.config.by_warps:
            return turn
        rounds, phase = lax.div(turn, self.period), lax.rem(turn, self.period)
        return rounds * (WARPS * self.period) + phase
