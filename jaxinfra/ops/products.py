"""Products of activations and weights: the one place that knows every kind of weight and of input.

A weight is an array, a ``QuantizedWeight`` in 4 or 8 bits, or a ``GatheredWeight`` beside its
share. An input is an array, an ``Input`` quantized to 8-bit floats, or a ``Deferred`` one that the
product itself normalizes or gates.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxinfra.axes import Dims
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.deferred import Deferred
from jaxinfra.ops.few_rows import multiply_few_rows, swiglu_few_rows
from jaxinfra.ops.fp8_devices import FindDevices, one_device
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.fp8_swiglu import Factor, swiglu_input
from jaxinfra.ops.gathered import GATHERED, Gather, GatheredWeight
from jaxinfra.ops.multiply import multiply, prepared
from jaxinfra.ops.quantized import QuantizedWeight, repeated_outputs

type Weight = jax.Array | QuantizedWeight | GatheredWeight
"""What a product multiplies activations with."""
type Watch = Callable[[str, jax.Array, Weight], jax.Array]
"""(spec, input, weight) of a product that is traced -> the input that it multiplies instead."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """A matmul of activations and a weight, called as ``multiply(spec, x, weight, recipe=...)``.

    Args:
        devices: where the parts of matmuls in 8 bits run.
        few_rows: kernels for a few rows multiply, on one device and without a gradient; they also
            take norms before a product and sums after it.
        watch: sees each product while a program is traced; quantization records inputs with it.
    """

    devices: FindDevices = one_device
    few_rows: bool = False
    watch: Watch | None = None

    def __call__(
        self,
        spec: str,
        x: Float[Array, "..."] | Input | Deferred,
        weight: Float[Array, "..."] | QuantizedWeight | GatheredWeight,
        *,
        recipe: Recipe,
        out: jnp.dtype | None = None,
        record: jax.Array | None = None,
        dims: Dims | None = None,
        residual: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Returns ``einsum(spec, x, weight)`` in ``out``, by default the recipe's compute dtype.

        Args:
            record: fp32 [3, 3], what 8-bit operands held in the last step; its cotangent holds what
                they hold in this one.
            dims: logical dims of the weight.
            residual: array that the product is added to, in the same kernel.

        Raises:
            UnsupportedError: the input, the weight and ``residual`` do not go together.
        """
        if isinstance(x, Deferred) or residual is not None:
            return self._fused(spec, x, weight, recipe=recipe, residual=residual)
        if self.watch is not None:
            x = self.watch(spec, x.x if isinstance(x, Input) else x, weight)
        if self.few_rows:
            return multiply_few_rows(spec, x, weight, recipe=recipe, out=out)
        return multiply(
            spec,
            x,
            weight,
            recipe=recipe,
            out=out,
            record=record,
            dims=dims,
            devices=self.devices,
        )

    def _fused(
        self,
        spec: str,
        x: jax.Array | Input | Deferred,
        weight: Weight,
        *,
        recipe: Recipe,
        residual: jax.Array | None,
    ) -> jax.Array:
        self._check_few_rows(f"{spec} with a norm before it or a sum after it")
        if isinstance(x, Input):
            raise UnsupportedError(
                f"{spec} of an input in 8 bits with a sum after it: kernels for a few rows read "
                "the compute dtype; add the sum to the product"
            )
        weight = _ungathered(spec, weight)
        return multiply_few_rows(spec, x, weight, recipe=recipe, residual=residual)

    def swiglu(
        self, x_BTD: Float[Array, "B T D"] | Deferred, weight_DF: Weight, *, recipe: Recipe
    ) -> Float[Array, "B T _"] | Deferred:
        """Returns ``silu(x gate) * (x up)`` in the compute dtype, for ``few_rows`` only; of a
        quantized weight a ``Deferred`` one that the next product gates.

        Args:
            weight_DF: columns of the gate, then as many of up.
        """
        self._check_few_rows("a packed SwiGLU")
        return swiglu_few_rows(x_BTD, _ungathered("a packed SwiGLU", weight_DF), recipe=recipe)

    def swiglu_input(self, x: Input, gate: Factor, up: Factor, *, recipe: Recipe) -> Input | None:
        """Returns ``silu(x gate) * (x up)`` in 8 bits for the product that reads it; None where
        products, activation and casts follow one another.
        """
        return swiglu_input(x, gate, up, recipe=recipe, devices=self.devices)

    def prepared(
        self,
        x: Float[Array, "..."],
        *,
        recipe: Recipe,
        dims: Dims = (None,),
    ) -> Float[Array, "..."] | Input:
        """Returns x for several products of one recipe: quantized once where it multiplies in 8
        bits.

        Args:
            x: of the residual stream, placed as it is where devices quantize their parts.
            dims: logical dims of the weights that they contract.
        """
        return prepared(x, recipe=recipe, dims=dims, devices=self.devices)

    def _check_few_rows(self, what: str) -> None:
        if not self.few_rows:
            raise UnsupportedError(
                f"{what} in one kernel where few_rows={self.few_rows}: only the serving form of "
                "one device has such kernels; compute norm, product and sum one after another"
            )


def as_array(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """Returns a weight as an array: dequantized to ``dtype``, or the share of a gathered one."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantize(dtype)
    # Brought together where it is used, as the compiler does.
    return weight.share if isinstance(weight, GatheredWeight) else weight


def gathered(weight: jax.Array | QuantizedWeight, gather: Gather | None, dims: Dims) -> Weight:
    """Returns a weight brought together by ``gather``, under the name that recomputation keeps;
    a quantized one as it is.
    """
    if gather is None or isinstance(weight, QuantizedWeight):
        return weight
    whole = gather(weight, dims)
    return dataclasses.replace(whole, value=checkpoint_name(whole.value, GATHERED))


def copied(
    weight: Weight, copies: int, *, axis: int, of_array: Callable[[jax.Array], jax.Array]
) -> Weight:
    """Returns a weight with ``copies`` of each element of a dim of its outputs.

    Args:
        axis: the dim, from the end.
        of_array: makes the copies of an array.
    """
    if isinstance(weight, QuantizedWeight):
        return repeated_outputs(weight, copies, axis=axis)
    return jax.tree.map(of_array, weight)


def is_plain(weight: Weight) -> TypeGuard[jax.Array]:
    """Whether a weight is one array."""
    return not isinstance(weight, QuantizedWeight | GatheredWeight)


def _ungathered(what: str, weight: Weight) -> jax.Array | QuantizedWeight:
    if isinstance(weight, GatheredWeight):
        raise UnsupportedError(
            f"{what} with a gathered weight: kernels for a few rows run on one device, which has "
            "all of each weight; leave keep_gathered=False"
        )
    return weight
