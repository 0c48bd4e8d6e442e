"""The public functions: validate, choose who computes. Dims: as in ``reference``."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.paged_attention import append_heads, paged_attention

from .hopper import LayerKernel, unsupported
from .reference import LayerCall, TailCall, decode_layer_reference, layer_tail_reference

NO_GRADIENT = "has no gradient: it is for generating; norm, multiply and add apart"

type LayerImplementation = Literal["hopper", "apart", "reference"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """A layer's."""

    attention_norm: RmsNorm
    qkv: jax.Array  # [D, (N + 2 K) H]: heads of queries, then of keys, then of values
    out: jax.Array  # [N H, D]
    mlp_norm: RmsNorm
    gate_up: jax.Array  # [D, 2 F], gates first
    down: jax.Array  # [F, D]


def layer_tail(
    x: jax.Array,
    attended: jax.Array,
    out: jax.Array,
    norm: RmsNorm,
    gate_up: jax.Array,
    down: jax.Array,
    counter: jax.Array,
    *,
    implementation: LayerImplementation,
) -> tuple[jax.Array, jax.Array]:
    """What follows attention in a decoder layer: both sums of the stream, and all between them.

    It has no gradient.

    Args:
        x: [M, D], bfloat16 or float16: the stream before attention.
        attended: [M, A], what attention gave.
        out: [A, D], as are all weights in x's dtype.
        norm: of the stream before ``gate_up``.
        gate_up: [D, 2 F], gates first.
        down: [F, D].
        counter: int32 [1], 0 before the first layer of a step, and handed from layer to layer:
            blocks of the kernel meet by it. Donate it.
        implementation: "hopper" is one launch of a Mosaic GPU kernel, of one row, on one device
            with 132 multiprocessors that it has to itself; "apart" is a product after another,
            "reference" the formula in fp32.

    Returns:
        ``x1 + (silu(gate) * up) down``, [M, D] in x's dtype, where ``x1 = x + attended out`` and
        gate and up are halves of ``norm(x1) gate_up``; and the counter.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        >>> one = lambda *shape: jnp.ones(shape, jnp.bfloat16)
        >>> y, _ = pallas_kernels.layer_tail(
        ...     one(1, 8), one(1, 8), one(8, 8), RmsNorm(scale=one(8), epsilon=1e-6), one(8, 4),
        ...     one(2, 8), jnp.zeros(1, jnp.int32), implementation="apart",
        ... )
        >>> y[0, 0].item()
        137.0
    """
    call = TailCall(x=x, attended=attended, out=out, norm=norm, gate_up=gate_up, down=down)
    _check_tail(call, attended)
    _check_counter(counter)
    if implementation == "reference":
        y = layer_tail_reference(call)
    elif implementation == "apart":
        y = _tail_apart(call)
    else:
        y, counter = _launched(call, counter, {}, implementation)[:2]
    return without_gradient(y, f"layer_tail {NO_GRADIENT}"), counter


def decode_layer(
    x: jax.Array,
    weights: LayerWeights,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    counter: jax.Array,
    *,
    implementation: LayerImplementation,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A decoder layer's step of one token per row: both branches, and the token into its pages.

    It has no gradient.

    Args:
        x: [M, D], bfloat16 or float16: the stream.
        weights: in x's dtype.
        k_pages, v_pages: [P, S, K, H] in x's dtype; donate them.
        page_tables: int32 [M, pages of a row]; below 0 where a row has no page.
        positions: int32 [M]; below 0 in a row that has no token. Its pages have room for it.
        rope: cos and sin, float32 [M, H / 2]; pairs as in ``append_to_pages``.
        counter, implementation: as in ``layer_tail``; heads of 64 or 128 columns, which all turn.
        scale: of the scores; default 1 / sqrt(H).

    Returns:
        [M, D] in x's dtype, ``k_pages``, ``v_pages``, and the counter.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.
    """
    call = LayerCall(
        x=x, attention_norm=weights.attention_norm, qkv=weights.qkv, out=weights.out,
        mlp_norm=weights.mlp_norm, gate_up=weights.gate_up, down=weights.down, k_pages=k_pages,
        v_pages=v_pages, tables=jnp.asarray(page_tables), positions=positions, rope=rope,
        scale=k_pages.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    _check_layer(call)
    _check_counter(counter)
    if implementation == "reference":
        found = decode_layer_reference(call)
    elif implementation == "apart":
        found = _layer_apart(call)
    else:
        y, counter, *pages = _launched(call, counter, {"k": k_pages, "v": v_pages}, implementation)
        found = y, *pages
    y, k_pages, v_pages = without_gradient(found, f"decode_layer {NO_GRADIENT}")
    return y, k_pages, v_pages, counter


def _launched(
    call: TailCall | LayerCall, counter: jax.Array, pages: dict[str, jax.Array], implementation: str
) -> tuple[jax.Array, ...]:
    """The stream, the counter, the pages, of one launch."""
    if implementation != "hopper":
        raise InputError(f"implementation={implementation!r} must be hopper, apart, reference")
    reason = unsupported(call)
    if reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute {call.describe()}: {reason}; apart can"
        )
    # References, which the kernel writes into: what it leaves is not copied.
    refs = {name: jax.new_ref(x) for name, x in {"counter": counter, **pages}.items()}
    y = LayerKernel.of(call).result(call, refs)
    return y, *(jax.freeze(ref) for ref in refs.values())


def _check_counter(counter: jax.Array) -> None:
    if counter.shape != (1,) or counter.dtype != jnp.int32:
        raise InputError(f"counter is {counter.dtype}{list(counter.shape)}; it must be int32[1]")


def _check_tail(call: TailCall | LayerCall, attended: jax.Array | jax.ShapeDtypeStruct) -> None:
    x = call.x
    if x.ndim != 2 or attended.ndim != 2 or len(x) != len(attended):
        raise InputError(
            f"x is {list(x.shape)} and attended {list(attended.shape)}; they must be [M, D], [M, A]"
        )
    D, A, F = x.shape[1], attended.shape[1], call.down.shape[0]
    wanted = {"out": (A, D), "gate_up": (D, 2 * F), "down": (F, D)}
    for name, shape in wanted.items():
        weight = getattr(call, name)
        if weight.shape != shape or weight.dtype != x.dtype:
            raise InputError(
                f"{name} is {weight.dtype}{list(weight.shape)}; it must be {x.dtype}{list(shape)}: "
                f"{call.describe()}"
            )
    if attended.dtype != x.dtype:
        raise InputError(f"attended is {attended.dtype}; it must be {x.dtype}")
    for name, norm in call.norms.items():
        if norm.scale.shape != (D,):
            raise InputError(f"the {name} norm's scale is {list(norm.scale.shape)}, not [{D}]")


def _check_layer(call: LayerCall) -> None:
    pages, x = call.k_pages, call.x
    if pages.ndim != 4 or call.v_pages.shape != pages.shape or pages.dtype != x.dtype:
        raise InputError(
            f"pages are {pages.dtype}{list(pages.shape)} and {list(call.v_pages.shape)}; they must "
            f"be alike, {x.dtype}[P, S, K, H]"
        )
    _, _, K, H = pages.shape
    A, M = call.qkv.shape[1] - 2 * K * H, len(x)
    if A <= 0 or A % (K * H) or call.qkv.shape[0] != x.shape[1] or call.qkv.dtype != x.dtype:
        raise InputError(
            f"qkv is {call.qkv.dtype}{list(call.qkv.shape)}; it must be {x.dtype}[D, (N + 2 K) H] "
            f"with D={x.shape[1]}, K={K}, H={H} and N a multiple of K"
        )
    shapes = [call.tables.shape[:1], call.positions.shape, *(each.shape for each in call.rope)]
    if shapes != [(M,), (M,), (M, H // 2), (M, H // 2)]:
        raise InputError(
            f"tables, positions, cos, sin begin with {shapes}; of {M} rows they must be "
            f"[M, pages], [M], [M, {H // 2}], [M, {H // 2}]"
        )
    _check_tail(call, jax.ShapeDtypeStruct((M, A), x.dtype))


def _tail_apart(call: TailCall) -> jax.Array:
    """Product after product, each by whom its op chooses."""
    x = fused_matmul(call.attended, call.out, residual=call.x)
    hidden = fused_matmul(x, call.gate_up, norm=call.norm, swiglu=True)
    return fused_matmul(hidden, call.down, residual=x)


def _layer_apart(call: LayerCall) -> tuple[jax.Array, ...]:
    heads = fused_matmul(call.x, call.qkv, norm=call.attention_norm)
    M, H = len(call.x), call.k_pages.shape[3]
    q, k_pages, v_pages = append_heads(
        heads.reshape(M, 1, -1, H), call.k_pages, call.v_pages, call.tables, *call.per_token()
    )
    attended = paged_attention(
        q, k_pages, v_pages, call.tables, call.positions + 1, scale=call.scale
    )
    return _tail_apart(call.tail(call.x, attended)), k_pages, v_pages
