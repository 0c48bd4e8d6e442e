"""The public functions that cast a matrix and its transpose to 8 bits, reading the matrix once.

Dims: R row, C column (the dim that a layer contracts).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import tables
from pallas_kernels.common.chosen import announce, choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.scales import Quantized, Scaling
from pallas_kernels.common.varying import results_vary, vary_alike

from . import formula
from .api import NAMES, WHY_NO_GRADIENT, checked, quantize
from .hopper_both_ways import WithTranspose, both_ways_hopper, unsupported
from .xla import quantize_across_xla

TUNED = pathlib.Path(__file__).parent / "tuned"
QUESTION = "both-ways"
"""``tuned/both-ways-DEVICE.json``: a row's case is ``case_of``, its choice {"implementation":
"hopper" or "apart"}: the one kernel, or the separate steps that "auto" takes otherwise."""
LEAST_GAIN = 1.03
"""Least measured speedup of the one kernel for "auto" to choose it."""
_FARTHEST = {"rows": 2.0, "columns": 2.0}
"""Largest ``|log2(ratio)|`` of a size to a measured one at which the measurement counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CastSource:
    """An element-wise fp32 function whose results are cast to 8 bits, such as SwiGLU."""

    name: str
    num_results: int
    plainly: Callable[..., tuple[jax.Array, ...]]
    in_kernel: Callable[..., tuple[jax.Array, ...]]


PLAIN = CastSource(name="x", num_results=1, plainly=formula.same, in_kernel=formula.same)
SWIGLU = CastSource(
    name="swiglu",
    num_results=1,
    plainly=formula.swiglu,
    in_kernel=formula.swiglu_in_kernel,
)
SWIGLU_GRADIENT = CastSource(
    name="swiglu gradient",
    num_results=2,
    plainly=formula.swiglu_gradient,
    in_kernel=formula.gradient_in_kernel,
)


def quantize_both_ways(
    x: jax.Array,
    scaling: Scaling | str = Scaling.BLOCK_OF_ROW,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: str = "auto",
    num_devices: int = 1,
) -> WithTranspose:
    """Quantizes ``x`` by blocks to 8 bits, and also its transpose by blocks.

    A layer's product contracts the columns of its input; the weight's gradient contracts the rows.

    Args:
        x: [R, C], bfloat16, float16 or float32.
        scaling: "1x128", with separate scales for matrix and transpose, or "128x128", with the
            same.
        dtype, power_of_two: as in ``quantize``.
        implementation: "hopper" (one Mosaic GPU kernel that reads x once; bf16, R and C multiples
            of 128), "xla", or "auto": that kernel where it was measured 1.03 times as fast
            (``tuned``), else ``quantize`` for x and XLA for its transpose. All give the same bits.
        num_devices: number of devices that the call is partitioned over; kernels need 1.

    Returns:
        x [R, C] and its transpose [C, R].

    Raises:
        InputError, UnsupportedError: as ``quantize``.

    Examples:
        >>> x, transposed = pallas_kernels.quantize_both_ways(jnp.ones((128, 256)))
        >>> x.values.shape, transposed.values.shape
        ((128, 256), (256, 128))
    """
    (both,) = _both_ways(
        PLAIN, (x,), scaling, dtype, power_of_two, implementation=implementation, num=num_devices
    )
    return both


def quantize_swiglu(
    gate: jax.Array,
    up: jax.Array,
    scaling: Scaling | str = Scaling.BLOCK_OF_ROW,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: str = "auto",
    num_devices: int = 1,
) -> WithTranspose:
    """Quantizes ``silu(gate) * up`` by blocks to 8 bits, and also its transpose.

    The layer's product contracts the result; its weight's gradient contracts the transpose.

    The hidden values are computed in fp32, rounded to the dtype of ``gate``, then quantized as by
    ``quantize``, bit for bit. The kernel computes silu with other instructions than XLA: one value
    in some thousands is rounded to the next number.

    Args:
        gate, up: [R, C], of one dtype.
        scaling, dtype, power_of_two, implementation, num_devices: as in ``quantize_both_ways``;
            other implementations than the one kernel write the rounded hidden values to memory
            first.

    Returns:
        The hidden values [R, C] and their transpose [C, R].

    Raises:
        InputError, UnsupportedError: as ``quantize``.

    Examples:
        >>> gate = jnp.full((128, 256), 20.0, jnp.bfloat16)
        >>> hidden, transposed = pallas_kernels.quantize_swiglu(gate, gate)
        >>> hidden.values[0, 0].item(), round(hidden.scale[0, 0].item() * 448), transposed[0].shape
        (448.0, 400, (256, 128))
    """
    (both,) = _both_ways(
        SWIGLU, (gate, up), scaling, dtype, power_of_two,
        implementation=implementation, num=num_devices,
    )  # fmt: skip
    return both


def quantize_swiglu_gradient(
    gate: jax.Array,
    up: jax.Array,
    d_hidden: jax.Array,
    scaling: Scaling | str = Scaling.BLOCK_OF_ROW,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: str = "auto",
    num_devices: int = 1,
) -> tuple[WithTranspose, WithTranspose]:
    """Quantizes the gradients of ``silu(gate) * up``, and also their transposes, by blocks.

    Args:
        gate, up, d_hidden: [R, C], of one dtype; ``d_hidden`` is the hidden values' cotangent.
        scaling, dtype, power_of_two, implementation, num_devices: as in ``quantize_swiglu``, with
            the same steps of rounding.

    Returns:
        The cotangent of gate and that of up, as ``quantize_both_ways`` returns them.

    Raises:
        InputError, UnsupportedError: as ``quantize``.

    Examples:
        >>> gate = jnp.full((128, 128), 20.0, jnp.bfloat16)
        >>> of_gate, of_up = pallas_kernels.quantize_swiglu_gradient(gate, gate, gate)
        >>> of_up[0].values[0, 0].item(), round(of_up[0].scale[0, 0].item() * 448)
        (448.0, 400)
    """
    of_gate, of_up = _both_ways(
        SWIGLU_GRADIENT, (gate, up, d_hidden), scaling, dtype, power_of_two,
        implementation=implementation, num=num_devices,
    )  # fmt: skip
    return of_gate, of_up


def case_of(
    source: CastSource, scaling: Scaling, shape: tuple[int, ...]
) -> dict[str, tables.Value]:
    """Returns a call's case in the tuning table of casts both ways: function, scaling and shape."""
    rows, columns = shape
    return {"form": source.name, "scaling": str(scaling), "rows": rows, "columns": columns}


def takes_one_kernel(
    source: CastSource,
    inputs: tuple[jax.Array, ...],
    scaling: Scaling,
    *,
    power_of_two: bool,
    num_devices: int = 1,
) -> bool:
    """Returns whether "auto" takes the one kernel, which must support the call and be faster."""
    reason = unsupported(inputs, scaling, power_of_two=power_of_two, num_devices=num_devices)
    case = case_of(source, scaling, inputs[0].shape)
    faster = reason is None and _was_faster({**case})
    told = " ".join(map(str, case.values()))
    because = None if reason is None else f"not hopper: {reason}"
    announce("quantize_both_ways", "hopper" if faster else "apart", told, because=because)
    return faster


def _was_faster(case: dict[str, Any]) -> bool:
    sizes = {name: case.pop(name) for name in _FARTHEST}
    nearest = tables.by_nearness(tables.find(TUNED, QUESTION), case, sizes, _FARTHEST)[:1]
    ms = {dict(row.choice)["implementation"]: row.ms for _, rows in nearest for row in rows}
    return {"hopper", "apart"} <= set(ms) and ms["apart"] >= LEAST_GAIN * ms["hopper"]


def _both_ways(
    source: CastSource,
    inputs: tuple[jax.Array, ...],
    scaling: Scaling | str,
    dtype: Any,
    power_of_two: bool,
    *,
    implementation: str,
    num: int,
) -> tuple[WithTranspose, ...]:
    form, dtype = checked(inputs[0], scaling, jnp.dtype(dtype))
    for x in inputs[1:]:
        if (x.shape, x.dtype) != (inputs[0].shape, inputs[0].dtype):
            raise InputError(
                f"{source.name} takes matrices of one shape and dtype, and has "
                f"{inputs[0].dtype}{list(inputs[0].shape)} and {x.dtype}{list(x.shape)}"
            )
    inputs = vary_alike(without_gradient(inputs, WHY_NO_GRADIENT))
    options: dict[str, Any] = {"dtype": dtype, "power_of_two": power_of_two}
    given: dict[str, Any] = {"power_of_two": power_of_two, "num_devices": num}
    if implementation == "auto":
        is_one = takes_one_kernel(source, inputs, form, **given)
    else:
        why_not = functools.partial(unsupported, inputs, form, **given)
        is_one = choose("cast both ways", implementation, NAMES, why_not) == "hopper"
    if not is_one:
        return apart(source, inputs, form, implementation=implementation, num=num, **options)
    call = functools.partial(
        both_ways_hopper,
        source.in_kernel,
        scaling=form,
        num_results=source.num_results,
        **options,
    )
    return results_vary(lambda *x: call(x))(*inputs)


def apart(
    source: CastSource,
    inputs: tuple[jax.Array, ...],
    form: Scaling,
    *,
    implementation: str,
    num: int,
    **options: Any,
) -> tuple[WithTranspose, ...]:
    """Casts results and transposes in separate steps: first the 16-bit results, then each cast."""

    def cast(x: jax.Array) -> WithTranspose:
        rows = quantize(x, form, implementation=implementation, num_devices=num, **options)
        if form is Scaling.BLOCK:
            return rows, Quantized(rows.values.T, rows.scale.T)
        return rows, quantize_across_xla(x, **options)

    if source is PLAIN:
        return (cast(inputs[0]),)
    made = source.plainly(*(x.astype(jnp.float32) for x in inputs))
    rounded = tuple(x.astype(inputs[0].dtype) for x in made)
    # One array for what rounds it, by rows and across: XLA would compute it again for each.
    return tuple(map(cast, jax.lax.optimization_barrier(rounded)))
