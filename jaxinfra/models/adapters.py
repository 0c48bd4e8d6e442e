"""Low-rank adapters put beside a decoder's projections."""

from flax import nnx

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.core.errors import ConfigError
from jaxinfra.layers.lora import Adapter
from jaxinfra.models.decoder import Decoder


def add_adapters(decoder: Decoder, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Gives each projection that ``config.targets`` names an adapter, in every layer.

    Raises:
        ConfigError: the model has no projection of such a name.
    """
    for block in decoder.blocks:
        attention, mlp = block.attention, block.mlp
        projections = {
            "query": attention.query,
            "key": attention.key,
            "value": attention.value,
            "out": attention.out,
            "gate": mlp.gate,
            "up": mlp.up,
            "down": mlp.down,
        }
        for name in config.targets:
            projection = projections[name]
            if projection is None:
                raise ConfigError(
                    f"lora target {name!r}: this model has no such projection; name others"
                )
            weight = projection.weight
            projection.adapter = Adapter(
                config,
                projection.spec,
                shape=weight.shape,
                dims=weight.axes,
                policy=projection.policy,
                rngs=rngs,
            )
