"""Matmuls of activations and weights, for every kind of weight and of input.

A weight is an array, a ``QuantizedWeight`` in 4 or 8 bits, or a ``GatheredWeight`` with its shard.
An input is an array, an ``Input`` quantized to 8-bit floats, or a ``Deferred`` that the matmul
itself normalizes or gates. On a Hopper GPU special kernels multiply the few rows of a decode step.
Operand and accumulator dtypes are explicit in the program.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

import pallas_kernels
from jaxinfra.axes import Dims
from jaxinfra.config.kinds import MlpKind
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.exact import rounded
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.activation import activated
from jaxinfra.ops.exact_product import are_kernels
from jaxinfra.ops.fp8 import multiply_fp8, quantized_input
from jaxinfra.ops.fp8_devices import STREAM_TOKENS, FindDevices, one_device
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.quantized import (
    QuantizedWeight,
    contracted_dims,
    multiply_quantized,
    repeated_outputs,
    takes_any_rows,
)
from pallas_kernels.common import device
from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum
from pallas_kernels.common.row_inputs import RmsNorm as RmsNorm
from pallas_kernels.common.row_inputs import swiglu_of_halves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deferred:
    """Input of one matmul, whose kernel first normalizes it or applies SwiGLU.

    Only one matmul may read it, so that nothing is computed twice.
    """

    x: jax.Array  # [B, T, D]; for SwiGLU [B, T, 2 D], gate first, then up
    norm: RmsNorm | None = None  # None: x is for SwiGLU

    def value(self) -> jax.Array:
        """Computes the normalized or gated input [B, T, D] in x's dtype, with fp32 inside."""
        if self.norm is not None:
            return self.norm(self.x)
        return swiglu_of_halves(self.x)


GATHERED = "gathered_weight"
"""Name of what was brought together once for both passes: kept whatever is recomputed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredWeight:
    """A weight gathered from all devices, with this device's shard, which receives the gradient.

    So gradients are summed over devices in the shard's dtype, not in the compute dtype of the
    gathered weight.
    """

    share: Float[Array, "..."]  # this device's shard; receives the gradient
    value: Float[Array, "..."]  # the whole weight in the compute dtype; receives no gradient
    # Where N devices sum gradients by copies: it receives each device's own, in place of ``share``.
    by_device: Float[Array, "N ..."] | None = None


class Gather(Protocol):
    """A function that all-gathers a weight from its shards, and reduce-scatters its gradient."""

    def __call__(self, weight: jax.Array, dims: Dims) -> GatheredWeight:
        """Gathers the weight in the compute dtype."""
        ...

    def whole(self, vector: jax.Array, dims: Dims) -> jax.Array:
        """Gathers a norm's scale or bias in its own dtype."""
        ...


class OrderedProduct(Protocol):
    """A function of ``exact_product.ordered_einsum``'s arguments, for a device or a mesh."""

    def __call__(
        self,
        spec: str,
        x: jax.Array,
        weight: jax.Array,
        *,
        out: jnp.dtype,
        dims: Dims | None = None,
    ) -> jax.Array:
        """Computes ``einsum(spec, x, weight)``, each row in an order of its own."""
        ...


class StreamProduct(Protocol):
    """Products of a stream whose positions devices share, which gather or scatter it themselves."""

    def gathers(self, spec: str, dims: Dims) -> bool:
        """Whether a product with a weight of these dims reads the stream."""
        ...

    def scatters(self, spec: str, dims: Dims) -> bool:
        """Whether a product with a weight of these dims is added to the stream."""
        ...

    def whole(self, x_BTD: jax.Array) -> jax.Array:
        """Gathers the stream."""
        ...

    def gather(
        self, x_BTD: jax.Array, products: Sequence["StreamFactor"], *, recipe: Recipe
    ) -> tuple[jax.Array, ...]:
        """Computes products of the stream, each in the compute dtype."""
        ...

    def scatter(self, x: jax.Array, product: "StreamFactor", *, recipe: Recipe) -> jax.Array:
        """Computes a product into the stream, in the compute dtype."""
        ...


class StreamFactor(NamedTuple):
    """Weight of a product that reads the stream or is added to it."""

    spec: str
    share: jax.Array  # receives the gradient
    value: jax.Array  # is multiplied
    dims: Dims


type AnyWeight = jax.Array | QuantizedWeight | GatheredWeight
"""Weight that a product can multiply activations with."""


def multiply(
    spec: str,
    x: Float[Array, "..."] | Input,
    weight: AnyWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    record: jax.Array | None = None,
    dims: Dims | None = None,
    devices: FindDevices = one_device,
    ordered: OrderedProduct | None = None,
) -> Float[Array, "..."]:
    """Computes ``einsum(spec, x, weight)`` in the recipe's dtypes, for any kind of weight or input.

    Gradients are computed from operands in ``recipe.compute``, with sums in ``recipe.accum``. dx is
    returned in x's dtype, dweight in the weight's. So fp32 masters get the fp32 sums, unless
    ``recipe.gradient`` rounds these first.

    Args:
        spec: einsum of two operands with explicit output; every index of an operand is also in the
            other operand or in the output. With fp8, the spec must be a matmul.
        out: dtype of the result; ``recipe.compute`` by default.
        weight: a quantized weight is a constant (see ``multiply_quantized``); the gradient of a
            gathered weight goes to its shard.
        record, devices: as in ``multiply_fp8``; used only if the recipe has fp8.
        dims: logical dims of the weight, for fp8 and ordered products.
        ordered: product of the forward pass; None: whatever is fastest.
    """
    if isinstance(weight, QuantizedWeight):
        if ordered is not None:
            raise UnsupportedError(
                f"numerics=exact with a weight of {weight.format.code.bits} bits, whose products "
                "have no fixed order; dequantize the model first, or set numerics=fast"
            )
        x = x.x if isinstance(x, Input) else x
        return multiply_quantized(
            spec, x, weight, recipe=recipe, out=out, is_whole=devices().num == 1
        )
    if recipe.fp8 is not None:
        if isinstance(weight, GatheredWeight):
            raise UnsupportedError(
                f"{spec} in 8 bits with a gathered weight: it is gathered in {weight.value.dtype}, "
                "and fp8 gathers weights in 8 bits; leave keep_gathered=False"
            )
        return multiply_fp8(
            spec, x, weight, recipe=recipe, out=out, record=record, dims=dims, devices=devices
        )
    x = x.x if isinstance(x, Input) else x
    return _einsum(spec, x, weight, recipe=recipe, out=out, ordered=ordered, dims=dims)


def _einsum(
    spec: str,
    x: jax.Array,
    weight: jax.Array | GatheredWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None,
    ordered: OrderedProduct | None,
    dims: Dims | None,
) -> jax.Array:
    """``multiply`` of arrays in the compute dtype, with its gradients."""
    compute = recipe.compute
    assert recipe.accum == ACCUMULATOR, f"sums in {recipe.accum}; products are in {ACCUMULATOR}"

    def dot(dot_spec: str, a: jax.Array, b: jax.Array, result: jnp.dtype) -> jax.Array:
        return pinned_einsum(dot_spec, a.astype(compute), b.astype(compute), result=result)

    share, value = share_and_value(weight)

    @jax.custom_vjp
    def product(x: jax.Array, share: jax.Array, value: jax.Array) -> jax.Array:
        if ordered is None:
            return dot(spec, x, value, out or compute)
        # Operands of kernels are stored, and so rounded. None of them gets more bits than it has.
        cast = _narrowed if are_kernels() else rounded
        operands = [cast(each, compute) for each in (x, value)]
        return ordered(spec, *operands, out=out or compute, dims=dims)

    def forward(x: jax.Array, share: jax.Array, value: jax.Array):
        return product(x, share, value), (x, value)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        x, value = residuals
        operands, out_dims = spec.split("->")
        x_dims, weight_dims = operands.split(",")
        dx = dot(f"{out_dims},{weight_dims}->{x_dims}", cotangent, value, x.dtype)
        return dx, weight_gradient(spec, x, cotangent, share, recipe), None

    product.defvjp(forward, backward)
    return product(x, share, value)


def share_and_value(weight: jax.Array | GatheredWeight) -> tuple[jax.Array, jax.Array]:
    """Returns the array that receives a weight's gradient, and the one that is multiplied.

    Of an array both are the parameter, which the backward pass then keeps without a copy.
    """
    if isinstance(weight, GatheredWeight):
        share = weight.share if weight.by_device is None else weight.by_device
        return share, weight.value
    return weight, weight


def weight_gradient(
    spec: str, x: jax.Array, cotangent: jax.Array, share: jax.Array, recipe: Recipe
) -> jax.Array:
    """Computes the gradient of the weight of ``einsum(spec, x, weight)``, in ``share``'s dtype.

    A share with one dim more than the weight, [N, ...], gets the gradients of N parts of the batch.
    """
    operands, out_dims = spec.split("->")
    x_dims, weight_dims = operands.split(",")
    if share.ndim > len(weight_dims):
        x, cotangent = (each.reshape(len(share), -1, *each.shape[1:]) for each in (x, cotangent))
        x_dims, out_dims, weight_dims = (f"Z{dims}" for dims in (x_dims, out_dims, weight_dims))
    handed_on = share.dtype if recipe.gradient is None else recipe.gradient
    held = x.astype(recipe.compute), cotangent.astype(recipe.compute)
    gradient = pinned_einsum(f"{x_dims},{out_dims}->{weight_dims}", *held, result=handed_on)
    return gradient.astype(share.dtype)


def _narrowed(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x.astype(dtype) if dtype.itemsize < x.dtype.itemsize else x


MOST_ROWS = 256


def multiply_few_rows(
    spec: str,
    x: Float[Array, "..."] | Deferred,
    weight: Float[Array, "..."] | QuantizedWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    residual: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Computes ``residual + einsum(spec, x, weight)`` on one device.

    If x has few rows, or the product is in 8 bits, a kernel multiplies them. It includes the norm
    before and the sum after the matmul, if that was measured to be faster. These kernels have no
    gradient.
    """
    assert recipe.fp8 is None, "execution_on"
    raw, rank = x.x if isinstance(x, Deferred) else x, contracted_dims(spec)
    if isinstance(x, Deferred) or residual is not None:
        fits = raw.dtype == recipe.compute
    else:
        fits = isinstance(weight, jax.Array) and out in (None, recipe.compute)
    if rank is None or not fits or not _takes(raw, weight, rank, recipe):
        x = x.value() if isinstance(x, Deferred) else x
        product = multiply(spec, x, weight, recipe=recipe, out=out)
        return product if residual is None else residual + product
    product = _product(x, weight, rank, recipe, residual=residual)
    outputs = weight.outputs if isinstance(weight, QuantizedWeight) else weight.shape[rank:]
    return product.reshape(*raw.shape[:-rank], *outputs)


def _product(
    x: jax.Array | Deferred,
    weight: jax.Array | QuantizedWeight,
    rank: int,
    recipe: Recipe,
    *,
    residual: jax.Array | None = None,
    swiglu: bool = False,
) -> jax.Array:
    """Returns the product as a matrix, computed by the kernels' op."""
    raw, norm = (x.x, x.norm) if isinstance(x, Deferred) else (x, None)
    if not isinstance(weight, QuantizedWeight):
        weight = weight.astype(recipe.compute).reshape(math.prod(weight.shape[:rank]), -1)
    return pallas_kernels.few_rows_matmul(
        raw.astype(recipe.compute).reshape(-1, math.prod(raw.shape[-rank:])),
        weight,
        norm=norm,
        swiglu_input=isinstance(x, Deferred) and norm is None,
        swiglu=swiglu,
        residual=None if residual is None else residual.reshape(-1, residual.shape[-1]),
    )


def _takes(x: jax.Array, weight: jax.Array | QuantizedWeight, rank: int, recipe: Recipe) -> bool:
    """Whether a kernel may multiply: few rows, or any rows by a weight for 8-bit products."""
    is_few = math.prod(x.shape[:-rank]) <= MOST_ROWS or takes_any_rows(weight)
    return is_few and recipe.compute.itemsize == 2 and device.target().capability == (9, 0)


type WatchInput = Callable[[str, jax.Array, AnyWeight], jax.Array]
"""(spec, input, weight) of a product that is traced -> the input that it multiplies instead."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """A matmul of activations and a weight, called as ``multiply(spec, x, weight, recipe=...)``.

    Args:
        devices: function that returns the ``Devices`` of matmuls in 8 bits.
        few_rows: whether to use ``multiply_few_rows``, on one device and without gradients.
        ordered: product whose rows do not depend on their number, for exact numerics.
        stream: products that gather or scatter the residual stream themselves.
        watch: function that is called for each matmul while a program is traced, and may replace
            its input; calibration of quantization records inputs with it.
    """

    devices: FindDevices = one_device
    few_rows: bool = False
    ordered: OrderedProduct | None = None
    stream: StreamProduct | None = None
    watch: WatchInput | None = None

    def __call__(
        self,
        spec: str,
        x: Float[Array, "..."] | Input | Deferred,
        weight: AnyWeight,
        *,
        recipe: Recipe,
        out: jnp.dtype | None = None,
        record: jax.Array | None = None,
        dims: Dims | None = None,
        residual: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Returns ``einsum(spec, x, weight)`` in ``out``, by default the recipe's compute dtype.

        Args:
            record: statistics of 8-bit operands in the last step, fp32 [3, 3]; its cotangent is
                this step's statistics.
            dims: logical dims of the weight.
            residual: array that the product is added to in the same kernel, with ``few_rows``.
        """
        if self.watch is not None:
            assert not isinstance(x, Deferred), "no layer fuses its norm while it is watched"
            x = self.watch(spec, x.x if isinstance(x, Input) else x, weight)
        if self.few_rows:
            assert not isinstance(x, Input), "execution_on"
            assert not isinstance(weight, GatheredWeight), "one device has all of each weight"
            return multiply_few_rows(spec, x, weight, recipe=recipe, out=out, residual=residual)
        assert not isinstance(x, Deferred), "Abilities.fuses"
        assert residual is None, "Abilities.fuses"
        if self.stream is not None and out is None and not isinstance(x, Input):
            factor = self.stream_factor(spec, weight, dims, recipe=recipe)
            if factor is not None and self.stream.scatters(spec, factor.dims):
                return self.stream.scatter(x, factor, recipe=recipe)
        return multiply(
            spec,
            x,
            weight,
            recipe=recipe,
            out=out,
            record=record,
            dims=dims,
            devices=self.devices,
            ordered=self.ordered,
        )

    def stream_factor(
        self, spec: str, weight: AnyWeight, dims: Dims | None, *, recipe: Recipe
    ) -> StreamFactor | None:
        """Returns a weight for products of the stream; None if they do not take it."""
        is_watched = self.stream is None or self.watch is not None
        if is_watched or recipe.fp8 is not None or dims is None:
            return None
        if isinstance(weight, QuantizedWeight):
            return None
        return StreamFactor(spec, *share_and_value(weight), dims)

    def swiglu(
        self, x_BTD: Float[Array, "B T D"] | Deferred, weight_DF: AnyWeight, *, recipe: Recipe
    ) -> Float[Array, "B T _"] | Deferred:
        """Returns ``silu(x gate) * (x up)`` in the compute dtype, for ``few_rows`` only.

        With a quantized weight it returns a ``Deferred``, to which the next matmul applies SwiGLU.

        Args:
            weight_DF: columns of the gate, then as many of up.
        """
        assert self.few_rows, "Abilities.fuses"
        if isinstance(weight_DF, QuantizedWeight):
            return Deferred(x=multiply_few_rows("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe))
        assert not isinstance(weight_DF, GatheredWeight), "one device has all of each weight"
        raw = x_BTD.x if isinstance(x_BTD, Deferred) else x_BTD
        if _takes(raw, weight_DF, 1, recipe) and raw.dtype == recipe.compute:
            hidden = _product(x_BTD, weight_DF, 1, recipe, swiglu=True)
            return hidden.reshape(*raw.shape[:-1], -1)
        x_BTD = x_BTD.value() if isinstance(x_BTD, Deferred) else x_BTD
        product_BTF = multiply("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe).astype(recipe.accum)
        gate, up = jnp.split(product_BTF, 2, axis=-1)
        return activated(MlpKind.SWIGLU, up, gate).astype(recipe.compute)

    def prepared(
        self, x: Float[Array, "..."], *, recipe: Recipe, dims: Dims = (None,)
    ) -> Float[Array, "..."] | Input:
        """Quantizes x once for several matmuls with an fp8 recipe; otherwise returns x unchanged.

        Args:
            x: activation in the residual stream's shape and sharding.
            dims: logical dims of x's last dims, which the matmuls contract.
        """
        if recipe.fp8 is None:
            return x
        return quantized_input(
            x, recipe=recipe, dims=dims, tokens=STREAM_TOKENS, devices=self.devices
        )


def as_array(weight: AnyWeight, dtype: jnp.dtype) -> jax.Array:
    """Returns a weight as an array: dequantized to ``dtype``, or a gathered weight's shard."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantize(dtype)
    # Brought together where it is used, as the compiler does.
    return weight.share if isinstance(weight, GatheredWeight) else weight


def gathered(weight: jax.Array | QuantizedWeight, gather: Gather | None, dims: Dims) -> AnyWeight:
    """Gathers a weight and names it, so that recomputation can keep it; a quantized weight is
    returned unchanged.
    """
    if gather is None or isinstance(weight, QuantizedWeight):
        return weight
    whole = gather(weight, dims)
    return dataclasses.replace(whole, value=checkpoint_name(whole.value, GATHERED))


def copied(
    weight: AnyWeight, copies: int, *, axis: int, of_array: Callable[[jax.Array], jax.Array]
) -> AnyWeight:
    """Returns a weight in which each element of an output dim is repeated ``copies`` times.

    Args:
        axis: the dim, counted from the end.
        of_array: function that repeats the elements of an array.
    """
    if isinstance(weight, QuantizedWeight):
        return repeated_outputs(weight, copies, axis=axis)
    return jax.tree.map(of_array, weight)


def is_plain(weight: AnyWeight) -> TypeGuard[jax.Array]:
    """Tells whether a weight is one plain array."""
    return not isinstance(weight, QuantizedWeight | GatheredWeight)
