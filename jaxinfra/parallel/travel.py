"""Rows that travel between devices and come back: in equal buffers, or as many as there are.

In two levels they travel between devices of one number in their nodes, then within a node.

Dims: N token of a device, J copy of a token that may travel, S row that is sent, R row that is
received, C row of one pair's buffer, D device.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfra.ops.experts import sorted_copies
from jaxinfra.parallel.collectives import Groups, all_to_all, rank


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The devices that rows travel between: all along some mesh axes, or those of a group."""

    axis: tuple[str, ...]
    groups: Groups | None = None

    @property
    def rank(self) -> jax.Array:
        """This device's number among them."""
        me = rank(self.axis)
        if self.groups is None:
            return me
        number = np.argsort(np.concatenate(self.groups)) % len(self.groups[0])
        return jnp.asarray(number, jnp.int32)[me]


def peers_of(axis: tuple[str, ...], *, num_devices: int, num_nodes: int) -> tuple[Peers, ...]:
    """The peers of each level: across nodes, then within them; of one node, all in one level.

    A node is a run of neighbours along these axes.
    """
    if num_nodes == 1:
        return (Peers(axis=axis),)
    within = np.arange(num_devices).reshape(num_nodes, -1)
    return tuple(
        Peers(axis=axis, groups=tuple(tuple(group) for group in groups.tolist()))
        for groups in (within.T, within)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Travel:
    """Which copy is in which row of a device's buffer, and the way there and back."""

    choice_S: jax.Array  # int32: the copy n J + j in a row; N J in an empty one
    place_NJ: jax.Array  # int32: the row of a copy; S for one that does not travel
    send: Callable[[jax.Array, jax.Array], jax.Array]  # (rows that are sent, what is there before)
    send_back: Callable[[jax.Array], jax.Array]
    received: int  # R

    def there(self, rows: jax.Array, *, nothing: int = 0) -> jax.Array:
        """The rows that arrive; ``nothing`` where none does."""
        shape = (self.received, *rows.shape[1:])
        return self.send(rows, jnp.full(shape, nothing, rows.dtype))

    def back(self, rows: jax.Array) -> jax.Array:
        """What was made of this device's rows elsewhere, in their places."""
        return self.send_back(rows)

    def of_copies(self, values: jax.Array, nothing: int) -> jax.Array:
        """Integers by copy, in the rows that are sent; ``nothing`` in empty ones."""
        count = values.shape[0]
        found = values[jnp.minimum(self.choice_S, count - 1)]
        return jnp.where(self.choice_S[:, None] < count, found, nothing)


def equal(device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, peers: Peers) -> Travel:
    """An all-to-all of buffers of ``room`` rows for each device, filled up with nothing.

    Args:
        device_NJ: where a copy goes; num_devices for nowhere.
    """
    copies = sorted_copies(device_NJ, num_experts=num_devices, room=device_NJ.size)
    starts_D = jnp.cumsum(copies.sizes_E) - copies.sizes_E
    c_C = jnp.arange(room, dtype=jnp.int32)[None]
    row_DC = jnp.minimum(starts_D[:, None] + c_C, device_NJ.size - 1)
    choice_DC = jnp.where(c_C < copies.sizes_E[:, None], copies.choice_M[row_DC], device_NJ.size)
    at_NJ = copies.place_NK - starts_D[jnp.minimum(device_NJ, num_devices - 1)]
    travels_NJ = (device_NJ < num_devices) & (at_NJ < room)
    return Travel(
        choice_S=choice_DC.reshape(-1),
        place_NJ=jnp.where(travels_NJ, device_NJ * room + at_NJ, num_devices * room),
        send=lambda rows, _: all_to_all(rows, peers.axis, groups=peers.groups),
        send_back=lambda rows: all_to_all(rows, peers.axis, groups=peers.groups),
        received=num_devices * room,
    )


def ragged(device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, peers: Peers) -> Travel:
    """A ragged all-to-all of what there is, into one buffer of num_devices x ``room`` rows, whose
    last senders' rows stay at home where it is full.

    Args:
        device_NJ: where a copy goes; num_devices for nowhere.
    """
    copies = sorted_copies(device_NJ, num_experts=num_devices, room=device_NJ.size)
    # Of every sender and receiver.
    sizes_SD = jax.lax.all_gather(copies.sizes_E, peers.axis, axis_index_groups=peers.groups)
    starts_SD = jnp.cumsum(sizes_SD, axis=1) - sizes_SD  # in the sender's buffer
    most = num_devices * room
    places_SD = jnp.minimum(jnp.cumsum(sizes_SD, axis=0) - sizes_SD, most)  # in the receiver's
    fitting_SD = jnp.minimum(sizes_SD, most - places_SD)
    me = peers.rank
    device_NJ_or_0 = jnp.minimum(device_NJ, num_devices - 1)
    at_NJ = copies.place_NK - starts_SD[me][device_NJ_or_0]
    travels_NJ = (device_NJ < num_devices) & (at_NJ < fitting_SD[me][device_NJ_or_0])
    name = peers.axis[0] if len(peers.axis) == 1 else peers.axis

    def send(rows: jax.Array, before: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(
            rows,
            before,
            starts_SD[me],
            fitting_SD[me],
            places_SD[me],
            fitting_SD[:, me],
            axis_name=name,
            axis_index_groups=peers.groups,
        )

    def send_back(rows: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(
            rows,
            jnp.zeros((device_NJ.size, *rows.shape[1:]), rows.dtype),
            places_SD[:, me],
            fitting_SD[:, me],
            starts_SD[:, me],
            fitting_SD[me],
            axis_name=name,
            axis_index_groups=peers.groups,
        )

    return Travel(
        choice_S=copies.choice_M,
        place_NJ=jnp.where(travels_NJ, copies.place_NK, device_NJ.size),
        send=send,
        send_back=send_back,
        received=most,
    )
