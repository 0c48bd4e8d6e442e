"""Presets, listed as a table of their sizes and purposes, and loaded by name."""

import dataclasses
import inspect

from jaxinfra.config.presets import MODELS, run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.planning.model import active_parameters, plan_model, total_parameters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresetInfo:
    """A preset's name, size and purpose, as ``presets`` lists it.

    Examples:
        >>> info = jaxinfra.presets("llama3_8b")[0]
        >>> f"{info.parameters:,} in {info.layers} layers"
        '8,030,261,248 in 32 layers'
    """

    name: str  # as ``preset`` and the command line take it
    parameters: int  # of the whole model
    active_parameters: int  # parameters that one token uses; fewer with experts
    layers: int  # of all stacks
    max_positions: int  # longest sequence, in tokens
    purpose: str  # use of the preset, in a few words


def preset(name: str) -> RunConfig:
    """Returns the run config of a preset: model, data, optimizer, batch and precision.

    Args:
        name: name of a preset; ``presets`` lists them.

    Raises:
        ConfigError: no preset has this name; the message suggests the nearest one.

    Examples:
        >>> jaxinfra.preset("tiny").training.sequence_length
        128
    """
    return run_preset(name)


def presets(part: str = "") -> tuple[PresetInfo, ...]:
    """Lists the presets whose names contain ``part``; by default all presets.

    Examples:
        >>> [each.name for each in jaxinfra.presets("tiny")]
        ['tiny', 'tiny_moe']
    """
    found = []
    for name, make in MODELS.items():
        if part not in name:
            continue
        config = make()
        planned = plan_model(config, name=name)
        doc = inspect.getdoc(make) or ""
        found.append(
            PresetInfo(
                name=name,
                parameters=total_parameters(planned),
                active_parameters=active_parameters(planned),
                layers=config.num_layers,
                max_positions=config.max_positions,
                purpose=" ".join(doc.split("\n\n")[0].split()),
            )
        )
    return tuple(found)
