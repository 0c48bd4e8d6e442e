"""Adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

Its adapters belong to tensors of theirs, [outputs, inputs]: ``lora_A`` [R, I], ``lora_B`` [O, R]
and with DoRA ``lora_magnitude_vector`` [O]. Where a tensor fuses several projections of ours, each
keeps its own rank on the way out: A are stacked, B is block diagonal, and the scale stays the same.
On the way in each projection gets all of A and its rows of B.

Dims: I inputs of a tensor of theirs, O its outputs, R rank.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfra.checkpoint.parameter_sources import ParameterSource
from jaxinfra.checkpoint.tensor_files import new_directory, write_tensor_files
from jaxinfra.checkpoint.trained_adapters import AdapterArrays, Adapters, column_norms
from jaxinfra.config.finetune import AdapterKind, AdapterScaling, LoraConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.mapping import Part, Tensor, WeightMap

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_peft(
    adapters: Adapters, weights: WeightMap, path: Path, *, base: str, source: ParameterSource
) -> None:
    """Writes adapters as PEFT reads them.

    Args:
        base: what the config names as the model that these adapters are for.
        source: its weights: with DoRA, projections without an adapter keep their length in a
            tensor that has one.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists and is not an empty directory; an export overwrites nothing: "
            "name another"
        )
    lora = adapters.lora
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for tensor in weights.tensors.values():
        adapted = [part for part in tensor.parts if adapters.of(part.path) is not None]
        if not adapted:
            continue
        module = tensor.name.removesuffix(".weight")
        a_RI, b_OR = _peft_pair(adapters, tensor, adapted)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a_RI
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b_OR
        if lora.kind is AdapterKind.DORA:
            vector = _peft_magnitude(adapters, tensor, source, input_dim(adapters, adapted[0]))
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = vector
        ranks[".".join(module.split(".")[-2:])] = lora.rank * len(adapted)
        transposed |= input_dim(adapters, adapted[0]) == 0
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
        "lora_dropout": 0.0,
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
    adapters: Adapters, tensor: Tensor, adapted: list[Part]
) -> tuple[np.ndarray, np.ndarray]:
    """A [k R, I] and B [O, k R] of a tensor of theirs that k adapted projections lie in."""
    rank = adapters.lora.rank
    out_dim = 1 - input_dim(adapters, adapted[0])
    b_OR = np.zeros((tensor.shape[out_dim], rank * len(adapted)), np.float32)
    rows = []
    for number, part in enumerate(adapted):
        found = _found(adapters, part)
        a, b = found.a[part.index], found.b[part.index]
        ours, theirs = part.layout.ours, part.layout.theirs
        inner, outer = ours[: found.num_inner], ours[found.num_inner :]
        a = a.transpose(-1, *(inner.index(letter) for letter in theirs[1 - out_dim]))
        b = b.transpose(*(1 + outer.index(letter) for letter in theirs[out_dim]), 0)
        rows.append(a.reshape(rank, -1))
        block = b.reshape(-1, rank)
        columns = slice(number * rank, (number + 1) * rank)
        b_OR[part.start : part.start + len(block), columns] = block
    return np.concatenate(rows), b_OR


def _peft_magnitude(
    adapters: Adapters, tensor: Tensor, source: ParameterSource, in_dim: int
) -> np.ndarray:
    """The length of each output [O] of a tensor of theirs: trained, or as the base has it."""
    vectors = []
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
        vectors.append(vector.transpose(order).reshape(-1))
    return np.concatenate(vectors).astype(np.float32)


def _found(adapters: Adapters, part: Part) -> AdapterArrays:
    found = adapters.of(part.path)
    assert found is not None
    return found


def input_dim(adapters: Adapters, part: Part) -> int:
    """Returns which dim of their matrix the inputs are."""
    inner = part.layout.ours[: _found(adapters, part).num_inner]
    return next(i for i, dim in enumerate(part.layout.theirs) if set(dim) == set(inner))
