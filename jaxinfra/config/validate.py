"""Checks across the configs of a run, such as that sizes divide over mesh axes."""

import dataclasses
import fnmatch
from collections.abc import Iterator

from jaxinfra.axes import MeshAxis
from jaxinfra.config.data import PAIRED, DataFormat, TokenizerKind
from jaxinfra.config.finetune import BaseWeights
from jaxinfra.config.kinds import Head
from jaxinfra.config.latent import INDEXER_PARAMETERS, indexer_of
from jaxinfra.config.mesh import EXPERT, MeshConfig
from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
)
from jaxinfra.config.own import OwnMixer
from jaxinfra.config.precision import StoredWeights
from jaxinfra.config.preferences import PreferenceLoss
from jaxinfra.config.rl import EngineDevices
from jaxinfra.config.run import (
    LATENT_METHODS,
    AttentionImplementation,
    ContextMethod,
    Remat,
    RunConfig,
)
from jaxinfra.errors import ConfigError


def check_divides(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raises ConfigError if a size of the model is not a multiple of the axis that shards it."""
    sharded = [("vocab_size", model.vocab_size, "tensor", mesh.tensor)]
    sharded.append(("model_dim", model.model_dim, "fsdp", mesh.fsdp))
    if any(stack.repeats % mesh.pipe for stack in model.stacks):
        # Layers that do not divide over the stages are stored there split by width.
        sharded.append(("model_dim", model.model_dim, "fsdp x pipe", mesh.fsdp * mesh.pipe))
    for block in model.blocks:
        sizes = block.mixer.tensor_sizes | _sizes(block.feed_forward)
        sharded += [(name, size, "tensor", mesh.tensor) for name, size in sizes.items()]
        if isinstance(block.feed_forward, ExpertsConfig):
            sharded.append(("num_experts", block.feed_forward.num_experts, EXPERT, mesh.expert))
            width = block.feed_forward.latent_dim or model.model_dim
            sharded.append(("experts.latent_dim", width, "fsdp", mesh.fsdp))
    _check_experts(model, mesh)
    for name, size, axis, shards in sharded:
        if name == "num_kv_heads" and shards % size == 0:
            continue  # each device has a copy of one
        if size % shards:
            raise ConfigError(
                f"{name}={size} does not divide over {axis}={shards}; "
                f"choose a {axis} size that divides it"
            )


def _sizes(feed_forward: FeedForwardConfig | None) -> dict[str, int]:
    return {} if feed_forward is None else feed_forward.tensor_sizes


def _check_experts(model: ModelConfig, mesh: MeshConfig) -> None:
    experts = [each for b in model.blocks if isinstance(each := b.feed_forward, ExpertsConfig)]
    if mesh.expert > 1 and not experts:
        raise ConfigError(f"expert={mesh.expert}, but this model has no experts; leave it out")
    capacities = [each.balance.capacity_factor for each in experts]
    if mesh.context > 1 and any(capacity is not None for capacity in capacities):
        raise ConfigError(
            f"capacity_factor={max(filter(None, capacities))} with context={mesh.context}: an "
            "expert's room is filled in the order of a sequence, which several devices share; drop "
            "nothing (capacity_factor=none), or use fsdp in place of context"
        )


def validate(run: RunConfig) -> None:
    """Checks rules that span configs; raises ConfigError naming values, rule and remedy."""
    training, mesh, model = run.training, run.mesh, run.model
    micro_batch = training.batch_size // training.accumulation
    if micro_batch % mesh.num_data_shards:
        raise ConfigError(
            f"a micro-batch of {micro_batch} sequences (batch_size={training.batch_size} / "
            f"accumulation={training.accumulation}) does not divide over {mesh.data_axes}; "
            f"make it a multiple of {mesh.num_data_shards}"
        )
    if training.sequence_length > model.max_positions:
        raise ConfigError(
            f"sequence_length={training.sequence_length} exceeds the model's max_positions="
            f"{model.max_positions}; shorten the sequence or raise model.max_positions"
        )
    if run.optimizer.warmup_steps > training.steps:
        raise ConfigError(
            f"warmup_steps={run.optimizer.warmup_steps} exceeds steps={training.steps}; set "
            "optimizer.warmup_steps"
        )
    _validate_preferences(run)
    _validate_rl(run)
    _validate_own(run)
    _validate_sharding(run)
    _validate_context(run)
    _validate_pipeline(run)
    _validate_lora(run)
    _validate_indexers(run)
    _validate_fp8(run)
    check_divides(model, mesh)
    run.exchange.num_nodes(mesh.expert)  # raises where experts' devices are not whole nodes


def with_warmup(run: RunConfig) -> RunConfig:
    """Returns the run with a warm-up of a tenth of its steps, if it is shorter than its warm-up."""
    steps = run.training.steps
    if run.optimizer.warmup_steps <= steps:
        return run
    optimizer = dataclasses.replace(run.optimizer, warmup_steps=steps // 10)
    return dataclasses.replace(run, optimizer=optimizer)


def describe_warmup(asked: RunConfig, run: RunConfig) -> str:
    """Says how much shorter a run's warm-up is than the one that was asked for."""
    return (
        f"warm-up of {run.optimizer.warmup_steps} steps instead of "
        f"{asked.optimizer.warmup_steps}: the run has {run.training.steps}"
    )


def _validate_preferences(run: RunConfig) -> None:
    preferences, data, training = run.preferences, run.data, run.training
    wanted = None if preferences is None else preferences.data_format
    if wanted != (data.format if data.format in PAIRED else None):
        given = "none" if preferences is None else f"loss={preferences.loss.value}"
        raise ConfigError(
            f"data format={data.format.value} with preferences {given}: pairs of answers and a "
            "loss of pairs go together; set "
            + ("preferences, or another data.format" if wanted is None else f"data.format={wanted}")
        )
    is_reward = preferences is not None and preferences.loss is PreferenceLoss.REWARD
    if is_reward != (run.model.head is Head.SCORE):
        raise ConfigError(
            f"model head={run.model.head.value} with preferences "
            f"{'none' if preferences is None else f'loss={preferences.loss.value}'}: a score is "
            "trained by loss=reward, and by no other; set both, or start from a language model"
        )
    if preferences is None:
        return
    if is_reward and run.lora is not None:
        raise ConfigError(
            "lora with preferences loss=reward: adapters have no head of scores; leave --lora out"
        )
    if data.mixture:
        raise ConfigError(
            f"preferences with a mixture of {len(data.mixture)} sources: pairs are read from one "
            "source; put the files into one directory"
        )
    if of_tokens := [n for n in ("loss", "z_loss", "label_smoothing") if getattr(training, n)]:
        raise ConfigError(
            f"preferences with {', '.join(of_tokens)}: pairs have a loss of their own; leave these "
            "out"
        )
    if preferences.has_reference and run.init is None:
        raise ConfigError(
            f"preferences loss={preferences.loss.value} compares with the model that the run "
            "starts from: name it with --init DIR, or choose simpo, orpo or cpo"
        )


def _validate_rl(run: RunConfig) -> None:
    rl, data, training = run.rl, run.data, run.training
    if rl is None:
        return
    for text in _refused_with_rl(run):
        raise ConfigError(text)
    rows = training.batch_size * rl.steps_per_rollout
    if rows % rl.group_size:
        raise ConfigError(
            f"a rollout of {rows} completions (batch_size={training.batch_size} x steps_per_rollout"
            f"={rl.steps_per_rollout}) is not a multiple of rl.group_size={rl.group_size}; change "
            "training.batch_size or rl.group_size"
        )
    if rl.max_new_tokens > training.sequence_length:
        raise ConfigError(
            f"rl.max_new_tokens={rl.max_new_tokens} leaves no room for a prompt in training."
            f"sequence_length={training.sequence_length}; raise the latter"
        )
    if data.tokenizer.kind is TokenizerKind.BPE or data.format is not DataFormat.TEXT:
        raise ConfigError(
            f"rl with data.format={data.format} and tokenizer kind={data.tokenizer.kind}: prompts "
            "are read from rl.prompts, for a tokenizer that there is; set format=text, and "
            "kind=file or bytes"
        )


def _refused_with_rl(run: RunConfig) -> Iterator[str]:
    """Messages about settings of the run that reinforcement learning cannot have."""
    training = run.training
    yield from _refused_meshes(run)
    if run.preferences is not None:
        yield "rl with preferences: each has a loss of its own; set one of them"
    if run.model.head is not Head.LOGITS:
        yield f"rl with model head={run.model.head.value}: sampling needs logits"
    if of_tokens := [n for n in ("loss", "z_loss", "label_smoothing") if getattr(training, n)]:
        yield f"rl with training.{', '.join(of_tokens)}: rl has a loss of its own; leave it out"
    if run.model.dropout_rate > 0.0:
        yield (
            f"rl with model.dropout_rate={run.model.dropout_rate}: the trainer's probabilities "
            "would not be those that completions were sampled with; set 0"
        )
    if run.precision.fp8 is not None:
        yield (
            "rl with precision.fp8: the trainer's probabilities would not be those that "
            "completions were sampled with; leave fp8 out"
        )


def _refused_meshes(run: RunConfig) -> Iterator[str]:
    """Messages about meshes that training and the engine of a run with rl cannot have."""
    rl, mesh = run.rl, run.mesh
    assert rl is not None
    engine = rl.mesh_of_engine(mesh)
    context = mesh.sizes()[MeshAxis.CONTEXT]
    if context > 1:
        yield f"rl with mesh context={context}: completions are not split; give fsdp the devices"
    for axis in (MeshAxis.PIPE, MeshAxis.CONTEXT):
        if (size := engine.sizes()[axis]) > 1:
            whose = " (that of training, as none is set)" if rl.engine_mesh is None else ""
            yield (
                f"rl with rl.engine_mesh {axis}={size}{whose}: the engine samples on replica, fsdp "
                f"and tensor; set rl.engine_mesh, such as fsdp={engine.num_devices}"
            )
    is_own = rl.engine_devices is EngineDevices.OWN
    if not is_own and engine.num_devices != mesh.num_devices:
        yield (
            f"rl.engine_mesh={rl.engine_mesh} of {engine.num_devices} devices with a mesh of "
            f"{mesh.num_devices}: both phases take turns on the same devices; give them equal "
            "numbers, or set rl.engine_devices=own"
        )
    if rl.overlap and not is_own and mesh.num_devices > 1:
        yield (
            f"rl.overlap on {mesh.num_devices} devices that sample and train: two programs at a "
            "time would wait for each other; set rl.engine_devices=own, or leave overlap out"
        )
    check_divides(run.model, engine)


def _validate_lora(run: RunConfig) -> None:
    if run.lora is not None and run.init is None:
        raise ConfigError(
            "lora adapts a model that is trained already; name it with --init DIR, or train all "
            "parameters"
        )
    kept = BaseWeights.COMPUTE if run.lora is None else run.lora.base
    if kept is not BaseWeights.COMPUTE and run.precision.fp8 is not None:
        raise ConfigError(
            f"lora base={kept} with precision.fp8: a quantized weight is dequantized and "
            "multiplied in the compute dtype; leave one of them out"
        )
    if kept is not BaseWeights.COMPUTE and run.sharding.keep_gathered:
        raise ConfigError(
            f"lora base={kept} with keep_gathered: quantized weights are dequantized in each "
            "pass; leave one of them out"
        )
    if run.lora is not None and run.training.remat is Remat.OPTIMAL:
        raise ConfigError(
            "remat=optimal with lora: what is computed again is priced for layers whose weights "
            "are trained; choose remat=auto or a policy"
        )


def _validate_indexers(run: RunConfig) -> None:
    """Refuses to train an indexer: its gradient is 0, and weight decay alone would move it."""
    if run.lora is not None:
        return  # what is beside adapters is frozen
    blocks = [(f"blocks/{i}", block) for i, block in enumerate(run.model.blocks)]
    blocks += [("mtp/block", run.model.mtp_part.blocks[0])] if run.model.mtp else []
    for at, block in blocks:
        if indexer_of(block.mixer) is None:
            continue
        for name in INDEXER_PARAMETERS:
            path = f"{at}/attention/indexer/{name}"
            if not any(fnmatch.fnmatchcase(path, each) for each in run.optimizer.frozen):
                raise ConfigError(
                    f"optimizer.frozen={list(run.optimizer.frozen)} leaves out {path}: no gradient "
                    "passes through an indexer's choice of keys and its own loss is not computed "
                    "here, so weight decay alone would change it; freeze it by --set "
                    "'optimizer.frozen=[\"*/indexer/*\"]'"
                )


def _validate_fp8(run: RunConfig) -> None:
    if run.precision.fp8 is None:
        return
    if run.sharding.keep_gathered:
        raise ConfigError(
            "keep_gathered keeps weights of the policy's format, and fp8 gathers them in 8 bits; "
            "leave one of them out"
        )
    latent = any(isinstance(each.mixer, LatentAttentionConfig) for each in run.model.blocks)
    if latent and run.mesh.context > 1:
        raise ConfigError(
            f"fp8 with latent attention and context={run.mesh.context}: what rebuilds heads of the "
            "latents that devices exchange is not in 8 bits; use fsdp in place of context"
        )


def _validate_sharding(run: RunConfig) -> None:
    sharding, mesh, length = run.sharding, run.mesh, run.training.sequence_length
    if sharding.zero < 3 and mesh.fsdp == 1:
        raise ConfigError(
            f"zero={sharding.zero} shards over the fsdp axis, which has one device here; give it "
            "some, as in --mesh fsdp=8"
        )
    if sharding.keep_gathered and (mesh.fsdp == 1 or sharding.zero < 3):
        raise ConfigError(
            f"keep_gathered keeps weights that are gathered, and with fsdp={mesh.fsdp}, zero="
            f"{sharding.zero} none are; leave it out, or give --mesh fsdp=N at stage 3"
        )
    if sharding.sequence_parallel:
        if mesh.tensor == 1:
            raise ConfigError(
                "sequence_parallel shards the residual stream over the tensor axis, which has one "
                "device here; give it some, as in --mesh tensor=4"
            )
        if length % (mesh.context * mesh.tensor):
            raise ConfigError(
                f"sequence_length={length} does not divide over context={mesh.context} x tensor="
                f"{mesh.tensor}, which sequence_parallel asks for; make it a multiple of "
                f"{mesh.context * mesh.tensor}"
            )


def may_keep_gathered(run: RunConfig) -> bool:
    """Whether ``sharding.keep_gathered`` applies: a run all-gathers weights that it could keep from
    the forward to the backward pass.
    """
    in_few_bits = run.lora is not None and run.lora.base is not BaseWeights.COMPUTE
    is_gathered = run.mesh.fsdp > 1 and run.sharding.zero == 3
    return is_gathered and run.mesh.pipe == 1 and run.precision.fp8 is None and not in_few_bits


def _validate_own(run: RunConfig) -> None:
    """Checks that the run asks nothing of the user's own layers that they cannot do."""
    mesh, training, mixers = run.mesh, run.training, [b.mixer for b in run.model.blocks]
    functions = [m.function for m in mixers if isinstance(m, GroupedAttentionConfig) and m.function]
    records = [type(mixer).__name__ for mixer in mixers if isinstance(mixer, OwnMixer)]
    if mesh.context > 1 and (functions or records):
        raise ConfigError(
            f"context={mesh.context} with {', '.join([*functions, *records])}: a device would have "
            "a part of the sequence, and your own attention sees all of it; use fsdp and tensor"
        )
    if functions and training.attention is not AttentionImplementation.AUTO:
        raise ConfigError(
            f"attention={training.attention.value} with {functions[0]}, which computes it: leave "
            "training.attention out"
        )


def _validate_context(run: RunConfig) -> None:
    mesh, training = run.mesh, run.training
    if mesh.context == 1:
        return
    if training.sequence_length % (2 * mesh.context):
        raise ConfigError(
            f"sequence_length={training.sequence_length} does not divide into 2 x context="
            f"{mesh.context} chunks, two a device; make it a multiple of {2 * mesh.context}"
        )
    if run.model.mtp:
        raise ConfigError(
            f"context={mesh.context} with model.mtp: its loss needs the token after next, which "
            "another device may have; use fsdp and tensor, or set model.mtp=false"
        )
    _validate_context_of_latents(run)
    mixers = [
        each.attention if isinstance(each, AttentionBesideStateConfig) else each
        for each in (block.mixer for block in run.model.blocks)
    ]
    if any(isinstance(each, GroupedAttentionConfig) and each.sinks for each in mixers):
        raise ConfigError(
            f"context={mesh.context} with attention sinks: parts of a softmax are merged without "
            "them; use fsdp and tensor instead"
        )
    if any(
        isinstance(m, GroupedAttentionConfig) and (m.chunk or m.distance_slopes) for m in mixers
    ):
        raise ConfigError(
            f"context={mesh.context} with chunks or distance slopes of attention: parts of a "
            "sequence are merged without them; use fsdp instead"
        )
    if training.context_method is ContextMethod.ULYSSES:
        for block in run.model.blocks:
            kv_heads = block.mixer.num_kv_heads
            if kv_heads % (mesh.tensor * mesh.context):
                raise ConfigError(
                    f"context_method=ulysses gives each device some of num_kv_heads={kv_heads}, "
                    f"which does not divide over tensor={mesh.tensor} x context={mesh.context}; "
                    "choose context_method=ring"
                )


def _validate_context_of_latents(run: RunConfig) -> None:
    method, length = run.training.context_method, run.training.sequence_length
    for mixer in (block.mixer for block in run.model.blocks):
        if not isinstance(mixer, LatentAttentionConfig):
            continue
        if mixer.indexer is not None:
            raise ConfigError(
                f"context={run.mesh.context} with an indexer: it chooses among all keys of a "
                "sequence, and devices have some of them; use fsdp in place of context"
            )
        if method not in LATENT_METHODS:
            raise ConfigError(
                f"context_method={method.value} with latent attention: devices exchange latents, "
                f"not heads; choose {' or '.join(each.value for each in LATENT_METHODS)}"
            )
        if mixer.window is not None and mixer.window < length:
            raise ConfigError(
                f"window={mixer.window} with latent attention over context={run.mesh.context}: "
                "windows there are not implemented; leave the window or the context axis out"
            )


def _validate_pipeline(run: RunConfig) -> None:
    pipe = run.mesh.pipe
    if pipe == 1:
        return
    for text in _refused_by_stages(run):
        raise ConfigError(text)
    groups, pipeline = run.model.stacks[0].repeats, run.pipeline
    if groups < pipe * pipeline.chunks_per_stage:
        raise ConfigError(
            f"{groups} repetitions of the block pattern are too few for pipe={pipe} stages x "
            f"{pipeline.chunks_per_stage} chunks of schedule={pipeline.schedule.value}; each needs "
            f"one: choose a pipe size or schedule of at most {groups}"
        )


def _refused_by_stages(run: RunConfig) -> Iterator[str]:
    """Messages about settings of the run that stages of a pipeline cannot have."""
    training, fp8, pipe = run.training, run.precision.fp8, f"with pipe={run.mesh.pipe}"
    first, last = (fp8.first_layers_out, fp8.last_layers_out) if fp8 is not None else (0, 0)
    if len(run.model.stacks) > 1:
        yield (
            f"{len(run.model.stacks)} stacks of layers {pipe}: stages share out the repetitions of "
            "one; use fsdp and tensor instead"
        )
    if run.model.mtp:
        yield (
            f"model.mtp {pipe}: stages share out the model's layers, and the last one's loss is of "
            "the next token alone; use fsdp and tensor, or set model.mtp=false"
        )
    if training.remat in (Remat.OPTIMAL, Remat.CHOSEN):
        yield (
            f"remat={training.remat} {pipe}: layers of stages are one program and keep the same; "
            "choose remat=auto or a policy"
        )
    if training.unroll > 1:
        yield (
            f"unroll={training.unroll} {pipe}: stages loop over their layers one by one; set "
            "training.unroll=1"
        )
    if training.context_method is ContextMethod.RING and run.mesh.context > 1:
        yield (
            f"context_method=ring {pipe}: stages do different work at a time, and would wait for "
            "each other's sends; choose context_method=all_gather or ulysses"
        )
    if run.sharding.keep_gathered:
        yield (
            f"keep_gathered {pipe}: a stage would keep its weights for every micro-batch in "
            "flight; leave it out"
        )
    if run.lora is not None:
        yield f"lora {pipe}: stages train all of their parameters; use fsdp and tensor instead"
    if run.preferences is not None:
        yield (
            f"preferences {pipe}: stages take the loss of a part of the tokens, and a pair's is of "
            "both answers; use fsdp and tensor"
        )
    if training.loss is not None:
        yield (
            f"loss={training.loss} {pipe}: stages take the loss of a part of the tokens with the "
            "built-in cross entropy; use fsdp and tensor"
        )
    if run.precision.weights is StoredWeights.BF16:
        yield (
            f"weights=bf16 {pipe}: stages sum gradients of micro-batches in the format of the "
            "weights; use fsdp and tensor, or weights=fp32"
        )
    if first + last > 0:
        yield (
            f"fp8 first_layers_out={first}, last_layers_out={last} {pipe}: layers of stages are "
            "one program; use fsdp and tensor, or leave no layer out of 8 bits"
        )
