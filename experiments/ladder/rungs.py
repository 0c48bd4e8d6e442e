"""The rungs in order: what each adds to the one before."""

import dataclasses
from collections.abc import Callable

import jax

from . import specialized, tensor_cores, threads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to multiply bf16 [M, K] by [K, N]."""

    matmul: Callable[[jax.Array, jax.Array], jax.Array]
    adds: str
    tensor_cores: bool = True

    @property
    def name(self) -> str:
        """Name of the rung in tables."""
        return self.matmul.__name__


RUNGS = (
    Rung(
        matmul=threads.naive, adds="one element a thread, warps down a column", tensor_cores=False
    ),
    Rung(matmul=threads.coalesced, adds="warps along a row", tensor_cores=False),
    Rung(matmul=threads.shared, adds="tiles in shared memory", tensor_cores=False),
    Rung(matmul=threads.registers, adds="8 x 8 elements a thread", tensor_cores=False),
    Rung(matmul=threads.prefetched, adds="tiles loaded a step ahead", tensor_cores=False),
    Rung(matmul=tensor_cores.tensor_core, adds="tensor cores, tiles by the copy engine"),
    Rung(matmul=tensor_cores.pipelined, adds="four tiles on their way"),
    Rung(matmul=specialized.specialized, adds="a warpgroup copies, two multiply; 128 x 256 tiles"),
    Rung(matmul=specialized.persistent, adds="persistent blocks, tiles in an order for L2"),
    Rung(matmul=specialized.clustered, adds="pairs of blocks share tiles of B"),
)
