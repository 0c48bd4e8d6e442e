"""Statistics of activations, which layers add to their ``Sums`` on request."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxinfra.model.passes import Sums
from jaxinfra.numerics.policy import Policy

PREFIX = "statistics/"
"""Prefix of statistics' names in ``Sums``, which tells them from the layers' own entries."""


def site_sums(sites: Mapping[str, jax.Array], *, policy: Policy) -> Sums:
    """Sums each array's squares and counts its elements, zeros and non-finite ones, and takes its
    largest absolute value; squares and maximum of finite elements. Complete once combined.
    """
    added, largest = {}, {}
    for name, array in sites.items():
        x = policy.to_accum(jax.lax.stop_gradient(array))
        finite = jnp.isfinite(x)
        kept = jnp.where(finite, x, jnp.zeros_like(x))
        site = f"{PREFIX}{name}"
        added[f"{site}/squares"] = jnp.sum(jnp.square(kept))
        added[f"{site}/elements"] = jnp.sum(jnp.ones_like(x))
        added[f"{site}/zeros"] = jnp.sum((x == 0).astype(x.dtype))
        added[f"{site}/nonfinite"] = jnp.sum((~finite).astype(x.dtype))
        largest[f"{site}/largest"] = jnp.max(jnp.abs(kept))
    return Sums(added=added, largest=largest)
