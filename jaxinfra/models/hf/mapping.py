"""A weight table resolved for one model: which tensors there are, and where each of our parameters
lies in them.
"""

import dataclasses
import re
from collections.abc import Mapping

from jaxinfra.config.model import ModelConfig
from jaxinfra.core.errors import ConfigError, UnsupportedError
from jaxinfra.models.definition import Parameters, by_path
from jaxinfra.models.hf.tensor_layout import TensorLayout, parse_layout
from jaxinfra.models.hf.weights import WEIGHTS, Rule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One layer of one of our parameters, within one of their tensors."""

    path: str
    layer: int | None  # of the stacked parameter; None: it is not stacked
    layout: TensorLayout
    start: int  # along the tensor's fused dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One of their tensors: parts of ours one after the other along a dim."""

    name: str
    shape: tuple[int, ...]
    fused_dim: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """All tensors of a model in the order they are written, and our parameters within them."""

    tensors: Mapping[str, Tensor]
    places: Mapping[tuple[str, int | None], tuple[Tensor, Part]]  # by our path and layer
    root: str
    ignored: re.Pattern[str] | None
    tied: Mapping[str, str]  # a tensor that may be there, and the one it then equals

    def parts_of(self, path: str) -> list[tuple[Tensor, Part]]:
        """Where the layers of a parameter of ours lie."""
        return [place for (each, _), place in self.places.items() if each == path]


def weight_map(model_type: str, config: ModelConfig, shapes: Parameters) -> WeightMap:
    """Resolves an architecture's table for a model.

    Args:
        shapes: ``ModelDefinition.arrays`` of the same model.

    Raises:
        ConfigError: a parameter of the model has no tensor in this architecture.
        UnsupportedError: the architecture has no table of weights.
    """
    table = WEIGHTS.get(model_type)
    if table is None:
        raise UnsupportedError(
            f"model_type={model_type!r}: its configuration is read, its weights are not; those of "
            f"{', '.join(WEIGHTS)} are"
        )
    flat = {path: leaf.shape for path, leaf in by_path(shapes).items()}
    tensors = [tensor for each in table.outside for tensor in _resolve(each, "", "", None, flat)]
    for number, (i, repetition) in enumerate(config.layer_places):
        prefix = table.layer_prefix.format(number)
        for each in table.layer:
            tensors += _resolve(each, prefix, f"blocks/{i}/", repetition, flat)
    places = {
        (part.path, part.layer): (tensor, part) for tensor in tensors for part in tensor.parts
    }
    _check_complete(model_type, config, flat, places)
    tied = {}
    if config.tie_embeddings:
        (vocabulary,) = (t.name for t in tensors if t.parts[0].path == "embedding/table")
        tied = {"lm_head.weight": vocabulary}
    return WeightMap(
        tensors={tensor.name: tensor for tensor in tensors},
        places=places,
        root=table.root,
        ignored=re.compile(table.ignored) if table.ignored else None,
        tied=tied,
    )


def _resolve(
    rule: Rule,
    prefix: str,
    path_prefix: str,
    layer: int | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Tensor]:
    """The rule's tensor, if the model has its parameters."""
    present = [path for path, _ in rule.parts if path_prefix + path in shapes]
    if len(present) < len(rule.parts):
        return []
    parts: list[Part] = []
    start = 0
    shape: tuple[int, ...] = ()
    for path, text in rule.parts:
        own = shapes[path_prefix + path]
        layout = parse_layout(text, own if layer is None else own[1:])
        parts.append(Part(path=path_prefix + path, layer=layer, layout=layout, start=start))
        shape = layout.their_shape
        start += shape[rule.fused_dim]
    whole = (*shape[: rule.fused_dim], start, *shape[rule.fused_dim + 1 :])
    name = prefix + rule.name
    return [Tensor(name=name, shape=whole, fused_dim=rule.fused_dim, parts=tuple(parts))]


def _repeats(config: ModelConfig, path: str) -> int:
    """Layers that share a stacked parameter, ``blocks/i/...``."""
    return config.repeats[int(path.split("/")[1])]


def _check_complete(
    model_type: str,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[tuple[str, int | None], tuple[Tensor, Part]],
) -> None:
    for path, shape in shapes.items():
        stacked = path.startswith("blocks/")
        layers = range(_repeats(config, path)) if stacked else (None,)
        found = [places[path, layer] for layer in layers if (path, layer) in places]
        if len(found) < len(layers):
            raise ConfigError(
                f"a {model_type} checkpoint has no tensor for parameter {path} "
                f"{'x'.join(map(str, shape))} of this model"
            )
        for _, part in found:
            expected = shape[1:] if stacked else shape
            assert part.layout.our_shape == expected, f"{path}: {part.layout.our_shape}, {expected}"
