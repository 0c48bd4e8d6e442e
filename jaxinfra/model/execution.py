"""``Execution`` says how a decoder runs (formats, kernels, placement), as one value for all layers.

``jaxinfra.parallel.execution.execution_on`` builds it, for one device and for meshes.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxinfra.axes import VOCAB, Dims
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import ExpertsConfig, LatentAttentionConfig, MixerConfig
from jaxinfra.config.run import KeptValues, Remat
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.cross_entropy import CrossEntropySums
from jaxinfra.ops.experts import ExpertWeights, apply_experts
from jaxinfra.ops.gathered import Gather
from jaxinfra.ops.multiply import Multiply


class Attend(Protocol):
    """A function that computes self-attention, such as ``jaxinfra.ops.attention.attention``."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        *,
        config: MixerConfig,
        segment_ids_BT: jax.Array | None,
        sinks_N: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, N, H] in q's dtype.

        Args:
            sinks_N: one score per head (attention sink) that joins its softmax without a value.
        """
        ...


class AttendLatents(Protocol):
    """A function that computes latent self-attention (MLA) of sequences shared by devices."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        latent_BTR: jax.Array,
        key_BTP: jax.Array,
        up_RNH: jax.Array,
        *,
        config: LatentAttentionConfig,
        recipe: Recipe,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """Returns [B, T, N, Hv] in q's dtype.

        Args:
            key_BTP: the rotated key that all heads share.
            up_RNH: weight that makes each head's key without position and value of a latent.
            recipe: of that product.
        """
        ...


class Decode(Protocol):
    """A function that attends to a KV cache, such as ``jaxinfra.ops.cached_attention``'s."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        pages: Pages,
        *,
        config: MixerConfig,
        positions_BT: jax.Array,
        sinks_N: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, T, N, H] in q's dtype: each query sees keys up to its own position, which the
        cache holds already; one whose position is below 0 is padding.
        """
        ...


class Lookup(Protocol):
    """A function that reads rows of an embedding table, such as ``take_rows``."""

    def __call__(
        self, table_VD: jax.Array, ids_BT: jax.Array, *, rows_dim: str, policy: Policy
    ) -> jax.Array:
        """Returns [B, T, D] in the compute dtype."""
        ...


def take_rows(
    table_VD: jax.Array, ids_BT: jax.Array, *, policy: Policy, rows_dim: str = VOCAB
) -> jax.Array:
    """Reads a table's rows by index, [B, T, D] in the compute dtype; NaN for ids outside it.

    Gathered in the param dtype, then cast, so that the gradient of repeated tokens is summed in the
    param dtype too.
    """
    del rows_dim
    return policy.to_compute(table_VD.at[ids_BT].get(mode="fill", fill_value=jnp.nan))


class CrossEntropy(Protocol):
    """A function that computes the training loss from the final norm's output."""

    def __call__(
        self,
        hidden_BTD: jax.Array,
        table_VD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        *,
        policy: Policy,
        z_loss: float,
        label_smoothing: float,
        logit_soft_cap: float | None,
    ) -> CrossEntropySums:
        """Returns the loss and its statistics as sums over all tokens.

        Args:
            table_VD: rows of the vocabulary, as stored.
        """
        ...


class ExpertExchange(Protocol):
    """A function that sends tokens to routed experts and back, such as ``within_device``."""

    def __call__(
        self,
        x_BTD: jax.Array,
        expert_BTK: jax.Array,
        weight_BTK: jax.Array,
        experts: ExpertWeights,
        *,
        config: ExpertsConfig,
        recipe: Recipe,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns each token's weighted sum of its experts' outputs, [B, T, D] in the recipe's
        compute dtype, and how many choices found no room; None where there is room for all.

        Args:
            expert_BTK: int32; num_experts for no expert.
            weight_BTK: fp32.
        """
        ...


def within_device(
    x_BTD: jax.Array,
    expert_BTK: jax.Array,
    weight_BTK: jax.Array,
    experts: ExpertWeights,
    *,
    config: ExpertsConfig,
    recipe: Recipe,
) -> tuple[jax.Array, None]:
    """Computes routed experts (``ExpertExchange``) on one device, where nothing is sent."""
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


class Place(Protocol):
    """Placement of activations on devices."""

    @property
    def batch_shards(self) -> int:
        """Number of devices that the rows of a batch are sharded over; it divides their number."""
        ...

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Returns the index in the whole batch of this device's first row; 0 outside shard_map."""
        ...

    def places(self, num_tokens: int) -> jax.Array:
        """Returns each token's position in the sequence, int32 [T], in the tokens' memory order."""
        ...

    def over_batch(self, x: jax.Array) -> jax.Array:
        """Sums x over the devices that hold different rows of the batch inside shard_map."""
        ...

    def copies(self, dim: str | None, size: int) -> int:
        """Counts the copies of each element of a dim, so that every device that shards it has one;
        above 1 where there are fewer key/value heads than devices.
        """
        ...

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Returns x, sharded as its logical dims require."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Anywhere:
    """``Place`` on one device: the identity."""

    batch_shards: int = 1

    def first_row(self, num_rows: int) -> int:
        """Returns 0: one device has all rows."""
        del num_rows
        return 0

    def places(self, num_tokens: int) -> jax.Array:
        """Returns 0..T-1: tokens are in the order of their positions."""
        return jnp.arange(num_tokens)

    def over_batch(self, x: jax.Array) -> jax.Array:
        """Returns x: there is one device."""
        return x

    def copies(self, dim: str | None, size: int) -> int:
        """Returns 1: one device has each element once."""
        del dim, size
        return 1

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Returns x: there is one device."""
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
    """Implementations of attention, lookup, loss and expert exchange, for a device or a mesh."""

    attend: Attend
    attend_latents: AttendLatents | None  # None: devices hold whole sequences, ``attend`` does
    decode: Decode
    lookup: Lookup
    cross_entropy: CrossEntropy
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
