"""``Pass``, the inputs of every layer besides x, and ``LayerOutput``, a layer's results.

Dims: B batch, T position.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxinfra.model.cache import Cache
from jaxinfra.model.rope import RopeTable
from jaxinfra.numerics.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """Steps of a block (norm, residual sum, quantization) that its layer can do itself."""

    fuses: bool = False  # its first matmul normalizes x, its last one adds the residual
    quantizes: bool = False  # it quantizes x for its 8-bit projections itself
    gathers: bool = False  # its first matmuls gather the positions of x themselves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Inputs of a layer besides its parameters and x.

    Examples:
        The positions of 2 rows of 3 tokens in their documents:

        >>> positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))
        >>> given = jaxinfra.Pass(positions_BT=positions)
    """

    positions_BT: jax.Array  # int32, within the document; below 0: padding, with a cache
    segment_ids_BT: jax.Array | None = None  # documents of packed rows, -1 for padding
    rope: RopeTable | None = None  # of these positions; None without rotary
    cache: Cache | None = None  # appended to at the positions, then attended to
    dropout_key: jax.Array | None = None  # no dropout without one
    # [B, T, D] that the layer adds its result to; None: its caller adds the residual.
    residual_BTD: jax.Array | None = None
    input_BTP: jax.Array | None = None  # this layer's own input, in models that have such
    # Keys and values of earlier layers, by the names of ``GroupedAttentionConfig.gives_keys``.
    shared: "dict[str, SharedKeys]" = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeys:
    """Keys and values that one layer computes and others attend to."""

    k_BTKH: jax.Array  # of this pass's tokens, with positions
    v_BTKH: jax.Array
    cache: Cache | None  # with them; empty if nothing was cached before this pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Named losses and statistics that layers return beside x, to be combined over the batch.

    ``losses`` and ``added`` are summed over micro-batches and devices, of ``largest`` the maximum
    is taken. All three are empty for layers without losses and statistics.
    ``metrics.jsonl`` has them as ``layers/NAME``: a mean loss per token, a sum or a maximum.

    Examples:
        A layer that keeps its outputs small, and counts those that are not:

        >>> x = jnp.ones((2, 3, 8))
        >>> sums = jaxinfra.Sums(
        ...     losses={"size": 1e-3 * jnp.sum(jnp.mean(x**2, axis=-1))},
        ...     added={"large": jnp.sum(jnp.abs(x) > 10.0)},
        ... )
        >>> out = jaxinfra.LayerOutput(x=x, sums=sums)
    """

    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    """fp32: auxiliary objectives as sums over tokens that are no padding; the training objective
    gets their means over these, whether the tokens' targets count or not."""
    added: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    largest: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    handed: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Keys and values for later layers, which the decoder takes out: no sums."""


def joined(first: Sums, second: Sums) -> Sums:
    """Merges the ``Sums`` of two layers of a block, which must not use a name twice."""

    def union(name: str) -> dict[str, jax.Array]:
        a, b = getattr(first, name), getattr(second, name)
        assert not a.keys() & b.keys(), f"{name} {sorted(a.keys() & b.keys())} emitted twice"
        return a | b

    names = ("losses", "added", "largest", "handed")
    return Sums(**{name: union(name) for name in names})


def combined(first: Any, second: Any) -> Any:
    """Combines the trees of ``Sums`` of two parts of a batch."""

    def both(a: Sums, b: Sums) -> Sums:
        return Sums(
            losses=jax.tree.map(jnp.add, a.losses, b.losses),
            added=jax.tree.map(jnp.add, a.added, b.added),
            largest=jax.tree.map(jnp.maximum, a.largest, b.largest),
        )

    return jax.tree.map(both, first, second, is_leaf=lambda node: isinstance(node, Sums))


def over_devices(sums: Any, axes: tuple[str, ...]) -> Any:
    """Combines a tree of ``Sums`` over the devices of these mesh axes, inside ``shard_map``."""

    def total(one: Sums) -> Sums:
        return Sums(
            losses=jax.lax.psum(one.losses, axes),
            added=jax.lax.psum(one.added, axes),
            largest=jax.lax.pmax(one.largest, axes),
        )

    return jax.tree.map(total, sums, is_leaf=lambda node: isinstance(node, Sums))


PREDICTION = "mtp"
"""Name of the loss of multi-token prediction, a sum over counted targets."""

STATISTICS = "statistics/"
"""Prefix of statistics' names in ``Sums``, which tells them from the layers' own entries."""


def site_sums(sites: Mapping[str, jax.Array], *, policy: Policy) -> Sums:
    """Computes statistics of each array, to be combined over the batch.

    They are the sum of squares and largest absolute value of finite elements, and the numbers of
    all elements, zeros and non-finite ones.

    Args:
        sites: arrays by the name of their place in the layer.
    """
    added, largest = {}, {}
    for name, array in sites.items():
        x = policy.to_accum(jax.lax.stop_gradient(array))
        finite = jnp.isfinite(x)
        kept = jnp.where(finite, x, jnp.zeros_like(x))
        site = f"{STATISTICS}{name}"
        added[f"{site}/squares"] = jnp.sum(jnp.square(kept))
        added[f"{site}/elements"] = jnp.sum(jnp.ones_like(x))
        added[f"{site}/zeros"] = jnp.sum((x == 0).astype(x.dtype))
        added[f"{site}/nonfinite"] = jnp.sum((~finite).astype(x.dtype))
        largest[f"{site}/largest"] = jnp.max(jnp.abs(kept))
    return Sums(added=added, largest=largest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerOutput:
    """Output of a layer, of a block, or of all layers of a model.

    For all layers of a model, ``sums`` is a tuple with one entry per distinct block, whose arrays
    have the block's repetitions as first dim.

    Examples:
        >>> jaxinfra.LayerOutput(x=jnp.zeros((2, 3, 8))).x.shape
        (2, 3, 8)
    """

    x: jax.Array  # [B, T, D] in the compute dtype
    cache: Any = None  # the cache after this pass; None if the pass had none
    sums: Any = dataclasses.field(default_factory=Sums)
    behind: Any = None  # the argument ``behind`` of ``Decoder.run``; None for single layers
    # x after each repetition of the stacks' patterns, where layers run unrolled with a cache.
    after: tuple[jax.Array, ...] = ()


def labelled(x: jax.Array, label: str) -> jax.Array:
    """Names x for recomputation, so that ``remat=chosen`` may keep it; "" leaves x unnamed."""
    return checkpoint_name(x, label) if label else x


type StateRule = Callable[[jax.Array, Sums, jax.Array], jax.Array]
"""(value, the block's sums over the whole batch, what the backward pass emitted) -> next value."""


class ModelState(nnx.Variable):
    """A layer's array that a rule updates instead of the optimizer, such as a router's bias.

    It is sharded and saved like a parameter. Its metadata are ``axes``, the logical dims, and
    ``rule``, a ``StateRule`` of one layer. A ``custom_vjp`` may return any statistic of the
    backward pass as the state's cotangent. The rule then gets the maximum of this cotangent over
    micro-batches and devices.
    """
