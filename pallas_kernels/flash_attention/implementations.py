"""Gradient rule that all implementations share: forward returns (out, logsumexp), from which
backward recomputes the probabilities.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from . import hopper, xla
from .sharding import Compute, Operands, call_opaque, call_traceable
from .spec import (
    AttentionCall,
    AttentionGradients,
    AttentionMasks,
    AttentionSpec,
    BackwardOperands,
    MeshAxes,
)

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"
"""Names of the two arrays that the backward pass needs besides q, k, v: a rematerialization policy
that saves them (``jax.checkpoint_policies.save_only_these_names``) never reruns the forward."""

type Forward = Callable[..., tuple[jax.Array, ...]]
"""Function (q, k, v, masks, *, spec) -> (out, lse)."""
type Backward = Callable[..., AttentionGradients]
"""Function (operands, *, spec) -> gradients; those of k, v, sinks and bias are sums over the
queries in ``operands``, such as a device's shard."""

_RESIDUALS = ("q", "k", "v", "out", "lse", "d_out", "d_lse")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """Forward and backward pass of an implementation on one device; both match ``reference.py``.

    The passes of different implementations can be combined, as only (out, lse) is passed on.
    """

    forward: Forward
    backward: Backward
    lift: Callable[[Compute, Operands, tuple[str, ...], MeshAxes], tuple[jax.Array, ...]]
    """Runs a pass under vmap and on meshes: ``call_opaque`` for custom calls, which JAX cannot
    partition, or ``call_traceable`` for plain JAX code."""


IMPLEMENTATIONS = {
    "xla": Implementation(forward=xla.forward, backward=xla.backward, lift=call_traceable),
    "hopper": Implementation(forward=hopper.forward, backward=hopper.backward, lift=call_opaque),
}
"""Implementations by name. cuDNN differentiates itself, and JAX the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The static part of an attention call, with its implementation and its mesh axes."""

    implementation: Implementation
    spec: AttentionSpec
    axes: MeshAxes = MeshAxes()

    @classmethod
    def of(cls, call: AttentionCall, chosen: str) -> "AttentionPlan":
        """Returns the plan of a validated call for the implementation named ``chosen``."""
        return cls(
            implementation=IMPLEMENTATIONS[chosen],
            spec=call.spec,
            axes=call.mesh_axes or MeshAxes(),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: AttentionPlan, q: jax.Array, k: jax.Array, v: jax.Array, masks: AttentionMasks
) -> tuple[jax.Array, jax.Array]:
    """Computes out [B, T, N, V] and logsumexp float32 [B, T, N], differentiable through both.

    Args:
        plan: the static part of the call and its implementation.
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        masks: the other arrays; sinks and bias get gradients.
    """
    compute = _by_name(functools.partial(plan.implementation.forward, spec=plan.spec))
    operands = {"q": q, "k": k, "v": v, **masks.arrays()}
    out, lse = plan.implementation.lift(compute, operands, ("out", "lse"), plan.axes)
    return out, lse


def _attend_fwd(plan, q, k, v, masks):
    out, lse = attend(plan, q, k, v, masks)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, masks, out, lse)


def _attend_bwd(plan, residuals, cotangents):
    q, k, v, masks, out, lse = residuals
    d_out, d_lse = cotangents
    dq, dk, dv, d_sinks, d_bias = attend_gradient(
        plan,
        BackwardOperands(q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=d_lse),
    )
    return dq, dk, dv, AttentionMasks(sinks=d_sinks, bias=d_bias)


attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_use(
    alone: Forward,
    with_gradient: Forward,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
) -> tuple[jax.Array, ...]:
    """Runs ``alone`` where the call is not differentiated, and ``with_gradient`` where it is.

    Args:
        alone: function of (q, k, v, masks) that closes over no traced array.
        with_gradient: function with the same arguments and results, and its own gradient.
    """
    del with_gradient
    return alone(q, k, v, masks)


def _by_use_fwd(alone, with_gradient, *arrays):
    return jax.vjp(with_gradient, *arrays)


def _by_use_bwd(alone, with_gradient, gradient, cotangents):
    return gradient(cotangents)


by_use.defvjp(_by_use_fwd, _by_use_bwd)


def attend_gradient(plan: AttentionPlan, operands: BackwardOperands) -> AttentionGradients:
    """Computes the gradients of q, k, v, sinks and bias, also under ``vmap`` and sharding."""
    masks = operands.masks
    results = ("dq", "dk", "dv")
    results += ("d_sinks",) * (masks.sinks is not None) + ("d_bias",) * (masks.bias is not None)

    def compute(block: Operands) -> tuple[jax.Array, ...]:
        mine = BackwardOperands(masks=_masks(block), **{name: block[name] for name in _RESIDUALS})
        gradients = plan.implementation.backward(mine, spec=plan.spec)
        return tuple(getattr(gradients, name) for name in results)

    arrays = {name: getattr(operands, name) for name in _RESIDUALS} | masks.arrays()
    found = plan.implementation.lift(compute, arrays, results, plan.axes)
    return AttentionGradients(**dict(zip(results, found, strict=True)))


def attend_traceable(
    forward: Forward,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    results: tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """Computes a forward pass that JAX itself differentiates, also under ``vmap`` and sharding."""
    operands = {"q": q, "k": k, "v": v, **masks.arrays()}
    return call_traceable(_by_name(forward), operands, results, MeshAxes())


def _by_name(forward: Forward) -> Compute:
    return lambda block: forward(block["q"], block["k"], block["v"], _masks(block))


def _masks(block: Operands) -> AttentionMasks:
    names = (field.name for field in dataclasses.fields(AttentionMasks))
    return AttentionMasks(**{name: block[name] for name in names if name in block})
