"""Configurations of kernels, as measured: those shipped for an H200, under the user's own.

Shipped ones are a JSON object of an op's ``tuned`` folder: kind of kernel to key to fields. The
user's own are a table ``OP/tiles-DEVICE.json``, made by the op's tuner: a row's case is
{"direction", "key"}, its choice the fields of a configuration.
"""

import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from . import device, tables

QUESTION = "tiles"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TunedConfigs[C]:
    """What was found fastest for the kernels of one op."""

    op: str
    folder: pathlib.Path
    kinds: Mapping[str, type[C]]  # of configurations, by direction

    def fastest(self, direction: str, key: str) -> C | None:
        """The user's own for this device if there is one, else the H200's.

        Args:
            direction: of ``kinds``.
            key: the case, as the op writes it.

        Raises:
            TableError: the user's file holds what no kernel understands.
        """
        own = tables.find(self.folder, self.op, QUESTION)
        rows = () if own is None else own.rows
        rows = [row for row in rows if self.check_row(row) == (direction, key)]
        if not rows:
            return self.shipped(direction, key)
        row = min(rows, key=lambda row: row.ms)
        choice: dict[str, Any] = dict(row.choice)  # of the right kinds: ``check_row``
        config = self.kinds[direction](**choice)
        announce(self.op, direction, key, str(config), str(self.user_file()))
        return config

    def shipped(self, direction: str, key: str) -> C | None:
        """The fastest on an H200, from the table in the package."""
        fields = _read(self.folder / "nvidia-h200.json")[direction].get(key)
        return None if fields is None else self.kinds[direction](**fields)

    def user_file(self) -> pathlib.Path:
        """Where the user's own for this kind of device are kept."""
        return tables.user_folder() / self.op / f"{QUESTION}-{device.target().slug}.json"

    def keep(self, rows: Iterable[tables.Row], environment: dict[str, str]) -> pathlib.Path:
        """Adds rows to the user's file, in place of those of the same case."""
        rows = tuple(rows)
        path = self.user_file()
        old = tables.load(path).rows if path.exists() else ()
        replaced = {row.case for row in rows}
        table = tables.Table(
            op=self.op,
            question=QUESTION,
            device_kind=device.target().kind,
            environment=tuple(sorted(environment.items())),
            rows=(*(row for row in old if row.case not in replaced), *rows),
        )
        for row in table.rows:
            self.check_row(row)
        tables.save(table, path)
        return path

    def check_row(self, row: tables.Row) -> tuple[str, str]:
        """A row's (direction, key), its choice being one that a kernel has."""
        case, choice = dict(row.case), dict(row.choice)
        direction, key = case.get("direction"), case.get("key")
        known = isinstance(direction, str) and direction in self.kinds and isinstance(key, str)
        if set(case) != {"direction", "key"} or not known:
            raise tables.TableError(
                f"{self.user_file()} has a case {case}: a direction of {', '.join(self.kinds)} and "
                "a key are expected; tune again, or delete it"
            )
        kind: Any = self.kinds[str(direction)]
        types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(kind)}
        for name, value in choice.items():
            if name not in types or type(value) is not types[name]:
                fields = ", ".join(f"{name}: {type.__name__}" for name, type in types.items())
                raise tables.TableError(
                    f"{self.user_file()} has {name}={value!r} for {direction} {key}: "
                    f"{kind.__name__} has {fields}; tune again, or delete it"
                )
        return str(direction), str(key)


@functools.cache
def announce(op: str, direction: str, key: str, config: str, path: str) -> None:
    """Logs a configuration of the user's; the cache makes it once for each."""
    _logger.info("%s %s %s: %s, from %s", op, direction, key, config, path)


@functools.cache
def _read(path: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(path.read_text())
