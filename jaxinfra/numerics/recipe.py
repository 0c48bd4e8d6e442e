"""Recipes of matmuls: operand and result formats, by site in the model."""

import dataclasses

import jax.numpy as jnp

from jaxinfra.config.precision import Fp8Format, Fp8Matmuls, Fp8Scales, Fp8Scaling
from jaxinfra.config.precision import Site as Site

FP8_FORMATS = {
    Fp8Format.E4M3: jnp.dtype(jnp.float8_e4m3fn),
    Fp8Format.E5M2: jnp.dtype(jnp.float8_e5m2),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """Formats of one matmul's 8-bit operands, and the source of their scales."""

    scaling: Fp8Scaling
    power_of_two: bool
    forward: jnp.dtype  # of x and the weight
    gradient: jnp.dtype  # of the cotangent


def fp8_recipe(config: Fp8Matmuls) -> Fp8Recipe:
    """Returns the recipe that a config names."""
    return Fp8Recipe(
        scaling=config.scaling,
        power_of_two=config.scales is Fp8Scales.POWER_OF_TWO,
        forward=FP8_FORMATS[config.forward],
        gradient=FP8_FORMATS[config.gradient],
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Formats of one matmul and of its gradients.

    Operands and the cotangent are cast to ``compute``, products are summed in ``accum``. If
    ``gradient`` is set, a weight's gradient is rounded to it before it is summed over devices. If
    ``fp8`` is set, operands are then quantized to 8 bits.
    """

    compute: jnp.dtype
    accum: jnp.dtype
    gradient: jnp.dtype | None = None
    fp8: Fp8Recipe | None = None
    is_exact: bool = False  # rows of grouped products are summed in one order

    @property
    def unquantized(self) -> "Recipe":
        """Returns the recipe without 8-bit operands."""
        return dataclasses.replace(self, fp8=None)
