"""Precision policies: storage, compute and accumulation dtypes as one value."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxinfra.config.precision import PolicyName
from jaxinfra.numerics.einsum import mixed_einsum


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Dtypes of a run (Micikevicius et al. 2018).

    Weights are stored in ``param``, cast to ``compute`` where used, and products are summed in
    ``accum``; softmax, norms, losses and every other reduction run in ``accum`` too.
    """

    param: jnp.dtype
    compute: jnp.dtype
    accum: jnp.dtype

    def einsum(self, spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Two-operand einsum: operands in ``compute``, sums in ``accum``, result ``compute``.

        The weight's gradient is summed and returned in ``param``, never rounded to ``compute``.
        """
        return mixed_einsum(spec, x, weight, compute=self.compute, accum=self.accum)

    def einsum_accum(self, spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The same, with the result left in ``accum``: scores and logits."""
        return mixed_einsum(spec, x, weight, compute=self.compute, accum=self.accum, out=self.accum)

    def to_compute(self, x: jax.Array) -> jax.Array:
        """Casts for use in a matmul or as an activation."""
        return x.astype(self.compute)

    def to_accum(self, x: jax.Array) -> jax.Array:
        """Casts for a reduction."""
        return x.astype(self.accum)


def _policy(param: DTypeLike, compute: DTypeLike) -> Policy:
    return Policy(param=jnp.dtype(param), compute=jnp.dtype(compute), accum=jnp.dtype(jnp.float32))


POLICIES: dict[PolicyName, Policy] = {
    PolicyName.FP32: _policy(jnp.float32, jnp.float32),
    PolicyName.BF16: _policy(jnp.float32, jnp.bfloat16),
    PolicyName.FP16: _policy(jnp.float32, jnp.float16),
}
"""Weights are fp32 masters in each: what differs is the compute dtype."""
