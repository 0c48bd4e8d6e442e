"""Selective state space mixer of Mamba 1 (Gu and Dao 2023, arXiv 2312.00752).

Dims: B batch, T position, D model width, M channel, H state width, R rank.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.model import NormConfig
from jaxinfra.config.recurrent import SelectiveScanConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.gated_delta import initial_step_bias
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.projection import Projection
from jaxinfra.model.recurrence import HEADS, Inward, TokenOperands, recurred
from jaxinfra.numerics.recipe import Site


class SelectiveScan(nnx.Module):
    """State space whose channels decay by a learned step of each token and channel.

    Channels x pass a short convolution, from which key B, query C and steps are computed. State h
    of a channel becomes exp(-rates step) h + B step x with rates = exp(decay_log) and step =
    softplus; its output C^T h + skip x is multiplied by the gate's SiLU.
    """

    abilities = Abilities(quantizes=True)

    def __init__(
        self,
        config: SelectiveScanConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config, self.execution = config, execution
        param, channels, width = execution.policy.param, config.num_channels, config.state_dim
        make = Inward(model_dim=model_dim, std=std, execution=execution, rngs=rngs)
        self.value, self.gate = (make.heads(channels, 1, bias=config.bias) for _ in range(2))
        self.value_conv = make.convolution(channels, 1, config.conv_width, bias=config.conv_bias)
        given = {"execution": execution, "rngs": rngs}
        by_channel = (axes.Q_HEADS, axes.HEAD)

        def shared(width: int) -> Projection:
            shape, dims = (channels, 1, width), (*by_channel, None)
            return Projection("BTMV,MVR->BTR", shape=shape, dims=dims, std=std, **given)

        self.query, self.key, self.step_down = map(shared, (width, width, config.rank))
        self.step = Projection(
            "BTR,RM->BTM",
            shape=(config.rank, channels),
            dims=(None, axes.Q_HEADS),
            std=config.rank**-0.5,
            site=Site.ROUTER,  # as a router's, in the accum dtype
            **given,
        )

        def norm(width: int) -> Norm | None:
            if config.norm_epsilon is None:
                return None
            kind = NormConfig(epsilon=config.norm_epsilon, scale=config.norm_scale)
            return Norm(kind, shape=(width,), dims=(None,), execution=execution)

        self.query_norm, self.key_norm, self.step_norm = map(norm, (width, width, config.rank))
        bias = initial_step_bias(rngs.params(), (channels,), param)
        self.step_bias = nnx.Param(bias, axes=by_channel[:1])
        rates = jnp.log(jnp.arange(1, width + 1, dtype=param))
        self.decay_log = nnx.Param(jnp.tile(rates, (channels, 1)), axes=by_channel)
        self.skip = nnx.Param(jnp.ones(channels, param), axes=by_channel[:1])
        self.out = Projection(
            "BTMV,MVD->BTD",
            shape=(channels, 1, model_dim),
            dims=(*by_channel, axes.EMBED),
            bias_rank=1 if config.bias else 0,
            std=out_std,
            **given,
        )

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes outputs [B, T, D] in the compute dtype, from the cached state if there is one.

        Documents of packed rows start from a state of zeros.
        """
        policy = self.execution.policy
        accum = policy.to_accum
        prepared = self.value.prepared(x_BTD)
        inputs = {"value": self.execution.place(self.value(prepared), HEADS)}
        v_BTM1 = self.value_conv(inputs["value"], given, name="value")
        step_BTM = self._step(v_BTM1)
        operands = TokenOperands(
            q=self._normed(self.query_norm, self.query(v_BTM1))[:, :, None],
            k=self._normed(self.key_norm, self.key(v_BTM1))[:, :, None],
            v=policy.to_compute(step_BTM[..., None] * accum(v_BTM1)),
            log_decay=-step_BTM,
            beta=None,
            rates=jnp.exp(accum(self.decay_log[...])),
        )
        with jax.named_scope("core"):
            out_BTM1, cache = recurred(operands, inputs, given, execution=self.execution)
        skip_11M1 = jnp.expand_dims(accum(self.skip[...]), (0, 1, 3))
        out_BTM1 = accum(out_BTM1) + skip_11M1 * accum(v_BTM1)
        gate_BTM1 = jax.nn.silu(accum(self.gate(prepared)))
        return LayerOutput(x=self.out(policy.to_compute(out_BTM1 * gate_BTM1)), cache=cache)

    def _normed(self, norm: Norm | None, x: jax.Array) -> jax.Array:
        return x if norm is None else norm(x)

    def _step(self, v_BTM1: jax.Array) -> jax.Array:
        """Each token's steps, [B, T, M] in the accum dtype."""
        accum = self.execution.policy.to_accum
        low_BTR = self._normed(self.step_norm, self.step_down(v_BTM1))
        bias_11M = jnp.expand_dims(accum(self.step_bias[...]), (0, 1))
        return jax.nn.softplus(accum(self.step(low_BTR)) + bias_11M)
