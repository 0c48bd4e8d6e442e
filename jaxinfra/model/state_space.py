"""State space mixer of Mamba 2 (Dao and Gu 2024, arXiv 2405.21060).

Dims: B batch, T position, D model width, N key heads, M value heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.recurrent import StateSpaceConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.gated_delta import initial_decay_log, initial_step_bias
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.projection import from_heads
from jaxinfra.model.recurrence import HEADS, GatedNorm, Inward, TokenOperands, recurred


class StateSpace(nnx.Module):
    """Linear attention whose state decays by a learned step of each token.

    Values x, keys B and queries C pass a short convolution. A head's state S becomes
    exp(-rate step) S + B (step x)^T with rate = exp(decay_log) and step = softplus; its output
    C^T S + skip x is gated and normalized.
    """

    abilities = Abilities(quantizes=True)

    def __init__(
        self,
        config: StateSpaceConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config, self.execution = config, execution
        param, keys, values = execution.policy.param, config.num_key_heads, config.num_value_heads
        make = Inward(model_dim=model_dim, std=std, execution=execution, rngs=rngs)
        key_dim, value_dim, taps = config.key_dim, config.value_dim, config.conv_width
        heads = functools.partial(make.heads, bias=config.bias)
        convolution = functools.partial(make.convolution, bias=config.conv_bias)
        self.query, self.key = heads(keys, key_dim), heads(keys, key_dim)
        self.value, self.gate = heads(values, value_dim), heads(values, value_dim)
        self.step = make.numbers(values, bias=config.bias)
        self.query_conv = convolution(keys, key_dim, taps)
        self.key_conv = convolution(keys, key_dim, taps)
        self.value_conv = convolution(values, value_dim, taps)
        by_head = (axes.Q_HEADS,)
        self.step_bias = nnx.Param(initial_step_bias(rngs.params(), (values,), param), axes=by_head)
        rates = initial_decay_log(rngs.params(), values, param)
        self.decay_log = nnx.Param(rates, axes=by_head)
        self.skip = nnx.Param(jnp.ones(values, param), axes=by_head)
        together = config.norm_heads
        norm = functools.partial(
            GatedNorm,
            shape=(values, config.value_dim),
            epsilon=config.norm_epsilon,
            gates_first=not config.norm_before_gate,
            execution=execution,
        )
        self.norm = None if together is None else norm(num_together=together)
        how = {"std": out_std, "execution": execution, "rngs": rngs}
        self.out = from_heads(values, value_dim, model_dim, bias=config.bias, **how)

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes outputs [B, T, D] in the compute dtype, from the cached state if there is one.

        Documents of packed rows start from a state of zeros.
        """
        policy = self.execution.policy
        accum = policy.to_accum
        prepared = self.query.prepared(x_BTD)
        gate_scale, value_scale, key_scale, query_scale, step_scale = (
            self.config.projection_scales or (1.0,) * 5
        )
        inputs = {
            "query": self._scaled(self.query(prepared), query_scale),
            "key": self._scaled(self.key(prepared), key_scale),
            "value": self._scaled(self.value(prepared), value_scale),
        }
        inputs = {name: self.execution.place(x, HEADS) for name, x in inputs.items()}
        v_BTMH = self.value_conv(inputs["value"], given, name="value")
        step_BTM = self._step(x_BTD, step_scale)
        rate_M = jnp.exp(accum(self.decay_log[...]))
        operands = TokenOperands(
            q=self.query_conv(inputs["query"], given, name="query"),
            k=self.key_conv(inputs["key"], given, name="key"),
            v=policy.to_compute(step_BTM[..., None] * accum(v_BTMH)),
            log_decay=-jnp.expand_dims(rate_M, (0, 1)) * step_BTM,
            beta=None,
        )
        with jax.named_scope("core"):
            out_BTMH, cache = recurred(operands, inputs, given, execution=self.execution)
        skip_M1 = accum(self.skip[...])[:, None]
        out_BTMH = accum(out_BTMH) + jnp.expand_dims(skip_M1, (0, 1)) * accum(v_BTMH)
        gate_BTMH = jax.nn.silu(accum(self._scaled(self.gate(prepared), gate_scale)))
        if self.norm is None:
            out_BTMH = policy.to_compute(out_BTMH * gate_BTMH)
        else:
            out_BTMH = self.norm(out_BTMH, gate_BTMH)
        return LayerOutput(x=self.out(out_BTMH), cache=cache)

    def _scaled(self, x: jax.Array, scale: float) -> jax.Array:
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def _step(self, x_BTD: jax.Array, scale: float) -> jax.Array:
        """Each token's step, [B, T, M] in the accum dtype."""
        accum, limit = self.execution.policy.to_accum, self.config.step_limit
        bias_11M = jnp.expand_dims(accum(self.step_bias[...]), (0, 1))
        step_BTM = jax.nn.softplus(self._scaled(accum(self.step(x_BTD)), scale) + bias_11M)
        return step_BTM if limit is None else jnp.clip(step_BTM, *limit)
