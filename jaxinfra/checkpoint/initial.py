"""Initial weights of a run that starts from another model, read directly onto the mesh."""

import concurrent.futures
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxinfra.checkpoint import directory_layout, processes
from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.model_directory import (
    TOKENIZER_FILES,
    is_model_directory,
    read_model_directory,
)
from jaxinfra.checkpoint.onto_mesh import place_parameters, place_quantized
from jaxinfra.checkpoint.parameter_sources import LiveParameters, ParameterSource
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.config.finetune import BaseWeights, InitConfig
from jaxinfra.config.kinds import Head
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import by_path
from jaxinfra.model.definition import (
    ModelDefinition,
    Parameters,
    define_model,
    merged,
    only,
)
from jaxinfra.numerics.policy import POLICIES, as_kept
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.files import read_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitialModel:
    """A model to start training from: its config and checksum, before its weights are read."""

    init: InitConfig
    config: ModelConfig
    policy: PolicyName  # precision policy that fits the dtype of the stored weights


def read_initial(path: Path) -> InitialModel:
    """Reads the model config of a directory or a run, and computes the checksum of its weights.

    The checksum of a model directory needs all its weight files; that of a run only its manifest.

    Raises:
        ConfigError, CheckpointError: a run cannot start from this model; the message says why.
    """
    path = path.expanduser().absolute()
    if is_model_directory(path):
        directory = read_model_directory(path)
        # Of the headers alone: names and shapes are checked when the weights are read.
        tensors = open_tensor_files(path).tensors.values()
        whole = max(tensors, key=lambda each: each.num_bytes).dtype.name in ("float32", "float64")
        return InitialModel(
            init=InitConfig(path=str(path), sha256=_sum_of_model(path)),
            config=directory.config,
            # Not fp16, even where it is stored so: gradients would need their scaling.
            policy=PolicyName.FP32 if whole else PolicyName.BF16,
        )
    run = RunDirectory(path)
    config = run.read_config()
    if config.lora is not None:
        raise ConfigError(
            f"{path} holds adapters, not a whole model; merge them first: "
            f"jaxinfra convert {shlex.quote(str(path))} DIR, then start from DIR"
        )
    step = max(directory_layout.steps(run.checkpoints), default=None)
    if step is None:
        raise ConfigError(f"{path} has no checkpoint to start from yet; train it further")
    return InitialModel(
        init=InitConfig(path=str(path), sha256=_sum_of_step(run, step), step=step),
        config=config.model,
        policy=config.precision.policy,
    )


def initial_head(init: InitConfig) -> Head:
    """Returns what the model that a run starts from computes: logits or a score."""
    path = Path(init.path)
    if init.step is None:
        return read_model_directory(path).config.head
    return RunDirectory(path).read_config().model.head


def place_initial(
    init: InitConfig,
    definition: ModelDefinition,
    shardings: Parameters,
    *,
    kept: BaseWeights = BaseWeights.COMPUTE,
) -> Parameters:
    """Reads a run's initial weights in the definition's dtypes onto devices; a collective.

    Args:
        shardings: shardings of the arrays to read: parameters, model state or both.
        kept: format in which devices store projections. Quantized formats are made layer by layer,
            so devices hold at most one unquantized layer. If the model is a run, the first device
            holds all of its weights meanwhile.

    Raises:
        CheckpointError: the weights differ from those that the run started from.
    """
    if kept is not BaseWeights.COMPUTE:
        source = initial_source(init, definition.config)
        return place_quantized(source, definition, shardings, kept=kept)
    if init.step is None:
        return place_parameters(_model_files(init, definition.config), definition, shardings)
    masters = _masters(init, definition.config, shardings)
    wanted = only(definition.arrays, shardings)
    return jax.tree.map(lambda leaf, to: leaf.astype(to.dtype), masters, wanted)


def initial_source(init: InitConfig, config: ModelConfig) -> ParameterSource:
    """Opens the initial weights for reading; those of a run are brought onto the first device."""
    if init.step is None:
        return _model_files(init, config)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = define_model(config, execution_on()).arrays
    masters = _masters(init, config, jax.tree.map(lambda _: device, shapes))
    return LiveParameters(arrays=by_path(masters))


def _model_files(init: InitConfig, config: ModelConfig) -> ParameterSource:
    path = Path(init.path)
    _require_same(init, processes.on_first(lambda: _sum_of_model(path)))
    return read_model_directory(path).open(define_model(config, execution_on()))


def _masters(init: InitConfig, config: ModelConfig, shardings: Parameters) -> Parameters:
    run, step = RunDirectory(Path(init.path)), init.step
    assert step is not None
    of_run = identity(run, config_of_run := run.read_config())
    weights = "parameters" if config_of_run.optimizer.average is None else "average"
    _require_same(init, processes.on_first(lambda: _sum_of_step(run, step)))
    kept = as_kept(POLICIES[PolicyName.FP32], config_of_run.precision)
    model = define_model(config, execution_on(policy=kept))

    def placed(shapes: Parameters) -> Parameters:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            only(shapes, shardings),
            only(shardings, shapes),
        )

    # The names of fields of the training state; what else is in there is not read.
    wanted = {weights: placed(model.shapes), "model_state": placed(model.state_shapes)}
    read = load_state(run.checkpoints, wanted, step=step, identity=of_run).state
    return merged(read[weights], read["model_state"])


def _require_same(init: InitConfig, found: str) -> None:
    if found != init.sha256:
        raise CheckpointError(
            f"the weights in {init.path} have SHA-256 {found[:16]}…, the run started from "
            f"{init.sha256[:16]}…; restore them, or name where they are with --set init.path=DIR"
        )


def kept_files(path: Path) -> dict[str, bytes]:
    """Returns the files that a run copies from its start model: template, separators and Hugging
    Face config. The run writes the tokenizer itself.
    """
    names = (name for name in TOKENIZER_FILES if name != "tokenizer.json")
    files = {name: read_bytes(path / name) for name in names if (path / name).is_file()}
    is_model = is_model_directory(path)
    hf = read_model_directory(path).hf if is_model else RunDirectory(path).read_hf_config()
    if hf is not None:
        files[RunDirectory(path).hf_config_file.name] = json.dumps(hf, indent=2).encode()
    return files


def _sum_of_model(path: Path) -> str:
    if not path.is_dir():
        raise CheckpointError(
            f"{path}, which the run started from, is not there; restore it, or name where it is "
            "with --set init.path=DIR"
        )
    return _sum({tensor.file for tensor in open_tensor_files(path).tensors.values()})


def _sum_of_step(run: RunDirectory, step: int) -> str:
    """The manifest has the sums of all files, and loading checks them."""
    file = run.checkpoints / directory_layout.step_name(step) / directory_layout.MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{run.path} has no checkpoint of step {step}, which the run started from; restore it, "
            "or name where it is with --set init.path=DIR"
        )
    return _sum({file})


def _sum(files: set[Path]) -> str:
    """SHA-256 of the files' names and sums."""
    ordered: Sequence[Path] = sorted(files)
    with concurrent.futures.ThreadPoolExecutor(directory_layout.MAX_THREADS) as pool:
        sums = list(pool.map(directory_layout.sha256, ordered))
    lines = [f"{file.name} {digest}\n" for file, digest in zip(ordered, sums, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
