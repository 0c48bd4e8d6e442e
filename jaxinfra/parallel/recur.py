"""Linear attention on a mesh whose devices have whole sequences.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.ops.linear_attention import linear_attention
from jaxinfra.parallel.place import Placement

_HEADS = (axes.BATCH, None, axes.Q_HEADS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedRecurrence:
    """Linear attention on a mesh: each device computes its own rows and heads, as for attention."""

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
        state: Float[Array, "B M H V"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T M V"], Float[Array, "B M H V"]]:
        """Computes ``ops.linear_attention.linear_attention``; results are sharded as v."""
        place = self.placement
        heads_spec, numbers_spec = place.spec((*_HEADS, None)), place.spec(_HEADS)
        state_spec = place.spec((axes.BATCH, axes.Q_HEADS, None, None))

        # Channels with rates share one key, which each device has.
        keys_spec = heads_spec if rates is None else place.spec((axes.BATCH, None, None, None))

        def local(q, k, v, log_decay, beta, rates, state, ids) -> tuple[jax.Array, jax.Array]:
            more = {"beta": beta, "rates": rates, "state": state, "segment_ids": ids}
            return linear_attention(q, k, v, log_decay, **more)

        return place.on_each_device(
            local,
            in_specs=(
                keys_spec,
                keys_spec,
                heads_spec,
                heads_spec if log_decay.ndim == 4 else numbers_spec,
                None if beta is None else numbers_spec,
                None if rates is None else place.spec((axes.Q_HEADS, None)),
                None if state is None else state_spec,
                None if segment_ids is None else place.spec((axes.BATCH, None)),
            ),
            out_specs=(heads_spec, state_spec),
            check_vma=False,  # as of attention: nothing is summed over a mesh axis
        )(q, k, v, log_decay, beta, rates, state, segment_ids)

    def in_slots(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T M V"],
        log_decay: Float[Array, "B T M *H"],
        *,
        beta: Float[Array, "B T M"] | None,
        rates: Float[Array, "M H"] | None,
        states: Float[Array, "S M H V"],
        read: Int[Array, "B"],
        written: Int[Array, "B"] | None,
    ) -> tuple[Float[Array, "B T M V"], Float[Array, "S M H V"]]:
        """Computes ``ops.linear_attention.linear_attention_in_slots`` by copies of the states."""
        given = {"beta": beta, "rates": rates, "state": states[read], "segment_ids": None}
        out, state = self(q, k, v, log_decay, **given)
        return out, states if written is None else states.at[written].set(state, mode="drop")
