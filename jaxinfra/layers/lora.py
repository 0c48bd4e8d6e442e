"""Low-rank adapters beside frozen projections (Hu et al. 2021, LoRA).

Dims: R rank, and those of the projection.
"""

import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.core.axes import LAYERS, Dims
from jaxinfra.layers.execution import Multiply
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Site

_RANK = "r"  # no letter of a projection


class Adapter(nnx.Module):
    """scale * (x A) B, the contribution of one projection's adapter.

    A's elements are uniform in +-1/sqrt(inputs), as the reference implementation draws them, B's
    are zero: before the first step nothing is added. Both are stored in the accum dtype, as what is
    trained is, and cast where they are used, as every weight is.

    Args:
        spec: of the projection, such as ``"BTD,DNH->BTNH"``.
        shape: of its weight, with the layers in front where it is stacked.
        dims: of its weight.
    """

    def __init__(
        self,
        config: LoraConfig,
        spec: str,
        *,
        shape: tuple[int, ...],
        dims: Dims,
        multiply: Multiply,
        policy: Policy,
        rngs: nnx.Rngs,
    ):
        self.multiply = multiply
        self.recipe = policy.recipe(Site.PROJECTION).unquantized  # of a small rank
        self.scale = config.scale
        x, weight, out = re.split(r",|->", spec)
        inner = "".join(letter for letter in weight if letter not in out)
        outer = "".join(letter for letter in weight if letter in out)
        batch = "".join(letter for letter in x if letter not in inner)
        self.in_spec = f"{x},{inner}{_RANK}->{batch}{_RANK}"
        self.out_spec = f"{batch}{_RANK},{_RANK}{outer}->{out}"
        self.weight_spec = f"{inner}{_RANK},{_RANK}{outer}->{weight}"
        stacked = len(shape) - len(weight)
        layers = tuple(shape[:stacked])
        size = dict(zip(weight, shape[stacked:], strict=True))
        dim = dict(zip(weight, dims[stacked:], strict=True))
        # The rank is never sharded: it is small, and A and B share its only use.
        a_shape = (*layers, *(size[letter] for letter in inner), config.rank)
        b_shape = (*layers, config.rank, *(size[letter] for letter in outer))
        bound = 1.0 / math.sqrt(math.prod(size[letter] for letter in inner))
        leading = (LAYERS,) * stacked
        self.a = nnx.Param(
            jax.random.uniform(rngs.params(), a_shape, policy.accum, -bound, bound),
            axes=(*leading, *(dim[letter] for letter in inner), None),
            matmul=True,
        )
        self.b = nnx.Param(
            jnp.zeros(b_shape, policy.accum),
            axes=(*leading, None, *(dim[letter] for letter in outer)),
            matmul=True,
        )

    def __call__(self, x: Float[Array, "B T *_"]) -> Float[Array, "B T *_"]:
        """What the adapter adds to the projection of x, in the accum dtype."""
        low = self.multiply(self.in_spec, x, self.a[...], recipe=self.recipe)
        return self.scale * self.multiply(
            self.out_spec, low, self.b[...], recipe=self.recipe, out=self.recipe.accum
        )

    @property
    def weight(self) -> Float[Array, "..."]:
        """What the adapter adds to the projection's weight, in the accum dtype."""
        return self.scale * self.multiply(
            self.weight_spec, self.a[...], self.b[...], recipe=self.recipe, out=self.recipe.accum
        )
