"""``Execution.exchange`` on a mesh: tokens travel to the devices that have their experts, and back.

Each device has its own tokens, and of each layer some of the experts. What travels are rows of x,
out and back, in one of two forms (``ExchangeForm``), in buffers of as many rows for each device.
In two levels a row first crosses to the device of its own number in a node, which sends it on
within the node, and returns the sum of what comes back. Where the rules give all of these devices
the same tokens, nothing travels: each computes what its experts add, and the sum of that is theirs.

Dims: N token of a device, K choice of a token, J copy of a token that may travel, I = N J of them,
S row that is sent, R row that is received, E expert, D model width, F hidden width; lower case of
one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm, ExchangeImplementation
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.model.execution import ExpertExchange, within_device
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.experts import ExpertWeights, apply_experts, combine_rows, spread
from jaxinfra.ops.quantized import QuantizedWeight, of_device
from jaxinfra.parallel.exchange_room import Level, room_for
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import quantized_shardings
from jaxinfra.parallel.travel import Peers, equal, peers_of, ragged

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
    """``shard_map`` over the mesh: two all-to-alls of rows over the axes that divide experts, in
    each of one or two levels, or a sum over them.

    Weights are gathered over the axes that split their width, where they are used. Over ``tensor``
    each device has a part of every expert's hidden layer, and their results are summed. Weights in
    few bits come to a device as they are kept; where their width is split, which gathers plain
    weights, all are dequantized first.
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
        holders = place.axes(axes.EXPERTS)
        apart = (*place.axes(axes.BATCH), *place.axes(axes.SEQUENCE))
        between = holders if set(holders) & set(apart) else ()

        def left(dim: str) -> tuple[str, ...]:
            """Of a dim's axes those that experts, which come first, leave it."""
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
    """The partition of each weight, and of each part of one in few bits."""

    def spec(name: str, dims: axes.Dims) -> Any:
        weight = getattr(experts, name)
        if isinstance(weight, QuantizedWeight):
            shardings = quantized_shardings(place, weight, dims, path=f"experts' {name}")
            return jax.tree.map(lambda each: each.spec, shardings)
        return None if weight is None else place.spec(dims)

    specs: dict[str, Any] = {name: spec(name, dims) for name, dims in _DIMS.items()}
    return ExpertWeights(**specs)


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
    if by_hidden:
        experts = _biased_once(experts, by_hidden)
    if own:
        expert_NK = _own_experts(expert_NK, experts.up_EDF.shape[0], own)
    apply = functools.partial(apply_experts, experts=experts, kind=config.kind, recipe=recipe)
    if between:
        room = room_for(len(x_ND), num_devices=num_devices, experts=config, exchange=exchange)
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
    make = ragged if implementation is ExchangeImplementation.RAGGED else equal
    scope = "exchange/nodes" if nearer else "exchange"
    with jax.named_scope(scope):
        travel = make(device_NJ, members, level.slots, peers=peers)
        x_RD = travel.there(spread(x_ND, travel.choice_S, travel.place_NJ))
        expert_RK = travel.there(travel.of_copies(expert_IK, own), nothing=own)
        weight_RK = jnp.ones(expert_RK.shape, weight_NK.dtype)
        if not per_expert:
            weight_RK = travel.there(spread(weight_NK, travel.choice_S, travel.place_NJ))
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


def exchange_on(placement: Placement | None, config: ExchangeConfig) -> ExpertExchange:
    """``within_device``; on a mesh of several devices its sharded form."""
    if placement is None or placement.mesh.size == 1:
        return within_device
    return ShardedExchange(placement=placement, config=config)
