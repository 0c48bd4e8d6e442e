"""Metadata of a checkpoint (``metadata.json``): step, identity, settings, tree of arrays."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np

from jaxinfra.checkpoint import directory_layout
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.files import read_json, require_type

type JSON = bool | int | float | str | list[JSON] | dict[str, JSON] | None

_FORMAT = 1
_LATER = ("tokenizer", "kept")  # keys of an identity that first checkpoints of this format lack
_SHOWN = 5  # differences listed in one error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """The shape and dtype of one array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class _WrittenLeaf(TypedDict):
    path: str
    shape: list[int]
    dtype: str


class _Written(TypedDict):
    step: int
    data_state: dict[str, Any]
    heldout_loss: float | None
    identity: dict[str, Any]
    settings: NotRequired[dict[str, Any]]
    tree: list[_WrittenLeaf]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """Everything in a checkpoint but its arrays."""

    step: int
    data_state: dict[str, JSON]
    heldout_loss: float | None
    identity: dict[str, JSON]
    settings: dict[str, JSON]  # of the run when it was saved; they may change
    tree: dict[str, Leaf]

    def encode(self) -> bytes:
        """Encodes the metadata as JSON; raises an error for a value that decoding would change."""
        _require_json("data_state", self.data_state)
        _require_json("identity", self.identity)
        tree = [
            {"path": path, "shape": list(leaf.shape), "dtype": leaf.dtype}
            for path, leaf in self.tree.items()
        ]
        head = json.dumps(
            {
                "format": _FORMAT,
                "step": self.step,
                "heldout_loss": self.heldout_loss,
                "identity": self.identity,
                "settings": self.settings,
                "data_state": self.data_state,
            },
            indent=1,
        )
        lines = ",\n  ".join(json.dumps(leaf) for leaf in tree)
        return f'{head[:-2]},\n "tree": [\n  {lines}\n ]\n}}\n'.encode()


def read(checkpoint: Path) -> Metadata:
    """Reads the metadata of a verified checkpoint."""
    file = checkpoint / directory_layout.METADATA
    values = read_json(file, error=CheckpointError)
    if values.get("format") != _FORMAT:
        raise CheckpointError(
            f"{checkpoint} has metadata format {values.get('format')!r}; this version reads "
            f"{_FORMAT}. Use the version that wrote it"
        )
    require_type(values, _Written, where=str(file), error=CheckpointError)
    return Metadata(
        step=values["step"],
        data_state=values["data_state"],
        heldout_loss=values["heldout_loss"],
        identity=values["identity"],
        settings=values.get("settings", {}),
        tree={
            leaf["path"]: Leaf(shape=tuple(leaf["shape"]), dtype=leaf["dtype"])
            for leaf in values["tree"]
        },
    )


def heldout_losses(directory: Path) -> dict[int, float | None]:
    """Returns the held-out loss of every committed step; None where it is unknown or unreadable."""
    losses = {}
    for step in directory_layout.steps(directory):
        try:
            losses[step] = read(directory / directory_layout.step_name(step)).heldout_loss
        except (OSError, ValueError, LookupError, TypeError, CheckpointError):
            losses[step] = None  # retention may still drop it by age; restore() names the damage
    return losses


def _require_json(name: str, value: JSON) -> None:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is not plain JSON: {error}; got {value!r}") from error
    if not same:
        raise CheckpointError(
            f"{name} would not come back from JSON as it is: {value!r}; use lists, not tuples, and "
            "string keys"
        )


def flatten(state: Any) -> tuple[dict[str, Any], Any]:
    """Returns a state's leaves by path, such as ``params/blocks/kernel``, and its structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise CheckpointError("two leaves of the state have one path; a key must not contain '/'")
    return flat, treedef


def describe(flat: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns the shape and dtype of each leaf of a flat tree, abstract or not."""
    return {
        path: Leaf(shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name)
        for path, leaf in flat.items()
    }


def require_same_tree(
    saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], *, subset: bool, where: Path
) -> None:
    """Raises CheckpointError naming leaves that differ; ``subset`` allows some to be left out."""
    wrong = [
        f"{path}: saved {saved.get(path, 'nothing')}, wanted {wanted.get(path, 'nothing')}"
        for path in {**wanted, **saved}
        if saved.get(path) != wanted.get(path) and not (subset and path not in wanted)
    ]
    _refuse(
        wrong,
        f"{where} holds another state than the one to restore",
        "restore with the configuration that saved it",
    )


def require_same_identity(saved: dict[str, JSON], wanted: dict[str, JSON], *, where: Path) -> None:
    """Raises CheckpointError naming the keys in which two identities differ, with both values."""
    wanted = {key: value for key, value in wanted.items() if key in saved or key not in _LATER}
    _refuse(
        differences(saved, wanted),
        f"{where} was saved by another configuration",
        "use the saved values, or start another run directory",
    )


def differences(saved: dict[str, JSON], wanted: dict[str, JSON]) -> list[str]:
    """Lists the keys in which two nested objects differ, with both values."""
    before, now = codec.flattened(saved), codec.flattened(wanted)

    def shown(value: Any) -> str:
        return repr(value.value if isinstance(value, enum.Enum) else value)

    return [
        f"{key}: saved {shown(before.get(key, 'nothing'))}, now {shown(now.get(key, 'nothing'))}"
        for key in {**before, **now}
        if (key in before, before.get(key)) != (key in now, now.get(key))
    ]


def setting_changes(saved: dict[str, JSON], now: dict[str, JSON]) -> list[str]:
    """Lists the settings of a run that changed since a checkpoint was saved, with both values.

    A setting that did not exist at the save counts as having had its default.
    """
    try:
        saved = codec.to_dict(codec.from_dict(RunConfig, saved))
    except ConfigError:  # of a version that is not read any more: compared as it is
        return differences(saved, now)
    return differences(saved, codec.to_dict(codec.from_dict(RunConfig, now)))


def _refuse(found: list[str], what: str, remedy: str) -> None:
    if found:
        shown = "; ".join(found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"{what}: {shown}{more}. Remedy: {remedy}")
