"""SwiGLU between 8-bit matmuls, computed and quantized by one kernel.

    hidden = silu(x gate) (x up)          quantized along F and tokens, for down and its gradient
    d_gate, d_up of d_hidden              quantized so too, for gradients of x and both weights

The kernel reads the 16-bit results of the matmuls and writes 8 bits. So neither the hidden values
nor these cotangents are stored in 16 bits. Rounding equals that of ``fp8_operands``: values are
rounded to 16 bits, then to 8.

Dims: B sequence, T token, M token of all sequences, D width in, F hidden width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxinfra.axes import Dims
from jaxinfra.config.kinds import MlpKind
from jaxinfra.numerics.recipe import Fp8Recipe, Recipe
from jaxinfra.ops.activation import activated
from jaxinfra.ops.fp8 import Call, named, planned
from jaxinfra.ops.fp8_devices import TOKENS, WHOLE, FindDevices, of_matrix, one_device, unmerged
from jaxinfra.ops.fp8_operands import COTANGENT, BothWays, Caster, Input, X, as_matrix
from pallas_kernels import quantize_swiglu, quantize_swiglu_gradient
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.fp8.both_ways import SWIGLU, SWIGLU_GRADIENT, takes_one_kernel

SPEC = "BTD,DF->BTF"


class Factor(NamedTuple):
    """The weight of an 8-bit matmul, with its record and logical dims."""

    weight: jax.Array  # [D, F]
    record: jax.Array | None  # as in ``multiply_fp8``
    dims: Dims  # logical dims of the weight
    keep: Callable[[jax.Array], jax.Array]  # gives the product its names for recomputation


def swiglu_input(
    x: Input,
    gate: Factor,
    up: Factor,
    *,
    recipe: Recipe,
    devices: FindDevices = one_device,
    implementation: str = "auto",
) -> Input | None:
    """Computes ``silu(x gate) * (x up)`` in 8 bits, as the input of the next product.

    Returns None if separate steps are as fast, or if a tile is sharded over devices.

    Args:
        x: input of both matmuls.
        gate, up: the weights of both matmuls.
        implementation: as in ``quantize_swiglu``; "auto" may give None.
    """
    assert recipe.fp8 is not None
    each = [
        planned(SPEC, x, w.weight, recipe=recipe, dims=w.dims, devices=devices) for w in (gate, up)
    ]
    calls, x = [call for call, _ in each], each[0][1]
    stage = _Stage(calls, (gate.keep, up.keep), recipe, recipe.fp8, implementation)
    if not x.is_matrix or not stage.is_taken():
        return None
    found = stage.made(x, (gate.weight, up.weight), (gate.record, up.record))
    return Input(*found)


class _Stage(NamedTuple):
    """Both products and what is between them and the next."""

    calls: list[Call]
    keep: tuple[Callable[[jax.Array], jax.Array], ...]
    recipe: Recipe
    fp8: Fp8Recipe
    implementation: str

    def is_taken(self) -> bool:
        """Tells whether devices have whole tiles of hidden values, and one kernel is faster."""
        call, (contracted, outer) = self.calls[0], self.calls[0].sides
        if call.devices.num_partitions > 1 or call.devices.token_dims_of_sum(contracted) != TOKENS:
            return False
        caster = Caster(X, self.fp8, call.devices)
        shape = (*call.tokens, self.calls[0].weight_shape[-1])
        share = call.devices.shard_shape(shape, (*TOKENS, *outer))
        hidden = jax.eval_shape(
            functools.partial(self._matrix, call), jax.ShapeDtypeStruct(share, self.recipe.compute)
        )
        if hidden.ndim != 2:
            return False
        power_of_two = self.fp8.power_of_two
        return self.implementation != "auto" or any(
            takes_one_kernel(source, (hidden,), caster.form, power_of_two=power_of_two)
            for source in (SWIGLU, SWIGLU_GRADIENT)
        )

    def made(self, x: Input, weights: tuple, records: tuple):
        """Computes the hidden values in 8 bits and their statistics.

        The cotangent goes to the hidden values in the compute dtype.
        """
        x_dtype, w_dtypes = x.x.dtype, [w.dtype for w in weights]

        def forward(x, quantized, x_seen, weights, records):
            products, kept = [], []
            for i, call in enumerate(self.calls):
                y, left = call.forward(quantized, x_seen, weights[i], records[i])
                products.append(self.keep[i](y))
                kept.append(left)
            both, seen = named(self._hidden(*products))
            hidden = _plain_hidden(*products)
            return (hidden, both, seen), (kept, products)

        def backward(kept, cotangents):
            kept, products = kept
            dxs, dws, emitted = [], [], []
            for i, (both, seen) in enumerate(self._gradient([*products, cotangents[0]])):
                dx, dw, out = self.calls[i].gradients(kept[i], both, seen)
                dxs.append(dx.astype(x_dtype))
                dws.append(dw.astype(w_dtypes[i]))
                emitted.append(out)
            return dxs[0] + dxs[1], None, None, tuple(dws), tuple(emitted)

        @jax.custom_vjp
        def stage(*arguments):
            return forward(*arguments)[0]

        stage.defvjp(forward, backward)
        return stage(x.x, x.quantized, x.seen, weights, records)

    def _hidden(self, gate: jax.Array, up: jax.Array) -> tuple[BothWays, jax.Array]:
        """Computes the hidden values in 8 bits and their statistics."""
        call = self.calls[0]
        caster = Caster(X, self.fp8, call.devices)
        outer = call.sides[1]

        def part(gate: jax.Array, up: jax.Array):
            gate, up = self._matrix(call, gate), self._matrix(call, up)
            both = quantize_swiglu(gate, up, caster.form, **self._options(caster))
            return BothWays(*both), caster.seen(_plain_hidden(gate, up), both[0], TOKENS + outer)

        return self._on_each(part, 2, self._placed(caster))(gate, up)

    def _gradient(self, arrays: list[jax.Array]):
        """Quantized gradients of gate and up, from gate, up and d_hidden, and their statistics."""
        call = self.calls[0]
        caster = Caster(COTANGENT, self.fp8, call.devices)
        outer = call.sides[1]

        def part(*arrays: jax.Array):
            gate, up, d_hidden = (self._matrix(call, each) for each in arrays)
            found = quantize_swiglu_gradient(
                gate, up, d_hidden, caster.form, **self._options(caster)
            )
            plain = jax.vjp(_plain_hidden, gate, up)[1](d_hidden)
            return tuple(
                (BothWays(*both), caster.seen(x, both[0], TOKENS + outer))
                for both, x in zip(found, plain, strict=True)
            )

        placed = self._placed(caster)
        return self._on_each(part, 3, (placed, placed))(*arrays)

    def _matrix(self, call: Call, x: jax.Array) -> jax.Array:
        return as_matrix(x, 1, call.devices)

    def _options(self, caster: Caster) -> dict[str, Any]:
        return {**caster.options, "implementation": self.implementation}

    def _placed(self, caster: Caster) -> Any:
        """Placements of the quantized values and of their statistics."""
        outer = self.calls[0].sides[1]
        ways = of_matrix(TOKENS, outer), of_matrix(outer, TOKENS)
        return BothWays._make(ways), WHOLE

    def _on_each(self, part: Callable, num_inputs: int, gives: Any) -> Callable:
        takes = (unmerged((*TOKENS, *self.calls[0].sides[1])),) * num_inputs
        return self.calls[0].devices.each(part, takes=takes, gives=gives)


def _plain_hidden(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes the hidden values as the layer does."""
    wide = (each.astype(ACCUMULATOR) for each in (up, gate))
    return activated(MlpKind.SWIGLU, *wide).astype(gate.dtype)
