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
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import KeptValues, Remat
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.cross_entropy import CrossEntropySums
from jaxinfra.ops.decode_layers import DecodedLayers
from jaxinfra.ops.experts import ExpertWeights, apply_experts
from jaxinfra.ops.multiply import Gather, Multiply


def take_rows(
    table_VD: jax.Array, ids_BT: jax.Array, *, policy: Policy, rows_dim: str = VOCAB
) -> jax.Array:
    """Reads a table's rows by index, [B, T, D] in the compute dtype; NaN for ids outside it.

    The rows are cast after the lookup, so that gradients of repeated tokens are summed in the param
    dtype.
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
    dtype, and None: no choice is dropped for lack of buffer space.

    Args:
        expert_BTK: each token's chosen experts, int32; num_experts means none.
        weight_BTK: weight of each choice, fp32.
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
    """Placement of activations on one device; ``parallel.place`` has the subclass for a mesh."""

    @property
    def batch_shards(self) -> int:
        """Number of devices that the batch is sharded over; a divisor of the number of rows."""
        return 1

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Returns the index in the whole batch of this device's first row; 0 outside shard_map."""
        del num_rows
        return 0

    def token_positions(self, num_tokens: int) -> jax.Array:
        """Returns each token's position in the sequence, int32 [T], in the tokens' memory order."""
        return jnp.arange(num_tokens)

    def over_batch(self, x: jax.Array) -> jax.Array:
        """Sums x over the devices that have different rows of the batch, inside shard_map."""
        return x

    def shards(self, dim: str) -> int:
        """Returns the number of devices that shard a dim."""
        del dim
        return 1

    def copies(self, dim: str | None, size: int) -> int:
        """Returns how often each element of a dim is repeated, so that every shard has one.

        The number is above 1 only for key/value heads that are fewer than the devices.
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

    Each field has the signature of the function in its comment.
    """

    attend: Callable[..., jax.Array]  # ``ops.attention.attention``
    # ``parallel.context.methods.ContextLatentAttention``, if devices shard sequences; None:
    # ``attend`` computes latent attention too.
    attend_latents: Callable[..., jax.Array] | None
    decode: Callable[..., jax.Array]  # ``ops.cached_attention.cached_attention``
    # ``ops.decode_layers.decode_layers``; None: layers are always computed one by one.
    decode_layers: Callable[..., DecodedLayers | None] | None
    recur: Callable[..., tuple[jax.Array, jax.Array]]  # ``ops.linear_attention.linear_attention``
    # ``ops.linear_attention.linear_attention_in_slots``
    recur_in_slots: Callable[..., tuple[jax.Array, jax.Array]]
    convolve: Callable[..., jax.Array]  # ``ops.linear_attention.short_convolution``
    # ``ops.linear_attention.short_convolutions_in_slots``; None: tokens are convolved as sequences.
    convolve_in_slots: Callable[..., tuple[list[jax.Array], list[jax.Array]]] | None
    lookup: Callable[..., jax.Array]  # ``take_rows``
    cross_entropy: Callable[..., CrossEntropySums]  # ``parallel.loss.TokenLoss``
    exchange: ExpertExchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeForm:
    """Settings of a decoder for serving, which unrolls its layers when it has a cache."""

    # Projections of the same input are one weight: each device's columns of all of them together.
    packed: bool
    # Whether that has a layer's projections onto a number per head, too: if no weight is quantized.
    numbers: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Settings of how layers compute: dtypes, recomputation, matmuls, kernels, placement.

    Layers call ``place(x, dims)`` on activations whose sharding matters. It is the identity on one
    device, and a sharding constraint on a mesh.
    """

    policy: Policy
    recomputation: Recomputation
    multiply: Multiply
    kernels: Kernels
    place: Place
    gather: Gather | None  # keeps gathered weights for the backward pass; None: XLA gathers
    cache_format: CacheFormat  # of past tokens' keys and values, or latents, and of states
    decode_form: DecodeForm | None = None  # None: layers are computed as in training
    statistics: bool = False  # layers add statistics of their activations to ``Sums``

    @property
    def state_dtype(self) -> jnp.dtype:
        """Dtype of the sums over tokens that layers keep as a state."""
        is_small = self.cache_format is CacheFormat.BF16_STATES
        return POLICIES[PolicyName.BF16].compute if is_small else self.policy.accum
