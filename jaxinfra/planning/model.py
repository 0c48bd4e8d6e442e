"""A model for planning: its parameter table, grouped into layers of equal structure."""

import dataclasses
import functools
from pathlib import Path

from jaxinfra import axes
from jaxinfra.checkpoint.run_directory import read_config
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    FeedForwardConfig,
    MixerConfig,
    ModelConfig,
)
from jaxinfra.config.presets import MODELS
from jaxinfra.config.recurrent import RecurrentConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.hf import from_hf_config
from jaxinfra.model import flops
from jaxinfra.model.definition import ParameterInfo, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import TENSOR_DIMS
from jaxinfra.runtime.files import INFINITY, read_json


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerKind:
    """A model's layers of equal structure; compared by identity, so it can be a cache key."""

    block: BlockConfig
    model_dim: int
    count: int
    parameters: tuple[ParameterInfo, ...]  # of one layer

    @property
    def mixer(self) -> MixerConfig:
        """The attention config of these layers."""
        return self.block.mixer

    @property
    def feed_forward(self) -> FeedForwardConfig | None:
        """The config of these layers' dense feed-forward network or experts; None: no such."""
        return self.block.feed_forward

    @functools.cached_property
    def num_norms(self) -> int:
        """Number of norms per layer whose input has the residual stream's width."""
        return self.block.num_norms

    @functools.cached_property
    def kv_width(self) -> int:
        """Width of the keys and values that attention reads per token, over all KV heads."""
        mixer = self.mixer
        if mixer.num_kv_heads == mixer.num_q_heads or isinstance(mixer, RecurrentConfig):
            return mixer.score_width + mixer.value_width
        return mixer.cache.elements

    def kv_width_on(self, tensor: int) -> float:
        """Returns the KV width on one of ``tensor`` devices, which has at least one KV head."""
        return self.kv_width / min(tensor, self.mixer.num_kv_heads)

    @functools.cached_property
    def hidden_width(self) -> int:
        """Hidden elements per token in the feed-forward network, over its active experts."""
        feed_forward = self.feed_forward
        if feed_forward is None:
            return 0
        if isinstance(feed_forward, ExpertsConfig):
            return feed_forward.top_k * feed_forward.hidden_dim + feed_forward.shared_hidden_dim
        return feed_forward.hidden_dim

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward network has a gate projection."""
        return self.feed_forward is not None and self.feed_forward.kind.gated


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedModel:
    """A named model's layers and parameters for planning, compared by identity as a cache key."""

    name: str
    config: ModelConfig
    layers: tuple[LayerKind, ...]
    ends: tuple[ParameterInfo, ...]  # embedding, output head and final norm

    @functools.cached_property
    def num_experts(self) -> int:
        """Number of routed experts in the MoE layer that has fewest; 0 in a dense model."""
        counts = [
            layer.feed_forward.num_experts
            for layer in self.layers
            if isinstance(layer.feed_forward, ExpertsConfig)
        ]
        return min(counts, default=0)

    @functools.cached_property
    def rows(self) -> tuple[tuple[ParameterInfo, int], ...]:
        """All arrays of a layer, embedding or head, each with the number of layers that have it."""
        in_layers = [(each, layer.count) for layer in self.layers for each in layer.parameters]
        return (*in_layers, *((each, 1) for each in self.ends))

    @functools.cached_property
    def matmul_parameters(self) -> int:
        """Number of parameters that take part in each token's matmuls."""
        return sum(count * flops.matmul_parameters((each,)) for each, count in self.rows)

    def forward_flops(self, length: int, *, batch: int = 1) -> float:
        """Counts FLOPs of a forward pass by ``models.flops.forward_flops``."""
        return flops.forward_flops(self.config, self.matmul_parameters, length, batch=batch)

    def training_flops(self, length: int, *, batch: int = 1) -> float:
        """Counts FLOPs of a training step with all parameters trained (``training_flops``)."""
        return flops.training_flops(self.config, self.matmul_parameters, length, batch=batch)

    def decode_flops(self, context: int, *, batch: int = 1) -> float:
        """Counts FLOPs of a decode step by ``models.flops.decode_flops``."""
        return flops.decode_flops(self.config, self.matmul_parameters, context, batch=batch)


def shards(parameter: ParameterInfo, *, tensor: int, expert: int) -> int:
    """Returns the number of stored shards of an array under tensor and expert parallelism.

    With fewer KV heads than tensor devices, KV weights are stored whole on each device.
    """
    by_tensor = used_shards(parameter, tensor=tensor)
    # Heads fewer than the axis are kept whole, and repeated where they are used.
    by_tensor = by_tensor if by_tensor == tensor else 1
    return by_tensor * (expert if is_expert(parameter) else 1)


def used_shards(parameter: ParameterInfo, *, tensor: int) -> int:
    """Returns into how many parts tensor parallelism splits a matmul: at most one per KV head."""
    for dim, size in zip(parameter.dims, parameter.shape, strict=True):
        if dim in TENSOR_DIMS:
            return min(tensor, size) if dim == axes.KV_HEADS else tensor
    return 1


def is_expert(parameter: ParameterInfo) -> bool:
    """Tells whether an array belongs to the routed experts."""
    return axes.EXPERTS in parameter.dims


def total_parameters(model: PlannedModel) -> int:
    """Counts elements of all arrays, including those that are updated without gradients."""
    return sum(each.size * count for each, count in model.rows)


def active_parameters(model: PlannedModel) -> int:
    """Counts the parameters used per token: all but the experts that the token is not routed to.

    The whole input table counts, as in DeepSeek-V3's "37B activated", though a token reads one row.
    """
    return round(sum(each.size * each.active * count for each, count in model.rows))


def parameters_by_role(model: PlannedModel) -> dict[str, int]:
    """Counts a model's parameters by role: attention, mlp, experts, router, norms, tables..."""
    roles: dict[str, int] = dict.fromkeys(_ROLES.split(), 0)
    for each, count in model.rows:
        roles[_role(each)] += each.size * count
    return {role: count for role, count in roles.items() if count}


_ROLES = "attention mlp expert router shared norm embedding positions unembedding mtp"


def _role(parameter: ParameterInfo) -> str:
    head, _, rest = parameter.path.partition("/")
    if head.endswith("norm"):
        return "norm"
    if is_expert(parameter):
        return "expert"
    part = rest.partition("_")[0].partition("/")[0]
    return part if part in ("shared", "router") else head


@functools.cache
def plan_model(config: ModelConfig, *, name: str = "model") -> PlannedModel:
    """Returns a model for planning; its parameters are traced as shapes, without allocation."""
    layers: dict[BlockConfig, LayerKind] = {}
    table = define_model(config, execution_on()).table()
    for i, (block, repeats) in enumerate(zip(config.blocks, config.repeats, strict=True)):
        known = layers.get(block)
        if known is not None:
            layers[block] = dataclasses.replace(known, count=known.count + repeats)
            continue
        prefix = f"blocks/{i}/"
        own = (each for each in table if each.path.startswith(prefix))
        layers[block] = LayerKind(
            block=block,
            model_dim=config.model_dim,
            count=repeats,
            parameters=tuple(
                dataclasses.replace(
                    each,
                    path=each.path.removeprefix(prefix),
                    shape=each.shape[1:],
                    dims=each.dims[1:],
                )
                for each in own
            ),
        )
    ends = tuple(each for each in table if not each.path.startswith("blocks/"))
    return PlannedModel(name=name, config=config, layers=tuple(layers.values()), ends=ends)


def find_model(name: str) -> PlannedModel:
    """Returns the model that a preset's name, a ``config.json`` of Hugging Face or of a run, or the
    directory of one describes.
    """
    if name in MODELS:
        return plan_model(MODELS[name](), name=name)
    file = config_file(name)
    if file is None:
        raise ConfigError(f"unknown model {name!r}{nearest(name, MODELS)}")
    values = read_json(file, constants=INFINITY)
    is_run = "model" in values and "model_type" not in values
    config = read_config(file).model if is_run else from_hf_config(values)
    # Names of models count their layers; a step without drafts leaves the module out too.
    return plan_model(dataclasses.replace(config, mtp=False), name=name)


def config_file(name: str) -> Path | None:
    """Returns the ``config.json`` if ``name`` is its path or its directory's; None for presets."""
    path = Path(name)
    if name not in MODELS and path.is_dir():
        return path / "config.json"
    is_file = name not in MODELS and (path.suffix == ".json" or path.is_file())
    return path if is_file else None
