"""Presets as a table: what there is, how large, and what for."""

import dataclasses
import inspect

from jaxinfra.config.presets import MODELS, run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.planning.model import active_parameters, plan_model, total_parameters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresetInfo:
    """One preset of ``presets``.

    Examples:
        >>> info = jaxinfra.presets("llama3_8b")[0]
        >>> f"{info.parameters:,} in {info.layers} layers"
        '8,030,261,248 in 32 layers'
    """

    name: str  # as ``preset`` and the command line take it
    parameters: int  # of the whole model
    active_parameters: int  # that one token meets
    layers: int  # of all stacks
    max_positions: int  # longest sequence, in tokens
    purpose: str  # what it is for


def preset(name: str) -> RunConfig:
    """The run of that name: a model with data, optimizer, batch and precision that suit it.

    Args:
        name: one of those that ``presets`` lists.

    Raises:
        ConfigError: there is none; with the nearest name.

    Examples:
        >>> jaxinfra.preset("tiny").training.sequence_length
        128
    """
    return run_preset(name)


def presets(part: str = "") -> tuple[PresetInfo, ...]:
    """The presets whose names contain ``part``; all of them by default.

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
