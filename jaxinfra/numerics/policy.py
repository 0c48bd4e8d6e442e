"""Precision policies: storage, compute and accumulation dtypes as one value."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxinfra.config.precision import (
    Numerics,
    PolicyName,
    PrecisionConfig,
    StoredWeights,
    WeightGradients,
)
from jaxinfra.numerics.exact import pinned, rounded
from jaxinfra.numerics.recipe import Recipe, Site, fp8_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Dtypes of a run (Micikevicius et al. 2018).

    Weights are stored in ``param``, cast to ``compute`` where used, and products are summed in
    ``accum``; softmax, norms, losses and every other reduction run in ``accum`` too.
    """

    param: jnp.dtype
    compute: jnp.dtype
    accum: jnp.dtype
    gradient: jnp.dtype | None = None  # of weight gradients in sums over devices; None: ``param``
    sites: tuple[tuple[Site, Recipe], ...] = ()  # sites with their own recipe
    out_of_eight_bits: tuple[int, int] = (0, 0)  # number of first and of last layers without 8 bits
    numerics: Numerics = Numerics.FAST

    @property
    def is_exact(self) -> bool:
        """Whether sums have one order, whatever is computed beside a token."""
        return self.numerics == Numerics.EXACT

    def in_eight_bits(self, layer: int, num_layers: int) -> bool:
        """Tells whether a layer's matmuls may use 8 bits; first and last layers may be exempt."""
        first, last = self.out_of_eight_bits
        return first <= layer < num_layers - last

    def recipe(self, site: Site) -> Recipe:
        """Returns the recipe of a site's matmuls.

        A router's scores are computed in ``accum`` by default, since rounding a score may change
        the chosen expert.
        """
        for named, recipe in self.sites:
            if named is site:
                return recipe
        compute = self.accum if site is Site.ROUTER else self.compute
        return Recipe(
            compute=compute, accum=self.accum, gradient=self.gradient, is_exact=self.is_exact
        )

    def to_compute(self, x: jax.Array) -> jax.Array:
        """Casts x to the compute dtype, for a matmul or as an activation."""
        return rounded(x, self.compute) if self.is_exact else x.astype(self.compute)

    def to_accum(self, x: jax.Array) -> jax.Array:
        """Casts x to the accum dtype, for a reduction."""
        return x.astype(self.accum)

    def pinned(self, product: jax.Array) -> jax.Array:
        """Returns a product that no sum behind it is fused with, if numerics are exact."""
        return pinned(product) if self.is_exact else product

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Adds two activations in the compute dtype."""
        if not self.is_exact:
            return x + y
        return self.to_compute(pinned(self.to_accum(x)) + pinned(self.to_accum(y)))

    def scaled(self, x: jax.Array, factor: float) -> jax.Array:
        """Multiplies an activation in the compute dtype with a number, rounded to it."""
        scale = jnp.asarray(factor, x.dtype)
        if not self.is_exact:
            return x * scale
        return self.to_compute(self.pinned(self.to_accum(x) * self.to_accum(scale)))


def _policy(param: DTypeLike, compute: DTypeLike) -> Policy:
    return Policy(param=jnp.dtype(param), compute=jnp.dtype(compute), accum=jnp.dtype(jnp.float32))


POLICIES: dict[PolicyName, Policy] = {
    PolicyName.FP32: _policy(jnp.float32, jnp.float32),
    PolicyName.BF16: _policy(jnp.float32, jnp.bfloat16),
    PolicyName.FP16: _policy(jnp.float32, jnp.float16),
}
"""Weights are fp32 masters in each: what differs is the compute dtype."""


def policy_of(config: PrecisionConfig) -> Policy:
    """Returns the precision policy of a run's config."""
    policy = dataclasses.replace(POLICIES[config.policy], numerics=config.numerics)
    if config.weight_gradients is WeightGradients.COMPUTE:
        policy = dataclasses.replace(policy, gradient=policy.compute)
    if config.weights is StoredWeights.BF16:
        policy = stored_as_computed(policy)
    if config.fp8 is None:
        return policy
    fp8 = fp8_recipe(config.fp8)
    sites = tuple(
        (site, dataclasses.replace(policy.recipe(site), fp8=fp8)) for site in config.fp8.sites
    )
    ends = (config.fp8.first_layers_out, config.fp8.last_layers_out)
    return dataclasses.replace(policy, sites=sites, out_of_eight_bits=ends)


def unquantized(policy: Policy) -> Policy:
    """Returns the policy that evaluates and exports a model trained with 8-bit matmuls."""
    sites = tuple((site, recipe.unquantized) for site, recipe in policy.sites)
    return dataclasses.replace(policy, sites=sites, out_of_eight_bits=(0, 0))


def stored_as_computed(policy: Policy) -> Policy:
    """Returns the policy with weights stored in the compute dtype, without fp32 masters.

    It is for weights that are frozen, or whose updates are rounded stochastically.
    """
    return dataclasses.replace(policy, param=policy.compute)


def as_kept(policy: Policy, config: PrecisionConfig) -> Policy:
    """Returns the policy with the ``param`` dtype in which a run of this config stores weights."""
    return dataclasses.replace(policy, param=policy_of(config).param)
