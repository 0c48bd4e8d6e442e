"""The public ``decode_layers``, which validates a call and chooses an implementation.

Dims: as in ``reference``.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.quantized_weight import QuantizedWeight

from .hopper import decode_layers_hopper, unsupported
from .reference import KeyAndValuePools, LayersCall, LayerWeights, decode_layers_reference

type LayerImplementation = Literal["hopper", "reference"]


def decode_layers(
    x: jax.Array,
    layers: LayerWeights,
    pages: KeyAndValuePools,
    page_tables: jax.Array | np.ndarray,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    implementation: LayerImplementation,
    scale: float | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, KeyAndValuePools]:
    """Computes decoder layers for one new token per row, and writes its key and value to pages.

    Each layer is attention over the row's pages, then a SwiGLU MLP, both with RMSNorm before them
    and a residual. There is no gradient. With ``axis``, inside ``shard_map``, devices share every
    layer: each has its own heads and hidden columns, and all have the same x and result.

    Args:
        x: [M, D], bfloat16 or float16: the residual stream.
        layers: weights, stacked over layers, in x's dtype or all in one quantized format.
        pages: pools of all layers' keys and values, [L, P, S, K, H] in x's dtype; donate them.
        page_tables: int32 [M, pages of a row], page numbers 0 to P - 1, the same in every layer;
            below 0 where a row has no page.
        positions: int32 [M], each new token's position, for which the row must have a page; below 0
            for a row without a token.
        rope: cos and sin, float32 [M, H / 2]; pairs as in ``append_to_pages``.
        implementation: "hopper" is one launch of a Mosaic GPU kernel for all layers. It needs one
            row, heads of 64 or 128 columns that RoPE rotates whole, and one GPU of 132 SMs on which
            nothing else runs. Quantized weights must be ``arranged`` and without zero points.
            "reference" is the formula in fp32.
        scale: factor of the scores; default 1 / sqrt(H).
        axis: mesh axis over which N, K and F are divided; arguments are one device's blocks. The
            kernel writes partial sums to other GPUs over NVLink. It needs one process, all devices
            of the mesh and 16-bit weights; the launch fails if a GPU does not take part for 20 s.

    Returns:
        [M, D] in x's dtype, and ``pages``.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        A layer whose weights are 0 adds nothing to x, and its key is 0:

        >>> from pallas_kernels.common.row_inputs import RmsNorm
        >>> from pallas_kernels.decode_layer import LayerWeights
        >>> zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
        >>> norm = RmsNorm(scale=zeros(1, 8), epsilon=1e-5)
        >>> layers = LayerWeights(
        ...     attention_norm=norm, qkv=zeros(1, 8, 16), out=zeros(1, 8, 8), mlp_norm=norm,
        ...     gate_up=zeros(1, 8, 12), down=zeros(1, 6, 8),
        ... )
        >>> pages = zeros(1, 2, 4, 1, 4) + 1, zeros(1, 2, 4, 1, 4)
        >>> place = jnp.array([[1]]), jnp.array([2]), (jnp.ones((1, 2)), jnp.zeros((1, 2)))
        >>> y, (k, v) = pallas_kernels.decode_layers(
        ...     zeros(1, 8) + 3, layers, pages, *place, implementation="reference"
        ... )
        >>> y.tolist(), k[0, 1, :, 0, 0].tolist()
        ([[3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]], [1.0, 1.0, 0.0, 1.0])
    """
    call = _checked(x, layers, pages, page_tables, positions, rope, scale, axis)
    if implementation == "reference":
        found = decode_layers_reference(call)
    elif implementation == "hopper":
        reason = unsupported(call)
        if reason is not None:
            raise UnsupportedError(
                f"implementation='hopper' cannot compute {call.describe()}: {reason}; compute "
                "layers one after another"
            )
        found = decode_layers_hopper(call)
    else:
        raise InputError(f"implementation={implementation!r} must be hopper or reference")
    return without_gradient(
        found, "decode_layers has no gradient: it is for generating; norm, multiply and add apart"
    )


def refused_layers(
    x: jax.Array,
    layers: LayerWeights,
    pages: KeyAndValuePools,
    page_tables: jax.Array | np.ndarray,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    axis: str | None = None,
) -> str | None:
    """Returns why ``decode_layers`` by "hopper" refuses these arguments; None if it takes them.

    Raises:
        InputError: as ``decode_layers``.
    """
    return unsupported(_checked(x, layers, pages, page_tables, positions, rope, None, axis))


def _checked(x, layers, pages, page_tables, positions, rope, scale, axis) -> LayersCall:
    call = LayersCall(
        x=x, layers=layers, pages=pages, tables=jnp.asarray(page_tables), positions=positions,
        rope=rope, scale=pages[0].shape[-1] ** -0.5 if scale is None else scale, axis=axis,
    )  # fmt: skip
    _check(call)
    return call


def _check(call: LayersCall) -> None:
    x, layers, shape = call.x, call.layers, call.pages[0].shape
    if x.ndim != 2 or len(shape) != 5 or not shape[0]:
        raise InputError(
            f"x is {list(x.shape)}, pages {list(shape)}: [M, D] and [L, P, S, K, H] of a layer or "
            "more"
        )
    (M, D), (L, _, _, K, H) = x.shape, shape
    A, F = (layers.shape(name)[0] for name in ("out", "down"))
    if A % (K * H):
        raise InputError(f"out has {A} rows, no multiple of {K} kv heads of {H} columns")
    width = A + 2 * K * H
    wanted = {"qkv": (D, width), "out": (A, D), "gate_up": (D, 2 * F), "down": (F, D)}
    wanted = {name: (L, *each) for name, each in wanted.items()}
    arrays = {name: getattr(layers, name) for name in wanted}
    arrays |= dict(zip(("keys' pages", "values' pages"), call.pages, strict=True))
    for name, array in arrays.items():
        if isinstance(array, QuantizedWeight):
            array.check()
            found, held, is_right = (*array.leading, *array.matrix_shape), array.format.name, True
        else:
            found, held, is_right = array.shape, array.dtype, array.dtype == x.dtype
        want = wanted.get(name, shape)
        if tuple(found) != tuple(want) or not is_right:
            raise InputError(
                f"{name} of all layers are {list(found)}, {held}; they must be {list(want)}, "
                f"{x.dtype} or quantized, for {call.describe()}"
            )
    scales = [norm.scale.shape for norm in layers.norms]
    if any(each != (L, D) for each in scales):
        raise InputError(f"norms have scales {scales}; they must be [{L}, {D}]")
    shapes = [call.tables.shape[:1], call.positions.shape, *(each.shape for each in call.rope)]
    if shapes != [(M,), (M,), (M, H // 2), (M, H // 2)]:
        raise InputError(
            f"tables, positions, cos, sin begin with {shapes}; of {M} rows they must be "
            f"[M, pages], [M], [M, {H // 2}], [M, {H // 2}]"
        )
