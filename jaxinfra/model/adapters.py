"""Adds low-rank adapters to a decoder's projections: one to train, or a bank, one per batch row.

Dims: L layers, S adapters, B row.

"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxinfra.config.finetune import PROJECTIONS, LoraConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.block import Block
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.experts import Experts
from jaxinfra.model.lora import Adapter, AdapterFactors, ChosenAdapters, RowAdapters
from jaxinfra.model.projection import Projection

_OF_EXPERTS = ("gate", "up", "down")


def add_adapters(decoder: Decoder, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Adds an adapter to each projection that ``config.targets`` names, in every layer that has it.

    A target is the projection's name in its layer: the last component but one of its weight's
    path, such as ``query`` in ``blocks/0/attention/query/weight``.

    Raises:
        ConfigError: no block has a projection with a target's name, or experts have it.
    """
    blocks = [projections_of(block) for block in decoder.blocks]
    mixers = {_name(path) for each in blocks for path in each if path.startswith("attention/")}
    for name in config.targets:
        if not any(_name(path) == name for each in blocks for path in each):
            has_experts = any(isinstance(block.mlp, Experts) for block in decoder.blocks)
            experts = ", and its experts have no adapters" if has_experts else ""
            others = {_name(path) for each in blocks for path in each} & {*PROJECTIONS}
            others -= {*_OF_EXPERTS} - mixers if has_experts else set()
            raise ConfigError(
                f"lora target {name!r}: this model has no such projection{experts}; it has "
                f"{', '.join(sorted(others))}"
            )
        # Else experts would be left out though others with this name are not.
        if name in _OF_EXPERTS and name not in mixers:
            _require_no_experts(decoder, name)
    for projections in blocks:
        for name in config.targets:
            for path, projection in projections.items():
                if _name(path) == name:
                    _adapt(projection, config, rngs)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _require_no_experts(decoder: Decoder, name: str) -> None:
    if any(isinstance(block.mlp, Experts) for block in decoder.blocks):
        raise ConfigError(
            f"lora target {name!r}: this model's experts have no adapters; name others"
        )


def _adapt(projection: Projection, config: LoraConfig, rngs: nnx.Rngs) -> None:
    weight = projection.weight
    projection.adapter = Adapter(
        config,
        projection.spec,
        weight=weight.get_value(),
        dims=weight.axes,
        multiply=projection.multiply,
        policy=projection.policy,
        rngs=rngs,
    )


def projections_of(block: Block) -> dict[str, Projection]:
    """Maps paths within a block, such as ``attention/query``, to its layers' projections.

    Those of a state space beside attention are left out, since attention's have the same names, and
    those of an indexer, through which no gradient passes.
    """
    return {
        f"{part}/{'/'.join(map(str, path))}": node
        for part in ("attention", "mlp")
        if getattr(block, part) is not None
        for path, node in nnx.iter_modules(getattr(block, part))
        if isinstance(node, Projection) and not {"state_space", "indexer"} & {*path}
    }


def add_bank(decoder: Decoder, factors: Mapping[str, AdapterFactors]) -> None:
    """Adds a bank of adapters to projections; each batch row uses one of them or none.

    Args:
        factors: adapters by the weight's path, such as ``blocks/0/attention/query/weight``.

    Raises:
        ConfigError: the decoder has no projection of such a path, or has packed it with others.
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
    """Sets the adapter of each batch row in a decoder's state; no change if it has no bank.

    Args:
        chosen_B: each row's adapter, int32; 0 means none, 1 the first of the bank.
    """

    def choose(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, ChosenAdapters):
            return variable
        num_layers = variable.get_value().shape[0]
        rows = jnp.broadcast_to(chosen_B, (num_layers, *chosen_B.shape))
        return variable.replace(rows)

    return jax.tree.map(choose, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
