"""A decoder with the adapters of several fine-tunings beside its projections.

Dims: L layers, S adapters, B row.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxinfra.errors import ConfigError
from jaxinfra.model.adapters import projections_of
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.projection import Projection
from jaxinfra.model.row_adapters import AdapterFactors, ChosenAdapters, RowAdapters


def add_bank(decoder: Decoder, factors: Mapping[str, AdapterFactors]) -> None:
    """Puts adapters beside projections, of which each row of a batch is to choose one.

    Args:
        factors: by the path of a projection's weight, ``blocks/0/attention/query/weight``.

    Raises:
        ConfigError: the decoder has no such projection by itself.
    """
    known: dict[str, Projection] = {
        f"blocks/{number}/{path}/weight": projection
        for number, block in enumerate(decoder.blocks)
        for path, projection in projections_of(block).items()
    }
    for path, each in factors.items():
        if path not in known:
            raise ConfigError(f"{path}: the model has no projection of this name to adapt")
        projection = known[path]
        projection.adapter = RowAdapters(
            each, projection.spec, multiply=projection.multiply, policy=projection.policy
        )


def with_chosen(state: nnx.State, chosen_B: Int[Array, "B"]) -> nnx.State:
    """A decoder's state with the adapter that each row has; as it is where there is no bank.

    Args:
        chosen_B: 0: none; 1: the first of the bank.
    """

    def choose(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, ChosenAdapters):
            return variable
        num_layers = variable.get_value().shape[0]
        rows = jnp.broadcast_to(chosen_B, (num_layers, *chosen_B.shape))
        return variable.replace(rows)

    return jax.tree.map(choose, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
