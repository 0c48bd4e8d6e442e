"""Programs that move pages and states on the device, and to and from the host's memory.

Dims: N page or slot, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfra.serving.engine.programs import DeviceState, Pools

PAGES_AT_ONCE = 8
"""Number of pages that one copy, save or restore call moves."""

type MovedPages = tuple[Pools, Pools]
"""Pages of the model's and the draft model's pools, [L, N, size, ...] each."""

type Moved[Leaf] = tuple[tuple[dict[str, Leaf], ...], tuple[dict[str, Leaf], ...]]
"""Contents of ``MovedPages`` with other leaves, such as NumPy arrays or shapes."""


def copy_pages(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """Returns the state with pages copied, all read before any write; ignores pages beyond the
    last.
    """
    return write_pages(state, to_N, read_pages(state, from_N))


def copy_states(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """Returns the state with layers' states copied between slots."""
    states = jax.tree.map(lambda stored: stored.at[:, to_N].set(stored[:, from_N]), state.states)
    return dataclasses.replace(state, states=states)


def read_pages(state: DeviceState, from_N: Int[Array, "N"]) -> MovedPages:
    """Returns the contents of these pages; a number beyond the last page reads the last one."""

    def read(stored: jax.Array) -> jax.Array:
        return stored[:, jnp.minimum(from_N, stored.shape[1] - 1)]

    return jax.tree.map(read, (state.pools, state.draft_pools))


def write_pages(state: DeviceState, to_N: Int[Array, "N"], pages: MovedPages) -> DeviceState:
    """Returns the state with contents written to these pages; pages beyond the last are ignored."""

    def written(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[:, to_N].set(new, mode="drop")

    pools, draft_pools = jax.tree.map(written, (state.pools, state.draft_pools), pages)
    return dataclasses.replace(state, pools=pools, draft_pools=draft_pools)


def moved_shapes(state: DeviceState) -> Moved[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the page contents that one save or restore call moves."""
    pages = jax.ShapeDtypeStruct((PAGES_AT_ONCE,), np.int32)
    return jax.eval_shape(read_pages, state, pages)


def read_states(state: DeviceState, from_N: Int[Array, "N"]) -> Pools:
    """Returns the contents of these slots of states, [L, N, ...] each."""
    return jax.tree.map(lambda stored: stored[:, from_N], state.states)


def write_states(state: DeviceState, to_N: Int[Array, "N"], states: Pools) -> DeviceState:
    """Returns the state with contents written to these slots of states."""
    written = jax.tree.map(lambda x, new: x.at[:, to_N].set(new), state.states, states)
    return dataclasses.replace(state, states=written)


def moved_state_shapes(state: DeviceState) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
    """Returns shapes and dtypes of the one slot of states that a call moves."""
    return jax.eval_shape(read_states, state, jax.ShapeDtypeStruct((1,), np.int32))
