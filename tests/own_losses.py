"""A policy loss of a user's own."""

import jax.numpy as jnp

import jaxinfra


@jaxinfra.part
def unclipped(log_probabilities, old, advantages, *, weights):
    """The policy gradient without a clip."""
    del weights
    return -jnp.exp(log_probabilities - old) * advantages
