"""A matmul of operands in 8 bits, forward and backward.

With x [M, K], a weight w [K, N] and a cotangent g [M, N], each quantized along the dim that a
product contracts:

    y = x w        x along K, w along K
    dx = g w^T     g along N, w along N
    dw = x^T g     x and g along M

With blocks of 128 x 128, one quantized array serves both contractions; blocks of 1 x 128 are
quantized once per contraction. x is quantized by the layer that computes it (``quantized_input``).
Quantized x and w have a name that remat policies keep (``QUANTIZED``), so nothing is quantized
again for the backward pass.

The computation has three kinds of parts: an operand is quantized, tokens are multiplied with a
weight (y, dx), or tokens with tokens (dw). On a mesh, ``Devices.each`` runs a part on each device's
shards. If M is sharded, y and dx need no communication, and dw is summed over devices. If K is
sharded, y is summed; if N is sharded, dx is. Kernels multiply arrays of one device; XLA multiplies
arrays that its partitioner shards over a mesh.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxinfra.axes import Dims
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Fp8Recipe, Recipe
from jaxinfra.ops import fp8_operands as operands
from jaxinfra.ops.fp8_devices import (
    TOKENS,
    WHOLE,
    Devices,
    FindDevices,
    ShardingUse,
    Side,
    of_matrix,
    one_device,
    unmerged,
)
from jaxinfra.ops.fp8_operands import COTANGENT, WEIGHT, BothWays, Caster, Input, X
from pallas_kernels.common.chosen import announce
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import Quantized, Scaling, spread
from pallas_kernels.fp8 import scaled_matmul


def _dequantized(
    a: Quantized,
    b: Quantized,
    *,
    spec: str,
    forms: tuple[Scaling, Scaling],
    out: jnp.dtype,
    dtype: jnp.dtype,
) -> jax.Array:
    """Product of operands that are multiplied with their scales first, in ``dtype``."""

    def widened(x: Quantized, form: Scaling) -> jax.Array:
        scale = spread(form, x.scale, *x.values.shape[-2:])
        scale = scale.reshape((1,) * (x.values.ndim - scale.ndim) + scale.shape)
        return (x.values.astype(ACCUMULATOR) * scale).astype(dtype)

    sides = (widened(x, form) for x, form in zip((a, b), forms, strict=True))
    result = jnp.einsum(spec, *sides, preferred_element_type=ACCUMULATOR, precision="highest")
    return result.astype(out)


QUANTIZED = "quantized"
"""Name of quantized inputs and weights for recomputation policies."""


def named[Tree](tree: Tree) -> Tree:
    """Names the arrays ``QUANTIZED`` for recomputation, with 8-bit floats as bytes.

    ``jax.checkpoint`` applies ``reduce_precision`` to saved floats, with their numbers of exponent
    and mantissa bits. This treats e4m3fn as a format with infinities, whose largest number is 240,
    so values between 240 and 448 would become infinite. XLA drops the rounding if excess precision
    is allowed, which is the default on GPUs but not on CPUs.
    """

    def leaf(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize > 1:
            return checkpoint_name(x, QUANTIZED)
        bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint8), QUANTIZED)
        return jax.lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(leaf, tree)


def _form(spec: str) -> tuple[int, int, bool]:
    """Counts x's leading dims that stay and those that are contracted, and tells whether the
    weight's are contracted first: [K, N], not [N, K].
    """
    x, weight, out = spec.replace("->", ",").split(",")
    contracted = "".join(letter for letter in x if letter not in out)
    tokens = x.removesuffix(contracted)
    outer = out.removeprefix(tokens)
    orders = {contracted + outer: True, outer + contracted: False}
    if tokens + contracted != x or tokens + outer != out or weight not in orders or not tokens:
        raise UnsupportedError(
            f"{spec} is no matmul of tokens and a weight, which is what can be computed in 8 bits; "
            "use the recipe without fp8 (Recipe.unquantized)"
        )
    return len(tokens), len(contracted), orders[weight]


def _fitting(devices: Devices, sides: tuple[Side, ...], fp8: Fp8Recipe) -> Devices:
    """Returns devices whose shares have whole blocks, else those partitioned by the compiler."""
    why = devices.why_unfit(sides)
    if why is None:
        return devices
    shape = " x ".join(str(math.prod(sizes)) for _, sizes in sides)
    case = f"scales by {operands.form_of(fp8)} of {shape}"
    announce("8-bit matmul", "xla", case, because=why)
    return devices.compiler_partitioned


def _quantized_tokens(
    x: jax.Array,
    *,
    operand: int,
    recipe: Recipe,
    dims: Dims,
    tokens: Dims,
    devices: Devices,
) -> tuple[BothWays, jax.Array]:
    """x or a cotangent, whose last dims ``dims`` a product contracts, and what was seen of it.

    Args:
        tokens: logical dims of x's tokens.
    """
    fp8 = recipe.fp8
    assert fp8 is not None
    caster = Caster(operand, fp8, devices)
    sizes = x.shape[: x.ndim - len(dims)]
    if devices.why_unfit(((tokens, sizes),)) is not None:
        tokens = TOKENS  # brought together in 16 bits

    def part(x: jax.Array) -> tuple[BothWays, jax.Array]:
        matrix = operands.as_matrix(x.astype(recipe.compute), len(dims), devices)
        return caster.tokens(matrix, dims=dims, token_dims=tokens, sequences=x.shape[0])

    both = BothWays._make((of_matrix(TOKENS, dims), of_matrix(dims, TOKENS)))
    takes = (unmerged((*tokens, *dims)),)
    return devices.each(part, takes=takes, gives=(both, WHOLE))(x)


def quantized_input(
    x: jax.Array,
    *,
    recipe: Recipe,
    dims: Dims = (None,),
    tokens: Dims = TOKENS,
    devices: FindDevices = one_device,
) -> Input:
    """Quantizes an activation once for all projections that multiply with it.

    Args:
        x: [B, T, ...], with one or more dims of width at the end.
        dims: logical dims of the width, which are the weights' contracted dims.
        tokens: logical dims of x's tokens.
    """
    fp8 = recipe.fp8
    assert fp8 is not None
    shape = x.shape
    here = _fitting(devices(), _sides(shape, dims), fp8)

    def quantized(x: jax.Array):
        return named(
            _quantized_tokens(x, operand=X, recipe=recipe, dims=dims, tokens=tokens, devices=here)
        )

    # Its gradient is nothing: cotangents reach x through the products.
    constant = jax.custom_vjp(quantized)
    constant.defvjp(lambda x: (quantized(x), None), lambda *_: (None,))
    return Input(x, *constant(x))


def _sides(shape: tuple[int, ...], dims: Dims) -> tuple[Side, Side]:
    """Tokens, and the width that the last ``dims`` of an array of this shape are."""
    width = len(shape) - len(dims)
    return (TOKENS, shape[:width]), (dims, shape[width:])


def multiply_fp8(
    spec: str,
    x: jax.Array | Input,
    weight: jax.Array,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    record: jax.Array | None = None,
    dims: Dims | None = None,
    devices: FindDevices = one_device,
) -> jax.Array:
    """Computes ``einsum(spec, x, weight)`` of 8-bit operands, and its gradients, by a recipe.

    Args:
        spec: einsum of a matmul, in which dims of x that are not contracted come first.
        record: statistics of the last step's operands, fp32 [3, 3]; its cotangent is the
            statistics of this step.
        dims: logical dims of the weight; by default none is sharded.

    Raises:
        UnsupportedError: the einsum is no matmul.
    """
    call, x = planned(spec, x, weight, recipe=recipe, out=out, dims=dims, devices=devices)
    return call.product(x.x, x.quantized, x.seen, weight, record)


def planned(
    spec: str,
    x: jax.Array | Input,
    weight: jax.Array,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    dims: Dims | None = None,
    devices: FindDevices = one_device,
) -> tuple["Call", Input]:
    """Prepares an 8-bit matmul: returns its ``Call``, and x quantized if it was not.

    Args:
        spec, x, weight, recipe, out, dims, devices: as in ``multiply_fp8``.
    """
    fp8, (num_tokens, num_contracted, contracted_first) = recipe.fp8, _form(spec)
    assert fp8 is not None
    dims = (None,) * weight.ndim if dims is None else dims
    split = num_contracted if contracted_first else weight.ndim - num_contracted
    ends = slice(None, split), slice(split, None)
    contracted, outer = ends if contracted_first else ends[::-1]
    shape = (x.x if isinstance(x, Input) else x).shape
    sides = (*_sides(shape, dims[contracted]), (dims[outer], weight.shape[outer]))
    here = devices()
    fitting = _fitting(here, sides, fp8)
    if isinstance(x, Input) and fitting is not here and x.is_matrix:
        x = x.x  # quantized by each device for other weights, which fit
    if not isinstance(x, Input):
        x = quantized_input(x, recipe=recipe, dims=dims[contracted], devices=lambda: fitting)
    call = Call(
        recipe=recipe,
        fp8=fp8,
        contracted_first=contracted_first,
        weight_shape=weight.shape,
        matrix_dims=(dims[:split], dims[split:]),
        tokens=shape[:num_tokens],
        out=out or recipe.compute,
        devices=fitting,
    )
    return call, x


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A planned 8-bit matmul without its arrays: shapes, dims, recipe and devices."""

    recipe: Recipe
    fp8: Fp8Recipe
    contracted_first: bool
    weight_shape: tuple[int, ...]
    matrix_dims: tuple[Dims, Dims]  # of the weight, as a matrix
    tokens: tuple[int, ...]
    out: jnp.dtype
    devices: Devices

    def product(self, x, quantized, x_seen, weight, record) -> jax.Array:
        """Computes the matmul [B, T, N], with a gradient rule; of x only the dtype is used."""
        x_dtype = x.dtype

        @jax.custom_vjp
        def call(x, quantized, x_seen, weight, record):
            return self.forward(quantized, x_seen, weight, record)[0]

        def backward(kept, cotangent):
            dx, dweight, emitted = self.backward(kept, cotangent)
            return dx.astype(x_dtype), None, None, dweight.astype(weight.dtype), emitted

        call.defvjp(lambda x, *others: self.forward(*others), backward)
        return call(x, quantized, x_seen, weight, record)

    def forward(self, quantized, x_seen, weight, record):
        """Computes y, and the residuals of the backward pass."""
        w, seen = named(self._quantized_weight(weight))
        y = self._with_weight(quantized.rows, w, out=self.out, along_first=self.contracted_first)
        return y, (quantized.tokens, x_seen, w, seen, record is not None)

    def backward(self, kept, cotangent):
        """Quantizes the cotangent; returns dx, dweight, and this step's statistics or None."""
        contracted, outer = self.sides
        both, seen = _quantized_tokens(
            cotangent,
            operand=COTANGENT,
            recipe=self.recipe,
            dims=outer,
            tokens=self.devices.token_dims_of_sum(contracted),
            devices=self.devices,
        )
        return self.gradients(kept, both, seen)

    def gradients(self, kept, cotangent: BothWays, g_seen: jax.Array):
        """Computes dx, dweight and statistics from a cotangent that is already in 8 bits."""
        x_tokens, x_seen, w, w_seen, is_recorded = kept
        compute, first = self.recipe.compute, self.contracted_first
        dx = self._with_weight(cotangent.rows, w, out=compute, along_first=not first)
        sides = (x_tokens, cotangent.tokens) if first else (cotangent.tokens, x_tokens)
        dweight = self._of_weight(*sides)
        return dx, dweight, jnp.stack([x_seen, w_seen, g_seen]) if is_recorded else None

    @property
    def sides(self) -> tuple[Dims, Dims]:
        """Logical dims of the weight in two groups: dims contracted with x, and output dims."""
        return self.matrix_dims if self.contracted_first else self.matrix_dims[::-1]

    def _quantized_weight(self, weight):
        """Quantizes the weight in this device's share; returns it and its statistics."""
        caster = Caster(WEIGHT, self.fp8, self.devices)
        rows, columns = self.matrix_dims

        def part(weight: jax.Array):
            matrix = weight.reshape(self._as_matrix(weight.shape)).astype(self.recipe.compute)
            return caster.weight(matrix, self.matrix_dims)

        takes = (unmerged((*rows, *columns), ShardingUse.STORED),)
        return self.devices.each(part, takes=takes, gives=(self._placed_weight, WHOLE))(weight)

    def _with_weight(self, tokens: Quantized, w: Quantized, *, out: jnp.dtype, along_first: bool):
        """[B, T, ...]: tokens times the weight, which they contract along its first dim or last."""
        devices, forms = self.devices, (self._form, Scaling.BLOCK)
        rows, columns = self.matrix_dims
        contracted, outer = (rows, columns) if along_first else (columns, rows)
        placed = self._placed_weight
        split = len(rows)
        outer_shape = self.weight_shape[split:] if along_first else self.weight_shape[:split]
        shape = devices.shard_shape((*self.tokens, *outer_shape), (*TOKENS, *outer))

        def part(tokens: Quantized, w: Quantized) -> jax.Array:
            whole = devices.gather_weight(w, placed, self.weight_shape)
            b = operands.transposed(whole) if along_first else whole
            y = self._multiply(tokens, b, forms, out)
            return devices.sum_products(y.reshape(shape), contracted)

        takes = (of_matrix(TOKENS, contracted), placed)
        gives = unmerged((*devices.token_dims_of_sum(contracted), *outer))
        return devices.each(part, takes=takes, gives=gives)(tokens, w)

    def _of_weight(self, a: Quantized, b: Quantized) -> jax.Array:
        """The weight's gradient, of tokens along one another."""
        devices, (rows, columns) = self.devices, self.matrix_dims
        dims, form = (*rows, *columns), self._form
        handed_on = self.recipe.gradient or self.recipe.accum
        shape = devices.shard_shape(self.weight_shape, dims)

        def part(a: Quantized, b: Quantized) -> jax.Array:
            gradient = self._multiply(a, b, (form, form), self.recipe.accum).astype(handed_on)
            return devices.sum_gradient(gradient.reshape(shape), dims)

        takes = (of_matrix(rows, TOKENS), of_matrix(columns, TOKENS))
        return devices.each(part, takes=takes, gives=unmerged(dims, ShardingUse.SUMMED))(a, b)

    def _as_matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        split = len(self.matrix_dims[0])
        return math.prod(shape[:split]), math.prod(shape[split:])

    @property
    def _form(self) -> Scaling:
        return operands.form_of(self.fp8)

    @property
    def _placed_weight(self) -> Any:
        return of_matrix(*self.matrix_dims, ShardingUse.STORED)

    def _multiply(
        self, a: Quantized, b: Quantized, forms: tuple[Scaling, Scaling], out: jnp.dtype
    ) -> jax.Array:
        """``sum_k (a scale)[..., m, k] (b scale)[n, k]``, summed also over dims in front that both
        operands have; rounded from fp32 to ``out``.
        """
        if a.values.ndim == 2:
            num_devices = self.devices.num_partitions
            return scaled_matmul(
                a.values, b.values, a.scale, b.scale, out_dtype=out, num_devices=num_devices
            )
        lead = "uvwxyz"[: a.values.ndim - 2]
        spec = f"{lead}mk,{lead}nk->mn" if b.values.ndim > 2 else f"{lead}mk,nk->{lead}mn"
        dequantized = functools.partial(_dequantized, spec=spec, forms=forms, out=out)
        return lax.platform_dependent(
            a,
            b,
            # Blocks that XLA partitions over GPUs are dequantized to the compute dtype.
            cuda=functools.partial(dequantized, dtype=self.recipe.compute),
            default=functools.partial(dequantized, dtype=ACCUMULATOR),
        )
