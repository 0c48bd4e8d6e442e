"""Statistics over a text's tokens of the inputs to a layer's projections and experts.

Dims: M token, K input, G block of inputs, R input of a block, E expert, D model width, F hidden
width, C choice of a token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.config.model import ExpertsConfig
from jaxinfra.model.execution import ExpertExchange
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.numerics.storage import EXACT
from jaxinfra.ops.activation import activated
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.ops.quantized import Activations, QuantizedWeight, rounded_input


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputStatistics:
    """Sums over tokens of one projection's inputs, in fp32; one sum per expert, [E, ...]."""

    count: jax.Array  # []: tokens
    magnitude_K: jax.Array  # sum of |x|
    largest_K: jax.Array  # of |x|
    # x^T x as one block, or only the blocks on its diagonal. With the weights' errors it gives the
    # output error. Rounding errors of different input groups are independent, so on average the
    # diagonal blocks suffice.
    products_GRR: jax.Array

    @property
    def mean_K(self) -> jax.Array:
        """The mean of |x| per input channel; 0 if there were no tokens."""
        return self.magnitude_K / jnp.maximum(self.count, 1.0)[..., None]

    def divided(self, scales_K: jax.Array) -> "InputStatistics":
        """Returns the statistics of the inputs divided by scales, [K] or [E, K]."""
        scales_K = jnp.broadcast_to(scales_K, self.magnitude_K.shape)
        grid = self.products_GRR.shape[-3:-1]
        scales_GR = scales_K.reshape(*scales_K.shape[:-1], *grid)
        return InputStatistics(
            count=self.count,
            magnitude_K=self.magnitude_K / scales_K,
            largest_K=self.largest_K / scales_K,
            products_GRR=self.products_GRR / scales_GR[..., None] / scales_GR[..., None, :],
        )

    def with_more(self, other: "InputStatistics") -> "InputStatistics":
        """Returns the sum of these statistics and those of another text."""
        return InputStatistics(
            count=self.count + other.count,
            magnitude_K=self.magnitude_K + other.magnitude_K,
            largest_K=jnp.maximum(self.largest_K, other.largest_K),
            products_GRR=self.products_GRR + other.products_GRR,
        )


def statistics_of(x: jax.Array, num_inputs: int) -> InputStatistics:
    """Computes statistics of x [..., *inputs], whose last dims make ``num_inputs`` channels."""
    x_MK = x.reshape(-1, num_inputs).astype(EXACT)
    return _statistics(x_MK, jnp.asarray(x_MK.shape[0], EXACT), block=num_inputs)


def _statistics(x_MK: jax.Array, count: jax.Array, *, block: int) -> InputStatistics:
    blocks = x_MK.reshape(len(x_MK), -1, block)
    return InputStatistics(
        count=count,
        magnitude_K=jnp.sum(jnp.abs(x_MK), axis=0),
        largest_K=jnp.max(jnp.abs(x_MK), axis=0),
        products_GRR=jnp.einsum("mgr,mgs->grs", blocks, blocks, precision="highest"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTokens:
    """Tokens sent to experts, with each token's chosen experts and weights."""

    x_MD: jax.Array
    expert_MC: jax.Array  # int32
    weights: ExpertWeights
    config: ExpertsConfig

    def statistics(self, *, block: int) -> tuple[InputStatistics, InputStatistics]:
        """Computes each expert's input statistics, of its inward and outward projections.

        Args:
            block: size of the diagonal blocks of x^T x. The whole matrix for every expert would be
                larger than the model.
        """

        def of_expert(given: tuple[jax.Array, ExpertWeights]) -> tuple[Any, Any]:
            expert, weights = given
            mine_M1 = jnp.any(self.expert_MC == expert, axis=-1, keepdims=True)
            count = jnp.sum(mine_M1, dtype=EXACT)
            x_MD = jnp.where(mine_M1, self.x_MD, 0).astype(EXACT)
            hidden_MF = jnp.where(mine_M1, self._hidden(x_MD, weights), 0)
            inward = _statistics(x_MD, count, block=block)
            return inward, _statistics(hidden_MF, count, block=block)

        experts = jnp.arange(self.config.num_experts, dtype=jnp.int32)
        return jax.lax.map(of_expert, (experts, self.weights))

    def _hidden(self, x_MD: jax.Array, weights: ExpertWeights) -> jax.Array:
        def inward(w_DF: jax.Array | QuantizedWeight, bias_F: jax.Array | None) -> jax.Array:
            assert isinstance(w_DF, jax.Array), "calibrated weights are not quantized yet"
            y_MF = jnp.dot(x_MD, w_DF.astype(EXACT))
            return y_MF if bias_F is None else y_MF + bias_F.astype(EXACT)[None]

        gate = weights.gate_EDF  # of one expert here
        gate_MF = None if gate is None else inward(gate, weights.gate_bias_EF)
        return activated(self.config.kind, inward(weights.up_EDF, weights.up_bias_EF), gate_MF)


class InputRecorder:
    """Records the inputs of a layer's matmuls, and its experts' tokens, while it is traced.

    Weights are recognized by object identity, as a projection passes on its weight object.
    """

    def __init__(self, exchange: ExpertExchange) -> None:
        self._exchange = exchange
        self.calls: list[tuple[Any, jax.Array]] = []
        self.routed: list[RoutedTokens] = []
        self.rounded: list[Any] = []  # weights whose inputs are rounded to ``activations``
        self.activations: Activations | None = None

    def watch(self, spec: str, x: jax.Array, weight: Any) -> jax.Array:
        """Records a matmul's input, quantized if the weight's inputs are (``Multiply.watch``)."""
        self.calls.append((weight, x))
        if self.activations is None or not any(weight is each for each in self.rounded):
            return x
        operands, _ = spec.split("->")
        contracted = sum(letter in operands.split(",")[1] for letter in operands.split(",")[0])
        return rounded_input(x, self.activations, contracted=contracted)

    def exchange(
        self,
        x_BTD: jax.Array,
        expert_BTK: jax.Array,
        weight_BTK: jax.Array,
        experts: ExpertWeights,
        *,
        config: ExpertsConfig,
        recipe: Recipe,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Exchanges expert tokens as ``Kernels.exchange`` does; records tokens and experts."""
        routed = RoutedTokens(
            x_MD=x_BTD.reshape(-1, x_BTD.shape[-1]),
            expert_MC=expert_BTK.reshape(-1, expert_BTK.shape[-1]),
            weights=experts,
            config=config,
        )
        self.routed.append(routed)
        return self._exchange(x_BTD, expert_BTK, weight_BTK, experts, config=config, recipe=recipe)

    def taken(self, weights: dict[str, Any]) -> tuple[dict[str, jax.Array], RoutedTokens | None]:
        """Returns and clears the recorded inputs of these weights, and the experts' tokens."""
        calls, self.calls = self.calls, []
        routed, self.routed = self.routed, []
        found = {path: x for path, weight in weights.items() for seen, x in calls if seen is weight}
        return found, routed[0] if routed else None
