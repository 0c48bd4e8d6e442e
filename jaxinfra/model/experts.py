"""Routed and shared experts (DeepSeekMoE, arXiv 2401.06066).

Dims: B batch, T position, D model width, E experts, F hidden width, K experts of a token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxinfra import axes
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Abilities, LayerOutput, ModelState, Pass, Sums, joined
from jaxinfra.model.projection import HIDDEN, Projection
from jaxinfra.model.routing import EvenLoads, ExpertChoice, balance_sums, choose, within_capacity
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.activation import activated
from jaxinfra.ops.experts import CHOICE_NAME, ExpertWeights


class Experts(nnx.Module):
    """A mixture-of-experts layer: a router, routed experts (``top_k`` per token), shared experts.

    It returns the configured losses and three counts as ``Sums``. ``expert_tokens`` counts each
    expert's tokens before any is dropped. ``dropped`` counts choices beyond an expert's capacity,
    ``overflowed`` choices that did not fit in the buffers of the exchange between devices.

    Args:
        std: standard deviation of the initial weights, except of the down projections.
        out_std: standard deviation of the down projections, which write the residual stream.
    """

    abilities = Abilities()

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
        self.config, self.execution = config, execution
        policy = execution.policy
        param, num = policy.param, config.num_experts
        active = config.top_k / num
        self.recipe = policy.recipe(Site.EXPERTS)
        read_as = self.recipe.gradient  # as ``ops.experts`` rounds them
        build = functools.partial(Projection, execution=execution, rngs=rngs)

        def routed(shape: tuple[int, ...], dims: axes.Dims, std: float) -> nnx.Param:
            value = std * jax.random.normal(rngs.params(), (num, *shape), param)
            return nnx.Param(
                value, axes=(axes.EXPERTS, *dims), matmul=True, active=active, read_as=read_as
            )

        def bias(width: int, dim: str) -> nnx.Param | None:
            if not config.bias:
                return None
            value = jnp.zeros((num, width), param)
            return nnx.Param(value, axes=(axes.EXPERTS, dim), active=active)

        self.router = build(
            "BTD,DE->BTE",
            shape=(model_dim, num),
            dims=(axes.EMBED, None),
            bias_rank=1 if config.routing.logit_bias else 0,
            std=std,
            site=Site.ROUTER,
            whole=True,
        )
        self.router_correction = (
            ModelState(
                jnp.zeros(num, policy.accum),
                axes=(None,),
                rule=EvenLoads(config.balance.bias_rate),
            )
            if config.routing.correction_bias
            else None
        )
        inward, outward = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
        width = config.latent_dim or model_dim
        shape = (width, config.hidden_dim)
        gated = config.kind.gated
        self.gate = routed(shape, inward, std) if gated else None
        self.up = routed(shape, inward, std)
        self.down = routed(shape[::-1], outward, out_std)
        self.gate_bias = bias(config.hidden_dim, axes.MLP) if gated else None
        self.up_bias = bias(config.hidden_dim, axes.MLP)
        self.down_bias = bias(width, axes.EMBED)
        self._add_latent(build, (model_dim, width), std=std, out_std=out_std)
        self._add_shared(build, (model_dim, config.shared_hidden_dim), std=std, out_std=out_std)

    def _add_norms(self, model_dim: int) -> None:
        """Adds the norms of routed and shared experts and of the router, where they are apart, and
        experts' scales.
        """
        kind = self.config.norms
        ones = jnp.ones(self.config.num_experts, self.execution.policy.param)
        has_scales = self.config.routing.expert_scales
        self.expert_scale = nnx.Param(ones, axes=(None,)) if has_scales else None

        def norm() -> Norm | None:
            given = {"shape": (model_dim,), "dims": (axes.EMBED,), "execution": self.execution}
            return None if kind is None else Norm(kind, **given)

        self.router_norm, self.routed_norm, self.shared_norm = norm(), norm(), norm()
        self.routed_post_norm, self.shared_post_norm = norm(), norm()

    def _add_latent(
        self,
        build: Callable[..., Projection],
        shape: tuple[int, int],
        *,
        std: float,
        out_std: float,
    ) -> None:
        """Adds the projections to and from the routed experts' width, where it is their own."""
        has_latent, dims = self.config.latent_dim is not None, (axes.EMBED, None)
        down = functools.partial(build, "BTD,DR->BTR", shape=shape, dims=dims, std=std, whole=True)
        up = functools.partial(
            build, "BTR,RD->BTD", shape=shape[::-1], dims=dims[::-1], std=out_std
        )
        self.latent_down = down() if has_latent else None
        self.latent_up = up() if has_latent else None

    def _add_shared(
        self,
        build: Callable[..., Projection],
        shape: tuple[int, int],
        *,
        std: float,
        out_std: float,
    ) -> None:
        """Adds the expert that all tokens pass, where the config has one."""
        self._add_norms(shape[0])
        inward, outward = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
        has_shared = self.config.shared_hidden_dim > 0
        wide = functools.partial(
            build, "BTD,DF->BTF", shape=shape, dims=inward, std=std, name=HIDDEN
        )
        self.shared_gate = wide() if has_shared and self.config.kind.gated else None
        self.shared_up = wide() if has_shared else None
        self.shared_down = (
            build("BTF,FD->BTD", shape=shape[::-1], dims=outward, std=out_std)
            if has_shared
            else None
        )
        self.shared_scale = (
            build("BTD,DE->BTE", shape=(shape[0], 1), dims=(axes.EMBED, None), std=std, whole=True)
            if self.config.shared_gate
            else None
        )

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes the experts' output [B, T, D], compute dtype; padding chooses no expert."""
        policy, place = self.execution.policy, self.execution.place
        counts_BT = _counted(x_BTD, given)
        with jax.named_scope("routing"):
            routing_BTD = _normed(self.router_norm, x_BTD)
            if self.router_norm is not None:
                routing_BTD = policy.scaled(routing_BTD, x_BTD.shape[-1] ** -0.5)
            choice, sums = self._route(routing_BTD, counts_BT)
            if self.config.balance.capacity_factor is not None and given.cache is None:
                choice, dropped = within_capacity(choice, config=self.config)
                sums = joined(sums, Sums(added={"dropped": dropped}))
            expert_BTK = checkpoint_name(choice.expert_BTK, CHOICE_NAME)
        routed_BTD = _normed(self.routed_norm, x_BTD)
        routed_BTD = routed_BTD if self.latent_down is None else self.latent_down(routed_BTD)
        weight_BTK = choice.weight_BTK
        if self.config.routing.scales_inputs:
            routed_BTD = policy.to_compute(policy.to_accum(routed_BTD) * weight_BTK)
            weight_BTK = jnp.ones_like(weight_BTK)
        y_BTD, overflowed = self.execution.kernels.exchange(
            routed_BTD,
            place(expert_BTK, (axes.BATCH, axes.SEQUENCE, None)),
            place(weight_BTK, (axes.BATCH, axes.SEQUENCE, None)),
            self.weights,
            config=self.config,
            recipe=self.recipe,
        )
        if overflowed is not None:
            sums = joined(sums, Sums(added={"overflowed": overflowed}))
        if self.latent_up is not None:
            y_BTD = self.latent_up(policy.to_compute(y_BTD))
        if self.routed_post_norm is not None:
            y_BTD = self.routed_post_norm(policy.to_compute(y_BTD))
        if self.shared_up is not None:
            with jax.named_scope("shared"):
                shared_BTD = self._shared(_normed(self.shared_norm, x_BTD))
                if self.shared_post_norm is not None:
                    shared_BTD = self.shared_post_norm(policy.to_compute(shared_BTD))
                y_BTD = policy.to_accum(y_BTD) + policy.pinned(policy.to_accum(shared_BTD))
        return LayerOutput(x=policy.to_compute(y_BTD), sums=sums)

    @property
    def weights(self) -> ExpertWeights:
        """The routed experts' weights and biases, as the parameters are stored."""

        def value(parameter: nnx.Param | None) -> Any:
            return None if parameter is None else parameter.get_value()

        return ExpertWeights(
            gate_EDF=value(self.gate),
            up_EDF=value(self.up),
            down_EFD=value(self.down),
            gate_bias_EF=value(self.gate_bias),
            up_bias_EF=value(self.up_bias),
            down_bias_ED=value(self.down_bias),
        )

    def _route(self, x_BTD: jax.Array, counts_BT: Bool[Array, "B T"]) -> tuple[ExpertChoice, Sums]:
        place, accum = self.execution.place, self.execution.policy.to_accum
        logits_BTE = accum(self.router(x_BTD))
        logits_BTE = place(logits_BTE, (axes.BATCH, axes.SEQUENCE, None))
        bias = self.router_correction
        choice = choose(
            logits_BTE,
            config=self.config,
            correction_E=None if bias is None else bias[...],
            counts_BT=counts_BT,
            is_exact=self.execution.policy.is_exact,
        )
        sums = balance_sums(
            choice,
            logits_BTE,
            config=self.config,
            counts_BT=counts_BT,
            over_batch=place.over_batch,
        )
        if self.expert_scale is not None:
            choice = _scaled(choice, accum(self.expert_scale[...]))
        return choice, sums

    def _shared(self, x_BTD: jax.Array) -> jax.Array:
        """Output of the shared experts, which all tokens pass, in the accum dtype."""
        assert self.shared_up is not None
        assert self.shared_down is not None
        policy = self.execution.policy
        up_BTF = policy.to_accum(self.shared_up(x_BTD))
        gate = self.shared_gate
        gate_BTF = None if gate is None else policy.to_accum(gate(x_BTD))
        hidden_BTF = policy.to_compute(activated(self.config.kind, up_BTF, gate_BTF))
        hidden_BTF = self.execution.place(hidden_BTF, (axes.BATCH, axes.SEQUENCE, axes.MLP))
        y_BTD = policy.to_accum(self.shared_down(hidden_BTF))
        if self.shared_scale is None:
            return y_BTD
        return y_BTD * jax.nn.sigmoid(policy.to_accum(self.shared_scale(x_BTD)))


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _scaled(choice: ExpertChoice, scale_E: jax.Array) -> ExpertChoice:
    """The choice with each weight multiplied by its expert's scale."""
    experts = jnp.arange(len(scale_E), dtype=choice.expert_BTK.dtype)
    is_chosen_BTKE = choice.expert_BTK[..., None] == experts[None, None, None]
    # Not a gather: its gradient would be a scatter.
    scale_BTK = jnp.sum(jnp.where(is_chosen_BTKE, scale_E[None, None, None], 0.0), axis=-1)
    return dataclasses.replace(choice, weight_BTK=choice.weight_BTK * scale_BTK)


def _counted(x_BTD: jax.Array, given: Pass) -> jax.Array:
    """bool [B, T]: which tokens are no padding."""
    if given.segment_ids_BT is not None:
        return given.segment_ids_BT >= 0
    if given.cache is not None:
        return given.positions_BT >= 0
    return jnp.ones(x_BTD.shape[:2], jnp.bool)
