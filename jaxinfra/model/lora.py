"""Low-rank adapters of a projection: one that is trained (LoRA, DoRA), or one per batch row.

Dims: R rank, L layers, S adapters, B batch row, and the projection's dims.

"""

import dataclasses
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.axes import LAYERS, Dims
from jaxinfra.config.finetune import AdapterKind, LoraConfig
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import Multiply, as_array
from jaxinfra.ops.quantized import QuantizedWeight

_RANK = "r"  # no letter of a projection


def _unchanged(x: jax.Array) -> jax.Array:
    return x


class Adapter(nnx.Module):
    """A projection's LoRA adapter, which adds scale * (x A) B; with DoRA also a magnitude.

    A is sampled uniformly in +-1/sqrt(inputs), as in the reference implementation, and B is zero.
    So the adapter adds nothing before the first step. Both are stored in the accum dtype and cast
    to the compute dtype at use.

    DoRA (equation 5) multiplies each output with ``magnitude / ||W + scale A B||``, the norm over
    all inputs of that output. Magnitudes begin as the norms of W, so at first the factor is 1.

    Args:
        spec: einsum of the projection, such as ``"BTD,DNH->BTNH"``.
        weight: the projection's weight, with a leading dim of layers if it is stacked.
        dims: logical dims of the weight.
    """

    def __init__(
        self,
        config: LoraConfig,
        spec: str,
        *,
        weight: jax.Array | QuantizedWeight,
        dims: Dims,
        multiply: Multiply,
        policy: Policy,
        rngs: nnx.Rngs,
    ):
        if policy.is_exact and config.kind is AdapterKind.DORA:
            raise ConfigError(
                "numerics=exact with lora kind=dora: the norms of its weights have no fixed order; "
                "set kind=lora, or numerics=fast"
            )
        self.multiply = multiply
        self.policy = policy
        self.recipe = policy.recipe(Site.PROJECTION).unquantized  # of a small rank
        self.scale = config.scale
        self.dropout_rate = config.dropout
        # What x goes through first: in training, a block puts dropout here for one call.
        self.drop: Callable[[jax.Array], jax.Array] = _unchanged
        x, letters, out = re.split(r",|->", spec)
        inner = "".join(letter for letter in letters if letter not in out)
        outer = "".join(letter for letter in letters if letter in out)
        batch = "".join(letter for letter in x if letter not in inner)
        self.in_spec = f"{x},{inner}{_RANK}->{batch}{_RANK}"
        self.out_spec = f"{batch}{_RANK},{_RANK}{outer}->{out}"
        self.weight_spec = f"{inner}{_RANK},{_RANK}{outer}->{letters}"
        self.inner_axes = tuple(letters.index(letter) - len(letters) for letter in inner)
        stacked = weight.ndim - len(letters)
        layers = tuple(weight.shape[:stacked])
        size = dict(zip(letters, weight.shape[stacked:], strict=True))
        dim = dict(zip(letters, dims[stacked:], strict=True))
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
        self.magnitude = (
            nnx.Param(
                self.column_norms(weight),
                axes=(*leading, *(dim[letter] for letter in outer)),
            )
            if config.kind is AdapterKind.DORA
            else None
        )

    def __call__(self, x: Float[Array, "B T *_"]) -> Float[Array, "B T *_"]:
        """Computes ``scale (x A) B``, which is added to the projection of x, in the accum dtype."""
        low = self.multiply(self.in_spec, self.drop(x), self.a[...], recipe=self.recipe)
        return self.scale * self.multiply(
            self.out_spec, low, self.b[...], recipe=self.recipe, out=self.recipe.accum
        )

    def adapted(
        self,
        y: Float[Array, "B T *_"],
        x: Float[Array, "B T *_"],
        weight: Float[Array, "..."] | QuantizedWeight,
        *,
        repeated: Callable[[jax.Array], jax.Array],
    ) -> Float[Array, "B T *_"]:
        """Applies the adapter to y, the projection's output of x before the bias.

        Args:
            weight: the projection's weight in this layer.
            repeated: function that repeats an output's heads as often as y has each of them.
        """
        y_accum = self.policy.to_accum(y) + self.policy.pinned(repeated(self(x)))
        gain = self.gain(weight)
        if gain is not None:
            gain = repeated(gain)
            y_accum *= jnp.expand_dims(gain, range(y.ndim - gain.ndim))
        return self.policy.to_compute(y_accum)

    def merged(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the weight with the adapter merged into it, in the accum dtype."""
        changed = self._changed(weight)
        gain = self._gain(changed)
        return changed if gain is None else changed * jnp.expand_dims(gain, self.inner_axes)

    def gain(self, weight: Float[Array, "..."] | QuantizedWeight) -> Float[Array, "..."] | None:
        """Returns DoRA's factor on each output, in the accum dtype; None without DoRA.

        As the paper's section 4.3 suggests, the norm is computed from A and B but gives them no
        gradient. If a weight's inputs are sharded, the sums of squares are all-reduced (4 bytes per
        output and device).
        """
        return None if self.magnitude is None else self._gain(self._changed(weight))

    def column_norms(self, weight: Float[Array, "..."] | QuantizedWeight) -> Float[Array, "..."]:
        """Computes the norm of each output's weights over all inputs, in the accum dtype."""
        squares = jnp.square(self._accurate(weight))
        return jnp.sqrt(jnp.sum(squares, axis=self.inner_axes))

    def _accurate(self, weight: jax.Array | QuantizedWeight) -> jax.Array:
        return self.policy.to_accum(as_array(weight, self.policy.accum))

    def _changed(self, weight: jax.Array | QuantizedWeight) -> jax.Array:
        delta = self.multiply(
            self.weight_spec, self.a[...], self.b[...], recipe=self.recipe, out=self.recipe.accum
        )
        return self._accurate(weight) + self.scale * delta

    def _gain(self, changed: jax.Array) -> jax.Array | None:
        if self.magnitude is None:
            return None
        norms = jax.lax.stop_gradient(self.column_norms(changed))
        # An output without weights stays 0 whatever its factor.
        return self.magnitude[...] / jnp.where(norms == 0, 1, norms)


class ChosenAdapters(nnx.Variable):
    """Number of the adapter of each batch row, int32 [L, B]; 0 means none. Set before each call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFactors:
    """Factors of one projection's adapters, padded with zeros to the largest rank."""

    a: jax.Array  # [L, S, ...I, R]
    b: jax.Array  # [L, S, R, ...O]
    scale: jax.Array  # accum dtype [L, S]
    gain: jax.Array | None  # accum dtype [L, S, ...O], of DoRA; None: no adapter has one


class RowAdapters(nnx.Module):
    """A bank of adapters on one projection, of which each batch row uses one or none.

    A row's output gets its adapter's ``scale (x A) B`` and DoRA factor. The output of a row without
    an adapter is unchanged to the last bit.

    Args:
        spec: einsum of the projection, such as ``"BTD,DNH->BTNH"``.
    """

    def __init__(self, factors: AdapterFactors, spec: str, *, multiply: Multiply, policy: Policy):
        if policy.is_exact:
            raise ConfigError(
                "numerics=exact with adapters by row, whose products are of other shapes than in "
                "training; serve one adapter with its base (its run), or set numerics=fast"
            )
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
        """Applies each row's adapter to y, the projection's output of x before the bias.

        Args:
            weight: not used, as DoRA's stored factors already contain its norms.
            repeated: function that repeats an output's heads as often as y has each of them.
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
        """Raises an error: rows have different adapters, so they cannot be merged into one weight.

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
