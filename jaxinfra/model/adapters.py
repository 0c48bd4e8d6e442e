"""Low-rank adapters put beside a decoder's projections."""

from flax import nnx

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.block import Block
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.experts import Experts
from jaxinfra.model.lora import Adapter
from jaxinfra.model.projection import Projection


def add_adapters(decoder: Decoder, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Gives each projection that ``config.targets`` names an adapter, in every layer.

    A target is the name that the projection has in its layer: the last but one of its parameters'
    paths, ``query`` of ``blocks/0/attention/query/weight``.

    Raises:
        ConfigError: a block has no projection of such a name.
    """
    for block in decoder.blocks:
        projections = {
            path.rpartition("/")[2]: node for path, node in projections_of(block).items()
        }
        for name in config.targets:
            if name not in projections:
                what = "this model has no such projection"
                if isinstance(block.mlp, Experts):
                    what += ", and its experts have no adapters"
                raise ConfigError(f"lora target {name!r}: {what}; name others")
            projection = projections[name]
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
    """A block's projections by their paths in it, such as ``attention/query``."""
    return {
        f"{part}/{name}": node
        for part in ("attention", "mlp")
        for name, node in vars(getattr(block, part)).items()
        if isinstance(node, Projection)
    }
