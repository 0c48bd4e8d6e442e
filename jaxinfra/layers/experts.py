"""Routed and shared experts (DeepSeekMoE, arXiv 2401.06066): their parameters.

They are planned, counted and placed; nothing runs them yet.

Dims: D model width, E experts, F hidden width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.model import ExpertsConfig
from jaxinfra.core import axes
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.passes import LayerOutput, ModelState, Pass
from jaxinfra.layers.projection import HIDDEN, Projection
from jaxinfra.numerics.recipe import Site


class Experts(nnx.Module):
    """A router, experts of which each token passes ``top_k``, and those that every token passes.

    Args:
        std, out_std: of initial weights, inward and back into the residual stream.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config = config
        param, num = execution.policy.param, config.num_experts
        active = config.top_k / num

        def routed(shape: tuple[int, ...], dims: axes.Dims, std: float) -> nnx.Param:
            value = std * jax.random.normal(rngs.params(), (num, *shape), param)
            return nnx.Param(value, axes=(axes.EXPERTS, *dims), matmul=True, active=active)

        def shared(spec: str, shape: tuple[int, ...], dims: axes.Dims, std: float) -> Projection:
            return Projection(
                spec,
                shape=shape,
                dims=dims,
                std=std,
                execution=execution,
                rngs=rngs,
                name=HIDDEN,
            )

        self.router = Projection(
            "BTD,DE->BTE",
            shape=(model_dim, num),
            dims=(axes.EMBED, None),
            std=std,
            execution=execution,
            rngs=rngs,
            site=Site.ROUTER,
        )
        self.router_bias = (
            ModelState(jnp.zeros(num, execution.policy.accum), axes=(None,))
            if config.router_bias
            else None
        )
        inward, outward = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
        shape = (model_dim, config.hidden_dim)
        self.gate = routed(shape, inward, std) if config.kind.gated else None
        self.up = routed(shape, inward, std)
        self.down = routed(shape[::-1], outward, out_std)
        wide = (model_dim, config.shared_hidden_dim)
        has_shared = config.shared_hidden_dim > 0
        gated = has_shared and config.kind.gated
        self.shared_gate = shared("BTD,DF->BTF", wide, inward, std) if gated else None
        self.shared_up = shared("BTD,DF->BTF", wide, inward, std) if has_shared else None
        self.shared_down = (
            shared("BTF,FD->BTD", wide[::-1], outward, out_std) if has_shared else None
        )
        self.shared_scale = (
            shared("BTD,DE->BTE", (model_dim, 1), (axes.EMBED, None), std)
            if config.shared_gate
            else None
        )

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            "experts are planned, not run: choose a dense model, or jaxinfra plan for this one"
        )
