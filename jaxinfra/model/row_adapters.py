"""Adapters of several fine-tunings beside one projection: each row of a batch has its own, or none.

Dims: L layers, S adapters, R the largest rank, B row, and those of the projection.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.products import Multiply
from jaxinfra.ops.quantized import QuantizedWeight

_RANK = "r"  # no letter of a projection


class ChosenAdapters(nnx.Variable):
    """Which adapter each row of a batch has, int32 [L, B]; 0: none. A call sets it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFactors:
    """What adapters of one projection are made of; those of lower rank are filled up with zeros."""

    a: jax.Array  # [L, S, ...I, R]
    b: jax.Array  # [L, S, R, ...O]
    scale: jax.Array  # accum dtype [L, S]
    gain: jax.Array | None  # accum dtype [L, S, ...O], of DoRA; None: no adapter has one


class RowAdapters(nnx.Module):
    """Row b's output gets ``scale (x A) B`` of its adapter, and DoRA's factor; others none.

    A row without an adapter has the projection's own output, to the last bit.

    Args:
        spec: of the projection, such as ``"BTD,DNH->BTNH"``.
    """

    def __init__(self, factors: AdapterFactors, spec: str, *, multiply: Multiply, policy: Policy):
        self.multiply, self.policy = multiply, policy
        self.recipe = policy.recipe(Site.PROJECTION).unquantized
        x, weight, out = re.split(r",|->", spec)
        inner = "".join(letter for letter in weight if letter not in out)
        outer = "".join(letter for letter in weight if letter in out)
        batch = "".join(letter for letter in x if letter not in inner)
        row = batch[0]
        self.in_spec = f"{x},{row}{inner}{_RANK}->{batch}{_RANK}"
        self.out_spec = f"{batch}{_RANK},{row}{_RANK}{outer}->{out}"
        self.a, self.b = nnx.Param(factors.a), nnx.Param(factors.b)
        self.scale = nnx.Param(factors.scale)
        self.gain = None if factors.gain is None else nnx.Param(factors.gain)
        self.chosen = ChosenAdapters(jnp.zeros((len(factors.a), 1), jnp.int32))

    def adapted(
        self,
        y: Float[Array, "B T *_"],
        x: Float[Array, "B T *_"],
        weight: Float[Array, "..."] | QuantizedWeight,
        *,
        repeated: Callable[[jax.Array], jax.Array],
    ) -> Float[Array, "B T *_"]:
        """The projection's output y of x, before its bias, with what each row's adapter does to it.

        Args:
            weight: of the projection; its norms are in the factors of DoRA already.
            repeated: gives outputs the copies of heads that y has.
        """
        del weight
        y = jax.lax.optimization_barrier(y)
        chosen_B = self.chosen[...]
        slot_B = jnp.maximum(chosen_B - 1, 0)
        low = self.multiply(self.in_spec, x, self.a[...][slot_B], recipe=self.recipe)
        added = self.multiply(
            self.out_spec, low, self.b[...][slot_B], recipe=self.recipe, out=self.recipe.accum
        )
        added *= _beside(self.scale[...][slot_B], added)
        changed = self.policy.to_accum(y) + repeated(added)
        if self.gain is not None:
            gain = repeated(self.gain[...][slot_B])
            changed *= jnp.expand_dims(gain, range(1, 1 + y.ndim - gain.ndim))
        chosen = jnp.where(_beside(chosen_B > 0, y), self.policy.to_compute(changed), y)
        # What comes before and after is compiled as it is without adapters, and rounds alike.
        return jax.lax.optimization_barrier(chosen)

    def merged(self, weight: Float[Array, "..."] | QuantizedWeight) -> Float[Array, "..."]:
        """There is none: rows differ.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"a projection {list(weight.shape)} that is multiplied with other weights first, as "
            "latent attention's kv_up is, cannot have an adapter for each row; merge the adapter "
            "into the model (jaxinfra convert), or serve it alone"
        )


def _beside(of_rows: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.expand_dims(of_rows, range(1, x.ndim))
