"""Precision policies: storage, compute and accumulation dtypes as one value."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
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
    gradient: jnp.dtype | None = None  # of weights, as a matmul hands it on; None: ``param``

    def einsum(self, spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Two-operand einsum: operands in ``compute``, sums in ``accum``, result ``compute``.

        The weight's gradient is summed in ``accum`` and returned in ``param``, rounded to
        ``gradient`` between the two where that is given, before it is summed over devices.
        """
        return self._einsum(spec, x, weight, self.compute)

    def einsum_accum(self, spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The same, with the result left in ``accum``: scores and logits."""
        return self._einsum(spec, x, weight, self.accum)

    def _einsum(self, spec: str, x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
        return mixed_einsum(
            spec,
            x,
            weight,
            compute=self.compute,
            accum=self.accum,
            out=out,
            gradient=self.gradient,
        )

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


def policy_of(config: PrecisionConfig) -> Policy:
    """A run's policy."""
    policy = POLICIES[config.policy]
    if config.weight_gradients is WeightGradients.COMPUTE:
        policy = dataclasses.replace(policy, gradient=policy.compute)
    return policy
