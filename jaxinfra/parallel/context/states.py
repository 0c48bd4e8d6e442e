"""Linear attention over a sequence in zig-zag order: states are passed along its chunks.

A chunk's effect on a state is linear: S becomes A S + C. Each device computes A and C of its two
chunks, all devices gather those of all, and combine them in the sequence's order to the state
before each chunk. With that state a chunk's outputs follow. So a layer's recurrence is computed two
times (three, for the delta rule, whose A is the state that zeros as values leave of the identity).

Bytes per device forward: 2 (P-1) chunks x (state + A) in fp32, with P devices, and for a short
convolution of W taps 2 (P-1) (W-1) inputs. The backward pass sends as many.

Dims: B batch, t tokens of a device, c = t/2 of a chunk, N key heads, M value heads, H key width, V
value width, J = 2P chunks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.errors import ConfigError
from jaxinfra.ops.linear_attention import linear_attention, short_convolution
from jaxinfra.parallel.collectives import all_gather, num_devices, rank
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import chunk_length, chunk_order

_AXIS = str(MeshAxis.CONTEXT)
_HEADS = (axes.BATCH, axes.SEQUENCE, axes.Q_HEADS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextRecurrence:
    """Linear attention and short convolutions whose sequence dim the context axis shards.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
    """

    placement: Placement

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T M V"],
        log_decay: Float[Array, "B T M *H"],
        *,
        beta: Float[Array, "B T M"] | None,
        rates: Float[Array, "M H"] | None,
        state: None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T M V"], Float[Array, "B M H V"]]:
        """Computes ``ops.linear_attention.linear_attention`` from a state of zeros.

        Raises ConfigError if the sequence does not cut into 2P chunks.
        """
        assert state is None, "caches are not sharded over the context axis"
        place = self.placement
        chunk_length(q.shape[1], place.mesh.shape[MeshAxis.CONTEXT])
        heads_spec, numbers_spec = place.spec((*_HEADS, None)), place.spec(_HEADS)
        # Channels with rates share one key, which each device of the tensor axis has.
        keys_spec = heads_spec if rates is None else place.spec((*_HEADS[:2], None, None))
        return place.on_each_device(
            _recurred,
            in_specs=(
                keys_spec,
                keys_spec,
                heads_spec,
                heads_spec if log_decay.ndim == 4 else numbers_spec,
                None if beta is None else numbers_spec,
                None if rates is None else place.spec((axes.Q_HEADS, None)),
                None if segment_ids is None else place.spec(_HEADS[:2]),
            ),
            out_specs=(heads_spec, place.spec((axes.BATCH, axes.Q_HEADS, None, None))),
            check_vma=False,  # as of attention: nothing is summed over a mesh axis
        )(q, k, v, log_decay, beta, rates, segment_ids)

    def convolve(
        self,
        x: Float[Array, "B T N H"],
        weight: Float[Array, "N H W"],
        *,
        tail: None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T N H"]:
        """Computes ``ops.linear_attention.short_convolution`` of whole sequences.

        Raises ConfigError if a chunk has fewer tokens than a tap reaches back.
        """
        assert tail is None, "caches are not sharded over the context axis"
        place, num_before = self.placement, weight.shape[-1] - 1
        chunk = chunk_length(x.shape[1], place.mesh.shape[MeshAxis.CONTEXT])
        if chunk < num_before:
            raise ConfigError(
                f"chunks of {chunk} tokens over the context axis, and a convolution that reads "
                f"{num_before} tokens back: longer sequences, or a smaller context axis"
            )
        spec = place.spec((*_HEADS, axes.HEAD))
        return place.on_each_device(
            _convolved,
            in_specs=(
                spec,
                place.spec((axes.Q_HEADS, axes.HEAD, None)),
                None if segment_ids is None else place.spec(_HEADS[:2]),
            ),
            out_specs=spec,
            check_vma=False,
        )(x, weight, segment_ids)


def _recurred(
    q_Bt: jax.Array,
    k_Bt: jax.Array,
    v_Bt: jax.Array,
    log_decay_Bt: jax.Array,
    beta_Bt: jax.Array | None,
    rates: jax.Array | None,
    ids_Bt: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of this device's two chunks, [B, t, M, V], and the state after all, [B, M, H, V]."""
    if ids_Bt is None:
        ids_Bt = jnp.zeros(q_Bt.shape[:2], jnp.int32)
    q, k, v, log_decay, ids = map(_as_batch, (q_Bt, k_Bt, v_Bt, log_decay_Bt, ids_Bt))
    beta = None if beta_Bt is None else _as_batch(beta_Bt)
    more: dict[str, Any] = {"beta": beta, "rates": rates, "segment_ids": ids}
    _, added = linear_attention(q, k, v, log_decay, **more)
    if beta is None:
        decay = log_decay if rates is None else log_decay[..., None] * rates[None, None]
        kept = jnp.exp(jnp.sum(decay, axis=1, dtype=added.dtype))
        kept = kept.reshape(*kept.shape, *[1] * (4 - kept.ndim))
        is_one = jnp.all(ids == ids[:, :1], axis=1)
        kept = jnp.where(jnp.expand_dims(is_one, (1, 2, 3)), kept, 0.0)
    else:
        width = k.shape[3]
        whole = jnp.broadcast_to(
            jnp.eye(width, dtype=added.dtype), (*added.shape[:2], width, width)
        )
        zeros = jnp.zeros((*v.shape[:3], width), v.dtype)
        _, kept = linear_attention(q, k, zeros, log_decay, state=whole, **more)
    every = _states(*map(_in_sequence, (kept, added, ids[:, 0], ids[:, -1])))
    out, _ = linear_attention(q, k, v, log_decay, state=_own(every[:-1]), **more)
    return _as_sequence(out), every[-1]


def _states(
    kept_JB: jax.Array, added_JB: jax.Array, first_JB: jax.Array, last_JB: jax.Array
) -> jax.Array:
    """The state before each chunk and after the last, [J + 1, B, M, H, V] in fp32.

    Args:
        kept_JB: what a chunk makes of the state before it: a matrix [H, H] of each head, or
            numbers [H, 1] or [1, 1].
        added_JB: the state after a chunk that began with zeros.
        first_JB, last_JB: the documents of a chunk's first and last token.
    """
    state, before = jnp.zeros_like(added_JB[0]), []
    for chunk in range(len(added_JB)):
        if chunk:
            goes_on = first_JB[chunk] == last_JB[chunk - 1]
            state = jnp.where(jnp.expand_dims(goes_on, (1, 2, 3)), state, 0.0)
        before.append(state)
        kept = kept_JB[chunk]
        is_matrix = kept.shape[-1] > 1
        old = jnp.matmul(kept, state, precision="highest") if is_matrix else kept * state
        state = old + added_JB[chunk]
    return jnp.stack([*before, state])


def _convolved(x_Bt: jax.Array, weight: jax.Array, ids_Bt: jax.Array | None) -> jax.Array:
    """The convolution of this device's two chunks with the inputs before each, [B, t, N, H]."""
    x, num_before = _as_batch(x_Bt), weight.shape[-1] - 1
    ids = None if ids_Bt is None else _as_batch(ids_Bt)
    tails = _before(x[:, x.shape[1] - num_before :])
    if ids is not None:
        goes_on = _before(ids[:, ids.shape[1] - num_before :]) == ids[:, :1]
        tails = jnp.where(jnp.expand_dims(goes_on, (2, 3)), tails, jnp.zeros_like(tails))
    return _as_sequence(short_convolution(x, weight, tail=tails, segment_ids=ids))


def _before(x: jax.Array) -> jax.Array:
    """Returns the arrays of the chunk before each of this device's two, [2B, ...]; or zeros."""
    every = _in_sequence(x)
    return _own(jnp.concatenate([jnp.zeros_like(every[:1]), every[:-1]]))


def _as_batch(x_Bt: jax.Array) -> jax.Array:
    """A device's two chunks as two batches, [2B, c, ...]."""
    return jnp.concatenate(jnp.split(x_Bt, 2, axis=1))


def _as_sequence(x: jax.Array) -> jax.Array:
    """The inverse of ``_as_batch``."""
    return jnp.concatenate(jnp.split(x, 2), axis=1)


def _in_sequence(x: jax.Array) -> jax.Array:
    """Gathers what all chunks have, [2B, ...] of a device, in the sequence's order: [J, B, ...]."""
    gathered = all_gather(x.reshape(2, -1, *x.shape[1:]), _AXIS)
    order = chunk_order(num_devices(_AXIS))
    return gathered[jnp.array([order.index(chunk) for chunk in range(len(order))])]


def _own(x_JB: jax.Array) -> jax.Array:
    """This device's two of all chunks, [2B, ...]."""
    first, last = rank(_AXIS), 2 * num_devices(_AXIS) - 1 - rank(_AXIS)
    return jnp.concatenate([x_JB[first], x_JB[last]])
