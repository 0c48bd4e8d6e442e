"""A matmul of operands in 8 bits, forward and backward.

With x [M, K], a weight w [K, N] and a cotangent g [M, N], each quantized along the dim that a
product contracts:

    y = x w        x along K, w along K
    dx = g w^T     g along N, w along N
    dw = x^T g     x and g along M

Per tensor and by blocks of 128 x 128 the directions share values; rows and blocks of 1 x 128 are
quantized once for each. x is quantized where the layer makes it (``quantized_input``), under a name
that recomputation may keep (``QUANTIZED``), as is w: nothing is quantized again for the backward
pass.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxinfra.core.axes import Dims
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.numerics.recipe import Fp8Recipe, Recipe
from jaxinfra.ops import fp8_operands as operands
from jaxinfra.ops.fp8_operands import COTANGENT, ONE_DEVICE, WEIGHT, Devices, Input, X
from jaxinfra.ops.fp8_product import product
from pallas_kernels.common.scales import Quantized, Scaling

QUANTIZED = "quantized"
"""Name of quantized inputs and weights for recomputation policies."""


def named[Tree](tree: Tree) -> Tree:
    """The arrays under ``QUANTIZED``; 8-bit floats as the bytes that they are.

    ``jax.checkpoint`` rounds what it keeps by the bits of its exponent and mantissa. That takes
    e4m3fn for a format with infinities, of which 240 is the largest number: what lies between 240
    and 448 would come back as infinite. XLA drops that rounding where it allows excess precision,
    which it does on GPUs unless told otherwise, and not on CPUs.
    """

    def leaf(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize > 1:
            return checkpoint_name(x, QUANTIZED)
        bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint8), QUANTIZED)
        return jax.lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(leaf, tree)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """An einsum of x and a weight, as a matmul."""

    tokens: int  # leading dims of x that stay
    contracted: int  # dims of x that do not
    contracted_first: bool  # of the weight: [K, N], not [N, K]


def _form(spec: str) -> _Form:
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
    return _Form(tokens=len(tokens), contracted=len(contracted), contracted_first=orders[weight])


def _matrix(x: jax.Array, contracted: int, devices: Devices, fp8: Fp8Recipe) -> jax.Array:
    """x as [M, K] where one device has it, else [..., T, K]."""
    *lead, _ = x.shape[: x.ndim - contracted + 1]
    x = x.reshape(*lead, math.prod(x.shape[len(lead) :]))
    flat = devices.num == 1 and (not operands.form_of(fp8).by_blocks or operands.in_blocks(x))
    return x.reshape(-1, x.shape[-1]) if flat or x.ndim < 3 else x


def quantized_input(
    x: jax.Array,
    *,
    recipe: Recipe,
    contracted: int = 1,
    history: jax.Array | None = None,
    devices: Devices = ONE_DEVICE,
) -> Input:
    """An activation, quantized once for all projections that multiply with it.

    Args:
        x: [B, T, ...], the last ``contracted`` dims of which are the width.
        history: of a matmul that multiplies with x.
    """
    assert recipe.fp8 is not None
    fp8 = recipe.fp8

    def quantized(x: jax.Array, history: jax.Array | None):
        matrix = _matrix(x.astype(recipe.compute), contracted, devices, fp8)
        scale = operands.delayed_scale(fp8, history, X, matrix, fp8.forward)
        both = operands.both_ways(matrix, fp8, dtype=fp8.forward, scale=scale, devices=devices)
        seen = operands.seen(matrix, both.rows, operands.form_of(fp8), devices=devices)
        return named((both, seen))

    # Its gradient is nothing: cotangents reach x through the products.
    constant = jax.custom_vjp(quantized)
    constant.defvjp(lambda x, history: (quantized(x, history), None), lambda *_: (None, None))
    return Input(x, *constant(x, history))


def multiply_fp8(
    spec: str,
    x: jax.Array | Input,
    weight: jax.Array,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    history: jax.Array | None = None,
    dims: Dims | None = None,
    devices: Devices = ONE_DEVICE,
) -> jax.Array:
    """``einsum(spec, x, weight)`` of 8-bit operands, and its gradients, as the recipe says.

    Args:
        spec: a matmul: dims of x that are not contracted come first.
        history: fp32, ``fp8_operands.empty_history``; the backward pass hands out its next values
            as its cotangent.
        dims: logical dims of the weight, for ``devices.gather``.

    Raises:
        UnsupportedError: the einsum is no matmul.
    """
    fp8, form = recipe.fp8, _form(spec)
    assert fp8 is not None
    if not isinstance(x, Input):
        x = quantized_input(
            x, recipe=recipe, contracted=form.contracted, history=history, devices=devices
        )
    split = form.contracted if form.contracted_first else weight.ndim - form.contracted
    call = _Call(
        recipe=recipe,
        fp8=fp8,
        contracted_first=form.contracted_first,
        weight_shape=weight.shape,
        matrix_shape=(math.prod(weight.shape[:split]), math.prod(weight.shape[split:])),
        out=out or recipe.compute,
        dims=dims,
        devices=devices,
    )
    outer = weight.shape[split:] if form.contracted_first else weight.shape[:split]
    y = call.product(x.x, x.quantized, x.seen, weight, history)
    return y.reshape(*x.x.shape[: form.tokens], *outer)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One matmul: what is known of it without its arrays."""

    recipe: Recipe
    fp8: Fp8Recipe
    contracted_first: bool
    weight_shape: tuple[int, ...]
    matrix_shape: tuple[int, int]
    out: jnp.dtype
    dims: Dims | None
    devices: Devices

    def product(self, x, quantized, x_seen, weight, history) -> jax.Array:
        """[M, N] or [B, T, N]; what a gradient needs of x are its shape and dtype."""
        x_like = jax.ShapeDtypeStruct(x.shape, x.dtype)

        @jax.custom_vjp
        def call(x, quantized, x_seen, weight, history):
            return self.forward(quantized, x_seen, weight, history)[0]

        def forward(x, quantized, x_seen, weight, history):
            return self.forward(quantized, x_seen, weight, history)

        def backward(kept, cotangent):
            dx, dweight, emitted = self.backward(kept, cotangent)
            dx = dx.reshape(x_like.shape).astype(x_like.dtype)
            return dx, None, None, dweight.astype(weight.dtype), emitted

        call.defvjp(forward, backward)
        return call(x, quantized, x_seen, weight, history)

    @property
    def by_rows(self) -> bool:
        """Whether both directions of a weight are quantized, each by itself."""
        return operands.weight_form_of(self.fp8) is Scaling.ROW

    def forward(self, quantized, x_seen, weight, history):
        """y, and what the backward pass reads."""
        fp8 = self.fp8
        matrix = weight.reshape(self.matrix_shape).astype(self.recipe.compute)
        scale = operands.delayed_scale(fp8, history, WEIGHT, matrix, fp8.forward)
        cast = functools.partial(
            operands.quantized_weight, matrix, fp8, scale=scale, devices=self.devices
        )
        w = named(cast(by_columns=self.contracted_first))
        seen = named(
            operands.seen(matrix, w, operands.weight_form_of(fp8), devices=self.devices)
            if history is not None
            else jnp.zeros_like(x_seen)
        )
        whole = self._whole(w)
        b = operands.across(whole, fp8) if self.contracted_first else whole
        y = self._multiply(quantized.rows, b, (operands.form_of(fp8), self._weight_form), self.out)
        if self.by_rows:
            w = named(cast(by_columns=not self.contracted_first))
        return y, (quantized.tokens, x_seen, w, seen, history)

    def backward(self, kept, cotangent):
        """dx and dweight as matrices, and what the history emits."""
        x_tokens, x_seen, w, w_seen, history = kept
        fp8, devices = self.fp8, self.devices
        lead = x_tokens.values.shape[:-2]
        columns = self.matrix_shape[1 if self.contracted_first else 0]
        g = cotangent.reshape(*lead, x_tokens.values.shape[-1], columns)
        g = g.astype(self.recipe.compute)
        scale = operands.delayed_scale(fp8, history, COTANGENT, g, fp8.gradient)
        both = operands.both_ways(g, fp8, dtype=fp8.gradient, scale=scale, devices=devices)
        form = operands.form_of(fp8)
        whole = self._whole(w)
        b = whole if self.contracted_first else operands.across(whole, fp8)
        dx = self._multiply(both.rows, b, (form, self._weight_form), self.recipe.compute)
        sides = (x_tokens, both.tokens) if self.contracted_first else (both.tokens, x_tokens)
        handed_on = self.recipe.gradient or self.recipe.accum
        dweight = self._multiply(*sides, (form, form), self.recipe.accum).astype(handed_on)
        emitted = None
        if history is not None:
            g_seen = operands.seen(g, both.rows, form, devices=devices)
            emitted = operands.emitted(history, [x_seen, w_seen, g_seen])
        return dx, dweight.reshape(self.weight_shape), emitted

    @property
    def _weight_form(self) -> Scaling:
        return operands.weight_form_of(self.fp8)

    def _whole(self, w: Quantized) -> Quantized:
        """The weight as this product reads it: its shares come together in 8 bits."""
        if self.devices.gather is None or self.dims is None:
            return w
        shaped = w.values.reshape(self.weight_shape)
        values, scale = self.devices.gather(shaped, w.scale, self.dims)
        return Quantized(values.reshape(self.matrix_shape), scale)

    def _multiply(self, a: Quantized, b: Quantized, forms, out: jnp.dtype) -> jax.Array:
        return product(
            a,
            b,
            forms=forms,
            out=out,
            compute=self.recipe.compute,
            num_devices=self.devices.num,
        )
