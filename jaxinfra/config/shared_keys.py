"""Checks of what layers of one model have in common: keys and values, and the table of inputs."""

from typing import Any

from jaxinfra.errors import ConfigError


def check_shared(config: Any) -> None:
    """Checks which layers give keys to others, and that a model has a table for layers' inputs.

    Args:
        config: a ``ModelConfig``.

    Raises:
        ConfigError: keys that no earlier layer gives, or that layers of a loop would give; inputs
            without a table, a table without inputs, or inputs of several widths.
    """
    given: set[str] = set()
    for stack in config.stacks:
        mixers = [block.mixer for block in stack.pattern]
        gives, takes = (
            {name for each in mixers if (name := getattr(each, field, None)) is not None}
            for field in ("gives_keys", "takes_keys")
        )
        if gives and stack.repeats > 1:
            raise ConfigError(
                f"gives_keys={sorted(gives)} in a stack of {stack.repeats} repetitions: one layer "
                "gives keys; put it into a stack of one repetition"
            )
        if any(getattr(m, "takes_keys", None) and (m.out_gate or m.gives_keys) for m in mixers):
            raise ConfigError(
                "takes_keys with out_gate or gives_keys: a layer of others' keys has no gate and "
                "no keys to give; leave these out"
            )
        if takes - given:
            raise ConfigError(
                f"takes_keys={sorted(takes - given)}: no layer of an earlier stack gives these"
            )
        given |= gives
    if len({block.streams for block in config.blocks}) > 1:
        raise ConfigError("streams that differ between blocks: all read the same number of streams")
    widths = {block.layer_input_dim for block in config.blocks}
    if len(widths) > 1 or (widths != {0}) != (config.layer_input_rows > 0):
        raise ConfigError(
            f"layer_input_dim={sorted(widths)} of layers with layer_input_rows="
            f"{config.layer_input_rows}: all layers have inputs of one width, from a table with "
            "rows, or none has"
        )
