"""Shared reading and writing of the configs of Llama's descendants."""

import dataclasses
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    Stack,
    stacked,
)
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import REQUIRED, Keys
from jaxinfra.hf.rope import read_rope, write_rope, write_ropes_by_type

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_OLDER = {"mamba": LINEAR, "attention": FULL}
# The reference has several names, and ways to compute, of these two functions.
_GELU = ("gelu", "gelu_python")
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
_GATED = {
    "silu": MlpKind.SWIGLU,
    "swish": MlpKind.SWIGLU,
    **dict.fromkeys(_GELU, MlpKind.GEGLU),
    **dict.fromkeys(_GELU_TANH, MlpKind.GEGLU_TANH),
}
UNGATED = {
    **dict.fromkeys(_GELU_TANH, MlpKind.GELU_TANH),
    **dict.fromkeys(_GELU, MlpKind.GELU),
    "relu": MlpKind.RELU,
    "relu2": MlpKind.RELU_SQUARED,
    "xielu": MlpKind.XIELU,
}
ACTIVATION_NAMES = {
    MlpKind.SWIGLU: "silu",
    MlpKind.GEGLU: "gelu",
    MlpKind.GEGLU_TANH: "gelu_pytorch_tanh",
    MlpKind.GELU_TANH: "gelu_new",
    MlpKind.GELU: "gelu",
    MlpKind.RELU: "relu",
    MlpKind.RELU_SQUARED: "relu2",
    MlpKind.XIELU: "xielu",
}
"""Inverse of the readers' tables."""


def decoder_config(
    keys: Keys,
    *,
    windows: Sequence[int | None] = (None,),
    layers: Sequence[Mapping[str, Any]] | None = None,
    width: int | None = None,
    num_kv_heads: int | None = None,
    hidden_dim: int | None = None,
    max_positions: int | None = None,
    norm: NormConfig | None = None,
    rope: RopeConfig | None = None,
    has_rope: bool = True,
    activation_key: str = "hidden_act",
    activation: MlpKind | None = None,
    activation_default: Any = REQUIRED,
    gated: bool = True,
    mlp_bias: bool = False,
    mixer: Callable[[RopeConfig], MixerConfig] | None = None,
    partial_rotary: bool = False,
    original_max_positions: int | None = None,
    default_theta: float = 10_000.0,
    default_fraction: float = 1.0,
    pairs: RopePairs = RopePairs.HALVES,
    attention_bias: bool = False,
    tied_by_default: bool = False,
    block: Mapping[str, Any] = types.MappingProxyType({}),
    model: Mapping[str, Any] = types.MappingProxyType({}),
    **attention: Any,
) -> ModelConfig:
    """Reads a config with Llama's keys and the given differences.

    Args:
        windows: one window for all layers, or a window per layer.
        layers: fields of ``GroupedAttentionConfig`` that differ, by layer, in place of windows.
        width, num_kv_heads, hidden_dim, max_positions: sizes that are not under Llama's names.
        norm: all norms of the stream; None: RMSNorm with ``rms_norm_eps``.
        rope: rotary embedding of layers that have none of their own; None: read from the config.
        has_rope: whether the architecture rotates queries and keys at all.
        activation: activation of feed-forward layers; None: read from ``activation_key``.
        activation_default: name of the activation where the config has none.
        gated: whether that activation has a gate projection.
        mixer: mixer that replaces grouped attention, including its rotary embedding.
        partial_rotary: whether the architecture may rotate only a fraction of each head.
        original_max_positions, default_theta, default_fraction, pairs: as in ``read_rope``.
        attention_bias: whether all four projections of attention have biases.
        block, model: further fields of ``BlockConfig`` and of ``ModelConfig``.
        attention: further fields of ``GroupedAttentionConfig``.
    """
    width = width or keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    max_positions = max_positions or keys.integer("max_position_embeddings")
    if norm is None:
        norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    if has_rope and rope is None:
        rope = read_rope(
            keys,
            max_positions=max_positions,
            original_max_positions=original_max_positions,
            default_theta=default_theta,
            default_fraction=default_fraction,
            pairs=pairs,
        )
    if rope is not None and rope.fraction != 1.0 and not partial_rotary:
        raise ConfigError(
            f"partial_rotary_factor={rope.fraction}: this architecture rotates whole heads"
        )
    mlp = MlpConfig(
        hidden_dim=hidden_dim or keys.integer("intermediate_size"),
        kind=activation
        or keys.choice(activation_key, _GATED if gated else UNGATED, activation_default),
        bias=mlp_bias,
    )
    each_layer = period([{"window": w} for w in windows] if layers is None else layers)
    if mixer is None:
        plain: dict[str, Any] = {
            "num_q_heads": heads,
            "num_kv_heads": num_kv_heads or keys.integer("num_key_value_heads", heads),
            "head_dim": keys.integer("head_dim", width // heads),
            "rope": rope,
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            **attention,
        }
        mixers = [GroupedAttentionConfig(**{**plain, **each}) for each in each_layer]
    else:
        assert rope is not None, "a mixer's rope is read"
        mixers = [mixer(rope) for _ in each_layer]
    blocks = [BlockConfig(mixer=each, feed_forward=mlp, norm=norm, **block) for each in mixers]
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        model_dim=width,
        max_positions=max_positions,
        stacks=in_stacks(blocks, num_layers=keys.integer("num_hidden_layers")),
        tie_embeddings=keys.flag("tie_word_embeddings", tied_by_default),
        final_norm=norm,
        init_std=keys.number("initializer_range", 0.02),
        **model,
    )


def model_of(
    keys: Keys,
    blocks: Sequence[BlockConfig],
    *,
    max_positions: int | None = None,
    tied_by_default: bool = False,
    init_std: float = 0.02,
) -> ModelConfig:
    """Reads the keys around layers that a family reads itself; the first's norm is the last too.

    Args:
        max_positions: where states know no positions; None: read from the config.
        tied_by_default, init_std: values where the config has none.
    """
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        model_dim=keys.integer("hidden_size"),
        max_positions=max_positions or keys.integer("max_position_embeddings"),
        stacks=in_runs(blocks),
        tie_embeddings=keys.flag("tie_word_embeddings", tied_by_default),
        final_norm=blocks[0].norm,
        init_std=keys.number("initializer_range", init_std),
    )


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that ``model_of`` reads, but for the number of positions."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }


def in_stacks(blocks: Sequence[BlockConfig], *, num_layers: int) -> tuple[Stack, ...]:
    """Returns layers as one stack of a repeating pattern, and a second one for layers left over.

    Args:
        blocks: the pattern, or all layers if their number is no multiple of a pattern's length.
    """
    if len(blocks) < num_layers:
        return stacked(*blocks, num_layers=num_layers)
    for length in range(1, num_layers // 2 + 1):
        if all(block == blocks[i % length] for i, block in enumerate(blocks)):
            repeats, rest = divmod(num_layers, length)
            whole = Stack(pattern=tuple(blocks[:length]), repeats=repeats)
            return (whole, Stack(pattern=tuple(blocks[:rest]), repeats=1)) if rest else (whole,)
    return (Stack(pattern=tuple(blocks), repeats=1),)


def in_runs(blocks: Sequence[BlockConfig]) -> tuple[Stack, ...]:
    """Returns layers as stacks, each of the pattern that repeats over most of the layers left.

    Models of many kinds of layers are traced and compiled by as few blocks as they have.
    """
    stacks: list[Stack] = []
    loose: list[BlockConfig] = []  # layers of no pattern, since the last stack

    def close() -> None:
        if loose:
            stacks.append(Stack(pattern=tuple(loose), repeats=1))
            loose.clear()

    first = 0
    while first < len(blocks):
        left = blocks[first:]
        count = {length: _repeats(left, length) for length in range(1, len(left) // 2 + 1)}
        length = max(count, key=lambda each: (count[each] > 1) * each * count[each], default=1)
        if count.get(length, 1) > 1:
            close()
            stacks.append(Stack(pattern=tuple(left[:length]), repeats=count[length]))
        else:
            loose.append(left[0])
        first += length * count[length] if count.get(length, 1) > 1 else 1
    close()
    return tuple(stacks)


def _repeats(blocks: Sequence[BlockConfig], length: int) -> int:
    """Number of times that the first layers follow one another from the beginning."""
    pattern, count = blocks[:length], 1
    while blocks[count * length : (count + 1) * length] == pattern:
        count += 1
    return count


def with_mixers(config: ModelConfig, mixers: Sequence[MixerConfig | None]) -> ModelConfig:
    """Returns the model with other mixers, one entry per layer; None keeps a layer's own."""
    blocks = [
        block if mixer is None else dataclasses.replace(block, mixer=mixer)
        for block, mixer in zip(config.layers, mixers, strict=True)
    ]
    return dataclasses.replace(config, stacks=in_runs(blocks))


def as_attending[M](config: ModelConfig, absent: M) -> tuple[ModelConfig, M]:
    """Returns the model as if all of its layers attended, and its first mixer of another kind.

    Args:
        absent: a mixer of that kind, for the keys of a model that has none.
    """
    mixers = (block.mixer for block in config.layers)
    other = next((each for each in mixers if isinstance(each, type(absent))), absent)
    attention = next(
        (b.mixer for b in config.layers if isinstance(b.mixer, GroupedAttentionConfig)),
        GroupedAttentionConfig(num_q_heads=1, num_kv_heads=1, head_dim=config.model_dim, rope=None),
    )
    return with_mixers(config, [attention] * config.num_layers), other


def state_types(keys: Keys, default: Sequence[str], *, state: str = LINEAR) -> tuple[str, ...]:
    """Reads which layers have a state and which attend: ``layer_types``, or ``layers_block_type``.

    Args:
        default: types where the config names none.
        state: name of layers with a state.
    """
    named = keys.sequence("layers_block_type", default)
    types = tuple(_OLDER.get(each, each) for each in keys.sequence("layer_types", named))
    unknown = sorted({str(each) for each in types if each not in (state, FULL)})
    if unknown:
        raise ConfigError(
            f"layer_types: {', '.join(unknown)} is not supported; known: {state}, {FULL}"
        )
    if len(types) != (num_layers := keys.integer("num_hidden_layers")):
        raise ConfigError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return types


def decoder_keys(config: ModelConfig, *, mlp: MlpConfig | None = None) -> dict[str, Any]:
    """Writes the keys that ``decoder_config`` reads for every architecture.

    Args:
        mlp: the dense feed-forward layer; None takes the first block's.
    """
    block = config.blocks[0]
    attention = block.mixer
    if mlp is None:
        attention, mlp = dense_block(config)
    rope = next((each.mixer.rope for each in config.blocks if each.mixer.rope is not None), None)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": mlp.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_q_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": ACTIVATION_NAMES.get(mlp.kind),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": block.norm.epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    } | ({} if rope is None else write_rope(rope))


def renamed(keys: Mapping[str, Any], **names: str | None) -> dict[str, Any]:
    """Returns written keys under an architecture's own names; None leaves a key out."""
    found = {names.get(name, name): value for name, value in keys.items()}
    return {name: value for name, value in found.items() if name is not None}


def inverse(value: float) -> float:
    """Returns the shortest number whose inverse is the value."""
    found = (float(f"{1.0 / value:.{digits}g}") for digits in range(1, 18))
    return next((each for each in found if 1.0 / each == value), 1.0 / value)


def dense_block(config: ModelConfig) -> tuple[GroupedAttentionConfig, MlpConfig]:
    """Returns the layers of the first block; raises ConfigError where they are of other kinds."""
    block = config.blocks[0]
    if not isinstance(block.mixer, GroupedAttentionConfig):
        raise ConfigError(f"{type(block.mixer).__name__}: grouped attention is what these write")
    if not isinstance(block.feed_forward, MlpConfig):
        raise ConfigError(f"{type(block.feed_forward).__name__}: dense layers are what these write")
    return block.mixer, block.feed_forward


def mlp_kind(config: ModelConfig) -> MlpKind:
    """Returns the activation of the first block's feed-forward layer."""
    feed_forward = config.blocks[0].feed_forward
    assert feed_forward is not None, "decoder_config"
    return feed_forward.kind


def routed(dense: ModelConfig, experts: Sequence[ExpertsConfig | None]) -> ModelConfig:
    """Returns the dense model with experts in some layers, in as few stacks as possible."""
    layers = [
        block if each is None else dataclasses.replace(block, feed_forward=each)
        for block, each in zip(dense.layers, experts, strict=True)
    ]
    pattern = period(layers)
    if len(pattern) < len(layers):
        stacks = stacked(*pattern, num_layers=len(layers))
    else:
        runs = ((block, len(list(same))) for block, same in itertools.groupby(layers))
        stacks = tuple(Stack(pattern=(block,), repeats=count) for block, count in runs)
    return dataclasses.replace(dense, stacks=stacks)


def routes(config: ModelConfig) -> list[bool]:
    """Tells for each layer whether it has experts."""
    return [isinstance(block.feed_forward, ExpertsConfig) for block in config.layers]


def layer_windows(keys: Keys) -> tuple[int | None, ...]:
    """Returns each Qwen layer's window, from ``layer_types`` or else ``max_window_layers``."""
    use_windows = keys.flag("use_sliding_window", False)
    if use_windows:
        keys.require("sliding_window", *(() if keys.has("layer_types") else ("max_window_layers",)))
    window = keys.integer("sliding_window", None)
    start = keys.integer("max_window_layers", None)
    types = keys.sequence("layer_types", None)
    num_layers = keys.integer("num_hidden_layers")
    if not use_windows:
        window = None
    if types is None:
        types = [SLIDING if window and i >= start else FULL for i in range(num_layers)]
    return typed_windows(types, window, num_layers=num_layers)


def window_keys(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that ``layer_windows`` reads."""
    windows = [block.mixer.window for block in config.layers]
    widths = {window for window in windows if window is not None}
    return {
        "use_sliding_window": bool(widths),
        "sliding_window": max(widths, default=None),
        # What releases before layer_types read: the layers from here on have windows.
        "max_window_layers": next(
            (i for i, window in enumerate(windows) if window is not None), len(windows)
        ),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def layer_types(keys: Keys, *, every: int) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Reads each layer's type and window.

    Args:
        every: period of the layers without a window, where the config names no types.
    """
    num_layers = keys.integer("num_hidden_layers")
    by_default = [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
    types = keys.sequence("layer_types", by_default)
    window = keys.integer("sliding_window", None)
    return types, typed_windows(types, window, num_layers=num_layers)


def rotated_by_type(
    types: Sequence[str], windows: Sequence[int | None], ropes: Mapping[str, RopeConfig]
) -> list[dict[str, Any]]:
    """Returns the fields of attention by layer where each type has a rotary embedding."""
    return [
        {"window": window, "rope": ropes[kind]} for window, kind in zip(windows, types, strict=True)
    ]


def with_ropes_by_type(keys: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns written keys with a rotary embedding of each type of layer in place of one."""
    found: dict[str, RopeConfig] = {}
    for block in config.blocks:
        if block.mixer.rope is not None:
            found[FULL if block.mixer.window is None else SLIDING] = block.mixer.rope
    if not found:
        raise ConfigError("layers without rotary embedding: these write one of each type of layer")
    (first, *_) = found.values()
    plain = {name: keys[name] for name in keys if name not in ("rope_theta", "rope_scaling")}
    return plain | write_ropes_by_type({SLIDING: first, FULL: first} | found)


def type_keys(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that ``layer_types`` reads; a model without windows has its whole length."""
    found = window_keys(config)
    # The reference makes a mask of windows whether a layer has one or not.
    width = found["sliding_window"] or config.max_positions
    return {"sliding_window": width, "layer_types": found["layer_types"]}


def typed_windows(
    types: Sequence[str], window: int | None, *, num_layers: int
) -> tuple[int | None, ...]:
    """Returns each layer's attention window: ``window`` where its type is sliding, else None."""
    if len(types) != num_layers:
        raise ConfigError(f"layer_types has {len(types)} entries for {num_layers} layers")
    known = (FULL, SLIDING)
    for each in types:
        if each not in known:
            raise ConfigError(f"layer_types: {each!r} is not supported; known: {', '.join(known)}")
    if window is None and SLIDING in types:
        raise ConfigError(f"layer_types has {SLIDING!r}, but no sliding_window is set")
    return tuple(window if each == SLIDING else None for each in types)


def period[T](values: Sequence[T]) -> Sequence[T]:
    """Returns the shortest prefix that the values repeat."""
    for length in range(1, len(values)):
        if len(values) % length == 0 and all(
            value == values[i % length] for i, value in enumerate(values)
        ):
            return values[:length]
    return values
