"""Finding the newest checkpoint that is as it was written, and reading it."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxinfra.checkpoint import arrays, directory_layout, manifest, metadata, processes
from jaxinfra.checkpoint.directory_layout import Rejected
from jaxinfra.checkpoint.finite import require_finite
from jaxinfra.checkpoint.metadata import JSON
from jaxinfra.errors import CheckpointError

_PARAMETERS = "parameters/"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A state read back, and the checkpoints that were tried before it and found damaged."""

    step: int
    state: PyTree[jax.Array]
    data_state: dict[str, JSON]
    heldout_loss: float | None
    settings: dict[str, JSON]  # of the run when it was saved; empty where not known
    quarantined: tuple[Rejected, ...]


def load(
    directory: Path,
    abstract_state: PyTree[jax.ShapeDtypeStruct],
    *,
    step: int | None = None,
    identity: dict[str, JSON] | None = None,
    settings: dict[str, JSON] | None = None,
) -> Restored:
    """Reads from a run that may still be training: takes no lock, moves and deletes nothing.

    ``abstract_state`` may leave out parts of what was saved, such as the optimizer's. Damaged
    checkpoints are skipped with a warning. For the rest see ``Checkpointer.restore``.

    Args:
        settings: of the run as they are now; those that are others than when it was saved may
            change what is done with it, and are said in a warning.
    """
    restored = read_newest(
        directory, abstract_state, step=step, identity=identity, reject=_skip, subset=True
    )
    if settings is not None and restored.settings:
        changes = metadata.setting_changes(restored.settings, settings)
        if changes:
            _log.warning("settings changed since it was saved: %s", "; ".join(changes))
    return restored


type Reject = Callable[[Path, int, list[str]], Rejected]


def _skip(directory: Path, step: int, reasons: list[str]) -> Rejected:
    path = directory / directory_layout.step_name(step)
    rejected = Rejected(step=step, path=path, reasons=tuple(reasons))
    _log.warning("checkpoint skipped: %s, in %s", rejected, path)
    return rejected


def read_newest(
    directory: Path,
    abstract_state: PyTree[jax.ShapeDtypeStruct],
    *,
    step: int | None,
    identity: dict[str, JSON] | None,
    reject: Reject,
    subset: bool,
) -> Restored:
    """Verifies, checks that state and identity match, then reads; a collective of all processes."""
    wanted, treedef = metadata.flatten(abstract_state)
    unplaced = [path for path, leaf in wanted.items() if leaf.sharding is None]
    if unplaced:
        raise CheckpointError(
            f"no sharding for {unplaced[0]} ({len(unplaced)} of {len(wanted)} leaves); restoring "
            "places each array directly: pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    # One process reads all files to verify them; the others would load the disks N times over.
    found = processes.on_first(lambda: _choose(directory, step, reject))
    rejected = tuple(
        Rejected(step=item["step"], path=Path(item["path"]), reasons=tuple(item["reasons"]))
        for item in found["rejected"]
    )
    checkpoint = directory / directory_layout.step_name(found["step"])
    saved = metadata.read(checkpoint)
    if identity is not None:
        metadata.require_same_identity(saved.identity, identity, where=checkpoint)
    metadata.require_same_tree(
        saved.tree, metadata.describe(wanted), subset=subset, where=checkpoint
    )
    try:
        # Orbax refuses relative paths.
        flat = arrays.read((checkpoint / directory_layout.ARRAYS).absolute(), wanted)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint} is as it was written, but reading it failed: {error}"
        ) from error
    weights = {path: leaf for path, leaf in flat.items() if path.startswith(_PARAMETERS)}
    require_finite(weights, where=checkpoint)
    return Restored(
        step=saved.step,
        state=jax.tree.unflatten(treedef, [flat[path] for path in wanted]),
        data_state=saved.data_state,
        heldout_loss=saved.heldout_loss,
        settings=saved.settings,
        quarantined=rejected,
    )


def require_finite_parameters(checkpoint: Path) -> None:
    """Raises CheckpointError where a verified checkpoint's parameters hold a NaN or an infinity.

    For whoever wants to know that a model can be used, and does not use it: one array at a time
    is brought onto this process's first device.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for path, leaf in metadata.read(checkpoint).tree.items():
        if path.startswith(_PARAMETERS) and jnp.issubdtype(leaf.dtype, jnp.floating):
            wanted = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=device)
            stored = (checkpoint / directory_layout.ARRAYS).absolute()
            require_finite(arrays.read(stored, {path: wanted}), where=checkpoint)


def _choose(directory: Path, step: int | None, reject: Reject) -> dict[str, Any]:
    """The step to read, as JSON: the one asked for or the newest good one; and the bad ones."""
    available = directory_layout.steps(directory)
    candidates = list(reversed(available)) if step is None else [step]
    rejected: list[Rejected] = []
    for candidate in candidates:
        if candidate not in available:
            continue
        problems = manifest.verify(directory, candidate)
        if not problems:
            return {
                "step": candidate,
                "rejected": [
                    {"step": bad.step, "path": str(bad.path), "reasons": list(bad.reasons)}
                    for bad in rejected
                ],
            }
        if candidate not in directory_layout.steps(directory):
            continue  # a training run that is still going on pruned it meanwhile
        rejected.append(reject(directory, candidate, [str(problem) for problem in problems]))
    if rejected:
        found = "; ".join(f"{bad}, kept in {bad.path}" for bad in rejected)
        raise CheckpointError(f"no good checkpoint in {directory}: {found}{_others(directory)}")
    asked = "" if step is None else f" of step {step}"
    raise CheckpointError(f"no checkpoint{asked} in {directory}{_others(directory)}")


def _others(directory: Path) -> str:
    others = directory_layout.steps(directory)
    return f". Other steps there: {', '.join(map(str, others))}" if others else ""
