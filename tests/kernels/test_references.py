"""References that kernels write into: each has a buffer of its own."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import references


def test_arrays_of_one_value_are_apart():
    def both(x):
        first, second = references((x, x))
        first[0] = 1.0
        return jax.freeze(first), jax.freeze(second)

    x = jnp.zeros(3)
    first, second = jax.jit(both)(x)
    assert first.tolist() == [1.0, 0.0, 0.0]
    assert second.tolist() == [0.0, 0.0, 0.0]
    # What a compiler merges are equal values: here each reference has another of one barrier.
    equations = jax.make_jaxpr(both)(x).jaxpr.eqns
    (barrier,) = (each for each in equations if each.primitive.name == "optimization_barrier")
    made = [each.invars[0] for each in equations if each.primitive.name == "new_ref"]
    assert len(made) == 2
    assert set(made) == set(barrier.outvars)
