"""Reads run configs from TOML, YAML or JSON files, whole or as changes to a preset.
preset = "small"

[training]
steps = 500
batch_size = 16
"""

import tomllib
from pathlib import Path
from typing import Any

import yaml

from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import parse_json, read_bytes, require_type

_BYTES = 1 << 20  # a hundred times a large one; parsers of YAML are slow
_TAGS = ("type", "kind")  # say which record of a union it is


def read_run_config(file: str | Path) -> RunConfig:
    """Reads the run that a file describes: ``.toml``, ``.yaml``, ``.yml`` or ``.json``.

    With ``preset`` at the top, the other entries change that preset. Tables are merged with those
    of the preset, and other values replace them. In ``model.stacks``, keys that are numbers change
    single entries, as in ``stacks.0.repeats``. Without ``preset`` the file is a whole config, such
    as a run's config.json.

    Raises:
        ConfigError: the ``file`` cannot be read, or a setting is unknown or out of range; the
            message names it.

    Examples:
        With ``preset = "tiny"`` and ``[training]``, ``steps = 4`` in ``mine.toml``:

        >>> jaxinfra.read_run_config("mine.toml").training.steps
        4
    """
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, a config is a file: name {path / 'config.json'}")
    values = _parse(path)
    if "model_type" in values:
        raise ConfigError(
            f"{path} is of a Hugging Face model, not of a run; a run that starts from the model "
            f"is --init {path.parent}"
        )
    if "preset" in values:
        name = values.pop("preset")
        if not isinstance(name, str):
            raise ConfigError(f"{path}: preset={name!r} must be a preset's name")
        values = _merged(codec.to_dict(run_preset(name)), values, where="")
    try:
        return codec.from_dict(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(
            f"{path} is no config of this version: {error}; correct it, begin it with a preset, or "
            "use the version that wrote it"
        ) from error


def _parse(path: Path) -> dict[str, Any]:
    data = read_bytes(path, limit=_BYTES)
    if path.suffix == ".json":
        return parse_json(data, where=str(path))
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(data.decode())
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.load(data, _Loader)
        else:
            known = (".toml", ".yaml", ".yml", ".json")
            raise ConfigError(f"{path}: unknown kind of file {path.suffix!r}{nearest('', known)}")
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    require_type(values, dict[str, Any], where=str(path), error=ConfigError)
    return values


class _Loader(yaml.SafeLoader):
    """A YAML loader of plain values: no aliases, which could name each other, and no name twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConfigError("aliases (*name) are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"setting {name!r} is given twice")
        return super().construct_mapping(node, deep)


def _merged(before: Any, changes: dict[str, Any], *, where: str) -> Any:
    """A preset's values with a file's changes."""
    if isinstance(before, list | tuple):
        after = list(before)
        for name, value in changes.items():
            if not (str(name).isdecimal() and int(name) < len(after)):
                raise ConfigError(f"{where}{name}: there are entries 0 to {len(after) - 1}")
            after[int(name)] = _changed(after[int(name)], value, where=f"{where}{name}.")
        return after
    after = dict(before)
    for name, value in changes.items():
        if name not in after:
            raise ConfigError(f"unknown setting {where}{name}{nearest(str(name), after)}")
        after[name] = _changed(after[name], value, where=f"{where}{name}.")
    return after


def _changed(before: Any, value: Any, *, where: str) -> Any:
    if not isinstance(value, dict) or not isinstance(before, dict | list | tuple):
        return None if value == "none" else value
    tags = [tag for tag in _TAGS if isinstance(before, dict) and tag in before and tag in value]
    if any(before[tag] != value[tag] for tag in tags[:1]):
        return value  # a record of another kind has other settings
    return _merged(before, value, where=where)
