"""Runs of reinforcement learning: ``train`` on completions of the run's own model."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.config.parts import part_name
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.reinforcement.rollouts import RolloutData
from jaxinfra.training.metrics import Callback
from jaxinfra.training.session import train
from jaxinfra.training.summary import Outcome


def rl(
    config: RunConfig,
    directory: str | Path,
    *,
    reward: Callable[..., float] | None = None,
    advantage: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    resume: bool = False,
    cache_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Trains a model by reinforcement learning until ``config.training.steps``, or until SIGINT or
    SIGTERM asks to stop.

    Prompts go to an engine in this process, which samples groups of completions; a reward function
    scores them in worker processes; the policy loss trains on them; the engine takes the new
    weights. A resumed run continues bit for bit.

    Args:
        config: config with ``rl``, such as ``start_from(model, rl=RlConfig(...))`` returns.
        directory: the run's directory; it must be new unless ``resume`` is true.
        reward: ``(completion, *, prompt, row) -> number``, marked with ``jaxinfra.part``; by
            default ``config.rl.reward``.
        advantage: ``(rewards [P, G], is_valid [P, G]) -> [P, G]`` in NumPy, in place of the
            algorithm's.
        loss: ``(log_probabilities [B, T], old [B, T], advantages [B, T], *, weights) -> [B, T]`` in
            JAX, each token's loss in place of the clipped one.
        resume: continue the run in ``directory``.
        cache_dir: for compiled programs; the user's cache by default.
        callbacks: hooks around steps, such as loggers.

    Raises:
        JaxinfraError: config, prompts, reward or a checkpoint is wrong; the message says what.

    Examples:
        >>> learn = jaxinfra.RlConfig(
        ...     prompts="prompts.jsonl", reward="exact_match", group_size=2, max_new_tokens=4
        ... )
        >>> config = jaxinfra.start_from("runs/mine", rl=learn)
        >>> sizes = ["training.steps=1", "training.batch_size=4", "training.sequence_length=32"]
        >>> sizes.append("optimizer.warmup_steps=0")
        >>> outcome = jaxinfra.rl(jaxinfra.override(config, sizes), "runs/learned")
        7,152 parameters, fp32 on cpu (one device); 1 steps of 4 x 32 tokens
        ...
    """
    if config.rl is None:
        raise ConfigError("rl of a config without rl; give start_from(model, rl=RlConfig(...))")
    given = {"reward": reward, "advantage": advantage, "loss": loss}
    named: dict[str, Any] = {
        name: part_name(part) for name, part in given.items() if part is not None
    }
    config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, **named))
    return train(
        config,
        directory,
        resume=resume,
        cache_dir=cache_dir,
        callbacks=callbacks,
        data=RolloutData(),
    )
