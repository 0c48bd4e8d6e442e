"""State spaces in spans of a row, side by side: the states between the spans come first.

Without the delta rule, a span of chunks adds to the state what its tokens write, whatever the state
that enters. So spans of a row can be rows of their own as soon as their first states are known.
These come from a kernel that computes only what each span adds, and from the spans' decays.

Dims: B batch, S span of a row, R span of any row, T position, M value heads, H key width, V value
width.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu

from .chunks import COLUMNS, ChunkKernel, ChunkStep, keys_of
from .gates import CHUNK, Gate

_WIDTH = 2 * COLUMNS  # value columns of a block
_LEAST_CHUNKS = 4  # of a span: its own pass over keys and values should pay


def num_spans(batch: int, length: int, num_values: int, value_width: int) -> int:
    """Number of equal spans of a row, of whole chunks, that fill the processors."""
    if value_width % _WIDTH:
        return 1  # a block has 64 columns then, which do not pay for the pass
    blocks, chunks = batch * num_values * value_width // _WIDTH, -(-length // CHUNK)
    most = min(NUM_PROCESSORS // blocks, chunks // _LEAST_CHUNKS)
    return next((n for n in range(most, 1, -1) if chunks % n == 0), 1)


def cut(x: jax.Array, spans: int) -> jax.Array:
    """Reshapes [B, T, ...] to the spans, [R, T / S, ...]."""
    return x.reshape(len(x) * spans, -1, *x.shape[2:])


def cut_documents(document_BT: jax.Array, spans: int) -> jax.Array:
    """Numbers the documents of each span from 0 on, which goes on from the span's first state."""
    document_RT = cut(document_BT, spans)
    before_BS = document_RT[:, -1].reshape(-1, spans)[:, :-1]
    return document_RT - jnp.pad(before_BS, ((0, 0), (1, 0))).reshape(-1, 1)


def starts(operands: dict[str, jax.Array], state_BMVH: jax.Array) -> jax.Array:
    """Computes the states that enter the spans, fp32 [R, M, V, H], from those of the rows."""
    given = {name: operands[name] for name in ("k", "values", "gates")}
    return _added_to(_Written, given, state_BMVH)


def reversed_starts(operands: dict[str, jax.Array], d_state_BMVH: jax.Array) -> jax.Array:
    """Computes the cotangents of the states that leave the spans, [R, M, V, H]."""
    given = {"k": operands["q"], "values": operands["values"], "gates": operands["gates"]}
    return _added_to(_Read, given, d_state_BMVH)


def _added_to(
    kernel: type["_Added"], given: dict[str, jax.Array], state_BMVH: jax.Array
) -> jax.Array:
    spans = len(given["gates"]) // len(state_BMVH)
    added = kernel.run(given, spans=spans)["end"]
    return joined(added, given["gates"], state_BMVH, is_reversed=kernel.is_reversed)


def joined(
    added: jax.Array, gates: jax.Array, state_BMVH: jax.Array, *, is_reversed: bool = False
) -> jax.Array:
    """Goes from span to span with the state of each row: states before the spans, [R, M, V, H].

    Args:
        added: what each span but the last adds to the state, decayed to its end.
        gates: of ``gates.gates``, of all spans.
        is_reversed: from the last span to the first.
    """
    batch, order = len(state_BMVH), slice(None, None, -1 if is_reversed else 1)
    decay = jnp.prod(gates[:, :, :, Gate.ENTERED, -1], axis=2)[..., None, None]
    added, decay = (x.reshape(batch, -1, *x.shape[1:])[:, order] for x in (added, decay))
    found = [state_BMVH]
    for s in range(added.shape[1]):
        found.append(decay[:, s] * found[-1] + added[:, s])
    return jnp.stack(found[order], axis=1).reshape(-1, *state_BMVH.shape[1:])


class _Added(ChunkKernel):
    """The kernel of what a span's tokens add to the state."""

    has_weights: ClassVar[bool] = False
    gate: ClassVar[Gate]

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *carry):
        values = self.values_of(smem, at).astype(jnp.float32)
        values = self.by_column(smem, at, values, self.gate).astype(self.dtype)

        def add(acc):
            plgpu.wgmma(acc, values, keys_of(smem, at.slot))

        state = pl.run_state(add)(plgpu.ACC.init(self.decayed(smem, at, state)))
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        return (state,)


class _Written(_Added):
    """The kernel of states."""

    name: ClassVar[str] = "space_written"
    gate: ClassVar[Gate] = Gate.WRITTEN


class _Read(_Added):
    """The kernel of their cotangents, which queries read."""

    name: ClassVar[str] = "space_read"
    gate: ClassVar[Gate] = Gate.ENTERED
    is_reversed: ClassVar[bool] = True
