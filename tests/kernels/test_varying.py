"""Kernels inside ``shard_map``: their results must not seem to be the same on every device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import layer_norm, log_softmax, rms_norm, softmax
from pallas_kernels.common import device

P = PartitionSpec
ROWS, COLUMNS = 512, 1024


def norm(x, scale, implementation):
    return rms_norm(x, scale, epsilon=1e-6, implementation=implementation)


def of_rows(x, scale, implementation):
    del scale
    return softmax(x, implementation=implementation)


def summed_norm(x, scale, implementation):
    how = {"epsilon": 1e-6, "implementation": implementation}
    return sum(layer_norm(x, scale, scale, residual=x, **how))


def masked(x, scale, implementation):
    return softmax(x, where=scale > 0, implementation=implementation)


def logarithms(x, scale, implementation):
    del scale
    return log_softmax(x, implementation=implementation)


NUM_SUMS = {norm: 1, summed_norm: 2, of_rows: 0, masked: 0, logarithms: 0}
"""Sums over devices in the gradient: of the scale's and the bias' alone."""


@pytest.mark.slow_cases("summed_norm")
@pytest.mark.parametrize("op", NUM_SUMS)
def test_cotangents_of_rows_are_not_summed(op):
    """As in plain JAX: only the scale's gradient is a sum over devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((COLUMNS,), jnp.bfloat16)

    def sums(implementation):
        split = jax.shard_map(
            functools.partial(op, implementation=implementation),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
        )

        def gradients(x, scale):
            return jax.vjp(split, x, scale)[1](x)

        with device.compiling_for(device.H200):
            text = jax.jit(gradients).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == (implementation == "hopper")
        return text.count("stablehlo.all_reduce")

    assert sums("hopper") == sums("xla") == NUM_SUMS[op]
