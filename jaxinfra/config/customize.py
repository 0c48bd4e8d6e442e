"""Puts a user's own functions and layers into a run in place of built-in ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfra.config.model import (
    BlockConfig,
    FeedForwardConfig,
    GroupedAttentionConfig,
    MixerConfig,
)
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
) -> RunConfig:
    """Puts functions and layers of your own into every block; config.json names them.

    Functions and records that other processes read, such as ``jaxinfra generate``, are marked with
    ``jaxinfra.part`` where they are defined.

    Args:
        config: what to change; what is not named below stays.
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

    Raises:
        ConfigError: a function that no config can name; attention for a mixer that has none.

    Examples:
        >>> wide = jaxinfra.MlpConfig(hidden_dim=1024)
        >>> config = jaxinfra.customize(jaxinfra.preset("tiny"), feed_forward=wide)
        >>> config.model.blocks[0].feed_forward.hidden_dim
        1024
    """

    def changed(block: BlockConfig) -> BlockConfig:
        mixing = _with_attention(mixer or block.mixer, attention)
        normed = block.norm
        if norm is not None:
            normed = dataclasses.replace(normed, function=part_name(norm))
        feeding = feed_forward or block.feed_forward
        return dataclasses.replace(block, mixer=mixing, feed_forward=feeding, norm=normed)

    stacks = tuple(
        dataclasses.replace(stack, pattern=tuple(map(changed, stack.pattern)))
        for stack in config.model.stacks
    )
    training = config.training
    if loss is not None:
        training = dataclasses.replace(training, loss=part_name(loss))
    model = dataclasses.replace(config.model, stacks=stacks)
    return dataclasses.replace(config, model=model, training=training)


def _with_attention(mixer: MixerConfig, attention: Callable[..., Any] | None) -> MixerConfig:
    if attention is None:
        return mixer
    if not isinstance(mixer, GroupedAttentionConfig):
        raise ConfigError(
            f"attention={attention.__name__} for {type(mixer).__name__}: it takes the place of "
            "grouped attention only"
        )
    return dataclasses.replace(mixer, function=part_name(attention))
