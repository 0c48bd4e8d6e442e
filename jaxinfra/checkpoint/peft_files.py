"""Adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT's adapters belong to Hugging Face tensors [outputs, inputs]: ``lora_A`` [R, I], ``lora_B`` [O,
R] and with DoRA ``lora_magnitude_vector`` [O]. A Hugging Face tensor may fuse several of our
projections. On export their A are stacked, B is block diagonal, and the scale stays unchanged, so
each projection keeps its rank. On import each projection gets all of A and its rows of B. Our
adapters of one name have one rank in all layers: those of lower rank are padded with zeros, layers
without an adapter get zeros, and a layer's own scale is multiplied into B.

Dims: L layers, I inputs of a Hugging Face tensor, O its outputs, R rank.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfra.checkpoint.finite import require_finite_piece
from jaxinfra.checkpoint.parameter_sources import LiveParameters, ParameterSource
from jaxinfra.checkpoint.peft_settings import CONFIG, PeftSettings, read_settings
from jaxinfra.checkpoint.tensor_files import (
    TensorFiles,
    new_directory,
    open_tensor_file,
    write_tensor_files,
)
from jaxinfra.config.finetune import PROJECTIONS, AdapterKind, AdapterScaling, LoraConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import by_path
from jaxinfra.hf.mapping import Part, Tensor, WeightMap
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.model.definition import ModelDefinition, define_model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterArrays:
    """The fp32 adapter arrays of one projection, stacked over all layers that have it."""

    a: np.ndarray  # [L, ...I, R]
    b: np.ndarray  # [L, R, ...O]
    magnitude: np.ndarray | None  # [L, ...O], of DoRA

    @property
    def num_inner(self) -> int:
        """Number of dims of the projection's inputs."""
        return self.a.ndim - 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """A and B of every adapted projection, by path, with DoRA's magnitudes; on the host."""

    lora: LoraConfig
    arrays: Mapping[str, np.ndarray]

    def of(self, weight_path: str) -> AdapterArrays | None:
        """Returns the adapter of a weight [L, ...I, ...O], None if it has none."""
        prefix = weight_path.removesuffix("weight") + "adapter/"
        if prefix + "a" not in self.arrays:
            return None
        return AdapterArrays(
            a=self.arrays[prefix + "a"],
            b=self.arrays[prefix + "b"],
            magnitude=self.arrays.get(prefix + "magnitude"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergedParameters:
    """A source of weights with their adapters merged in: W + scale A B, with DoRA each output
    scaled to its magnitude; summed in fp32, rounded once to the dtype of W.
    """

    base: ParameterSource
    adapters: Adapters
    # Model state after training, which replaces that of the base model.
    state: LiveParameters = LiveParameters(arrays={})
    _gains: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)

    def dtype(self, path: str) -> np.dtype:
        """Returns the element type of the base model's parameter."""
        return (self.state if path in self.state.arrays else self.base).dtype(path)

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads a slice of a base parameter, with its adapter merged in if it has one."""
        if path in self.state.arrays:
            return self.state.read(path, index)
        found = self.adapters.of(path)
        if found is None:
            return self.base.read(path, index)
        changed = self._changed(path, found, index)
        if found.magnitude is not None:
            layers = range(index[0].start, index[0].stop)
            outer = index[1 + found.num_inner :]
            gains = np.stack([self.gain(path, found, layer)[outer] for layer in layers])
            changed *= np.expand_dims(gains, tuple(range(1, 1 + found.num_inner)))
        return changed.astype(self.base.dtype(path))

    def _changed(self, path: str, found: AdapterArrays, index: Index) -> np.ndarray:
        """W + scale A B, fp32."""
        weight = self.base.read(path, index)
        inner, outer = index[1 : 1 + found.num_inner], index[1 + found.num_inner :]
        a = found.a[(index[0], *inner, slice(None))]
        b = found.b[(index[0], slice(None), *outer)]
        layers, rank = len(a), self.adapters.lora.rank
        product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        delta = np.float32(self.adapters.lora.scale) * product.reshape(weight.shape)
        return weight.astype(np.float32) + delta

    def gain(self, path: str, found: AdapterArrays, layer: int) -> np.ndarray:
        """Returns DoRA's factor on each output of a layer. It is cached, because its norm needs the
        whole weight matrix.
        """
        if (path, layer) not in self._gains:
            assert found.magnitude is not None
            shape = (*found.a.shape[1:-1], *found.b.shape[2:])
            index = (slice(layer, layer + 1), *(slice(0, size) for size in shape))
            norms = column_norms(self._changed(path, found, index)[0], found.num_inner)
            self._gains[path, layer] = found.magnitude[layer] / np.where(norms == 0, 1, norms)
        return self._gains[path, layer]


def column_norms(weight: np.ndarray, num_inner: int) -> np.ndarray:
    """Returns the L2 norm of each output's weights: fp32 [...O] from a weight [...I, ...O]."""
    squares = np.square(weight.astype(np.float32))
    return np.sqrt(squares.sum(axis=tuple(range(num_inner)), dtype=np.float32))


def host_adapters(lora: LoraConfig, arrays: Mapping[str, jax.Array]) -> Adapters:
    """Copies adapters, and no other parameters among ``arrays``, to the host."""
    chosen = {path: np.asarray(x) for path, x in arrays.items() if "/adapter/" in path}
    return Adapters(lora=lora, arrays=chosen)


TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_peft(
    adapters: Adapters, weights: WeightMap, path: Path, *, base: str, source: ParameterSource
) -> None:
    """Writes LoRA or DoRA adapters in the layout that PEFT reads.

    Args:
        base: name of the base model in adapter_config.json.
        source: the base model's weights. With DoRA they give the magnitudes of projections that
            have no adapter but are fused with one that has.
    """
    lora = adapters.lora
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for tensor in weights.tensors.values():
        found = [(part, adapters.of(part.path)) for part in tensor.parts]
        adapted = [(part, each) for part, each in found if each is not None]
        if not adapted:
            continue
        module = tensor.name.removesuffix(".weight")
        in_dim = _input_dim(adapted[0][0], adapted[0][1].num_inner)
        a_RI, b_OR = _peft_pair(adapted, tensor, in_dim, rank=lora.rank)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a_RI
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b_OR
        if lora.kind is AdapterKind.DORA:
            vector = _peft_magnitude(adapters, tensor, source, in_dim)
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = vector
        ranks[".".join(module.split(".")[-2:])] = lora.rank * len(adapted)
        transposed |= in_dim == 0
    fused = {name: each for name, each in ranks.items() if each != lora.rank}
    values = _peft_config(
        lora, base=base, modules=sorted(ranks), fused=fused, transposed=transposed
    )
    with new_directory(path) as directory:
        (directory / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        write_tensor_files(
            directory,
            {
                name: (x.shape, x.dtype, lambda x=x: [np.ascontiguousarray(x)])
                for name, x in tensors.items()
            },
            max_shard_bytes=10**12,
        )
        (directory / "model.safetensors").rename(directory / TENSORS)


def _peft_config(
    lora: LoraConfig, *, base: str, modules: list[str], fused: dict[str, int], transposed: bool
) -> dict[str, Any]:
    """The adapter_config.json; ``fused`` has the ranks of modules that hold several of ours."""
    is_rslora = lora.scaling is AdapterScaling.RSLORA
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "target_modules": modules,
        "rank_pattern": fused,
        "alpha_pattern": {
            name: lora.scale * (math.sqrt(each) if is_rslora else each)
            for name, each in fused.items()
        },
        "use_dora": lora.kind is AdapterKind.DORA,
        "use_rslora": is_rslora,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def _peft_pair(
    adapted: list[tuple[Part, AdapterArrays]], tensor: Tensor, in_dim: int, *, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """A [k R, I] and B [O, k R] of one of PEFT's tensors, which holds k adapted projections."""
    b_OR = np.zeros((tensor.shape[1 - in_dim], rank * len(adapted)), np.float32)
    rows = []
    for number, (part, found) in enumerate(adapted):
        a, b = found.a[part.index], found.b[part.index]
        ours, theirs = part.layout.ours, part.layout.theirs
        inner, outer = ours[: found.num_inner], ours[found.num_inner :]
        a = a.transpose(-1, *(inner.index(letter) for letter in theirs[in_dim]))
        b = b.transpose(*(1 + outer.index(letter) for letter in theirs[1 - in_dim]), 0)
        rows.append(a.reshape(rank, -1))
        block = b.reshape(-1, rank)
        columns = slice(number * rank, (number + 1) * rank)
        b_OR[_outputs(tensor, part, in_dim), columns] = block
    return np.concatenate(rows), b_OR


def _peft_magnitude(
    adapters: Adapters, tensor: Tensor, source: ParameterSource, in_dim: int
) -> np.ndarray:
    """The length of each output [O] of a tensor of theirs: trained, or as the base has it."""
    vector_O = np.empty(tensor.shape[1 - in_dim], np.float32)
    for part in tensor.parts:
        found = adapters.of(part.path)
        ours, theirs = part.layout.ours, part.layout.theirs
        outer = [letter for letter in ours if letter in theirs[1 - in_dim]]
        if found is None:
            whole = (slice(0, size) for size in part.layout.our_shape)
            leading = tuple(slice(i, i + 1) for i in part.index)
            weight = source.read(part.path, (*leading, *whole)).reshape(part.layout.our_shape)
            vector = column_norms(weight, len(ours) - len(outer))
        else:
            assert found.magnitude is not None
            vector = found.magnitude[part.index]
        order = [outer.index(letter) for letter in theirs[1 - in_dim]]
        vector_O[_outputs(tensor, part, in_dim)] = vector.transpose(order).reshape(-1)
    return vector_O


def _outputs(tensor: Tensor, part: Part, in_dim: int) -> np.ndarray:
    """The numbers of a part's outputs among those of its tensor, whose groups may be interleaved.

    Raises:
        ConfigError: the parts have inputs of their own.
    """
    if len(tensor.parts) > 1 and tensor.fused_dim == in_dim:
        raise ConfigError(
            f"{tensor.name} joins inputs of several projections, whose adapters PEFT has no form "
            "for; leave its projections out of the targets"
        )
    groups = tensor.groups
    per_group = part.layout.their_shape[1 - in_dim] // groups
    first = np.arange(groups) * (tensor.shape[1 - in_dim] // groups) + part.start
    return (first[:, None] + np.arange(per_group)[None]).reshape(-1)


def _input_dim(part: Part, num_inner: int) -> int:
    """The number of the dim of a part's Hugging Face matrix that is the inputs."""
    inner = set(part.layout.ours[:num_inner])
    return next(i for i, dim in enumerate(part.layout.theirs) if set(dim) == inner)


def read_peft(
    path: Path, weights: WeightMap, definition: ModelDefinition, *, source: ParameterSource
) -> Adapters:
    """Reads a PEFT directory's adapters for a model.

    Args:
        weights: weight map of the model's architecture.
        definition: the model without adapters.
        source: the model's weights, which give magnitudes of layers without an adapter.

    Raises:
        ConfigError: settings are not supported.
        CheckpointError: tensors are damaged or of another model.
    """
    settings = read_settings(path)
    modules = _modules(path, weights, settings)
    rank = max(module.a_RI.shape[0] for module in modules)
    parts = [(module, part) for module in modules for part in module.tensor.parts]
    targets = {_target(path, part) for _, part in parts}
    # Standard scaling: alpha is what this rank needs for the factor that most modules have.
    scale = settings.scale()
    lora = LoraConfig(
        rank=rank,
        alpha=scale * (math.sqrt(rank) if settings.scaling is AdapterScaling.RSLORA else rank),
        targets=tuple(name for name in PROJECTIONS if name in targets),
        kind=settings.kind,
        scaling=settings.scaling,
    )
    whole = define_model(definition.config, definition.execution, lora=lora)
    shapes = by_path(whole.freeze(definition.shapes).shapes)
    arrays = {name: np.zeros(leaf.shape, np.float32) for name, leaf in shapes.items()}
    adapted = set()
    for module, part in parts:
        _fill(arrays, module, part, ratio=module.scale / scale)
        adapted.add((part.path, part.index))
    for name in (name for name in arrays if name.endswith("/adapter/magnitude")):
        weight = name.removesuffix("adapter/magnitude") + "weight"
        for layer in range(len(arrays[name])):
            if (weight, (layer,)) not in adapted:
                arrays[name][layer] = _own_lengths(source, arrays, weight, layer)
    return Adapters(lora=lora, arrays=arrays)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """The adapter of one tensor of theirs."""

    tensor: Tensor
    a_RI: np.ndarray
    b_OR: np.ndarray
    magnitude_O: np.ndarray | None
    scale: float


def _modules(path: Path, weights: WeightMap, settings: PeftSettings) -> list[_Module]:
    files = open_tensor_file(path / TENSORS)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in files.tensors:
        module, kind = _parsed(path, name)
        if module + ".weight" not in weights.tensors:
            raise CheckpointError(
                f"{path}: {name} is of no weight of the model; the adapters are of another one"
            )
        found.setdefault(module, {})[kind] = _read(files, name)
    if not found:
        raise CheckpointError(f"{path / TENSORS} holds no adapter")
    return [
        _module(path, weights.tensors[module + ".weight"], module, tensors, settings)
        for module, tensors in found.items()
    ]


ENDS = dict.fromkeys(("lm_head", "embed_out"), "output head")
ENDS |= dict.fromkeys(("embed_tokens", "wte", "wpe"), "embeddings")
"""Modules of models beside their layers, by the last part of their names."""


def _parsed(path: Path, name: str) -> tuple[str, str]:
    """A tensor's module, and its role in the module's adapter."""
    for part in name.split("."):
        if part in ENDS:
            raise ConfigError(
                f"{path}: {name} adapts the {ENDS[part]}, or holds a whole copy, as PEFT saves "
                "after training or resizing it; adapters of projections in layers are read. "
                "Merge it in PEFT (merge_and_unload) and load the merged model"
            )
    for kind, ending in (
        ("A", ".lora_A.weight"),
        ("B", ".lora_B.weight"),
        ("magnitude", ".lora_magnitude_vector"),
        ("magnitude", ".lora_magnitude_vector.weight"),
    ):
        if name.startswith(PREFIX) and name.endswith(ending):
            return name.removeprefix(PREFIX).removesuffix(ending), kind
    raise ConfigError(f"{path}: tensor {name} is no adapter of a projection, which is what is read")


def _read(files: TensorFiles, name: str) -> np.ndarray:
    shape = files.tensors[name].shape
    value = files.read(name, tuple(slice(0, size) for size in shape))
    require_finite_piece(value, name=name)
    return value.astype(np.float32)


def _module(
    path: Path, tensor: Tensor, name: str, found: Mapping[str, np.ndarray], settings: PeftSettings
) -> _Module:
    is_dora = settings.kind is AdapterKind.DORA
    wanted = {"A", "B", "magnitude"} if is_dora else {"A", "B"}
    if found.keys() != wanted:
        raise CheckpointError(
            f"{path}: {name} has {', '.join(sorted(found))}, its config asks for "
            f"{', '.join(sorted(wanted))}"
        )
    a_RI, b_OR = found["A"], found["B"]
    rank = a_RI.shape[0]
    settings.require(name, rank)
    sizes = {(b_OR.shape[0], a_RI.shape[-1]), (a_RI.shape[-1], b_OR.shape[0])}
    if a_RI.ndim != 2 or b_OR.ndim != 2 or b_OR.shape[1] != rank or tensor.shape not in sizes:
        raise CheckpointError(
            f"{path}: {name} has A {list(a_RI.shape)} and B {list(b_OR.shape)}, the model's weight "
            f"is {list(tensor.shape)}; the adapters are of another model"
        )
    magnitude_O = found.get("magnitude")
    if magnitude_O is not None and magnitude_O.size != b_OR.shape[0]:
        raise CheckpointError(
            f"{path}: {name} has {magnitude_O.size} magnitudes for {b_OR.shape[0]} outputs"
        )
    return _Module(
        tensor=tensor,
        a_RI=a_RI,
        b_OR=b_OR,
        magnitude_O=None if magnitude_O is None else magnitude_O.reshape(-1),
        scale=settings.scale(name),
    )


def _target(path: Path, part: Part) -> str:
    name = part.path.split("/")[-2]
    if name not in PROJECTIONS or len(part.index) != 1:
        raise ConfigError(
            f"{path}: {part.path} has an adapter; those of {', '.join(PROJECTIONS)} are read. "
            "Merge it in PEFT (merge_and_unload) and load the merged model"
        )
    return name


def _fill(arrays: dict[str, np.ndarray], module: _Module, part: Part, *, ratio: float) -> None:
    """Writes a projection's share of a module's adapter into the stacked arrays.

    Args:
        ratio: of the module's factor to that of all.
    """
    prefix = part.path.removesuffix("weight") + "adapter/"
    a, b = arrays[prefix + "a"], arrays[prefix + "b"]
    (layer,), rank, sizes = part.index, len(module.a_RI), part.layout.sizes
    num_inner = a.ndim - 2
    inner, outer = part.layout.ours[:num_inner], part.layout.ours[num_inner:]
    in_dim = _input_dim(part, num_inner)
    theirs_in, theirs_out = part.layout.theirs[in_dim], part.layout.theirs[1 - in_dim]
    rows = _outputs(module.tensor, part, in_dim)
    a_theirs = module.a_RI.reshape(rank, *(sizes[letter] for letter in theirs_in))
    b_theirs = module.b_OR[rows].reshape(*(sizes[letter] for letter in theirs_out), rank)
    a[layer][..., :rank] = a_theirs.transpose(*_order(theirs_in, inner, offset=1), 0)
    order = _order(theirs_out, outer)
    b[layer][:rank] = np.float32(ratio) * b_theirs.transpose(-1, *order)
    if module.magnitude_O is not None:
        lengths = module.magnitude_O[rows].reshape([sizes[letter] for letter in theirs_out])
        arrays[prefix + "magnitude"][layer] = lengths.transpose(order)


def _order(theirs: Sequence[str], ours: Sequence[str], *, offset: int = 0) -> list[int]:
    return [theirs.index(letter) + offset for letter in ours]


def _own_lengths(
    source: ParameterSource, arrays: Mapping[str, np.ndarray], path: str, layer: int
) -> np.ndarray:
    """The magnitudes that leave a layer's projection as it is."""
    prefix = path.removesuffix("weight") + "adapter/"
    inner, outer = arrays[prefix + "a"].shape[1:-1], arrays[prefix + "b"].shape[2:]
    index = (slice(layer, layer + 1), *(slice(0, size) for size in (*inner, *outer)))
    return column_norms(source.read(path, index)[0], len(inner))
