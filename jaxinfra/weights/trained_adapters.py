"""Trained adapters on their way out: merged into the weights, or alone in the layout of PEFT.

Dims: L layers, I inputs of a projection, O its outputs, R rank.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.core.errors import ConfigError
from jaxinfra.models.hf.mapping import Part, Tensor, WeightMap
from jaxinfra.models.hf.tensor_layout import Index
from jaxinfra.weights.parameter_sources import LiveParameters, ParameterSource
from jaxinfra.weights.tensor_writer import new_directory, write_tensor_files


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """A and B of every adapted projection, by path, on the host."""

    lora: LoraConfig
    arrays: Mapping[str, np.ndarray]

    def of(self, weight_path: str) -> tuple[np.ndarray, np.ndarray] | None:
        """A [L, ...I, R] and B [L, R, ...O] beside a weight [L, ...I, ...O], fp32, if there."""
        prefix = weight_path.removesuffix("weight") + "adapter/"
        if prefix + "a" not in self.arrays:
            return None
        return self.arrays[prefix + "a"], self.arrays[prefix + "b"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergedParameters:
    """W + scale A B, a slice at a time: summed in fp32, rounded once to the type of W."""

    base: ParameterSource
    adapters: Adapters
    # Of the model: training changed it, in place of the base's.
    state: LiveParameters = LiveParameters(arrays={})

    def dtype(self, path: str) -> np.dtype:
        """Element type of the base's parameter."""
        return (self.state if path in self.state.arrays else self.base).dtype(path)

    def read(self, path: str, index: Index) -> np.ndarray:
        """The slice of the base, with the adapter's product added where there is one."""
        if path in self.state.arrays:
            return self.state.read(path, index)
        weight = self.base.read(path, index)
        found = self.adapters.of(path)
        if found is None:
            return weight
        a, b = found
        num_inner = a.ndim - 2
        a = a[(*index[: 1 + num_inner], slice(None))]
        b = b[(index[0], slice(None), *index[1 + num_inner :])]
        layers, rank = len(a), self.adapters.lora.rank
        product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        delta = np.float32(self.adapters.lora.scale) * product.reshape(weight.shape)
        return (weight.astype(np.float32) + delta).astype(weight.dtype)


def host_adapters(lora: LoraConfig, arrays: Mapping[str, jax.Array]) -> Adapters:
    """Fetches adapters from the devices; other parameters among ``arrays`` stay there."""
    chosen = {path: np.asarray(x) for path, x in arrays.items() if "/adapter/" in path}
    return Adapters(lora=lora, arrays=chosen)


def write_peft(adapters: Adapters, weights: WeightMap, path: Path, *, base: str) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT reads them.

    Its adapters belong to tensors of theirs, and where those fuse several projections of ours, each
    keeps its own rank: A are stacked, B is block diagonal, and the scale stays alpha / rank.

    Args:
        base: what the config names as the model that these adapters are for.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists and is not an empty directory; an export overwrites nothing: "
            "name another"
        )
    rank, alpha = adapters.lora.rank, adapters.lora.alpha
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for tensor in weights.tensors.values():
        adapted = [part for part in tensor.parts if adapters.of(part.path) is not None]
        if not adapted:
            continue
        module = tensor.name.removesuffix(".weight")
        tensors |= {
            f"base_model.model.{module}.lora_{name}.weight": x
            for name, x in zip("AB", _peft_pair(adapters, tensor, adapted), strict=True)
        }
        ranks[".".join(module.split(".")[-2:])] = rank * len(adapted)
        transposed |= _input_dim(adapters, adapted[0]) == 0
    fused = {name: each for name, each in ranks.items() if each != rank}
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": fused,
        "alpha_pattern": {name: alpha * each / rank for name, each in fused.items()},
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    with new_directory(path) as directory:
        (directory / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")
        write_tensor_files(
            directory,
            {
                name: (x.shape, x.dtype, lambda x=x: [np.ascontiguousarray(x)])
                for name, x in tensors.items()
            },
            max_shard_bytes=10**12,
        )
        (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")


def _peft_pair(
    adapters: Adapters, tensor: Tensor, adapted: list[Part]
) -> tuple[np.ndarray, np.ndarray]:
    """A [k R, I] and B [O, k R] of a tensor of theirs that k adapted projections lie in."""
    rank = adapters.lora.rank
    out_dim = 1 - _input_dim(adapters, adapted[0])
    b_OR = np.zeros((tensor.shape[out_dim], rank * len(adapted)), np.float32)
    rows = []
    for number, part in enumerate(adapted):
        found = adapters.of(part.path)
        assert found is not None
        a, b = (x[part.index] for x in found)
        ours, theirs = part.layout.ours, part.layout.theirs
        inner, outer = ours[: a.ndim - 1], ours[a.ndim - 1 :]
        a = a.transpose(-1, *(inner.index(letter) for letter in theirs[1 - out_dim]))
        b = b.transpose(*(1 + outer.index(letter) for letter in theirs[out_dim]), 0)
        rows.append(a.reshape(rank, -1))
        block = b.reshape(-1, rank)
        columns = slice(number * rank, (number + 1) * rank)
        b_OR[part.start : part.start + len(block), columns] = block
    return np.concatenate(rows), b_OR


def _input_dim(adapters: Adapters, part: Part) -> int:
    """Which dim of their matrix the inputs lie along."""
    found = adapters.of(part.path)
    assert found is not None
    inner = part.layout.ours[: found[0].ndim - 2]
    return next(i for i, dim in enumerate(part.layout.theirs) if set(dim) == set(inner))
