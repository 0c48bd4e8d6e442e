"""Launches of kernels: references that they write into, and results that XLA must not repeat."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import launch, references


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


def test_results_are_behind_a_barrier():
    """Without it XLA runs a kernel twice whose result a loop keeps and something else uses."""

    def run(x):
        result = jax.ShapeDtypeStruct((128,), jnp.float32)
        return launch(
            lambda gmem, smem: None, name="nothing", operands={"x": x}, results={"y": result},
            scratch={}, num_threads=1,
        )["y"]  # fmt: skip

    jaxpr = jax.make_jaxpr(run)(jnp.zeros(128)).jaxpr
    *_, barrier = jaxpr.eqns
    assert barrier.primitive.name == "optimization_barrier"
    assert barrier.outvars == jaxpr.outvars
