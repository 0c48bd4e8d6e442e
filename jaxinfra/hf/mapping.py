"""Weight map of one model: its Hugging Face tensors, and where our parameters are in them."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jaxinfra.config.kinds import Head
from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.config import FAMILIES
from jaxinfra.hf.tensor_layout import Index, TensorLayout, parse_layout
from jaxinfra.hf.weights import PredictionTable, Rule, WeightTable
from jaxinfra.model.definition import Parameters, by_path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One layer (or expert) of one of our parameters, within a tensor of the files."""

    path: str
    index: tuple[int, ...]  # layer in the stacked parameter, and expert if it has its own tensor
    layout: TensorLayout
    start: int  # offset along the tensor's fused dim, within a group if it has several


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A Hugging Face tensor: parts of our parameters, joined along a dim.

    With several groups, the dim is cut into equal groups, each of which has rows of every part.
    """

    name: str
    shape: tuple[int, ...]
    fused_dim: int
    parts: tuple[Part, ...]
    groups: int = 1

    def fused(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Joins parts, already in Hugging Face layout, to the tensor or to some of its rows."""
        if len(parts) == 1:
            return parts[0]
        dim = self.fused_dim
        total = sum(part.shape[dim] for part in parts)

        def grouped(part: np.ndarray) -> np.ndarray:
            return part.reshape(*part.shape[:dim], self.groups, -1, *part.shape[dim + 1 :])

        joined = np.concatenate(list(map(grouped, parts)), axis=dim + 1)
        return joined.reshape(*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :])

    def read(
        self, part: Part, read_tensor: Callable[[Index], np.ndarray], index: Index
    ) -> np.ndarray:
        """Reads a slice of one parameter's part from the tensor."""
        if len(self.parts) == 1:
            return part.layout.read(read_tensor, index)
        dim = self.fused_dim
        group = self.shape[dim] // self.groups
        width = part.layout.their_shape[dim] // self.groups

        def read_part(theirs: Index) -> np.ndarray:
            moved = list(theirs)
            rows = moved[dim]
            if self.groups == 1:
                moved[dim] = slice(rows.start + part.start, rows.stop + part.start)
                return read_tensor(tuple(moved))
            first, behind = rows.start // width, -(-rows.stop // width)
            moved[dim] = slice(first * group, behind * group)
            found = np.moveaxis(read_tensor(tuple(moved)), dim, 0)
            found = found.reshape(behind - first, group, *found.shape[1:])
            mine = found[:, part.start : part.start + width].reshape(-1, *found.shape[2:])
            skipped = rows.start - first * width
            return np.moveaxis(mine[skipped : skipped + rows.stop - rows.start], 0, dim)

        return part.layout.read(read_part, index)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """All tensors of a model in the order they are written, and our parameters within them."""

    tensors: Mapping[str, Tensor]
    places: Mapping[tuple[str, tuple[int, ...]], tuple[Tensor, Part]]  # keys: our path and index
    root: str
    ignored: re.Pattern[str] | None
    extra: tuple[re.Pattern[str], int] | None  # pattern of layers' names, and number of layers
    # From a tensor that files need not have to the tensor that it must equal. One that is among
    # the tensors is written too.
    tied: Mapping[str, str]

    def parts_of(self, path: str) -> list[tuple[Tensor, Part]]:
        """Returns each (tensor, part) that holds a layer or expert of our parameter."""
        return [place for (each, _), place in self.places.items() if each == path]

    def is_in(self, stored: Collection[str]) -> bool:
        """Whether files have all of these tensors, under their names or without the root."""
        return all(
            name in stored or name.removeprefix(self.root) in stored
            for name in self.tensors
            if name not in self.tied
        )

    def extra_layer(self, name: str) -> int | None:
        """Returns the layer of a tensor that belongs to a layer after the model's last, or None.

        Such layers are modules of multi-token prediction that are left out.
        """
        if self.extra is None:
            return None
        pattern, num_layers = self.extra
        found = pattern.match(name)
        number = -1 if found is None else int(found[1])
        return number if number >= num_layers else None


def weight_map(
    model_type: str,
    config: ModelConfig,
    shapes: Parameters,
    *,
    stored: Collection[str] = (),
) -> WeightMap:
    """Resolves an architecture's table for a model.

    Args:
        shapes: ``ModelDefinition.arrays`` of the same model.
        stored: names of the tensors that files have, which say whose table they follow.

    Raises:
        ConfigError: a parameter of the model has no tensor in this architecture.
    """
    found = FAMILIES[model_type].weights
    table = found if isinstance(found, WeightTable) else found(config)
    tables = (table, *table.others)
    maps = (_weight_map(each, model_type, config, shapes, tables, stored) for each in tables)
    first = next(maps)
    if not table.others or first.is_in(stored):
        return first
    return next((each for each in maps if each.is_in(stored)), first)


def _weight_map(
    table: WeightTable,
    model_type: str,
    config: ModelConfig,
    shapes: Parameters,
    tables: Sequence[WeightTable],
    stored: Collection[str],
) -> WeightMap:
    """Resolves one table of an architecture; multi-token prediction may follow any of them."""
    flat = {path: leaf.shape for path, leaf in by_path(shapes).items()}
    outside = table.outside
    if config.head is Head.SCORE:
        outside = tuple(_as_score(each) for each in outside)
    tensors = [tensor for each in outside for tensor in _resolve(each, "", "", (), flat)]
    for number, (i, repetition) in enumerate(config.layer_positions):
        prefix = table.layer_prefix.format(number)
        for each in table.layer:
            tensors += _resolve(each, prefix, f"blocks/{i}/", (repetition,), flat)
    tied = {}
    if config.mtp and table.prediction is not None:
        layers = [table.layer, *(each.layer for each in tables)]
        found = [_of_prediction(each, table.prediction, config, flat, tensors) for each in layers]
        of_module, tied = next(
            (each for each in found if all(t.name in stored for t in each[0])), found[0]
        )
        tensors = [*of_module, *tensors]
    places = {
        (part.path, part.index): (tensor, part) for tensor in tensors for part in tensor.parts
    }
    _check_complete(model_type, flat, places)
    if config.tie_embeddings and config.head is Head.LOGITS:
        vocabulary = places["embedding/table", ()][0].name
        tied[_head(table)] = vocabulary
    return WeightMap(
        tensors={tensor.name: tensor for tensor in tensors},
        places=places,
        root=table.root,
        ignored=_ignored(table, config),
        extra=(_layer_names(table), config.num_layers + config.mtp) if table.extra_layers else None,
        tied=tied,
    )


def _ignored(table: WeightTable, config: ModelConfig) -> re.Pattern[str] | None:
    """The pattern of tensors that the model does not read."""
    patterns = [] if table.ignored is None else [table.ignored]
    for number, block in enumerate(config.layers):
        if table.takers_have and getattr(block.mixer, "takes_keys", None) is not None:
            patterns.append(re.escape(table.layer_prefix.format(number)) + table.takers_have)
    return re.compile("|".join(patterns)) if patterns else None


def _head(table: WeightTable) -> str:
    (name,) = (each.name for each in table.outside if each.parts[0][0] == "unembedding/table")
    return name


def _of_prediction(
    layer: Sequence[Rule],
    module: PredictionTable,
    config: ModelConfig,
    flat: Mapping[str, tuple[int, ...]],
    tensors: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, str]]:
    """Returns the tensors of multi-token prediction, and of which of the model's some are copies.

    Args:
        tensors: those of the model.
    """
    prefix, known = module.prefix.format(config.num_layers), {each.name: each for each in tensors}
    found = [each for rule in module.outside for each in _resolve(rule, prefix, "mtp/", (), flat)]
    for rule in layer:
        found += _resolve(rule, prefix + module.block, "mtp/block/", (0,), flat)
    copies = {}
    for name, original in module.copies:
        if original not in known:  # the vocabulary is the embedding table
            original = next(t.name for t in tensors if t.parts[0].path == "embedding/table")
        found.append(dataclasses.replace(known[original], name=prefix + name))
        copies[prefix + name] = original
    return found, copies


def _as_score(rule: Rule) -> Rule:
    is_head = rule.parts[0][0] == "unembedding/table"
    return dataclasses.replace(rule, name="score.weight") if is_head else rule


def own_weight_map(shapes: Parameters) -> WeightMap:
    """Returns the map of our own layout, in which each parameter is a tensor of its path's name.

    Files may also have multi-token prediction that the model leaves out.

    Args:
        shapes: ``ModelDefinition.arrays`` of the model.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[tuple[str, tuple[int, ...]], tuple[Tensor, Part]] = {}
    for path, leaf in by_path(shapes).items():
        dims = tuple(map(str, range(len(leaf.shape))))
        sizes = dict(zip(dims, leaf.shape, strict=True))
        layout = TensorLayout(theirs=tuple((dim,) for dim in dims), ours=dims, sizes=sizes)
        part = Part(path=path, index=(), layout=layout, start=0)
        tensors[path] = Tensor(name=path, shape=leaf.shape, fused_dim=0, parts=(part,))
        places[path, ()] = tensors[path], part
    ignored = re.compile("mtp/.*")
    return WeightMap(tensors=tensors, places=places, root="", ignored=ignored, extra=None, tied={})


def head_weight_map(
    rules: Sequence[Rule], part: ModelConfig, shapes: Parameters, ignored: str
) -> WeightMap:
    """Returns the map of a draft head's own files: its rules, one layer and parameters."""
    table = WeightTable(layer_prefix="", layer=(), outside=tuple(rules), root="", ignored=ignored)
    return _weight_map(table, "draft head's", part, shapes, (table,), ())


def _layer_names(table: WeightTable) -> re.Pattern[str]:
    prefix, suffix = map(re.escape, table.layer_prefix.split("{}"))
    return re.compile(rf"{prefix}(\d+){suffix}")


def _resolve(
    rule: Rule,
    prefix: str,
    path_prefix: str,
    index: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Tensor]:
    """The rule's tensor, or tensors one an expert, if the model has its parameters."""
    paths = [path_prefix + path for path, _ in rule.parts]
    needed = paths if rule.beside is None else [*paths, path_prefix + rule.beside]
    if any(path not in shapes for path in needed):
        return []
    if rule.without is not None and path_prefix + rule.without in shapes:
        return []
    name = prefix + rule.name
    if "{}" not in rule.name:
        return [_tensor(rule, name, path_prefix, index, shapes)]
    num_experts = shapes[paths[0]][len(index)]
    return [
        _tensor(rule, prefix + rule.name.format(e), path_prefix, (*index, e), shapes)
        for e in range(num_experts)
    ]


def _tensor(
    rule: Rule,
    name: str,
    path_prefix: str,
    index: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Tensor:
    parts: list[Part] = []
    layouts: list[tuple[str, TensorLayout]] = []
    start, groups = 0, rule.groups if isinstance(rule.groups, int) else 1
    shape: tuple[int, ...] = ()
    for path, text in rule.parts:
        path = path_prefix + path
        layout = parse_layout(text, shapes[path][len(index) :])
        if rule.groups in layout.sizes:
            groups = layout.sizes[rule.groups]
        layouts.append((path, layout))
    for path, layout in layouts:
        parts.append(Part(path=path, index=index, layout=layout, start=start // groups))
        shape = layout.their_shape
        start += shape[rule.fused_dim] if shape else 0
    if shape:
        shape = (*shape[: rule.fused_dim], start, *shape[rule.fused_dim + 1 :])
    return Tensor(
        name=name,
        shape=shape,
        fused_dim=rule.fused_dim,
        parts=tuple(parts),
        groups=groups,
    )


def _check_complete(
    model_type: str,
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[tuple[str, tuple[int, ...]], tuple[Tensor, Part]],
) -> None:
    found = collections.Counter[str]()
    for (path, index), (_, part) in places.items():
        assert part.layout.our_shape == shapes[path][len(index) :], path
        found[path] += math.prod(part.layout.our_shape)
    for path, shape in shapes.items():
        if found[path] < math.prod(shape):
            raise ConfigError(
                f"a {model_type} checkpoint has no tensor for parameter {path} "
                f"{'x'.join(map(str, shape))} of this model"
            )
