"""What a text tells of the inputs of a layer's projections.

Dims: M token, K input.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.numerics.storage import EXACT
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.quantized import Activations, rounded_input


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputStatistics:
    """Sums over tokens of one projection's input, fp32."""

    count: jax.Array  # []: tokens
    magnitude_K: jax.Array  # sum of |x|
    largest_K: jax.Array  # of |x|
    products_KK: jax.Array  # x^T x: errors of outputs follow from it and the weights' alone

    @property
    def mean_K(self) -> jax.Array:
        """Of |x|."""
        return self.magnitude_K / self.count

    def divided(self, scales_K: jax.Array) -> "InputStatistics":
        """Of the inputs divided by these scales."""
        return InputStatistics(
            count=self.count,
            magnitude_K=self.magnitude_K / scales_K,
            largest_K=self.largest_K / scales_K,
            products_KK=self.products_KK / scales_K[:, None] / scales_K[None],
        )

    def with_more(self, other: "InputStatistics") -> "InputStatistics":
        """Of both texts."""
        return InputStatistics(
            count=self.count + other.count,
            magnitude_K=self.magnitude_K + other.magnitude_K,
            largest_K=jnp.maximum(self.largest_K, other.largest_K),
            products_KK=self.products_KK + other.products_KK,
        )


def statistics_of(x: jax.Array, num_inputs: int) -> InputStatistics:
    """Of [..., *inputs], whose dims from the end make ``num_inputs``."""
    x_MK = x.reshape(-1, num_inputs).astype(EXACT)
    return InputStatistics(
        count=jnp.asarray(x_MK.shape[0], EXACT),
        magnitude_K=jnp.sum(jnp.abs(x_MK), axis=0),
        largest_K=jnp.max(jnp.abs(x_MK), axis=0),
        products_KK=jnp.dot(x_MK.T, x_MK, precision="highest"),
    )


class InputRecorder:
    """A ``Multiply`` that notes, while a layer is traced, what each weight is multiplied with.

    A projection hands its weight on as it was given it, so it is told by identity.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, jax.Array]] = []
        self.rounded: list[Any] = []  # weights whose inputs are rounded to ``activations``
        self.activations: Activations | None = None

    def __call__(self, spec: str, x: jax.Array | Input, weight: Any, **options: Any) -> jax.Array:
        """As ``ops.multiply.multiply``."""
        plain = x.x if isinstance(x, Input) else x
        self.calls.append((weight, plain))
        if self.activations is not None and any(weight is each for each in self.rounded):
            operands, _ = spec.split("->")
            contracted = sum(letter in operands.split(",")[1] for letter in operands.split(",")[0])
            plain = rounded_input(plain, self.activations, contracted=contracted)
        return multiply(spec, plain, weight, **options)

    def inputs(self, weights: dict[str, Any]) -> dict[str, jax.Array]:
        """What these weights were multiplied with since the last call of this, by path."""
        calls, self.calls = self.calls, []
        return {path: x for path, weight in weights.items() for seen, x in calls if seen is weight}
