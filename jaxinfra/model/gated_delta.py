"""The gated delta rule as a mixer: Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention.

Dims: B batch, T position, D model width, N key heads, M value heads, H head width, R rank.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.recurrent import GatedDeltaConfig, OutputGate
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.projection import from_heads, unpacked
from jaxinfra.model.recurrence import (
    HEADS,
    GatedNorm,
    Inward,
    TokenOperands,
    recurred,
    stepped,
    steps,
)
from jaxinfra.ops.multiply import Deferred

_LENGTH_EPSILON = 1e-6  # added to a key's squared length before it is scaled to 1
_LARGEST_RATE = 16.0  # initial decay rates are uniform between 1 and this
_STEPS = (1e-3, 1e-1)  # range of initial steps, log-uniform (arXiv 2405.21060)


def initial_step_bias(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Samples biases whose softplus is a step between 0.001 and 0.1."""
    least, most = (jnp.log(jnp.asarray(step, dtype)) for step in _STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, least, most))
    return step + jnp.log(-jnp.expm1(-step))


def initial_decay_log(key: jax.Array, num_heads: int, dtype: jnp.dtype) -> jax.Array:
    """Samples logarithms of decay rates between 1 and 16."""
    return jnp.log(jax.random.uniform(key, (num_heads,), dtype, 1.0, _LARGEST_RATE))


class GatedDelta(nnx.Module):
    """Linear attention whose state moves towards each value and decays by learned amounts.

    Queries, keys and values pass a short convolution; queries and keys have length 1. A head's
    state S becomes exp(g) S + k (beta (v - k^T exp(g) S))^T with g = -exp(decay_log) softplus(decay
    + decay_bias) and beta = sigmoid; its output q^T S / sqrt(H) is normalized and gated.
    """

    def __init__(
        self,
        config: GatedDeltaConfig,
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
        rank, is_wide, form = config.rank, config.channel_decay, execution.decode_form
        is_packed = form is not None and form.packed and key_dim == value_dim
        has_numbers = form is not None and form.numbers and rank is None and not is_wide
        is_whole = execution.place.shards(axes.Q_HEADS) == 1
        self.packs_numbers = is_packed and has_numbers and is_whole
        gates = values if rank is None else 0
        numbers = -(-2 * values // key_dim) if self.packs_numbers else 0
        heads = 2 * keys + values + gates + numbers
        self.packed = make.heads(heads, key_dim) if is_packed else None
        if self.packed is None:
            self.query, self.key = make.heads(keys, key_dim), make.heads(keys, key_dim)
            self.value = make.heads(values, value_dim)
        self.beta = None if self.packs_numbers else make.numbers(values)
        self.query_conv = make.convolution(keys, key_dim, taps)
        self.key_conv = make.convolution(keys, key_dim, taps)
        self.value_conv = make.convolution(values, value_dim, taps)
        self.decay_down = None if rank is None else make.down(rank)
        self.gate_down = None if rank is None else make.down(rank)
        if self.packs_numbers:
            self.decay = self.gate = None
        elif rank is None:
            self.decay = make.heads(values, key_dim) if is_wide else make.numbers(values)
            self.gate = None if is_packed else make.heads(values, value_dim)
        else:
            self.decay = make.up(rank, values, key_dim if is_wide else 1)
            self.gate = make.up(rank, values, value_dim)
        decay_shape = (values, config.key_dim) if is_wide else (values,)
        decay_dims = (axes.Q_HEADS, axes.HEAD)[: len(decay_shape)]
        bias = initial_step_bias(rngs.params(), decay_shape, param)
        self.decay_bias = nnx.Param(bias, axes=decay_dims)
        rates = initial_decay_log(rngs.params(), values, param)
        self.decay_log = nnx.Param(rates, axes=(axes.Q_HEADS,))
        self.norm = GatedNorm(
            shape=(config.value_dim,),
            epsilon=config.norm_epsilon,
            num_together=1,
            gates_first=False,
            execution=execution,
        )
        how = {"std": out_std, "execution": execution, "rngs": rngs}
        self.out = from_heads(values, value_dim, model_dim, **how)

    @property
    def abilities(self) -> Abilities:
        """Steps of a block that this layer does itself: norm and residual sum, if all is packed."""
        fuses = self.packs_numbers and self.execution.multiply.few_rows
        return Abilities(fuses=fuses, quantizes=True)

    def __call__(self, x_BTD: Float[Array, "B T D"] | Deferred, given: Pass) -> LayerOutput:
        """Computes outputs [B, T, D] in the compute dtype, from the cached state if there is one.

        Documents of packed rows start from a state of zeros.
        """
        accum = self.execution.policy.to_accum
        packed_BTNH = None if self.packed is None else self.packed(x_BTD)
        inputs = self._projected(x_BTD, packed_BTNH)
        gate_BTMH, beta_BTM, decay = (inputs.pop(name) for name in ("gate", "beta", "decay"))
        lengths = {"query": self.config.key_dim**-0.5, "key": 1.0}
        convolutions = {
            "query": self.query_conv, "key": self.key_conv, "value": self.value_conv
        }  # fmt: skip
        if packed_BTNH is not None and self.packs_numbers and steps(given, self.execution):
            x_BTC = packed_BTNH.reshape(*packed_BTNH.shape[:2], -1)
            tokens, given = stepped(x_BTC, convolutions, lengths, given, execution=self.execution)
            inputs = {}
        else:
            inputs = {name: self.execution.place(x, HEADS) for name, x in inputs.items()}
            tokens = {n: conv(inputs[n], given, name=n) for n, conv in convolutions.items()}
            tokens |= {n: self._directed(tokens[n], length) for n, length in lengths.items()}
        operands = TokenOperands(
            q=tokens["query"],
            k=tokens["key"],
            v=tokens["value"],
            log_decay=self._log_decay(decay),
            beta=jax.nn.sigmoid(accum(beta_BTM)),
        )
        with jax.named_scope("core"):
            out_BTMH, cache = recurred(operands, inputs, given, execution=self.execution)
        is_silu = self.config.gate is OutputGate.SILU
        gate_BTMH = (jax.nn.silu if is_silu else jax.nn.sigmoid)(accum(gate_BTMH))
        out_BTD = self.out(self.norm(out_BTMH, gate_BTMH), residual=given.residual_BTD)
        return LayerOutput(x=out_BTD, cache=cache)

    def _projected(
        self, x_BTD: jax.Array | Deferred, packed_BTNH: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Queries, keys, values, and what gate, beta and decay are computed from."""
        names, found = ["query", "key", "value", "gate"], {}
        if not self.packs_numbers:
            assert not isinstance(x_BTD, Deferred), "abilities"
            found = self._apart(x_BTD)
            names = [each for each in names if each not in found]
        if packed_BTNH is None:
            assert not isinstance(x_BTD, Deferred), "abilities"
            prepared = self.query.prepared(x_BTD)
            return found | {name: getattr(self, name)(prepared) for name in names}
        keys, values = self.config.num_key_heads, self.config.num_value_heads
        shards = self.execution.place.shards(axes.Q_HEADS)
        ends = [n // shards for n in (keys, 2 * keys, 2 * keys + values, 2 * (keys + values))]
        num_ends = len(names) - (not self.packs_numbers)
        *parts, last = unpacked(packed_BTNH, ends[:num_ends], shards, axis=2)
        if not self.packs_numbers:
            return found | dict(zip(names, [*parts, last], strict=True))
        numbers = last.reshape(*last.shape[:2], -1)
        found |= {"beta": numbers[..., :values], "decay": numbers[..., values : 2 * values]}
        return found | dict(zip(names, parts, strict=True))

    def _apart(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
        """Beta, decay and, if it has a rank, the gate: of products that are never packed."""
        assert self.beta is not None
        assert self.decay is not None, "numbers are apart"
        found = {"beta": self.beta(x_BTD)}
        if self.gate_down is None or self.decay_down is None:
            return found | {"decay": self.decay(x_BTD)}
        assert self.gate is not None, "of a rank"
        decay = self.decay(self.decay_down(x_BTD))
        found["decay"] = decay if self.config.channel_decay else decay[..., 0]
        return found | {"gate": self.gate(self.gate_down(x_BTD))}

    def _directed(self, x_BTNH: jax.Array, length: float) -> jax.Array:
        """Vectors of this length in the directions of x."""
        policy = self.execution.policy
        x_BTNH = policy.to_accum(x_BTNH)
        squares = jnp.sum(x_BTNH**2, axis=-1, keepdims=True)
        return policy.to_compute(length * x_BTNH * jax.lax.rsqrt(squares + _LENGTH_EPSILON))

    def _log_decay(self, raw: jax.Array) -> jax.Array:
        """Logarithms of decays, [B, T, M] or [B, T, M, H], in the accum dtype."""
        accum = self.execution.policy.to_accum
        bias = jnp.expand_dims(accum(self.decay_bias[...]), (0, 1))
        rate = jnp.expand_dims(jnp.exp(accum(self.decay_log[...])), (0, 1))
        rate = rate[..., None] if self.config.channel_decay else rate
        return -rate * jax.nn.softplus(accum(raw) + bias)
