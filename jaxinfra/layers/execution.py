"""How a decoder runs, as opposed to what it is: one value handed to every layer."""

import dataclasses
from typing import Protocol

import jax

from jaxinfra.config.model import AttentionConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import Remat
from jaxinfra.core.axes import Dims
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


class Constrain(Protocol):
    """Where activations lie."""

    @property
    def batch_shards(self) -> int:
        """Devices that the batch dim is spread over."""
        ...

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """x, placed as a tensor of these dims."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Anywhere:
    batch_shards: int = 1

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        del dims
        return x


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Precision, attention implementation, recomputation and placement of activations.

    Layers call ``constrain(x, dims)`` on activations whose placement matters; on one device it is
    the identity, on a mesh ``jaxinfra.parallel`` supplies it.
    """

    policy: Policy = POLICIES[PolicyName.FP32]
    attend: Attend = attention
    constrain: Constrain = _Anywhere()
    remat: Remat = Remat.NONE
    unroll: int = 1
