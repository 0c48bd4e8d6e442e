"""The gradient rule that implementations share: forward returns (out, logsumexp), backward
recomputes the probabilities from them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from . import hopper, xla
from .opaque import call_opaque
from .sharding import Kernel, MeshAxes, has_explicit_layout, over_explicit_axes
from .spec import AttentionMasks, AttentionSpec

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"
"""Names of the two arrays that the backward pass needs besides q, k, v: a rematerialization policy
that saves them (``jax.checkpoint_policies.save_only_these_names``) never reruns the forward."""

type Call = Callable[
    [Kernel, dict[str, jax.Array], tuple[str, ...], MeshAxes], tuple[jax.Array, ...]
]
"""Runs a kernel on operands by name and returns the named results."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One direction of an implementation, and what lifts it to batches and meshes.

    A forward is (q, k, v, masks, *, spec) -> (out, lse).

    A backward is (q, k, v, masks, out, lse, d_out, d_lse, *, spec, deterministic)
    -> (dq, dk, dv, d_sinks, d_bias), the last two None where the call has no sinks and no bias.

    Shapes are those of one device's block: out and d_out [B, T, N, V] in q's dtype, lse and d_lse
    float32 [B, T, N], gradients in the dtypes of what they are gradients of. Of the gradients,
    those of k, v, sinks and bias are sums over the block's own queries.
    """

    compute: Callable[..., tuple[Any, ...]]
    call: Call


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """Two passes that agree with ``reference.py``; all combine, as they share only (out, lse)."""

    forward: Pass
    backward: Pass


def call_traceable(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """Runs plain JAX code: the compiler batches and partitions it, except over Explicit axes, where
    cutting sequences in chunks would need a layout for every intermediate array.
    """
    del axes
    if has_explicit_layout(operands):
        return over_explicit_axes(kernel, operands, results)
    return kernel(operands)


def call_by_name(
    forward: Callable[..., tuple[jax.Array, ...]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    results: tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """Calls a forward that JAX differentiates by itself."""

    def kernel(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        (q, k, v), block_masks = _split(operands, 3)
        return forward(q, k, v, block_masks)

    return call_traceable(
        kernel, {"q": q, "k": k, "v": v, **_mask_arrays(masks)}, results, MeshAxes()
    )


def _hopper_backward(*arrays, **options) -> tuple[jax.Array | None, ...]:
    return (*hopper.backward(*arrays, **options), None)


IMPLEMENTATIONS = {
    "xla": Implementation(
        forward=Pass(compute=xla.forward, call=call_traceable),
        backward=Pass(compute=xla.backward, call=call_traceable),
    ),
    "hopper": Implementation(
        forward=Pass(compute=hopper.forward, call=call_opaque),
        backward=Pass(compute=_hopper_backward, call=call_opaque),
    ),
}
"""By name. cuDNN differentiates itself, and JAX the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The static part of a call and who computes it."""

    implementation: Implementation
    spec: AttentionSpec
    deterministic: bool = False  # the gradient repeats bit for bit
    axes: MeshAxes = MeshAxes()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, V] in q's dtype, logsumexp float32 [B, T, N]), differentiable through both.

    Args:
        plan: all that is no array.
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        masks: the other arrays; sinks and bias get gradients.
    """

    def kernel(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        (q, k, v), block_masks = _split(operands, 3)
        return plan.implementation.forward.compute(q, k, v, block_masks, spec=plan.spec)

    operands = {"q": q, "k": k, "v": v, **_mask_arrays(masks)}
    out, lse = plan.implementation.forward.call(kernel, operands, ("out", "lse"), plan.axes)
    return out, lse


def _attend_fwd(plan, q, k, v, masks):
    out, lse = attend(plan, q, k, v, masks)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, masks, out, lse)


def attend_gradient(
    plan: Plan,
    residuals: tuple[jax.Array, jax.Array, jax.Array, AttentionMasks, jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, AttentionMasks]:
    """Gradients of q, k, v and of the masks' sinks and bias.

    Args:
        plan: of the forward.
        residuals: q, k, v, masks, out, lse.
        cotangents: of out and lse.
    """
    q, k, v, masks, out, lse = residuals
    d_out, d_lse = cotangents
    wanted = {"dq": True, "dk": True, "dv": True}
    wanted |= {"d_sinks": masks.sinks is not None, "d_bias": masks.bias is not None}

    def kernel(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        (q, k, v, *rest), block_masks = _split(operands, 7)
        grads = plan.implementation.backward.compute(
            q, k, v, block_masks, *rest, spec=plan.spec, deterministic=plan.deterministic
        )
        return tuple(grad for grad, want in zip(grads, wanted.values(), strict=True) if want)

    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    results = tuple(name for name, want in wanted.items() if want)
    operands = {**arrays, **_mask_arrays(masks)}
    grads = plan.implementation.backward.call(kernel, operands, results, plan.axes)
    by_name = dict(zip(results, grads, strict=True))
    d_masks = AttentionMasks(sinks=by_name.get("d_sinks"), bias=by_name.get("d_bias"))
    return by_name["dq"], by_name["dk"], by_name["dv"], d_masks


attend.defvjp(_attend_fwd, attend_gradient)


def _mask_arrays(masks: AttentionMasks) -> dict[str, jax.Array]:
    fields = (field.name for field in dataclasses.fields(masks))
    return {name: x for name in fields if (x := getattr(masks, name)) is not None}


def _split(
    operands: dict[str, jax.Array], count: int
) -> tuple[tuple[jax.Array, ...], AttentionMasks]:
    """Operands by name as the first ``count`` arrays and the masks."""
    names = tuple(operands)
    masks = AttentionMasks(**{name: operands[name] for name in names[count:]})
    return tuple(operands[name] for name in names[:count]), masks
