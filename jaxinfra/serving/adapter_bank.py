"""LoRA adapters of several fine-tunings kept beside one model; each request chooses an adapter."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.checkpoint.model_directory import (
    hf_config_for,
    is_model_directory,
    read_model_directory,
)
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.checkpoint.peft_files import (
    Adapters,
    MergedParameters,
    host_adapters,
    read_peft,
)
from jaxinfra.checkpoint.peft_settings import CONFIG, is_peft_directory
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.finetune import BaseWeights
from jaxinfra.errors import ConfigError
from jaxinfra.hf import weight_map
from jaxinfra.hf.mapping import WeightMap
from jaxinfra.model.adapters import add_bank
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import by_path, define_model, is_weight
from jaxinfra.model.lora import AdapterFactors
from jaxinfra.serving.load import LoadedModel, restore_trained

MAX_RANK = 64
"""Default limit on an adapter's rank, as all adapters are padded to the largest of them."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBank:
    """Several LoRA adapters of one model by name; ``load_bank`` reads them."""

    names: tuple[str, ...]
    adapters: tuple[Adapters, ...]

    @property
    def rank(self) -> int:
        """The largest rank of the adapters; smaller ones are padded to it with zeros."""
        return max(each.lora.rank for each in self.adapters)

    def added_to(self, model: LoadedModel) -> Decoder:
        """Returns the model with all adapters beside its projections; each batch row selects one.

        Every device holds all adapters: they are small beside the model.
        """
        held = LiveParameters(arrays=by_path(model.parameters, is_leaf=is_weight))
        merged = [MergedParameters(base=held, adapters=each) for each in self.adapters]
        paths = sorted(
            {
                name.removesuffix("adapter/a") + "weight"
                for each in self.adapters
                for name in each.arrays
                if name.endswith("/adapter/a")
            }
        )
        compute = model.definition.execution.policy.compute
        decoder = model.decoder
        add_bank(decoder, {path: self._factors(path, merged, compute, model) for path in paths})
        return decoder

    def _factors(
        self, path: str, merged: list[MergedParameters], dtype: jnp.dtype, model: LoadedModel
    ) -> AdapterFactors:
        found = [each.adapters.of(path) for each in merged]
        first = next(each for each in found if each is not None)
        (layers, *inner, _), outer = first.a.shape, first.b.shape[2:]
        a = np.zeros((layers, len(found), *inner, self.rank), np.float32)
        b = np.zeros((layers, len(found), self.rank, *outer), np.float32)
        scale = np.zeros((layers, len(found)), np.float32)
        gain = np.ones((layers, len(found), *outer), np.float32)
        for place, (each, whole) in enumerate(zip(found, merged, strict=True)):
            if each is None:
                continue
            rank = each.a.shape[-1]
            a[:, place, ..., :rank], b[:, place, :rank] = each.a, each.b
            scale[:, place] = whole.adapters.lora.scale
            if each.magnitude is not None:
                for layer in range(layers):
                    gain[layer, place] = whole.gain(path, each, layer)
        everywhere = None if model.placement is None else model.placement.replicated
        has_gains = any(each is not None and each.magnitude is not None for each in found)
        return AdapterFactors(
            a=jax.device_put(a.astype(dtype), everywhere),
            b=jax.device_put(b.astype(dtype), everywhere),
            scale=jax.device_put(scale, everywhere),
            gain=jax.device_put(gain, everywhere) if has_gains else None,
        )


def load_bank(
    model: LoadedModel,
    path: str | Path,
    adapters: Mapping[str, str | Path],
    *,
    max_rank: int = MAX_RANK,
) -> AdapterBank:
    """Reads adapters of one model from PEFT directories or from runs that trained adapters.

    Args:
        path: the model's directory.
        adapters: the adapters' directories by the names that requests will use.
        max_rank: largest rank that an adapter may have.

    Raises:
        ConfigError: a directory has no adapters, or has adapters of too large a rank or of another
            model. Adapters of runs are compared by the checksum of the model's weights, others by
            names and shapes.
        CheckpointError: files are damaged or belong to another model.
    """
    if model.definition.lora is not None:
        raise ConfigError(
            f"{path} has adapters of its own; name the model that it started from, and it among "
            "the adapters"
        )
    if not adapters:
        raise ConfigError("no adapters are named; a bank has at least one")
    read: dict[str, Adapters] = {}
    for name, directory in adapters.items():
        read[name] = _read(model, Path(path), Path(directory))
        rank = read[name].lora.rank
        if rank > max_rank:
            raise ConfigError(
                f"adapter {name!r} has rank {rank}, more than {max_rank}: all adapters are filled "
                "up to the largest; raise --max-adapter-rank, or leave it out"
            )
    return AdapterBank(names=tuple(read), adapters=tuple(read.values()))


def _read(model: LoadedModel, path: Path, directory: Path) -> Adapters:
    if is_peft_directory(directory):
        held = LiveParameters(arrays=by_path(model.parameters, is_leaf=is_weight))
        return read_peft(directory, _weights(model, path), model.definition, source=held)
    if not RunDirectory(directory).config_file.is_file():
        raise ConfigError(
            f"{directory} holds no adapters: neither {CONFIG} of PEFT, nor a run's config.json"
        )
    return _of_run(model, path, directory)


def _weights(model: LoadedModel, path: Path) -> WeightMap:
    is_model = is_model_directory(path)
    hf = read_model_directory(path).hf if is_model else RunDirectory(path).read_hf_config()
    config = model.definition.config
    return weight_map(hf_config_for(config, hf)["model_type"], config, model.definition.arrays)


def _of_run(model: LoadedModel, path: Path, directory: Path) -> Adapters:
    config = RunDirectory(directory).read_config()
    if config.lora is None or config.init is None:
        raise ConfigError(f"{directory} trained all parameters, not adapters; serve it by itself")
    if config.lora.base is not BaseWeights.COMPUTE:
        raise ConfigError(
            f"{directory} trained adapters over a base in {config.lora.base}, and {path} is "
            "another form of it; serve the run by itself, or export its adapters (jaxinfra convert "
            "--adapters-only) and name those"
        )
    found = read_initial(path).init.sha256
    if found != config.init.sha256:
        raise ConfigError(
            f"{directory} trained adapters of weights with SHA-256 {config.init.sha256[:16]}…, and "
            f"those of {path} have {found[:16]}…; name the model that it started from"
        )
    whole = define_model(config.model, model.definition.execution, lora=config.lora)
    trained = whole.freeze(model.definition.shapes)
    if trained.state_shapes:
        raise ConfigError(
            f"{directory} changed the model's state as it trained, which rows of a batch share; "
            "serve the run by itself"
        )
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, trained.shapes)
    _, parameters = restore_trained(directory, config, trained, shardings, {})
    return host_adapters(config.lora, by_path(parameters))
