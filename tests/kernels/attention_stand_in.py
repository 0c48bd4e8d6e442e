"""An implementation that JAX treats as it treats the Hopper kernels, and that runs on a CPU.

The computation is the reference's, but vmap, partitioning and the gradient rule see a custom call.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.varying import vary_alike
from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention.implementations import (
    IMPLEMENTATIONS,
    AttentionPlan,
    Implementation,
    attend,
)
from pallas_kernels.flash_attention.sharding import call_opaque
from pallas_kernels.flash_attention.spec import AttentionGradients

FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames="spec")
def attention_forward(q, k, v, masks, *, spec):
    """Named, so that its calls can be counted in a jaxpr."""
    return reference.forward(q, k, v, masks, spec=spec)


def attention_backward(operands, *, spec):
    q, k, v, masks = operands.q, operands.k, operands.v, operands.masks

    def forward(q, k, v, sinks, bias):
        arrays = dataclasses.replace(masks, sinks=sinks, bias=bias)
        return reference.forward(q, k, v, arrays, spec=spec)

    dq, *grads = jax.vjp(forward, q, k, v, masks.sinks, masks.bias)[1](
        (operands.d_out, operands.d_lse)
    )
    total = jax.new_ref(jnp.zeros_like(dq))  # as the fused backward sums it
    total[...] += dq
    return AttentionGradients(total[...], *grads)


STAND_IN = Implementation(forward=attention_forward, backward=attention_backward, lift=call_opaque)
XLA = IMPLEMENTATIONS["xla"]
BOTH = {"xla": XLA, "custom-call": STAND_IN}


def results(implementation, spec, q, k, v, masks, d_out, d_lse):
    """(out, lse) and the gradients of q, k, v, sinks and bias."""

    def forward(q, k, v, sinks, bias):
        arrays = dataclasses.replace(masks, sinks=sinks, bias=bias)
        return attend(
            AttentionPlan(implementation=implementation, spec=spec),
            *vary_alike((q, k, v, arrays)),
        )

    outs, pull = jax.vjp(forward, q, k, v, masks.sinks, masks.bias)
    return outs, pull((d_out, d_lse))
