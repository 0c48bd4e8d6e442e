"""One collective of the compiled step, and what of a run decides which there are."""

import dataclasses
import math

from jaxinfra.ops.cross_entropy import xla_chunks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective of the program."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    times: int
    reason: str

    @property
    def num_bytes(self) -> int:
        """Of its results, all executions together."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype] * self.times


_ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What of a run decides its communication."""

    rows: int  # sequences of a micro-batch over all devices
    length: int
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 3
    accumulation: int = 1
    recomputes: bool = False  # any form of remat: norms are gathered again in the backward pass
    recomputes_outputs: bool = False  # projections too: remat named or full
    recomputes_attention: bool = False  # its output too: remat full

    @property
    def local_rows(self) -> int:
        """B."""
        return self.rows // (self.replica * self.fsdp)

    def loss_chunks(self, vocab: int) -> tuple[int, int]:
        """Chunks of positions that the loss runs in on a CPU, and positions of each."""
        chunks = xla_chunks(
            rows=self.local_rows,
            length=self.length // self.context,
            num_ids=vocab,
            platform="cpu",
        )
        return chunks.count, chunks.length

    @property
    def gradient_last(self) -> tuple[int, ...]:
        """Sizes of the axes that are summed once, where gradients are whole (``summed_last``)."""
        scattered = self.fsdp > 1 and self.zero == 1
        over = [self.replica] if self.replica > 1 else []
        over += [self.fsdp] if scattered else []
        return tuple(over) if self.accumulation > 1 or scattered else ()

    @property
    def last_replica(self) -> bool:
        """Whether the replica axis is summed after the last micro-batch."""
        return self.replica > 1 and bool(self.gradient_last)
