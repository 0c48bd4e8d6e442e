"""Rows that travel between devices and come back: in equal buffers, or as many as there are.

Dims: N token of a device, J copy of a token that may travel, S row that is sent, R row that is
received, C row of one pair's buffer, D device.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxinfra.ops.experts import sorted_copies
from jaxinfra.parallel.collectives import all_to_all


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


def equal(
    device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, axis: tuple[str, ...]
) -> Travel:
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
        send=lambda rows, _: all_to_all(rows, axis),
        send_back=lambda rows: all_to_all(rows, axis),
        received=num_devices * room,
    )


def ragged(
    device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, axis: tuple[str, ...]
) -> Travel:
    """A ragged all-to-all of what there is, into one buffer of num_devices x ``room`` rows, whose
    last senders' rows stay at home where it is full.

    Args:
        device_NJ: where a copy goes; num_devices for nowhere.
    """
    copies = sorted_copies(device_NJ, num_experts=num_devices, room=device_NJ.size)
    sizes_SD = jax.lax.all_gather(copies.sizes_E, axis)  # of every sender and receiver
    starts_SD = jnp.cumsum(sizes_SD, axis=1) - sizes_SD  # in the sender's buffer
    most = num_devices * room
    places_SD = jnp.minimum(jnp.cumsum(sizes_SD, axis=0) - sizes_SD, most)  # in the receiver's
    fitting_SD = jnp.minimum(sizes_SD, most - places_SD)
    me = jax.lax.axis_index(axis)
    device_NJ_or_0 = jnp.minimum(device_NJ, num_devices - 1)
    at_NJ = copies.place_NK - starts_SD[me][device_NJ_or_0]
    travels_NJ = (device_NJ < num_devices) & (at_NJ < fitting_SD[me][device_NJ_or_0])
    name = axis[0] if len(axis) == 1 else axis

    def send(rows: jax.Array, before: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(
            rows,
            before,
            starts_SD[me],
            fitting_SD[me],
            places_SD[me],
            fitting_SD[:, me],
            axis_name=name,
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
        )

    return Travel(
        choice_S=copies.choice_M,
        place_NJ=jnp.where(travels_NJ, copies.place_NK, device_NJ.size),
        send=send,
        send_back=send_back,
        received=most,
    )
