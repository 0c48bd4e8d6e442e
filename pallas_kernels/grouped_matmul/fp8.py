"""The public grouped product of 8-bit operands: validates, chooses who computes.

Dims: M row, G group, K contracted, N column of the result, J blocks of 128 of K, I blocks of 128
of N.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.scales import BLOCK, FORMATS
from pallas_kernels.common.varying import vary_alike

from . import hopper, xla
from .reference import scaled_grouped_matmul_reference
from .validate import counts_within

NAMES = ("hopper", "xla", "reference")
OUT_DTYPES = ("bfloat16", "float16", "float32")


def scaled_grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    implementation: str = "auto",
) -> jax.Array:
    """Rows in consecutive groups times their group's weight, of operands in 8 bits.

    ``out[m, n] = sum_k (a a_scale)[m, k] (b b_scale)[group(m), n, k]``, as ``scaled_matmul`` has it
    for one group: scales are of 1x128 blocks of a and 128x128 blocks of b, and multiply fp32 sums
    of 128 products. Rows beyond the last group are 0 whatever a is there. It has no gradient; a
    layer's input gradient is this product of its quantized cotangent with b transposed.

    Args:
        a: [M, K], float8_e4m3fn or float8_e5m2.
        b: [G, N, K], either, in any pairing.
        a_scale: float32 [J, M], as ``quantize(a, "1x128")`` gives it.
        b_scale: float32 [G, J, I], as ``quantize(b[g], "128x128")`` gives it for each group.
        group_sizes: int32 [G], 0 allowed; what exceeds M in sum is cut off.
        out_dtype: bfloat16, float16 or float32, rounded to once, from fp32.
        implementation: "hopper" (Mosaic GPU; K a multiple of 128, N of 64 from 128), "xla"
            (dequantized, on a GPU to bf16), "reference" (dequantized, M * G * N memory), or "auto":
            hopper where it can, else xla.

    Returns:
        [M, N].

    Raises:
        InputError: shapes, dtypes or options that disagree.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> a, a_scale = pallas_kernels.quantize(jnp.ones((3, 128)), "1x128")
        >>> b, b_scale = pallas_kernels.quantize(jnp.ones((2, 128)), "128x128")
        >>> b, b_scale = jnp.stack([b, b]), jnp.stack([b_scale, 2 * b_scale])
        >>> pallas_kernels.scaled_grouped_matmul(a, b, a_scale, b_scale, jnp.array([1, 1])).tolist()
        [[128.0, 128.0], [256.0, 256.0], [0.0, 0.0]]
    """
    out_dtype = jnp.dtype(out_dtype)
    _check(a, b, a_scale, b_scale, group_sizes, out_dtype)
    chosen = _choose(implementation, b)
    arrays = without_gradient(
        (a, b, a_scale, b_scale),
        "scaled_grouped_matmul has no gradient: a recipe quantizes the cotangent and calls it "
        "again with the weights transposed, inside its own jax.custom_vjp; or train in bfloat16 "
        "with grouped_matmul",
    )
    sizes = group_sizes if chosen == "hopper" else counts_within(group_sizes, a.shape[0])
    operands = vary_alike((*arrays, sizes))
    match chosen:
        case "reference":
            return scaled_grouped_matmul_reference(*operands).astype(out_dtype)
        case "hopper":
            return hopper.scaled_product(*operands, out_dtype=out_dtype)
        case _:
            return xla.scaled_product(*operands, out_dtype=out_dtype)


def _choose(implementation: str, b: jax.Array) -> str:
    if implementation not in ("auto", *NAMES):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(NAMES)}"
        )
    if implementation not in ("auto", "hopper"):
        return implementation
    reason = hopper.scaled_unsupported(b)
    if reason is None:
        return "hopper"
    if implementation == "hopper":
        raise UnsupportedError(
            f"implementation='hopper' cannot compute this scaled grouped matmul: {reason}. "
            "implementation='xla' can"
        )
    return "xla"


def _check(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    out_dtype: jnp.dtype,
) -> None:
    for name, x, dims in (("a", a, "[M, K]"), ("b", b, "[G, N, K]")):
        if x.ndim != dims.count(",") + 1 or x.dtype not in FORMATS or 0 in x.shape:
            raise InputError(
                f"{name} is {x.dtype}{list(x.shape)}; it must be float8_e4m3fn or float8_e5m2 "
                f"{dims}, no dim empty: make it by quantize"
            )
    (M, K), (G, N, depth) = a.shape, b.shape
    if depth != K:
        raise InputError(
            f"a is {list(a.shape)} and b {list(b.shape)}; both end in the contracted dim: a [M, "
            "K], b [G, N, K]. Transpose b if it is [G, K, N]"
        )
    J, I = -(-K // BLOCK), -(-N // BLOCK)  # noqa: E741
    for name, scale, shape, form in (
        ("a_scale", a_scale, (J, M), "1x128 blocks of a"),
        ("b_scale", b_scale, (G, J, I), "128x128 blocks of each group's b"),
    ):
        if scale.shape != shape or scale.dtype != jnp.float32:
            raise InputError(
                f"{name} is {scale.dtype}{list(scale.shape)}; scales of {form} are float32 "
                f"{list(shape)}: quantize by these blocks"
            )
    if group_sizes.shape != (G,) or group_sizes.dtype != jnp.int32:
        raise InputError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; b {list(b.shape)} asks "
            f"for int32 [{G}]"
        )
    if out_dtype.name not in OUT_DTYPES:
        raise InputError(f"out_dtype={out_dtype.name} must be one of {', '.join(OUT_DTYPES)}")
