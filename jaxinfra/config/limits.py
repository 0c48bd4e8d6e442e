"""Upper limits of sizes: a larger number is taken for a typing error and refused."""

import os
from typing import Any

from jaxinfra.errors import ConfigError

VARIABLE = "JAXINFRA_LIMITS"
"""Environment variable that switches the limits off if it is ``off``."""

LIMITS = {
    "steps": 10**9,
    "batch_size": 1 << 24,
    "tokens_a_step": 1 << 28,
    "accumulation": 1 << 16,
    "sequence_length": 1 << 28,
    "max_positions": 1 << 31,
    "vocab_size": 1 << 24,
    "model_dim": 1 << 20,
    "hidden_dim": 1 << 22,
    "num_layers": 1 << 14,
    "num_experts": 1 << 14,
    "num_q_heads": 1 << 14,
    "head_dim": 1 << 14,
    "kv_rank": 1 << 20,
    "lora_rank": 1 << 16,
    "num_threads": 1 << 10,
    "prefetch_batches": 1 << 12,
    "devices": 1 << 20,
    "processes": 1 << 10,  # of one node
    "stages": 1 << 10,
    "micro_batches": 1 << 16,
    "schedule_boxes": 1 << 12,  # stages x micro-batches x chunks, drawn one by one
    "layouts": 1 << 17,  # that a search prices
}


def limits_are_on() -> bool:
    """Whether sizes above ``LIMITS`` are refused; an environment variable switches this off."""
    return os.environ.get(VARIABLE) != "off"


def require_within(*, remedy: str = "make it smaller", **sizes: int) -> None:
    """Raises ConfigError for the first of ``sizes`` that is above the limit of its name."""
    if not limits_are_on():
        return
    for name, size in sizes.items():
        if size > LIMITS[name]:
            raise ConfigError(
                f"{name}={size:,} is above the limit of {LIMITS[name]:,}, where a slip is likelier "
                f"than a wish; {remedy}, or set {VARIABLE}=off in the environment"
            )


def require_positive(config: Any, *names: str) -> None:
    """Raises ConfigError for the first of a config's fields that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1")


def check_cap(cap: float | None) -> None:
    """Raises ConfigError for a soft cap that is not positive."""
    if cap is not None and cap <= 0.0:
        raise ConfigError(f"logit_soft_cap={cap} must be positive, or none")


def check_window(window: int | None) -> None:
    """Raises ConfigError for a window without a token."""
    if window is not None and window < 1:
        raise ConfigError(f"window={window} must be at least 1 (a token sees itself)")
