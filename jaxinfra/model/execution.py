"""``Execution`` says how a decoder runs (formats, kernels, placement), as one value for all layers.

``jaxinfra.parallel.execution.execution_on`` builds it, for one device and for meshes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfra.axes import VOCAB, Dims
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.run import KeptValues, Remat
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.cross_entropy import CrossEntropySums
from jaxinfra.ops.experts import ExpertWeights, apply_experts
from jaxinfra.ops.multiply import Gather, Multiply


def take_rows(
    table_VD: jax.Array, ids_BT: jax.Array, *, policy: Policy, rows_dim: str = VOCAB
) -> jax.Array:
    """Reads a table's rows by index, [B, T, D] in the compute dtype; NaN for ids outside it.

    Gathered in the param dtype, then cast, so that the gradient of repeated tokens is summed in the
    param dtype too.
    """
    del rows_dim
    return policy.to_compute(table_VD.at[ids_BT].get(mode="fill", fill_value=jnp.nan))


type ExpertExchange = Callable[..., tuple[jax.Array, jax.Array | None]]
"""Function that sends tokens to routed experts and back, called as ``within_device``."""


def within_device(
    x_BTD: jax.Array,
    expert_BTK: jax.Array,
    weight_BTK: jax.Array,
    experts: ExpertWeights,
    *,
    config: ExpertsConfig,
    recipe: Recipe,
) -> tuple[jax.Array, None]:
    """Computes routed experts on one device, where nothing is sent.

    Returns each token's weighted sum of its experts' outputs, [B, T, D] in the recipe's compute
    dtype, and how many choices found no room; None where there is room for all.

    Args:
        expert_BTK: int32; num_experts for no expert.
        weight_BTK: fp32.
    """
    batch, length, width = x_BTD.shape
    y_ND, _ = apply_experts(
        x_BTD.reshape(-1, width),
        expert_BTK.reshape(batch * length, -1),
        weight_BTK.reshape(batch * length, -1),
        experts,
        kind=config.kind,
        recipe=recipe,
    )
    return y_ND.reshape(batch, length, width), None


class Place:
    """Placement of activations: here on one device, and on a mesh as ``parallel.place`` says."""

    @property
    def batch_shards(self) -> int:
        """Number of devices that the rows of a batch are sharded over; it divides their number."""
        return 1

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Returns the index in the whole batch of this device's first row; 0 outside shard_map."""
        del num_rows
        return 0

    def places(self, num_tokens: int) -> jax.Array:
        """Returns each token's position in the sequence, int32 [T], in the tokens' memory order."""
        return jnp.arange(num_tokens)

    def over_batch(self, x: jax.Array) -> jax.Array:
        """Sums x over the devices that hold different rows of the batch inside shard_map."""
        return x

    def copies(self, dim: str | None, size: int) -> int:
        """Counts the copies of each element of a dim, so that every device that shards it has one;
        above 1 where there are fewer key/value heads than devices.
        """
        del dim, size
        return 1

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Returns x, sharded as its logical dims require."""
        del dims
        return x


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recomputation:
    """Settings of recomputation: values kept for the backward pass, and layers per loop body."""

    remat: Remat = Remat.NONE
    kept: tuple[KeptValues, ...] = ()  # of remat=chosen
    unroll: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Implementations of attention, lookup, loss and expert exchange, for a device or a mesh.

    Each is called as the function that is named beside it.
    """

    attend: Callable[..., jax.Array]  # ``ops.attention.attention``
    # ``parallel.context.methods``, where devices share sequences; None: ``attend`` computes it.
    attend_latents: Callable[..., jax.Array] | None
    decode: Callable[..., jax.Array]  # ``ops.cached_attention.cached_attention``
    lookup: Callable[..., jax.Array]  # ``take_rows``
    cross_entropy: Callable[..., CrossEntropySums]  # ``parallel.loss.TokenLoss``
    exchange: ExpertExchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeForm:
    """Settings of a decoder that serves: with a cache, its layers are unrolled."""

    packed: bool  # projections of one input are one weight; without tensor parallelism


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Settings by which layers compute: dtypes, recomputation, products, kernels, placement.

    Layers call ``place(x, dims)`` on activations whose placement matters; on one device it is the
    identity, on a mesh ``jaxinfra.parallel`` supplies it.
    """

    policy: Policy
    recomputation: Recomputation
    multiply: Multiply
    kernels: Kernels
    place: Place
    gather: Gather | None  # of weights that are kept as gathered; None: left to the compiler
    cache_format: CacheFormat  # of past tokens' keys and values, or latents
    decode_form: DecodeForm | None = None  # None: the form of training, with a cache too
    statistics: bool = False  # layers add statistics of their activations to ``Sums``
