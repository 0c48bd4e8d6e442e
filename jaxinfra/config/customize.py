"""Puts a user's own functions and layers into a run in place of built-in ones."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfra.config.model import (
    BlockConfig,
    FeedForwardConfig,
    GroupedAttentionConfig,
    MixerConfig,
    ModelConfig,
)
from jaxinfra.config.optimizer import RATE, UPDATE, OptimizerConfig
from jaxinfra.config.parts import part_name
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError


def customize(
    config: RunConfig,
    *,
    loss: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
    norm: Callable[..., Any] | None = None,
    mixer: MixerConfig | None = None,
    feed_forward: FeedForwardConfig | None = None,
    optimizer: Callable[..., Any] | None = None,
    schedule: Callable[..., Any] | None = None,
    gradients: Callable[..., Any] | None = None,
    frozen: Sequence[str] | None = None,
) -> RunConfig:
    """Puts functions and layers of your own into a run; config.json names them.

    Mark them with ``jaxinfra.part`` where they are defined, so that other processes, such as
    ``jaxinfra generate``, can import them by name.

    Args:
        config: the config to change; arguments that are left out change nothing.
        loss: ``(logits [B, T, V] fp32, targets [B, T], *, weights [B, T]) -> [B, T]``, each
            token's loss, which is averaged by ``weights``: 0 where a target does not count. It sees
            a whole micro-batch, so rows may be compared. The held-out loss stays the cross
            entropy, so that runs compare.
        attention: ``(q [B, T, N, H], k [B, S, K, H], v [B, S, K, H], *, mask, distance) -> [B, T,
            N, H]``, of grouped attention: ``mask`` [B, T, S] says which keys a query may see, and
            ``distance`` how many tokens before it they stand. On a mesh it is given a device's rows
            and heads.
        norm: ``(x [..., D] fp32, epsilon) -> [..., D]``; scale and bias follow.
        mixer, feed_forward: records, of your own (``OwnMixer``, ``OwnFeedForward``) or built in.
        optimizer: ``(learning_rate) -> optax.GradientTransformation``, given the run's schedule. It
            takes the place of the kind, its constants, Muon and weight decay; ``clip_norm`` clips
            before it.
        schedule: ``(step, *, steps, peak) -> learning rate``, step int32 [], given the run's steps
            and ``learning_rate``. It takes the place of the schedule and its warm-up.
        gradients: ``() -> optax.GradientTransformation``, applied to gradients before they are
            clipped; ``gradient_norm`` stays that of the gradients as they were.
        frozen: patterns of parameters that stay as they begin, such as ``"embedding/*"``; they are
            saved with the rest and have no optimizer state.

    Raises:
        ConfigError: a function that no config can name; attention for a mixer that has none; a
            value that is none of these.

    Examples:
        >>> wide = jaxinfra.MlpConfig(hidden_dim=1024)
        >>> config = jaxinfra.customize(jaxinfra.preset("tiny"), feed_forward=wide)
        >>> config.model.blocks[0].feed_forward.hidden_dim
        1024
    """

    _require(config, RunConfig, "config")
    model = _own_blocks(config.model, attention, norm, mixer, feed_forward)
    learns = _own_optimizer(config.optimizer, optimizer, schedule, gradients, frozen)
    training = config.training
    if loss is not None:
        training = dataclasses.replace(training, loss=part_name(loss))
    return dataclasses.replace(config, model=model, training=training, optimizer=learns)


def _own_blocks(
    model: ModelConfig,
    attention: Callable[..., Any] | None,
    norm: Callable[..., Any] | None,
    mixer: MixerConfig | None,
    feed_forward: FeedForwardConfig | None,
) -> ModelConfig:
    _require(mixer, MixerConfig.__value__ | None, "mixer")
    _require(feed_forward, FeedForwardConfig.__value__ | None, "feed_forward")

    def changed(block: BlockConfig) -> BlockConfig:
        mixing = _with_attention(mixer or block.mixer, attention)
        normed = block.norm
        if norm is not None:
            normed = dataclasses.replace(normed, function=part_name(norm))
        feeding = feed_forward or block.feed_forward
        return dataclasses.replace(block, mixer=mixing, feed_forward=feeding, norm=normed)

    return model.with_blocks(changed)


def _own_optimizer(
    config: OptimizerConfig,
    optimizer: Callable[..., Any] | None,
    schedule: Callable[..., Any] | None,
    gradients: Callable[..., Any] | None,
    frozen: Sequence[str] | None,
) -> OptimizerConfig:
    changes: dict[str, Any] = {}
    if optimizer is not None:
        changes |= {**UPDATE, "function": part_name(optimizer)}
    if schedule is not None:
        changes |= {**RATE, "schedule_function": part_name(schedule)}
    if gradients is not None:
        changes["gradients"] = part_name(gradients)
    if frozen is not None:
        _require(frozen, list | tuple, "frozen")
        changes["frozen"] = tuple(frozen)
    return dataclasses.replace(config, **changes)


def _require(value: Any, kinds: Any, what: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(
            f"customize {what}={value!r} is a {type(value).__name__}; give {_NEEDED[what]}"
        )


_NEEDED = {
    "config": "a RunConfig, such as jaxinfra.preset returns",
    "mixer": "a record, such as GroupedAttentionConfig or a subclass of OwnMixer",
    "feed_forward": "a record, such as MlpConfig or a subclass of OwnFeedForward",
    "frozen": "a tuple of patterns, as in frozen=('embedding/*',)",
}


def _with_attention(mixer: MixerConfig, attention: Callable[..., Any] | None) -> MixerConfig:
    if attention is None:
        return mixer
    if not isinstance(mixer, GroupedAttentionConfig):
        raise ConfigError(
            f"attention={attention.__name__} for {type(mixer).__name__}: it takes the place of "
            "grouped attention only"
        )
    return dataclasses.replace(mixer, function=part_name(attention))
