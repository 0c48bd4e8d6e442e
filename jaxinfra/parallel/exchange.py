"""Expert parallelism: tokens are sent to the devices that have their experts, and results back.

Each device has its own tokens, and some of each layer's experts. An all-to-all sends rows of x to
the experts' devices, and another returns the results. A row is a token per device or a token per
expert (``ExchangeForm``). The all-to-all is padded to equal buffers per device, or ragged.

An exchange may have two levels. A row first goes to another node, to the device with the sender's
number there. That device sends it on within the node, and returns the sum of the results. If the
sharding rules give all these devices the same tokens, nothing is exchanged: each device computes
its own experts, and the results are summed over the devices.

The table is for n tokens on each of N devices, which have E/N of E experts each; a token chooses K:

| level | rows that a device has to send | a row is | sent |
|---|---|---|---|
| one, per device | n N p(N) | a token, once per device | (N-1)/N |
| one, per expert | n K | a choice | (N-1)/N |
| two: across O nodes | n O p(O) | a token, once per node | (O-1)/O |
| two: within a node of I | n N p(N), or n K | as in one level | (I-1)/I |

If the experts are divided into P equal parts, p(P) is the probability that a token chooses an
expert of one part (``chosen_probability``). Buffers have ``room_factor`` times these rows, or space
for n per destination, in the form per expert n min(K, E/N). If a token chooses from M of G groups
of experts, and a group's experts are in one node, it is sent to at most M nodes: n O p(O) <= n M.

Dims: N token of a device, K choice of a token, J copy of a token that may be sent, I = N J copies,
S row that is sent, R row that is received, C row of one pair's buffer, E expert, D model width (of
a row) or device (of a buffer), F hidden width; lower case of one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm, ExchangeImplementation
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.experts import ExpertWeights, apply_experts, combine_rows, sorted_copies, spread
from jaxinfra.ops.quantized import QuantizedWeight, of_device
from jaxinfra.parallel.collectives import Groups, all_to_all, rank
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import quantized_shardings


class Level(NamedTuple):
    """One level of the exchange: a device sends up to ``slots`` rows to each of ``members``."""

    members: int
    slots: int
    form: ExchangeForm


class BufferSizes(NamedTuple):
    """Sizes of one device's exchange buffers, in rows."""

    levels: tuple[Level, ...]  # across nodes, then within a node
    choices: int  # rows that a device's experts compute: one per choice of an expert


def buffer_sizes(
    num_tokens: int, *, num_devices: int, experts: ExpertsConfig, exchange: ExchangeConfig
) -> BufferSizes:
    """Computes buffer sizes: ``room_factor`` times the mean rows if all choices are equally likely.

    Raises:
        ConfigError: the number of devices is not a multiple of the devices per node.
    """
    own, top_k = experts.num_experts // num_devices, experts.top_k
    num_nodes = exchange.num_nodes(num_devices)

    def bounded(mean: float, most: int) -> int:
        factor = exchange.room_factor
        return most if factor is None else min(math.ceil(factor * mean), most)

    levels, rows = [], num_tokens
    if num_nodes > 1:
        slots = bounded(num_tokens * chosen_probability(experts, num_nodes), num_tokens)
        levels.append(Level(num_nodes, slots, ExchangeForm.PER_DEVICE))
        rows = num_nodes * slots
    # A device sends on what as many devices as there are nodes sent to it.
    if exchange.form is ExchangeForm.PER_EXPERT:
        slots = bounded(num_nodes * num_tokens * top_k / num_devices, rows * min(top_k, own))
    else:
        slots = bounded(num_nodes * num_tokens * chosen_probability(experts, num_devices), rows)
    levels.append(Level(num_devices // num_nodes, slots, exchange.form))
    most = num_devices * num_tokens * min(top_k, own)
    return BufferSizes(levels=tuple(levels), choices=bounded(num_tokens * top_k, most))


def chosen_probability(experts: ExpertsConfig, shares: int) -> float:
    """Returns the probability that a token chooses any expert of one of ``shares`` equal parts.

    A token chooses M of G groups, then K of their experts, each equally likely. If a part has s
    experts in each of g groups of S experts, it is not chosen with probability

        sum_j C(g, j) C(G - g, M - j) / C(G, M)  C(M S - j s, K) / C(M S, K).

    If a part is neither a divisor nor a multiple of a group, the formula assumes one group.

    Args:
        shares: number of equal parts that the experts are divided into.
    """
    share, top_k = experts.num_experts // shares, experts.top_k
    num_groups, top_groups = experts.routing.num_groups, experts.routing.top_groups
    group = experts.num_experts // num_groups
    if share % group and group % share:
        num_groups, top_groups, group = 1, 1, experts.num_experts
    groups = max(share // group, 1)
    eligible = top_groups * group
    passed_over = sum(
        math.comb(groups, j)
        * math.comb(num_groups - groups, top_groups - j)
        * math.comb(eligible - j * min(share, group), top_k)
        for j in range(min(groups, top_groups) + 1)
    )
    return 1.0 - passed_over / (math.comb(num_groups, top_groups) * math.comb(eligible, top_k))


def exchanged_bytes(level: Level, *, model_dim: int, itemsize: int, top_k: int) -> dict[str, int]:
    """Counts the bytes of one device's all-to-all buffers in a layer's forward pass, for a level.

    The buffers hold rows in both directions and the rows' experts; in the form per device, also
    the experts' weights. A device sends (members - 1) / members of these bytes.
    """
    rows = level.slots * level.members
    per_expert = level.form is ExchangeForm.PER_EXPERT
    return {
        "rows": 2 * rows * model_dim * itemsize,
        "experts": rows * 4 * (1 if per_expert else top_k),
        "weights": 0 if per_expert else rows * 4 * top_k,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Devices that exchange rows: all devices along some mesh axes, or groups of them."""

    axis: tuple[str, ...]
    groups: Groups | None = None

    @property
    def rank(self) -> jax.Array:
        """Returns this device's number among its peers."""
        me = rank(self.axis)
        if self.groups is None:
            return me
        number = np.argsort(np.concatenate(self.groups)) % len(self.groups[0])
        return jnp.asarray(number, jnp.int32)[me]


def peers_of(axis: tuple[str, ...], *, num_devices: int, num_nodes: int) -> tuple[Peers, ...]:
    """Returns the peers of each level: across nodes, then within a node; one level for one node.

    A node is a run of consecutive devices along these axes.
    """
    if num_nodes == 1:
        return (Peers(axis=axis),)
    within = np.arange(num_devices).reshape(num_nodes, -1)
    return tuple(
        Peers(axis=axis, groups=tuple(tuple(group) for group in groups.tolist()))
        for groups in (within.T, within)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowTransfer:
    """A planned all-to-all of token copies: each copy's row in the send buffer, and the sends."""

    choice_S: jax.Array  # int32: the copy n J + j in each row; N J in an empty row
    place_NJ: jax.Array  # int32: the row of each copy; S if the copy is not sent
    send: Callable[[jax.Array, jax.Array], jax.Array]  # (rows to send, initial receive buffer)
    back: Callable[[jax.Array], jax.Array]  # returns received rows to the senders' rows
    num_received: int  # R, rows of the receive buffer

    def send_rows(self, rows: jax.Array, *, nothing: int = 0) -> jax.Array:
        """Sends rows to their devices; unfilled rows of the receive buffer have ``nothing``."""
        shape = (self.num_received, *rows.shape[1:])
        return self.send(rows, jnp.full(shape, nothing, rows.dtype))

    def to_send_buffer(self, values: jax.Array, nothing: int) -> jax.Array:
        """Orders the copies' values as the send buffer's rows, with ``nothing`` in empty rows."""
        count = values.shape[0]
        found = values[jnp.minimum(self.choice_S, count - 1)]
        return jnp.where(self.choice_S[:, None] < count, found, nothing)


def plan_padded(
    device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, peers: Peers
) -> RowTransfer:
    """Plans an all-to-all with padded buffers of ``room`` rows for each device.

    Args:
        device_NJ: the device that each copy is sent to; num_devices means it is not sent.
    """
    copies = sorted_copies(device_NJ, num_experts=num_devices, room=device_NJ.size)
    starts_D = jnp.cumsum(copies.sizes_E) - copies.sizes_E
    c_C = jnp.arange(room, dtype=jnp.int32)[None]
    row_DC = jnp.minimum(starts_D[:, None] + c_C, device_NJ.size - 1)
    choice_DC = jnp.where(c_C < copies.sizes_E[:, None], copies.choice_M[row_DC], device_NJ.size)
    at_NJ = copies.place_NK - starts_D[jnp.minimum(device_NJ, num_devices - 1)]
    travels_NJ = (device_NJ < num_devices) & (at_NJ < room)
    exchange = functools.partial(all_to_all, axis=peers.axis, groups=peers.groups)
    return RowTransfer(
        choice_S=choice_DC.reshape(-1),
        place_NJ=jnp.where(travels_NJ, device_NJ * room + at_NJ, num_devices * room),
        send=lambda rows, _: exchange(rows),
        back=exchange,
        num_received=num_devices * room,
    )


def plan_ragged(
    device_NJ: Int[Array, "N J"], num_devices: int, room: int, *, peers: Peers
) -> RowTransfer:
    """Plans a ragged all-to-all without padding into one buffer of num_devices x ``room`` rows.

    If the buffer is too small, rows of the last senders are not sent.

    Args:
        device_NJ: the device that each copy is sent to; num_devices means it is not sent.
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

    exchange = functools.partial(
        jax.lax.ragged_all_to_all, axis_name=name, axis_index_groups=peers.groups
    )

    def send(rows: jax.Array, before: jax.Array) -> jax.Array:
        fitting = fitting_SD[me], places_SD[me], fitting_SD[:, me]
        return exchange(rows, before, starts_SD[me], *fitting)

    def back(rows: jax.Array) -> jax.Array:
        before = jnp.zeros((device_NJ.size, *rows.shape[1:]), rows.dtype)
        fitting = fitting_SD[:, me], starts_SD[:, me], fitting_SD[me]
        return exchange(rows, before, places_SD[:, me], *fitting)

    return RowTransfer(
        choice_S=copies.choice_M,
        place_NJ=jnp.where(travels_NJ, copies.place_NK, device_NJ.size),
        send=send,
        back=back,
        num_received=most,
    )


_TOKENS = (axes.BATCH, axes.SEQUENCE, None)
_DIMS = {
    "gate_EDF": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "up_EDF": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "down_EFD": (axes.EXPERTS, axes.MLP, axes.EMBED),
    "gate_bias_EF": (axes.EXPERTS, axes.MLP),
    "up_bias_EF": (axes.EXPERTS, axes.MLP),
    "down_bias_ED": (axes.EXPERTS, axes.EMBED),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedExchange:
    """The experts' exchange on a mesh: all-to-alls of rows there and back, or a sum.

    Both are over the mesh axes that shard experts, inside ``shard_map``. Weights sharded by width
    are all-gathered before use. The ``tensor`` axis shards every expert's hidden width, so results
    are summed over it. Quantized weights stay quantized, unless they are sharded by width: then all
    are dequantized before the all-gather.
    """

    placement: Placement
    config: ExchangeConfig

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        expert_BTK: Int[Array, "B T K"],
        weight_BTK: Float[Array, "B T K"],
        experts: ExpertWeights,
        *,
        config: ExpertsConfig,
        recipe: Recipe,
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""] | None]:
        """Returns the experts' output, sharded as x, and the number of dropped choices or None."""
        place = self.placement
        tokens = place.spec(_TOKENS)
        holders = place.axes(axes.EXPERTS)
        apart = (*place.axes(axes.BATCH), *place.axes(axes.SEQUENCE))
        between = holders if set(holders) & set(apart) else ()

        def left(dim: str) -> tuple[str, ...]:
            """The axes of a dim that experts, which come first, leave it."""
            return tuple(axis for axis in place.axes(dim) if axis not in holders)

        by_width = left(axes.EMBED)
        if by_width:
            experts = experts.changed(lambda weight: weight.dequantize(recipe.compute))
        local = functools.partial(
            _of_device,
            between=between,
            own=() if between else holders,
            num_devices=math.prod(place.mesh.shape[axis] for axis in between),
            by_hidden=left(axes.MLP),
            by_width=by_width,
            apart=apart,
            config=config,
            recipe=recipe,
            exchange=self.config,
        )
        y_BTD, left_out = place.on_each_device(
            local,
            in_specs=(tokens, tokens, tokens, _specs(place, experts)),
            out_specs=(tokens, PartitionSpec()),
        )(x_BTD, expert_BTK, weight_BTK, experts)
        bounded = bool(between) and self.config.room_factor is not None
        return y_BTD, left_out if bounded else None


def _specs(place: Placement, experts: ExpertWeights) -> Any:
    """Partition specs of each weight, and of each part of a quantized one."""

    def spec(name: str, dims: axes.Dims) -> Any:
        weight = getattr(experts, name)
        if isinstance(weight, QuantizedWeight):
            shardings = quantized_shardings(place, weight, dims, path=f"experts' {name}")
            return jax.tree.map(lambda each: each.spec, shardings)
        return None if weight is None else place.spec(dims)

    return ExpertWeights(**{name: spec(name, dims) for name, dims in _DIMS.items()})


def _of_device(
    x_btd: jax.Array,
    expert_btK: jax.Array,
    weight_btK: jax.Array,
    experts: ExpertWeights,
    *,
    between: tuple[str, ...],
    own: tuple[str, ...],
    num_devices: int,
    by_hidden: tuple[str, ...],
    by_width: tuple[str, ...],
    apart: tuple[str, ...],
    config: ExpertsConfig,
    recipe: Recipe,
    exchange: ExchangeConfig,
) -> tuple[jax.Array, jax.Array]:
    batch, length, width = x_btd.shape
    experts = _whole(experts.changed(of_device), recipe, by_width)
    x_ND = x_btd.reshape(-1, width).astype(recipe.compute)
    expert_NK = expert_btK.reshape(batch * length, -1)
    weight_NK = weight_btK.reshape(batch * length, -1)
    summed = (*own, *by_hidden)
    if summed:
        # Here, so that gradients are summed over tokens and not over what travelled.
        x_ND, weight_NK = jax.lax.pcast((x_ND, weight_NK), summed, to="varying")
    bias_ED = experts.down_bias_ED
    if by_hidden and bias_ED is not None:
        # On one device only, so that a sum over devices adds it once.
        is_first = jax.lax.axis_index(by_hidden) == 0
        once_ED = jnp.where(is_first, bias_ED, jnp.zeros_like(bias_ED))
        experts = dataclasses.replace(experts, down_bias_ED=once_ED)
    if own:
        # Choices among this device's own experts; ``number`` for those that others compute.
        number = experts.up_EDF.shape[0]
        mine_NK = expert_NK - jax.lax.axis_index(own) * number
        expert_NK = jnp.where((mine_NK >= 0) & (mine_NK < number), mine_NK, number)
    apply = functools.partial(apply_experts, experts=experts, kind=config.kind, recipe=recipe)
    if between:
        room = buffer_sizes(len(x_ND), num_devices=num_devices, experts=config, exchange=exchange)
        num_nodes = exchange.num_nodes(num_devices)
        peers = peers_of(between, num_devices=num_devices, num_nodes=num_nodes)
        y_ND, left_out = _exchanged(
            x_ND,
            expert_NK,
            weight_NK,
            levels=tuple(zip(room.levels, peers, strict=True)),
            num_experts=config.num_experts,
            implementation=exchange.implementation,
            apply=functools.partial(apply, room=room.choices),
        )
    else:
        y_ND, left_out = apply(x_ND, expert_NK, weight_NK)
    if summed:
        y_ND = jax.lax.psum(y_ND, summed)
    left_out = left_out.astype(recipe.accum)
    if apart or own:
        left_out = jax.lax.psum(left_out, (*apart, *own))
    return y_ND.reshape(batch, length, width), left_out


def _whole(experts: ExpertWeights, recipe: Recipe, by_width: tuple[str, ...]) -> ExpertWeights:
    """Weights gathered along their width, in the format that gradients are summed in.

    They are sent in the compute dtype, which products round them to anyway. Products in 8 bits have
    scales of what is stored, so theirs are sent as they are.
    """
    if not by_width:
        return experts

    def gathered(name: str) -> Any:
        weight = getattr(experts, name)
        if weight is None or axes.EMBED not in _DIMS[name]:
            return weight
        if recipe.gradient is not None:
            weight = weight.astype(recipe.gradient)
        sent = recipe.compute if recipe.fp8 is None else weight.dtype
        return _gathered(weight, by_width, _DIMS[name].index(axes.EMBED), sent)

    return ExpertWeights(**{name: gathered(name) for name in _DIMS})


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(weight: jax.Array, by_width: tuple[str, ...], dim: int, sent: Any) -> jax.Array:
    whole = jax.lax.all_gather(weight.astype(sent), by_width, axis=dim, tiled=True)
    return whole.astype(weight.dtype)


def _scattered(
    by_width: tuple[str, ...], dim: int, sent: Any, nothing: None, gradient: jax.Array
) -> tuple[jax.Array]:
    del sent, nothing
    # Summed in its own format: that of the weight, not that in which the weight was sent.
    return (jax.lax.psum_scatter(gradient, by_width, scatter_dimension=dim, tiled=True),)


_gathered.defvjp(lambda weight, *given: (_gathered(weight, *given), None), _scattered)


def _exchanged(
    x_ND: jax.Array,
    expert_NK: jax.Array,
    weight_NK: jax.Array,
    *,
    levels: tuple[tuple[Level, Peers], ...],
    num_experts: int,
    implementation: ExchangeImplementation,
    apply: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Each token's weighted sum of its experts' outputs, and the choices without room.

    Args:
        expert_NK: numbers among the experts that all of the first level's devices have together;
            ``num_experts``, which is how many, for none.
        apply: what a device makes of the rows that arrive on the last level.
    """
    (level, peers), *nearer = levels
    members, own = level.members, num_experts // level.members
    top_k = expert_NK.shape[1]
    device_NK = expert_NK // own  # members for no expert
    per_expert = level.form is ExchangeForm.PER_EXPERT
    if per_expert:
        device_NJ = device_NK
        choices_NJ = (expert_NK < num_experts).astype(jnp.int32)
        expert_IK = expert_NK.reshape(-1, 1) % own
    else:
        d_D = jnp.arange(members, dtype=jnp.int32)
        is_there_NKD = device_NK[..., None] == d_D[None, None]
        choices_NJ = jnp.sum(is_there_NKD, axis=1, dtype=jnp.int32)
        device_NJ = jnp.where(choices_NJ > 0, d_D[None], members)
        is_there_IK = jnp.swapaxes(is_there_NKD, 1, 2).reshape(-1, top_k)
        expert_IK = jnp.where(is_there_IK, jnp.repeat(expert_NK % own, members, axis=0), own)
    make = plan_ragged if implementation is ExchangeImplementation.RAGGED else plan_padded
    scope = "exchange/nodes" if nearer else "exchange"
    with jax.named_scope(scope):
        travel = make(device_NJ, members, level.slots, peers=peers)
        x_RD = travel.send_rows(spread(x_ND, travel.choice_S, travel.place_NJ))
        expert_RK = travel.send_rows(travel.to_send_buffer(expert_IK, own), nothing=own)
        weight_RK = jnp.ones(expert_RK.shape, weight_NK.dtype)
        if not per_expert:
            weight_RK = travel.send_rows(spread(weight_NK, travel.choice_S, travel.place_NJ))
    if nearer:
        apply = functools.partial(
            _exchanged,
            levels=tuple(nearer),
            num_experts=own,
            implementation=implementation,
            apply=apply,
        )
    y_RD, left_there = apply(x_RD, expert_RK, weight_RK)
    with jax.named_scope(scope):
        y_SD = travel.back(y_RD)
    weight_NJ = weight_NK if per_expert else jnp.ones(device_NJ.shape, weight_NK.dtype)
    y_ND = combine_rows(y_SD, travel.place_NJ, weight_NJ, inverse=travel.choice_S)
    stayed = jnp.sum(jnp.where(travel.place_NJ < travel.choice_S.size, 0, choices_NJ))
    return y_ND, stayed + left_there
