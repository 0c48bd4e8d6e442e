"""How many tokens a chunk takes: one formula for the loss and for whoever plans its memory."""

from typing import NamedTuple

from .hopper import ROW_TILE

# fp32 logits of one chunk. On accelerators large enough for matmuls at full rate and small beside a
# model's weights; on a CPU small enough for its caches (4096 tokens x 4096 ids, gradient of both
# inputs: 2 MiB chunks took a quarter of the time of one chunk).
_XLA_BYTES = {"cpu": 2**21}
_XLA_ACCELERATOR_BYTES = 2**30
# bf16 exponentials. With the table in bf16, 16,384 tokens of 128,256 ids stay under 1 GiB.
_HOPPER_BYTES = 470 * 2**20

HOPPER_LEAST_IDS = 100_000
"""Vocabularies, or a device's part of one, from which "auto" takes the Hopper form: 1.18 times as
fast at 128,256 ids, width 2048 and 16,384 tokens
(experiments/results/linear-cross-entropy-h200.json); not measured below."""


class Chunks(NamedTuple):
    """Of the positions of a row, or of all of a device's tokens as one row."""

    length: int  # positions of one; the last, or the first, may have fewer
    count: int


def xla_chunks(
    *, rows: int, length: int, num_ids: int, platform: str, chunk_bytes: int | None = None
) -> Chunks:
    """The fewest chunks of ``rows`` rows' fp32 logits that fit the bound, of even length.

    Args:
        num_ids: of the whole vocabulary, over however many devices it is spread.
        platform: "cpu", or an accelerator's.
        chunk_bytes: in place of the bound.
    """
    chunk_bytes = chunk_bytes or _XLA_BYTES.get(platform, _XLA_ACCELERATOR_BYTES)
    wanted = min(max(-(-rows * length * num_ids * 4 // chunk_bytes), 1), length)
    size = -(-length // wanted)
    return Chunks(size, -(-length // size))


def hopper_chunks(*, tokens: int, num_ids: int, chunk_bytes: int | None = None) -> Chunks:
    """As many tokens' bf16 exponentials as fit the bound, in whole tiles where a tile fits.

    Args:
        num_ids: rows of the device's own table.
    """
    most = max((chunk_bytes or _HOPPER_BYTES) // (2 * num_ids), 1)
    if most > ROW_TILE:
        most -= most % ROW_TILE
    size = min(most, tokens)
    return Chunks(size, -(-tokens // size))
