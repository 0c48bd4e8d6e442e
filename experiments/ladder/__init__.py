"""Matmul in steps, from one element a thread to what a Hopper GPU can do; docs/kernel-ladder.md.

To read, run and measure: models multiply through XLA.
"""

from .rungs import RUNGS as RUNGS
from .rungs import Rung as Rung
