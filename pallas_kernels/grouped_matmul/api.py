"""The public grouped products: validation, choice of an implementation, and gradients.

Dims: M row, T token, J visit (one of the experts that a token is routed to), G group, K width in, N
width out. For 8-bit operands J and I are blocks of 128 of K and N.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.common.chosen import choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.scales import BLOCK, FORMATS
from pallas_kernels.common.varying import vary_alike

from . import hopper, ordered, xla
from .combine import entries_by_result, take_rows
from .formulas import swiglu_gradient
from .reference import (
    grouped_matmul_reference,
    grouped_swiglu_reference,
    scaled_grouped_matmul_reference,
)

type GroupedImplementation = Literal["auto", "hopper", "xla", "ordered", "reference"]

NAMES = ("hopper", "xla", "ordered", "reference")
SCALED_NAMES = ("hopper", "xla", "reference")
OUT_DTYPES = ("bfloat16", "float16", "float32")

IMPLEMENTATIONS = {"hopper": hopper, "xla": xla, "ordered": ordered}
"""Modules with the same functions, by implementation name. JAX differentiates the reference."""

GATE_NAME = "grouped_gate"
UP_NAME = "grouped_up"
"""Checkpoint names of the two products that the gradient of ``grouped_swiglu`` needs besides its
operands, for a rematerialization policy that saves them."""


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    rows: jax.Array | None = None,
    positions: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: GroupedImplementation = "auto",
) -> jax.Array:
    """Multiplies each row by the weight of its group: ``out[m] = x[m] @ w[group(m)]``.

    Groups are consecutive: group g has ``group_sizes[g]`` rows, right behind those of group g - 1.
    Result rows beyond the last group are 0, whatever x holds there, and add nothing to gradients.
    Sums are fp32. Results and gradients of x and w repeat bit for bit.

    Args:
        x: bfloat16, float16 or float32 [M, K]; [T, K] with ``rows``.
        w: [G, K, N], any float dtype, cast to x's before the product. Its gradient is summed in
            fp32 and rounded to w's dtype.
        group_sizes: int32 [G], 0 allowed; groups are cut off at row M.
        rows: int32 [M]: row m is ``x[rows[m]]``, read in place; clipped to 0..T-1.
        positions: int32 [T, J], the inverse of ``rows``: row t lists all m with ``rows[m] == t``,
            padded with -1. It saves a sort in x's gradient, and is not checked.
        out_dtype: dtype of the result; x's by default.
        implementation: "hopper" (Mosaic GPU kernels; bfloat16 and float16, K and N multiples of 64
            from 128), "xla" (linear memory, any device), "ordered" (xla in blocks of one size, so
            that a row's bits do not depend on the other rows), "reference" (the formula, M * G * N
            memory), or "auto": hopper if it supports the call, else xla.

    Returns:
        [M, N].

    Raises:
        InputError: shapes, dtypes or options that disagree.
        UnsupportedError: the named implementation cannot compute this call.

    Examples:
        >>> x, w = jnp.ones((4, 8)), jnp.stack([jnp.ones((8, 2)), jnp.zeros((8, 2))])
        >>> pallas_kernels.grouped_matmul(x, w, jnp.array([3, 1]))[:, 0].tolist()
        [8.0, 8.0, 8.0, 0.0]
    """
    _check_operands(x, {"w": w}, group_sizes, rows, positions)
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"out_dtype={dtype} is not a float")
    chosen = _choose(implementation, x, w)
    x, w, group_sizes, rows, positions = _prepared(chosen, x, w, group_sizes, rows, positions)
    if chosen == "reference":
        return grouped_matmul_reference(x, w, group_sizes, rows).astype(dtype)
    return _matmul(chosen, dtype, x, w, group_sizes, rows, positions)


def grouped_swiglu(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    *,
    rows: jax.Array | None = None,
    positions: jax.Array | None = None,
    implementation: GroupedImplementation = "auto",
) -> jax.Array:
    """Computes ``silu(x @ gate) * (x @ up)``, each row with its group's gate and up.

    Both products are saved for the gradient, in x's dtype, under the checkpoint names ``GATE_NAME``
    and ``UP_NAME``.

    Args:
        gate: [G, K, N], as w of ``grouped_matmul``.
        up: of the shape of gate.
        x, group_sizes, rows, positions, implementation: as in ``grouped_matmul``.

    Returns:
        [M, N] in x's dtype, 0 beyond the groups.

    Raises:
        InputError, UnsupportedError: as ``grouped_matmul``.

    Examples:
        >>> x, gate = jnp.ones((4, 8)), jnp.ones((2, 8, 3))
        >>> pallas_kernels.grouped_swiglu(x, gate, gate, jnp.array([3, 1])).shape
        (4, 3)
    """
    _check_operands(x, {"gate": gate, "up": up}, group_sizes, rows, positions)
    chosen = _choose(implementation, x, gate)
    x, (gate, up), group_sizes, rows, positions = _prepared(
        chosen, x, (gate, up), group_sizes, rows, positions
    )
    if chosen == "reference":
        return grouped_swiglu_reference(x, gate, up, group_sizes, rows).astype(x.dtype)
    return _swiglu(chosen, x, gate, up, group_sizes, rows, positions)


def grouped_weight_gradient(
    x: jax.Array,
    d: jax.Array,
    group_sizes: jax.Array,
    *,
    rows: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: GroupedImplementation = "auto",
) -> jax.Array:
    """Computes ``out[g] = x[rows of g]^T @ d[rows of g]``: the gradient of a product's weights.

    It is for training code that computes its other products in FP8. It has no gradient of its own.

    Args:
        x, group_sizes, rows: as in ``grouped_matmul``.
        d: [M, N], the cotangent of the product, cast to x's dtype.
        out_dtype: dtype that fp32 sums are rounded to once; x's by default.
        implementation: "hopper", "xla" or "auto", as in ``grouped_matmul``.

    Returns:
        [G, K, N], 0 for a group without rows.

    Raises:
        InputError, UnsupportedError: as ``grouped_matmul``.

    Examples:
        >>> x, d = jnp.ones((4, 8)), jnp.ones((4, 2))
        >>> pallas_kernels.grouped_weight_gradient(x, d, jnp.array([3, 1]))[:, 0, 0].tolist()
        [3.0, 1.0]
    """
    like: Any = jax.ShapeDtypeStruct((group_sizes.size, x.shape[-1], d.shape[-1]), x.dtype)
    _check_operands(x, {"the gradient": like}, group_sizes, rows, None)
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    if d.shape != (num_rows, like.shape[2]):
        raise InputError(f"d is {list(d.shape)}; {num_rows} rows ask for [{num_rows}, N]")
    chosen = _choose(implementation, x, like)
    if chosen not in IMPLEMENTATIONS:
        raise InputError(f"implementation={chosen!r} has no gradient alone; choose hopper or xla")
    x, d, group_sizes, rows, _ = _prepared(chosen, x, d.astype(x.dtype), group_sizes, rows, None)
    by, dtype = IMPLEMENTATIONS[chosen], jnp.dtype(out_dtype or x.dtype)
    return by.weight_gradient(x, d, group_sizes, rows, out_dtype=dtype)


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
    """Multiplies 8-bit rows by the 8-bit weight of their group, with block scales.

    ``out[m, n] = sum_k (a a_scale)[m, k] (b b_scale)[group(m), n, k]``, as ``scaled_matmul`` does
    for one group. Scales belong to 1x128 blocks of a and 128x128 blocks of b. They multiply each
    sum of 128 products in fp32. Rows beyond the last group are 0, whatever a holds there. It has no
    gradient; for a layer's input gradient, pass the quantized cotangent and b transposed.

    Args:
        a: [M, K], float8_e4m3fn or float8_e5m2.
        b: [G, N, K], either 8-bit dtype, in any pairing with that of a.
        a_scale: float32 [J, M], as ``quantize(a, "1x128")`` gives it.
        b_scale: float32 [G, J, I], as ``quantize(b[g], "128x128")`` gives it for each group.
        group_sizes: int32 [G], 0 allowed; groups are cut off at row M.
        out_dtype: bfloat16, float16 or float32; fp32 sums are rounded to it once.
        implementation: "hopper" (Mosaic GPU; K a multiple of 128, N of 64 from 128), "xla"
            (dequantized, on a GPU to bf16), "reference" (dequantized, M * G * N memory), or "auto":
            hopper if it supports the call, else xla.

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
    _check_scaled(a, b, a_scale, b_scale, group_sizes, out_dtype)
    chosen = choose(
        "scaled grouped matmul", implementation, SCALED_NAMES, lambda: hopper.scaled_unsupported(b)
    )
    arrays = without_gradient(
        (a, b, a_scale, b_scale),
        "scaled_grouped_matmul has no gradient: a recipe quantizes the cotangent and calls it "
        "again with the weights transposed, inside its own jax.custom_vjp; or train in bfloat16 "
        "with grouped_matmul",
    )
    sizes = group_sizes if chosen == "hopper" else _counts_within(group_sizes, a.shape[0])
    operands = vary_alike((*arrays, sizes))
    if chosen == "reference":
        return scaled_grouped_matmul_reference(*operands).astype(out_dtype)
    return IMPLEMENTATIONS[chosen].scaled_product(*operands, out_dtype=out_dtype)


def _check_operands(
    x: jax.Array,
    weights: dict[str, jax.Array],
    group_sizes: jax.Array,
    rows: jax.Array | None,
    positions: jax.Array | None,
) -> None:
    """Raises InputError unless x, weights, group sizes and row indices agree in shape and dtype."""
    if x.ndim != 2 or x.dtype.name not in ("bfloat16", "float16", "float32"):
        raise InputError(
            f"x is {x.dtype}{list(x.shape)}; it must be bfloat16, float16 or float32 [M, K]"
        )
    for name, w in weights.items():
        if w.ndim != 3 or w.shape[1] != x.shape[1] or not jnp.issubdtype(w.dtype, jnp.floating):
            raise InputError(
                f"{name} is {w.dtype}{list(w.shape)}; x {list(x.shape)} asks for floats "
                f"[G, {x.shape[1]}, N]"
            )
    first, *others = weights.items()
    for name, w in others:
        if w.shape != first[1].shape:
            raise InputError(
                f"{name} is {list(w.shape)} and {first[0]} {list(first[1].shape)}; they must be "
                "of one shape"
            )
    num_groups = first[1].shape[0]
    if group_sizes.shape != (num_groups,) or group_sizes.dtype != jnp.int32 or not num_groups:
        raise InputError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; {first[0]} "
            f"{list(first[1].shape)} asks for int32 [{num_groups}], at least one"
        )
    if rows is None and positions is not None:
        raise InputError("positions are given without rows; they are the rows' inverse: give both")
    if rows is None:
        return
    if rows.ndim != 1 or rows.dtype != jnp.int32:
        raise InputError(f"rows is {rows.dtype}{list(rows.shape)}; it must be int32 [M]")
    if not x.shape[0]:
        raise InputError(f"rows {list(rows.shape)} name rows of x, which has none")
    if positions is None:
        return
    if positions.shape[:1] != x.shape[:1] or positions.ndim != 2 or positions.dtype != jnp.int32:
        raise InputError(
            f"positions is {positions.dtype}{list(positions.shape)}; x {list(x.shape)} asks for "
            f"int32 [{x.shape[0]}, J], where each of its rows went"
        )


def _check_scaled(
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


def _counts_within(group_sizes_G: jax.Array, num_rows: int) -> jax.Array:
    """Clips group sizes to at least 0 and, in sum, at most ``num_rows``."""
    ends_G = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes_G, 0)), num_rows)
    return jnp.diff(ends_G, prepend=0).astype(jnp.int32)


def _prepared(
    chosen: str, x: jax.Array, w: Any, group_sizes: jax.Array, rows: Any, positions: Any
) -> Any:
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    if chosen != "hopper":  # whose kernels cut sizes themselves
        group_sizes = _counts_within(group_sizes, num_rows)
    if rows is not None:
        rows = jnp.clip(rows, 0, x.shape[0] - 1)
    return vary_alike((x, w, group_sizes, rows, positions))


def _choose(implementation: str, x: jax.Array, w: jax.Array) -> str:
    return choose("grouped matmul", implementation, NAMES, lambda: hopper.unsupported(x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(chosen, out_dtype, x, w_GKN, group_sizes_G, rows_M, positions_TJ):
    del positions_TJ
    product = IMPLEMENTATIONS[chosen].product
    return product(x, w_GKN.astype(x.dtype), group_sizes_G, rows_M, out_dtype=out_dtype)


def _matmul_forward(chosen, out_dtype, *operands):
    return _matmul(chosen, out_dtype, *operands), operands


def _matmul_backward(chosen, out_dtype, operands, d_MN):
    del out_dtype
    by = IMPLEMENTATIONS[chosen]
    x, w_GKN, group_sizes_G, rows_M, positions_TJ = operands
    d_MN = d_MN.astype(x.dtype)
    d_rows_MK = by.input_gradient(((d_MN, w_GKN.astype(x.dtype)),), group_sizes_G)
    d_x = _scattered(d_rows_MK, x, group_sizes_G, rows_M, positions_TJ)
    d_w = by.weight_gradient(x, d_MN, group_sizes_G, rows_M, out_dtype=w_GKN.dtype)
    return d_x, d_w, None, None, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(chosen, x, gate_GKN, up_GKN, group_sizes_G, rows_M, positions_TJ):
    del positions_TJ
    weights = (gate_GKN.astype(x.dtype), up_GKN.astype(x.dtype))
    return IMPLEMENTATIONS[chosen].swiglu(x, *weights, group_sizes_G, rows_M, keep=False).out


def _swiglu_forward(chosen, *operands):
    x, gate_GKN, up_GKN, group_sizes_G, rows_M, _ = operands
    weights = (gate_GKN.astype(x.dtype), up_GKN.astype(x.dtype))
    by = IMPLEMENTATIONS[chosen]
    results = by.swiglu(x, *weights, group_sizes_G, rows_M, keep=True)
    gate_MN = checkpoint_name(results.gate, GATE_NAME)
    up_MN = checkpoint_name(results.up, UP_NAME)
    return results.out, (operands, gate_MN, up_MN)


def _swiglu_backward(chosen, kept, d_MN):
    by = IMPLEMENTATIONS[chosen]
    (x, gate_GKN, up_GKN, group_sizes_G, rows_M, positions_TJ), gate_MN, up_MN = kept
    d_gate_MN, d_up_MN = swiglu_gradient(gate_MN, up_MN, d_MN)
    pairs = ((d_gate_MN, gate_GKN.astype(x.dtype)), (d_up_MN, up_GKN.astype(x.dtype)))
    d_rows_MK = by.input_gradient(pairs, group_sizes_G)
    d_x = _scattered(d_rows_MK, x, group_sizes_G, rows_M, positions_TJ)
    d_gate, d_up = (
        by.weight_gradient(x, d, group_sizes_G, rows_M, out_dtype=w_GKN.dtype)
        for d, w_GKN in ((d_gate_MN, gate_GKN), (d_up_MN, up_GKN))
    )
    return d_x, d_gate, d_up, None, None, None


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _scattered(d_rows_MK, x, group_sizes_G, rows_M, positions_TJ):
    """Sums the gradient of gathered rows to that of x, in a fixed order."""
    if rows_M is None:
        return d_rows_MK
    if positions_TJ is not None:
        parts = [take_rows(d_rows_MK, positions_T) for positions_T in positions_TJ.T]
        return sum(parts[1:], parts[0]).astype(x.dtype)
    is_in_group_M = jnp.arange(rows_M.shape[0]) < jnp.sum(group_sizes_G)
    by_token = entries_by_result(jnp.where(is_in_group_M, rows_M, -1), num_results=x.shape[0])
    return by_token.sum(functools.partial(take_rows, d_rows_MK)).astype(x.dtype)
