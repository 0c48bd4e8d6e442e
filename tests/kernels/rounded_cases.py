"""What rounds to 8 bits or to a shorter scale, as a function of a float32 matrix."""

import jax
import jax.numpy as jnp

from pallas_kernels import (
    quantize,
    quantize_both_ways,
    quantize_swiglu,
)
from pallas_kernels.few_rows_matmul.rounded import rounded_rows
from pallas_kernels.fp8.xla import quantize_across_xla
from pallas_kernels.paged_attention import codes_of, numbers_of
from pallas_kernels.quantized_weight import WeightCode, round_weight
from pallas_kernels.quantized_weight.weight import (
    Activations,
    WeightFormat,
    dequantized_rows,
    double_quantized,
)

SHAPE = (256, 256)


def cached(code: WeightCode):
    """Elements through a cache, whose scales have 16 bits."""
    return lambda x: numbers_of(*codes_of(x, code, jnp.bfloat16), code, jnp.float32)


def weight(code: WeightCode):
    """Elements of a weight, whose scales have 16 bits."""
    form = WeightFormat(code=code, group_rows=128)

    def rounded(x: jax.Array) -> jax.Array:
        packed = round_weight(x, form, num_inputs=1, scale_dtype=jnp.bfloat16)
        return dequantized_rows(packed, jnp.float32)

    return rounded


ROUNDED = {
    **{f"cache {code}": cached(WeightCode(code)) for code in ("e4m3", "int8", "int4")},
    **{f"weight {code}": weight(WeightCode(code)) for code in ("e4m3", "int8", "int4")},
    **{
        f"quantize {form}": lambda x, form=form: quantize(x, form, implementation="xla")
        for form in ("1x128", "128x128")
    },
    "e5m2": lambda x: quantize(x, "1x128", dtype=jnp.float8_e5m2, implementation="xla"),
    "across": lambda x: quantize_across_xla(
        x, dtype=jnp.dtype("float8_e4m3fn"), power_of_two=False
    ),
    "both ways": lambda x: quantize_both_ways(x, implementation="xla"),
    "blocks both ways": lambda x: quantize_both_ways(x, "128x128", implementation="xla"),
    "swiglu": lambda x: quantize_swiglu(x, x, implementation="xla"),
    "inputs": lambda x: rounded_rows(x, Activations.E4M3),
    "scales": lambda x: double_quantized(x).values(),
}
"""By name; results that are of 8 bits are read as float32 by ``read``."""


def read(values):
    """8-bit floats in float32, where it is exact; others as they are."""

    def widened(x: jax.Array) -> jax.Array:
        is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
        return x.astype(jnp.float32) if is_short else x

    return jax.tree.map(widened, values)
