"""How a decoder runs, as opposed to what it is: one value handed to every layer."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxinfra.config.model import AttentionConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import Remat
from jaxinfra.core.axes import VOCAB, Dims
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.ops.attention import attention


class Attend(Protocol):
    """Self-attention over packed documents; ``jaxinfra.ops.attention.attention`` is one."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        *,
        config: AttentionConfig,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """Returns [B, T, N, H] in q's dtype."""
        ...


class Lookup(Protocol):
    """Reading rows of an embedding table; ``take_rows`` is one."""

    def __call__(
        self, table_VD: jax.Array, ids_BT: jax.Array, *, rows_dim: str, policy: Policy
    ) -> jax.Array:
        """Returns [B, T, D] in the compute dtype."""
        ...


def take_rows(
    table_VD: jax.Array, ids_BT: jax.Array, *, policy: Policy, rows_dim: str = VOCAB
) -> jax.Array:
    """Rows by index, [B, T, D] in the compute dtype; ids outside the table yield NaN.

    Gathered in the param dtype, then cast, so that the gradient of repeated tokens is summed in the
    param dtype too.
    """
    del rows_dim
    return policy.to_compute(table_VD.at[ids_BT].get(mode="fill", fill_value=jnp.nan))


class Gather(Protocol):
    """A weight brought together of which a device holds a part; its gradient goes back to parts."""

    def __call__(self, weight: jax.Array, dims: Dims) -> jax.Array:
        """Returns the weight as projections multiply with it, in the compute dtype."""
        ...


class Constrain(Protocol):
    """Where activations lie."""

    @property
    def batch_shards(self) -> int:
        """Devices that the compiler spreads the batch dim over."""
        ...

    @property
    def num_devices(self) -> int:
        """That a computation may be spread over in any way."""
        ...

    @property
    def sequence_shards(self) -> int:
        """Devices that the compiler spreads a sequence over, where layers mix its positions."""
        ...

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Where these rows begin in the whole batch: not at 0 where devices run apart."""
        ...

    def places(self, num_tokens: int) -> jax.Array:
        """int32 [T]: the place in the sequence of each token, in the order they lie in."""
        ...

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """x, placed as a tensor of these dims."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Anywhere:
    batch_shards: int = 1
    sequence_shards: int = 1
    num_devices: int = 1

    def first_row(self, num_rows: int) -> int:
        del num_rows
        return 0

    def places(self, num_tokens: int) -> jax.Array:
        return jnp.arange(num_tokens)

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        del dims
        return x


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Precision, attention and lookup implementation, recomputation, placement of activations.

    Layers call ``constrain(x, dims)`` on activations whose placement matters; on one device it is
    the identity, on a mesh ``jaxinfra.parallel`` supplies it.
    """

    policy: Policy = POLICIES[PolicyName.FP32]
    attend: Attend = attention
    lookup: Lookup = take_rows
    constrain: Constrain = _Anywhere()
    gather: Gather | None = None  # of weights that are kept as gathered; None: left to the compiler
    remat: Remat = Remat.NONE
    unroll: int = 1
