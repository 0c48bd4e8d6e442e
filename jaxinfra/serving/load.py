"""Loads a trained model from a run or a directory of safetensors, sharded over a mesh."""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.initial import place_initial
from jaxinfra.checkpoint.load_pretrained import load_pretrained, pretrained_shapes
from jaxinfra.checkpoint.model_directory import is_model_directory, read_model_directory
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config import codec
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import Numerics, PolicyName
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import check_divides
from jaxinfra.data.chat_template import ChatTemplate, load_chat_template
from jaxinfra.data.special_tokens import read_generation_config
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import CheckpointError, ConfigError, UnsupportedError, nearest
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.model.empty_cache import check_states
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.quantized_base import base_shapes
from jaxinfra.model.serving_form import (
    are_arrays,
    can_pack,
    serving_form,
    serving_parameters,
)
from jaxinfra.numerics.policy import POLICIES, as_kept, stored_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import SERVING_AXES, make_mesh, serving_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import base_shardings
from jaxinfra.runtime.files import require_type
from jaxinfra.serving.program_store import ProgramStore
from jaxinfra.serving.sampling import SamplingConfig


def serving_placement(
    config: ModelConfig, mesh: MeshConfig | None, *, devices: Sequence[jax.Device] = ()
) -> Placement:
    """Returns a mesh of the first devices and its sharding rules for serving. Rows are sharded over
    replica and fsdp, weights over fsdp and tensor, heads and their KV cache over tensor. If
    ``expert`` takes devices of fsdp or replica, these have no rows of their own: they shard
    experts, and all else as tensor does.

    Args:
        mesh: sizes of the mesh's axes; one device by default.
        devices: absent devices to compile for; by default those that are here.

    Raises:
        ConfigError: generation does not use an axis, or the model's sizes are not divisible by it.
    """
    mesh = mesh or MeshConfig()
    for axis, size in mesh.sizes().items():
        if size > 1 and axis not in SERVING_AXES:
            raise ConfigError(
                f"mesh {axis}={size}: generation spreads a model over {', '.join(SERVING_AXES)} "
                "only; give these the devices"
            )
    check_divides(config, mesh)
    if not devices:
        devices = jax.local_devices()
        if mesh.num_devices > len(devices):
            devices = jax.devices()
    return Placement(
        mesh=make_mesh(mesh, devices=devices[: mesh.num_devices]),
        rules=serving_rules(mesh),
    )


_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model with its weights and its tokenizer, as ``load`` returns it.

    Examples:
        >>> model = jaxinfra.load("runs/mine")
        >>> ids = model.tokenizer.encode("the cat")
        >>> model.decoder(ids[None]).shape == (1, len(ids), 300)
        True
    """

    definition: ModelDefinition  # the model, without its weights
    parameters: Parameters  # with the state, as ``ModelDefinition.bind`` takes them
    tokenizer: Tokenizer  # of its vocabulary
    config: RunConfig | None  # of the run that trained it; None: it comes from elsewhere
    step: int | None  # of the run's checkpoint
    prefix_ids: tuple[int, ...] | None = None  # put before a text; None: the tokenizer's bos_id
    placement: Placement | None = None  # None: wherever the arrays are
    # Of sampling, where nobody says: temperature, top_k and others of generation_config.json.
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Where engines keep compiled programs; None: nowhere.
    store: ProgramStore | None = dataclasses.field(default=None, compare=False)
    # What ``generate`` made of it: an engine, of this model alone.
    kept: dict[str, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_ids(self) -> int:
        """Number of token ids that may be sampled: known to the tokenizer and the model."""
        return min(self.tokenizer.vocab_size, self.definition.config.vocab_size)

    @property
    def platform(self) -> str:
        """JAX's name for the platform of the model's devices."""
        if self.placement is None:
            return jax.default_backend()
        return self.placement.mesh.devices.flat[0].platform

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The token ids that begin every text."""
        return (self.tokenizer.bos_id,) if self.prefix_ids is None else self.prefix_ids

    def sampling(self, **given: Any) -> SamplingConfig:
        """Returns sampling settings: those given, else those of the model's files, else temperature
        0.8.
        """
        return SamplingConfig.of({"temperature": 0.8}, self.defaults, given)

    def prompt(self, text: str, *, spelled_out: bool = False) -> list[int]:
        """Encodes a text to be continued, with the tokens that begin every text first.

        Args:
            spelled_out: encode special tokens that are spelled out in the text as such.
        """
        encode = self.tokenizer.encode_rendered if spelled_out else self.tokenizer.encode_batch
        return [*self.begin_ids, *encode([text])[0].tolist()] or [self.tokenizer.bos_id]

    @property
    def decoder(self) -> Decoder:
        """The model as a callable module with its parameters."""
        return self.definition.bind(self.parameters)

    def without_mtp(self) -> "LoadedModel":
        """Returns this model without its multi-token prediction, if it has one."""
        old = self.definition
        if not old.config.mtp:
            return self
        config = dataclasses.replace(old.config, mtp=False)
        kept = {name: each for name, each in self.parameters.items() if name != "mtp"}
        frozen = {name: each for name, each in old.frozen.items() if name != "mtp"}
        definition = define_model(config, old.execution, lora=old.lora).freeze(frozen)
        return dataclasses.replace(self, definition=definition, parameters=kept)

    def with_cache(self, form: CacheFormat) -> "LoadedModel":
        """Returns this model with a cache in another format; raises UnsupportedError where it names
        one of states, and the model has none.
        """
        old = self.definition
        if form is old.execution.cache_format:
            return self
        check_states(old.config, form)
        execution = dataclasses.replace(old.execution, cache_format=form)
        definition = define_model(old.config, execution, lora=old.lora).freeze(old.frozen)
        return dataclasses.replace(self, definition=definition)

    def with_numerics(self, numerics: Numerics) -> "LoadedModel":
        """Returns this model with sums as fast as they can be, or exact.

        Raises:
            ConfigError, UnsupportedError: exact numerics of a layer or a mesh that has none.

        Examples:
            >>> model = jaxinfra.load("runs/mine").with_numerics("exact")
        """
        old = self.definition
        if old.execution.policy.numerics == numerics:
            return self
        policy = dataclasses.replace(old.execution.policy, numerics=Numerics(numerics))
        execution = execution_on(
            self.placement, policy=policy, cache_format=old.execution.cache_format
        )
        definition = define_model(old.config, execution, lora=old.lora).freeze(old.frozen)
        return dataclasses.replace(self, definition=definition)

    def serving_definition(self, *, is_unrolled: bool | None = None) -> ModelDefinition:
        """Returns the definition of the form that an engine runs fastest. On GPUs layers are
        unrolled, and projections of one input are packed. Models with adapters or 8-bit matmuls
        stay as they are.

        Args:
            is_unrolled: use the form for GPUs on any device, or on none; by default on GPUs.
        """
        definition = self.definition
        if is_unrolled is None:
            is_unrolled = self.platform == "gpu"
        policy = definition.execution.policy
        in_8_bits = any(recipe.fp8 is not None for _, recipe in policy.sites)
        if not is_unrolled or definition.lora is not None or in_8_bits:
            return definition
        fits = can_pack(self.parameters, definition.config, definition.execution.place)
        if policy.is_exact and self.platform != "gpu":
            fits = False  # columns of a product would have other bits beside others
        execution = execution_on(
            self.placement,
            policy=policy,
            cache_format=definition.execution.cache_format,
            decode_form=DecodeForm(packed=fits, numbers=are_arrays(self.parameters)),
        )
        return serving_form(definition, execution)

    def serving_decoder(
        self,
        *,
        is_unrolled: bool | None = None,
        consumes: bool = False,
    ) -> Decoder:
        """Returns the model as ``serving_definition`` describes it, with packed copies of weights.

        Args:
            is_unrolled: as there.
            consumes: free weights that were copied; this object is unusable then.
        """
        form = self.serving_definition(is_unrolled=is_unrolled)
        if form is self.definition:
            return self.decoder
        if self.is_described:
            return form.bind(self._served_shapes(form))
        return form.bind(serving_parameters(form, self.parameters, consumes=consumes))

    def _served_shapes(self, form: ModelDefinition) -> Parameters:
        """Shapes and shardings of ``serving_parameters``."""
        if not self.can_describe:
            raise UnsupportedError(
                "the serving form of weights over several devices is known once they are loaded"
            )
        shapes = jax.eval_shape(functools.partial(serving_parameters, form), self.parameters)
        assert self.placement is not None
        replicated = self.placement.replicated
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), shapes
        )

    @property
    def is_described(self) -> bool:
        """Whether ``parameters`` are shapes instead of arrays."""
        return isinstance(jax.tree.leaves(self.parameters)[0], jax.ShapeDtypeStruct)

    @property
    def can_describe(self) -> bool:
        """Whether an engine can be made of shapes: of weights on one device."""
        return self.placement is not None and self.placement.mesh.size == 1


def load_model(path: str | Path, dtype: str = "float32", mesh: MeshConfig | None = None) -> Decoder:
    """Loads a trained decoder, which maps token ids, int [B, T], to float32 logits [B, T, V].

    Args:
        path: a run, a Hugging Face directory, or a directory that ``convert`` has written.
        dtype: dtype of matmul operands: "float32", "bfloat16" or "float16". A run's parameters stay
            float32; other weights are stored in this dtype, dequantized if the files are quantized.
            Sums, norms, softmax and logits are float32.
        mesh: devices that the model is sharded over; by default the first device.

    Raises:
        ConfigError, DataError, CheckpointError: ``path`` has no model, or an incomplete one.

    Examples:
        >>> model = jaxinfra.load_model("runs/mine", dtype="bfloat16")
        >>> model(np.array([[1, 2, 3]], np.int32)).dtype
        dtype('float32')
    """
    policies = {policy.compute.name: name for name, policy in POLICIES.items()}
    if dtype not in policies:
        raise ConfigError(f"unknown dtype {dtype!r}{nearest(dtype, policies)}")
    path = Path(path)
    if is_model_directory(path):
        placement = serving_placement(read_model_directory(path).config, mesh)
        pretrained = load_pretrained(path, policy=policies[dtype], placement=placement)
        return pretrained.definition.bind(pretrained.parameters)
    return load_run(path, policy=policies[dtype], mesh=mesh).decoder


def load(
    path: str | Path,
    *,
    policy: PolicyName | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
) -> LoadedModel:
    """Loads a model with its tokenizer from a run or a model directory. Weights quantized to 4 or 8
    bits stay quantized.

    Args:
        path: a run, a Hugging Face directory, or a directory that ``convert`` has written.
        policy: numeric policy; None: the policy of training, or of the stored dtype.
        step: step of a run's checkpoint; by default the newest intact one.
        mesh: devices that the model is sharded over; by default the first device.

    Raises:
        ConfigError: ``step`` is given for a model directory, which has none, or the mesh is
            impossible.
        DataError, CheckpointError: the model is missing or incomplete.

    Examples:
        >>> model = jaxinfra.load("runs/mine")
        >>> model.step, model.config.training.batch_size
        (4, 2)
    """
    return _load(Path(path), policy=policy, step=step, mesh=mesh, read=WeightReading.WEIGHTS)


def describe(
    path: str | Path,
    *,
    policy: PolicyName | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    devices: Sequence[jax.Device] = (),
) -> LoadedModel:
    """Returns what ``load`` returns, with shapes in place of weights; reads headers only.

    Args:
        devices: absent devices, for which programs can be compiled; by default those that are here.
    """
    return _load(
        Path(path),
        policy=policy,
        step=step,
        mesh=mesh,
        read=WeightReading.SHAPES,
        devices=devices,
    )


class WeightReading(enum.Enum):
    """Choice of what is read of a model: weights, or only their shapes."""

    WEIGHTS = enum.auto()
    SHAPES = enum.auto()


def _load(
    path: Path,
    *,
    policy: PolicyName | None,
    step: int | None,
    mesh: MeshConfig | None,
    read: WeightReading,
    devices: Sequence[jax.Device] = (),
) -> LoadedModel:
    if not is_model_directory(path):
        return load_run(path, policy=policy, step=step, mesh=mesh, read=read, devices=devices)
    if step is not None:
        raise ConfigError(f"step={step}: {path} is a single model, which has no steps")
    config = read_model_directory(path).config
    tokenizer = _read_tokenizer(path, vocab_size=config.vocab_size)
    placement = serving_placement(config, mesh, devices=devices)
    if read is WeightReading.SHAPES:
        model = pretrained_shapes(path, policy=policy, placement=placement)
    else:
        model = load_pretrained(path, policy=policy, placement=placement, keep_packed=True)
    return LoadedModel(
        definition=model.definition,
        parameters=model.parameters,
        tokenizer=tokenizer,
        config=None,
        step=None,
        prefix_ids=tokenizer.prefix_ids,
        placement=placement,
        defaults=sampling_defaults(path),
    )


def load_run(
    path: Path,
    *,
    policy: PolicyName | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    read: WeightReading = WeightReading.WEIGHTS,
    devices: Sequence[jax.Device] = (),
) -> LoadedModel:
    """Loads the model of a run's newest intact checkpoint; each device reads its own shard.

    The run may still be training; its files are not changed. The attention kernel is chosen for
    this device, not as in training.

    Args:
        policy: numeric policy; None: the policy of training.
        step: step of the checkpoint; by default the newest intact one.
        mesh: devices that the model is sharded over; by default the first device.
        read: whether weights are read, or shapes take their place.
        devices: absent devices to describe the model for; by default those that are here.
    """
    config = RunDirectory(path).read_config()
    tokenizer = _read_tokenizer(path, vocab_size=config.model.vocab_size)
    numbers = as_kept(POLICIES[policy or config.precision.policy], config.precision)
    placement = serving_placement(config.model, mesh, devices=devices)
    if config.lora is not None:
        # As in training: what is frozen is held as it is used.
        numbers = stored_as_computed(numbers)
    execution = execution_on(placement, policy=numbers)
    definition = define_model(config.model, execution, lora=config.lora)
    frozen: Parameters = {}
    if config.lora is not None:
        if config.init is None:
            raise ConfigError(
                f"{RunDirectory(path).config_file} has lora without init, the model that is "
                "adapted; restore the file as training wrote it"
            )
        base, kept = define_model(config.model, execution), config.lora.base
        shardings = base_shardings(placement, base, base_shapes(base, kept))
        if read is WeightReading.SHAPES:
            frozen = _shaped(base_shapes(base, kept), shardings)
        else:
            frozen = place_initial(config.init, base, shardings, kept=kept)
    trained = definition.freeze(frozen)
    places = placement.parameters(trained), placement.model_state(trained)
    if read is WeightReading.SHAPES:
        shapes = trained.shapes, trained.state_shapes
        parameters = functools.reduce(merged, map(_shaped, shapes, places))
    else:
        step, parameters = restore_trained(path, config, trained, *places, step=step)
    return LoadedModel(
        definition=definition,
        parameters=merged(frozen, parameters),
        tokenizer=tokenizer,
        config=config,
        step=step,
        placement=placement,
        defaults=sampling_defaults(path),
    )


def load_template(path: Path, settings: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Loads the chat template of a model, or of a run with the settings that it was trained with.

    Args:
        settings: values of variables that the template reads; they precede those of the run.

    Raises:
        ConfigError: there is no chat template, or it has no such setting.
    """
    run, trained = RunDirectory(path), {}
    if run.config_file.is_file() and not is_model_directory(path):
        trained = run.read_config().data.template_settings
    return load_chat_template(path).with_settings({**trained, **(settings or {})})


def _shaped(shapes: Parameters, shardings: Parameters) -> Parameters:
    return jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        shapes,
        shardings,
    )


def restore_trained(
    path: Path,
    config: RunConfig,
    trained: ModelDefinition,
    parameters: Parameters,
    state: Parameters,
    *,
    step: int | None = None,
) -> tuple[int, Parameters]:
    """Restores the step and the parameters, with the state, of a run's newest intact checkpoint.

    Args:
        config: the run's config.
        trained: the run's model, with the parameters frozen that it does not train.
        parameters, state: shardings of the parameters and of the state to restore.
        step: step of the checkpoint; by default the newest intact one.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another model.
    """
    # Fields of the training state by name; what else is in there is not read.
    weights = "parameters" if config.optimizer.average is None else "average"
    placed = jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        {weights: trained.shapes, "model_state": trained.state_shapes},
        {weights: parameters, "model_state": state},
    )
    checkpoints = RunDirectory(path).checkpoints
    if not checkpoints.is_dir():
        raise CheckpointError(
            f"{path} has no checkpoints/: the run ended before its first one; train it further"
        )
    restored = load_state(
        checkpoints,
        placed,
        step=step,
        identity=identity(RunDirectory(path), config),
        settings=codec.to_dict(config),
    )
    return restored.step, functools.reduce(merged, restored.state.values())


def _read_tokenizer(path: Path, *, vocab_size: int) -> Tokenizer:
    file = RunDirectory(path).tokenizer_file
    if not file.is_file():
        raise ConfigError(
            f"{path} has no tokenizer.json; without it text and tokens cannot be converted: "
            "copy it from where the model was trained"
        )
    tokenizer = Tokenizer.load(file)
    used = (*tokenizer.prefix_ids, tokenizer.bos_id, *tokenizer.end_ids)
    if beyond := [each for each in used if not 0 <= each < vocab_size]:
        raise ConfigError(
            f"{path}: text begins or ends with token {beyond[0]}, the model's vocabulary is "
            f"0..{vocab_size - 1}; restore tokenizer.json and the config's eos_token_id"
        )
    return tokenizer


def sampling_defaults(path: Path) -> dict[str, float]:
    """Returns the sampling settings in ``generation_config.json``.

    Raises:
        ConfigError: a setting is not a number.
    """
    values = read_generation_config(path)
    found = {name: values[name] for name in _DEFAULTS if values.get(name) is not None}
    require_type(found, dict[str, int | float], where=str(path), error=ConfigError)
    return found
