"""Whether a model's sizes divide over the axes of a mesh."""

from jaxinfra.config.mesh import EXPERT, MeshConfig
from jaxinfra.config.model import ExpertsConfig, ModelConfig
from jaxinfra.errors import ConfigError


def check_divides(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raises ConfigError where a size of the model does not divide over the axis that shards it."""
    sharded = [("vocab_size", model.vocab_size, "tensor", mesh.tensor)]
    sharded.append(("model_dim", model.model_dim, "fsdp", mesh.fsdp))
    for block in model.blocks:
        sizes = block.mixer.tensor_sizes | block.feed_forward.tensor_sizes
        sharded += [(name, size, "tensor", mesh.tensor) for name, size in sizes.items()]
        if isinstance(block.feed_forward, ExpertsConfig):
            sharded.append(("num_experts", block.feed_forward.num_experts, EXPERT, mesh.expert))
    _check_experts(model, mesh)
    for name, size, axis, shards in sharded:
        if name == "num_kv_heads" and shards % size == 0:
            continue  # each device has a copy of one
        if size % shards:
            raise ConfigError(
                f"{name}={size} does not divide over {axis}={shards}; "
                f"choose a {axis} size that divides it"
            )


def _check_experts(model: ModelConfig, mesh: MeshConfig) -> None:
    experts = [each for b in model.blocks if isinstance(each := b.feed_forward, ExpertsConfig)]
    if mesh.expert > 1 and not experts:
        raise ConfigError(f"expert={mesh.expert}, but this model has no experts; leave it out")
    capacities = [each.balance.capacity_factor for each in experts]
    if mesh.context > 1 and any(capacity is not None for capacity in capacities):
        raise ConfigError(
            f"capacity_factor={max(filter(None, capacities))} with context={mesh.context}: an "
            "expert's room is filled in the order of a sequence, which several devices share; drop "
            "nothing (capacity_factor=none), or use fsdp in place of context"
        )
