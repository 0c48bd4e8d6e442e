"""LoRA adapters of several fine-tunings kept beside one model; each request chooses an adapter."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

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
    AdapterArrays,
    Adapters,
    MergedParameters,
    host_adapters,
    read_peft,
)
from jaxinfra.checkpoint.peft_settings import CONFIG, is_peft_directory
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.finetune import PROJECTIONS, BaseWeights
from jaxinfra.errors import ConfigError
from jaxinfra.hf import weight_map
from jaxinfra.hf.mapping import WeightMap
from jaxinfra.model.adapters import add_bank
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import ParameterInfo, by_path, define_model, is_weight
from jaxinfra.model.lora import AdapterFactors
from jaxinfra.serving.load import LoadedModel, restore_trained

_MERGED = "kv_up"  # latent attention multiplies it with other weights first
MAX_RANK = 64
"""Default limit on an adapter's rank, as all adapters are padded to the largest of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRow:
    """One adapter of one projection, over all layers, padded to a bank's rank; on the host."""

    a: np.ndarray  # [L, ...I, R]
    b: np.ndarray  # [L, R, ...O]
    scale: np.ndarray  # [L]
    gain: np.ndarray  # [L, ...O], of DoRA; else 1


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBank:
    """Several LoRA adapters of one model by name; ``load_bank`` reads them."""

    names: tuple[str, ...]
    adapters: tuple[Adapters, ...]
    num_free: int = 0  # of further adapters, which may be loaded later
    max_rank: int = MAX_RANK  # of these

    @property
    def rank(self) -> int:
        """The largest rank of the adapters; smaller ones are padded to it with zeros."""
        if self.num_free:
            return self.max_rank
        return max(each.lora.rank for each in self.adapters)

    def added_to(self, model: LoadedModel) -> Decoder:
        """Returns the model with all adapters beside its projections; each batch row selects one.

        Every device holds all adapters: they are small beside the model.
        """
        rows = [self.rows(model, each) for each in self.adapters]
        rows += [self.rows(model, None)] * self.num_free
        compute = model.definition.execution.policy.compute
        decoder = model.decoder
        add_bank(
            decoder,
            {
                path: self._factors([each[path] for each in rows], compute, model)
                for path in self._adapted(model)
            },
        )
        return decoder

    def rows(self, model: LoadedModel, adapters: Adapters | None) -> dict[str, AdapterRow]:
        """Returns one adapter's rows of all projections in the bank; None: an adapter of zeros.

        Raises:
            ConfigError: the bank has not this rank, or not the adapted projections.
        """
        infos = self._adapted(model)
        if adapters is None:
            return {path: self._row(info, None, None) for path, info in infos.items()}
        if adapters.lora.rank > self.rank:
            raise ConfigError(
                f"the adapter has rank {adapters.lora.rank}, more than {self.rank}: all adapters "
                "are filled up to the largest; raise --max-adapter-rank, or leave it out"
            )
        if beyond := _weights_of(adapters) - infos.keys():
            raise ConfigError(
                f"the adapter changes {min(beyond)}, which no row of a batch can have for itself; "
                "merge it into the model (jaxinfra convert), and serve that"
            )
        held = LiveParameters(arrays=by_path(model.parameters, is_leaf=is_weight))
        merged = MergedParameters(base=held, adapters=adapters)
        return {path: self._row(info, adapters.of(path), merged) for path, info in infos.items()}

    def _adapted(self, model: LoadedModel) -> dict[str, ParameterInfo]:
        """Returns the projections that may have an adapter, by their weights' paths."""
        table = {info.path: info for info in model.definition.table() if info.matmul}
        named = set().union(*map(_weights_of, self.adapters))
        if self.num_free:
            named |= {
                path
                for path in table
                if path.startswith("blocks/")
                and path.split("/")[-2] in PROJECTIONS
                and path.split("/")[-2] != _MERGED
            }
        return {path: table[path] for path in sorted(named)}

    def _row(
        self, info: ParameterInfo, found: AdapterArrays | None, merged: MergedParameters | None
    ) -> AdapterRow:
        layers, *sizes = info.shape
        inner, outer = sizes[: info.contracted], sizes[info.contracted :]
        row = AdapterRow(
            a=np.zeros((layers, *inner, self.rank), np.float32),
            b=np.zeros((layers, self.rank, *outer), np.float32),
            scale=np.zeros(layers, np.float32),
            gain=np.ones((layers, *outer), np.float32),
        )
        if found is not None and merged is not None:
            rank = found.a.shape[-1]
            row.a[..., :rank], row.b[:, :rank] = found.a, found.b
            row.scale[:] = merged.adapters.lora.scale
            if found.magnitude is not None:
                for layer in range(layers):
                    row.gain[layer] = merged.gain(info.path, found, layer)
        return row

    def _factors(
        self, rows: Sequence[AdapterRow], dtype: jnp.dtype, model: LoadedModel
    ) -> AdapterFactors:
        everywhere = None if model.placement is None else model.placement.replicated

        def stacked(name: str, dtype: Any = np.float32) -> jax.Array:
            found = np.stack([getattr(each, name) for each in rows], axis=1)
            return jax.device_put(found.astype(dtype), everywhere)

        has_gains = self.num_free or any((each.gain != 1).any() for each in rows)
        return AdapterFactors(
            a=stacked("a", dtype),
            b=stacked("b", dtype),
            scale=stacked("scale"),
            gain=stacked("gain") if has_gains else None,
        )


def _weights_of(adapters: Adapters) -> set[str]:
    """Returns the paths of the weights that are adapted."""
    return {
        name.removesuffix("adapter/a") + "weight"
        for name in adapters.arrays
        if name.endswith("/adapter/a")
    }


def load_bank(
    model: LoadedModel,
    path: str | Path,
    adapters: Mapping[str, str | Path],
    *,
    max_rank: int = MAX_RANK,
    num_free: int = 0,
) -> AdapterBank:
    """Reads adapters of one model from PEFT directories or from runs that trained adapters.

    Args:
        path: the model's directory.
        adapters: the adapters' directories by the names that requests will use.
        max_rank: largest rank that an adapter may have.
        num_free: adapters that may be loaded later, beside these.

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
    if not adapters and not num_free:
        raise ConfigError("no adapters are named; a bank has at least one")
    read: dict[str, Adapters] = {}
    for name, directory in adapters.items():
        read[name] = read_adapters(model, Path(path), Path(directory))
        rank = read[name].lora.rank
        if rank > max_rank:
            raise ConfigError(
                f"adapter {name!r} has rank {rank}, more than {max_rank}: all adapters are filled "
                "up to the largest; raise --max-adapter-rank, or leave it out"
            )
    return AdapterBank(
        names=tuple(read), adapters=tuple(read.values()), num_free=num_free, max_rank=max_rank
    )


def read_adapters(model: LoadedModel, path: Path, directory: Path) -> Adapters:
    """Reads the adapters of one directory; raises as ``load_bank`` does.

    Args:
        path: the model's directory.
    """
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
