"""Shared reading and writing of the configs of Llama's descendants."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfra.config.kinds import MlpKind, NormPlacement
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
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_rope, write_rope

FULL, SLIDING = "full_attention", "sliding_attention"

_ACTIVATIONS = {
    "silu": MlpKind.SWIGLU,
    "swish": MlpKind.SWIGLU,
    "gelu": MlpKind.GEGLU,
    "gelu_pytorch_tanh": MlpKind.GEGLU_TANH,
    "gelu_new": MlpKind.GEGLU_TANH,
}
ACTIVATION_NAMES = {
    MlpKind.SWIGLU: "silu",
    MlpKind.GEGLU: "gelu",
    MlpKind.GEGLU_TANH: "gelu_pytorch_tanh",
}
"""Inverse of the reader's table; gated activations only."""


def decoder_config(
    keys: Keys,
    *,
    windows: Sequence[int | None] = (None,),
    activation_key: str = "hidden_act",
    mlp_bias: bool = False,
    mixer: Callable[[RopeConfig], MixerConfig] | None = None,
    logit_cap: float | None = None,
    norm_offset: float = 0.0,
    norm_placement: NormPlacement = NormPlacement.PRE,
    embedding_scale: float = 1.0,
    tied_by_default: bool = False,
    partial_rotary: bool = False,
    original_max_positions: int | None = None,
    default_theta: float = 10_000.0,
    dropout_rate: float = 0.0,
    **attention: Any,
) -> ModelConfig:
    """Reads a config with Llama's keys and the given differences.

    Args:
        windows: one window for all layers, or a window per layer.
        mixer: mixer that replaces grouped attention, including its rotary embedding.
        partial_rotary: whether the architecture may rotate only a fraction of each head.
        original_max_positions: default for a scaled rotary embedding whose config has none.
        attention: further fields of ``GroupedAttentionConfig``.
    """
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    max_positions = keys.integer("max_position_embeddings")
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"), scale_offset=norm_offset)
    rope = read_rope(
        keys,
        max_positions=max_positions,
        original_max_positions=original_max_positions,
        default_theta=default_theta,
    )
    if rope.fraction != 1.0 and not partial_rotary:
        raise ConfigError(
            f"partial_rotary_factor={rope.fraction}: this architecture rotates whole heads"
        )
    mlp = MlpConfig(
        hidden_dim=keys.integer("intermediate_size"),
        kind=keys.choice(activation_key, _ACTIVATIONS),
        bias=mlp_bias,
    )
    if mixer is None:
        grouped = functools.partial(
            GroupedAttentionConfig,
            num_q_heads=heads,
            num_kv_heads=keys.integer("num_key_value_heads", heads),
            head_dim=keys.integer("head_dim", width // heads),
            rope=rope,
            **attention,
        )
        mixers = [grouped(window=window) for window in period(windows)]
    else:
        mixers = [mixer(rope) for _ in period(windows)]
    rest = {"feed_forward": mlp, "norm": norm, "norm_placement": norm_placement}
    blocks = [BlockConfig(mixer=each, **rest) for each in mixers]
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        model_dim=width,
        max_positions=max_positions,
        stacks=stacked(*blocks, num_layers=keys.integer("num_hidden_layers")),
        tie_embeddings=keys.flag("tie_word_embeddings", tied_by_default),
        embedding_scale=embedding_scale,
        final_norm=norm,
        logit_soft_cap=logit_cap,
        dropout_rate=dropout_rate,
        init_std=keys.number("initializer_range", 0.02),
    )


def decoder_keys(config: ModelConfig, *, mlp: MlpConfig | None = None) -> dict[str, Any]:
    """Writes the keys that ``decoder_config`` reads for every architecture.

    Args:
        mlp: the dense feed-forward layer; None takes the first block's.
    """
    block = config.blocks[0]
    attention = block.mixer
    if mlp is None:
        attention, mlp = dense_block(config)
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
    } | ({} if attention.rope is None else write_rope(attention.rope))


def dense_block(config: ModelConfig) -> tuple[GroupedAttentionConfig, MlpConfig]:
    """Returns the layers of the first block; raises ConfigError where they are of other kinds."""
    block = config.blocks[0]
    if not isinstance(block.mixer, GroupedAttentionConfig):
        raise ConfigError(f"{type(block.mixer).__name__}: grouped attention is what these write")
    if not isinstance(block.feed_forward, MlpConfig):
        raise ConfigError(f"{type(block.feed_forward).__name__}: dense layers are what these write")
    return block.mixer, block.feed_forward


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
    """Returns each Qwen layer's window: by its type, or from ``max_window_layers`` on."""
    use_windows = keys.flag("use_sliding_window", False)
    if use_windows:
        keys.require("sliding_window", "max_window_layers")
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
