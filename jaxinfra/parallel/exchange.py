"""``Execution.exchange`` on a mesh: tokens travel to the devices that have their experts, and back.

Each device has its own tokens, and of each layer some of the experts. What travels are rows of x,
out and back, in one of two forms (``ExchangeForm``), in buffers of as many rows for each device.
Where the rules give all of these devices the same tokens, nothing travels: each computes what its
experts add, and the sum of that is theirs.

Dims: N token of a device, K choice of a token, J copy of a token that may travel, I = N J of them,
S row that is sent, R row that is received, E expert, D model width, F hidden width; lower case of
one device.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm, ExchangeImplementation
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.core import axes
from jaxinfra.layers.execution import ExpertExchange, within_device
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.experts import ExpertWeights, apply_experts, combine_rows, spread
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.travel import equal, ragged

_TOKENS = (axes.BATCH, axes.SEQUENCE, None)
_DIMS = {
    "gate_EDF": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "up_EDF": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "down_EFD": (axes.EXPERTS, axes.MLP, axes.EMBED),
    "gate_bias_EF": (axes.EXPERTS, axes.MLP),
    "up_bias_EF": (axes.EXPERTS, axes.MLP),
    "down_bias_ED": (axes.EXPERTS, axes.EMBED),
}


class Room(NamedTuple):
    """Rows of one device's buffers."""

    slots: int  # for each other device, and from it
    choices: int  # that a device's experts compute


def room_for(
    num_tokens: int, *, num_devices: int, experts: ExpertsConfig, exchange: ExchangeConfig
) -> Room:
    """Room for the tokens of one device.

    A token that chooses K of E experts visits a device with e of them with probability
    1 - C(E - e, K) / C(E, K), if all choices are equally likely.
    """
    own, top_k = experts.num_experts // num_devices, experts.top_k
    per_expert = exchange.form is ExchangeForm.PER_EXPERT
    most = num_tokens * min(top_k, own)
    slots = most if per_expert else num_tokens
    if exchange.room_factor is None:
        return Room(slots=slots, choices=num_devices * most)
    elsewhere = math.comb(experts.num_experts - own, top_k)
    visits = 1.0 - elsewhere / math.comb(experts.num_experts, top_k)
    even = num_tokens * (top_k / num_devices if per_expert else visits)
    return Room(
        slots=min(math.ceil(exchange.room_factor * even), slots),
        choices=min(math.ceil(exchange.room_factor * num_tokens * top_k), num_devices * most),
    )


def exchanged_bytes(
    room: Room,
    *,
    num_devices: int,
    model_dim: int,
    itemsize: int,
    experts: ExpertsConfig,
    exchange: ExchangeConfig,
) -> dict[str, int]:
    """Bytes of the buffers that one device gives to the all-to-alls of a layer's forward pass, of
    which it sends (N-1)/N: rows out and back, the experts they are for, and in the form per device
    these experts' weights.
    """
    rows = room.slots * num_devices
    per_expert = exchange.form is ExchangeForm.PER_EXPERT
    return {
        "rows": 2 * rows * model_dim * itemsize,
        "experts": rows * 4 * (1 if per_expert else experts.top_k),
        "weights": 0 if per_expert else rows * 4 * experts.top_k,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedExchange:
    """``shard_map`` over the mesh: two all-to-alls of rows over the axes that divide experts, or a
    sum over them.

    Weights are gathered over the axes that split their width, where they are used. Over ``tensor``
    each device has a part of every expert's hidden layer, and their results are summed.
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
        """Returns x placed as given, and the choices that had no room; None where all have."""
        place = self.placement
        tokens = place.spec(_TOKENS)
        specs: dict[str, Any] = {
            name: None if getattr(experts, name) is None else place.spec(dims)
            for name, dims in _DIMS.items()
        }
        holders = place.axes(axes.EXPERTS)
        apart = (*place.axes(axes.BATCH), *place.axes(axes.SEQUENCE))
        between = holders if set(holders) & set(apart) else ()

        def left(dim: str) -> tuple[str, ...]:
            """Of a dim's axes those that experts, which come first, leave it."""
            return tuple(axis for axis in place.axes(dim) if axis not in holders)

        local = functools.partial(
            _of_device,
            between=between,
            own=() if between else holders,
            num_devices=math.prod(place.mesh.shape[axis] for axis in between),
            by_hidden=left(axes.MLP),
            by_width=left(axes.EMBED),
            apart=apart,
            config=config,
            recipe=recipe,
            exchange=self.config,
        )
        y_BTD, left_out = place.on_each_device(
            local,
            in_specs=(tokens, tokens, tokens, ExpertWeights(**specs)),
            out_specs=(tokens, PartitionSpec()),
        )(x_BTD, expert_BTK, weight_BTK, experts)
        bounded = bool(between) and self.config.room_factor is not None
        return y_BTD, left_out if bounded else None


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
    experts = _whole(experts, recipe, by_width)
    x_ND = x_btd.reshape(-1, width).astype(recipe.compute)
    expert_NK = expert_btK.reshape(batch * length, -1)
    weight_NK = weight_btK.reshape(batch * length, -1)
    summed = (*own, *by_hidden)
    if summed:
        # Here, so that gradients are summed over tokens and not over what travelled.
        x_ND, weight_NK = jax.lax.pcast((x_ND, weight_NK), summed, to="varying")
    if by_hidden:
        experts = _biased_once(experts, by_hidden)
    if own:
        expert_NK = _own_experts(expert_NK, experts.up_EDF.shape[0], own)
    if between:
        y_ND, left_out = _exchanged(
            x_ND,
            expert_NK,
            weight_NK,
            experts,
            between=between,
            num_devices=num_devices,
            config=config,
            recipe=recipe,
            exchange=exchange,
        )
    else:
        y_ND, left_out = apply_experts(
            x_ND, expert_NK, weight_NK, experts, kind=config.kind, recipe=recipe
        )
    if summed:
        y_ND = jax.lax.psum(y_ND, summed)
    left_out = left_out.astype(recipe.accum)
    if apart or own:
        left_out = jax.lax.psum(left_out, (*apart, *own))
    return y_ND.reshape(batch, length, width), left_out


def _whole(experts: ExpertWeights, recipe: Recipe, by_width: tuple[str, ...]) -> ExpertWeights:
    """Weights gathered along their width, in the format that gradients are summed in."""
    if not by_width:
        return experts

    def gathered(name: str) -> Any:
        weight = getattr(experts, name)
        if weight is None or axes.EMBED not in _DIMS[name]:
            return weight
        if recipe.gradient is not None:
            weight = weight.astype(recipe.gradient)
        dim = _DIMS[name].index(axes.EMBED)
        return jax.lax.all_gather(weight, by_width, axis=dim, tiled=True)

    return ExpertWeights(**{name: gathered(name) for name in _DIMS})


def _biased_once(experts: ExpertWeights, by_hidden: tuple[str, ...]) -> ExpertWeights:
    """What is added to a sum over devices, added by one of them."""
    bias_ED = experts.down_bias_ED
    if bias_ED is None:
        return experts
    is_first = jax.lax.axis_index(by_hidden) == 0
    return dataclasses.replace(
        experts, down_bias_ED=jnp.where(is_first, bias_ED, jnp.zeros_like(bias_ED))
    )


def _own_experts(expert_NK: jax.Array, number: int, own: tuple[str, ...]) -> jax.Array:
    """Choices among a device's own experts; ``number`` for those that others compute."""
    mine_NK = expert_NK - jax.lax.axis_index(own) * number
    return jnp.where((mine_NK >= 0) & (mine_NK < number), mine_NK, number)


def _exchanged(
    x_ND: jax.Array,
    expert_NK: jax.Array,
    weight_NK: jax.Array,
    experts: ExpertWeights,
    *,
    between: tuple[str, ...],
    num_devices: int,
    config: ExpertsConfig,
    recipe: Recipe,
    exchange: ExchangeConfig,
) -> tuple[jax.Array, jax.Array]:
    own = config.num_experts // num_devices
    num_tokens, top_k = expert_NK.shape
    room = room_for(num_tokens, num_devices=num_devices, experts=config, exchange=exchange)
    device_NK = expert_NK // own  # num_devices for no expert
    per_expert = exchange.form is ExchangeForm.PER_EXPERT
    if per_expert:
        device_NJ = device_NK
        choices_NJ = (expert_NK < config.num_experts).astype(jnp.int32)
        expert_IK = expert_NK.reshape(-1, 1) % own
    else:
        d_D = jnp.arange(num_devices, dtype=jnp.int32)
        is_there_NKD = device_NK[..., None] == d_D[None, None]
        choices_NJ = jnp.sum(is_there_NKD, axis=1, dtype=jnp.int32)
        device_NJ = jnp.where(choices_NJ > 0, d_D[None], num_devices)
        is_there_IK = jnp.swapaxes(is_there_NKD, 1, 2).reshape(-1, top_k)
        expert_IK = jnp.where(is_there_IK, jnp.repeat(expert_NK % own, num_devices, axis=0), own)
    make = ragged if exchange.implementation is ExchangeImplementation.RAGGED else equal
    with jax.named_scope("exchange"):
        travel = make(device_NJ, num_devices, room.slots, axis=between)
        x_RD = travel.there(spread(x_ND, travel.choice_S, travel.place_NJ))
        expert_RK = travel.there(travel.of_copies(expert_IK, own), nothing=own)
        weight_RK = jnp.ones(expert_RK.shape, weight_NK.dtype)
        if not per_expert:
            weight_RK = travel.there(spread(weight_NK, travel.choice_S, travel.place_NJ))
    y_RD, left_there = apply_experts(
        x_RD, expert_RK, weight_RK, experts, kind=config.kind, recipe=recipe, room=room.choices
    )
    with jax.named_scope("exchange"):
        y_SD = travel.back(y_RD)
    weight_NJ = weight_NK if per_expert else jnp.ones(device_NJ.shape, weight_NK.dtype)
    y_ND = combine_rows(y_SD, travel.place_NJ, weight_NJ, inverse=travel.choice_S)
    stayed = jnp.sum(jnp.where(travel.place_NJ < travel.choice_S.size, 0, choices_NJ))
    return y_ND, stayed + left_there


def exchange_on(placement: Placement | None, config: ExchangeConfig) -> ExpertExchange:
    """``within_device``; on a mesh of several devices its sharded form."""
    if placement is None or placement.mesh.size == 1:
        return within_device
    return ShardedExchange(placement=placement, config=config)
