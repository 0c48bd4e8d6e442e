"""Remedies for programs that do not fit in memory: settings changed one at a time, and compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxinfra.config import codec
from jaxinfra.config.run import Remat, RunConfig
from jaxinfra.diagnostics.memory.report import gib
from jaxinfra.errors import JaxinfraError
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.recompute.budget import CHEAPEST_FIRST

type Trial[C] = tuple[tuple[str, ...], C]
"""Options of a command, and the case that they lead to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remedy[C]:
    """A change of a run's or an engine's settings, and the bytes per device that it then needs."""

    options: tuple[str, ...]  # of jaxinfra train or serve
    case: C
    bytes: int  # compiled
    fits: bool
    cost: str  # a phrase, such as a step time or tokens of cache
    figures: Mapping[str, Any]  # the cost's numbers, for JSON

    def describe(self) -> str:
        """Describes in one line the changed setting and the bytes per device."""
        word = "fits" if self.fits else "does not fit"
        return f"{' '.join(self.options)}: {gib(self.bytes)} per device, {word}{self.cost}"

    def as_json(self) -> dict[str, Any]:
        """Returns the changed setting and the bytes per device as JSON values."""
        known = {"options": list(self.options), "bytes": self.bytes, "fits": self.fits}
        return known | dict(self.figures)


_COMPILES = 9
"""Largest number of training steps to compile."""
COUNT = 3
"""Number of remedies to name."""


def compiled_changes[C](
    changes: Iterable[Trial[C]], needs: Callable[[C], int]
) -> Iterator[tuple[tuple[str, ...], C, int]]:
    """Yields the changes that can run, each with its bytes per device from ``needs``."""
    for options, case in changes:
        with contextlib.suppress(JaxinfraError):  # a combination that cannot run
            yield options, case, needs(case)


def find_remedies(
    config: RunConfig, *, limit_bytes: int, price: Callable[[RunConfig], float | None]
) -> list[Remedy[RunConfig]]:
    """Finds settings whose compiled step fits in memory, those that cost least time first.

    If fewer than three changes fit, the changes nearest to the limit follow.

    Args:
        limit_bytes: memory limit per device.
        price: predicted seconds per step of a config; None where there is no prediction.
    """
    now = price(config)
    found: list[Remedy[RunConfig]] = []
    for options, changed, needs in compiled_changes(_changes(config), compiled_bytes):
        then = price(changed)
        shrunk = config.training.batch_size / changed.training.batch_size
        share = None if now is None or then is None else shrunk * then / now
        found.append(
            Remedy(
                options=options,
                case=changed,
                bytes=needs,
                fits=needs <= limit_bytes,
                cost="" if share is None else f", {share - 1:+.0%} time per token",
                figures={"time_share": share},
            )
        )
        if len(found) == _COMPILES or sum(each.fits for each in found) == COUNT:
            break
    found.sort(key=lambda each: (not each.fits, each.figures["time_share"] or 1.0, each.bytes))
    return found[:COUNT]


def compiled_bytes(config: RunConfig) -> int:
    """Returns the bytes per device of a config's compiled step, or raises JaxinfraError."""
    return step_bytes(lower_step(make_job(config)).compile())


def _changes(config: RunConfig) -> Iterator[Trial[RunConfig]]:
    """Yields changes to try, alternating between kinds, the mildest of each kind first."""
    kinds = [list(_recomputing(config)), list(_accumulating(config)), list(_sharding(config))]
    half = config.training.batch_size // 2
    kinds.append([_set(config, f"training.batch_size={half}")] if half else [])
    for place in range(max(map(len, kinds))):
        for kind in kinds:
            if place < len(kind):
                yield kind[place]


def _recomputing(config: RunConfig) -> Iterator[Trial[RunConfig]]:
    remat = config.training.remat
    weaker = CHEAPEST_FIRST.index(remat) if remat in CHEAPEST_FIRST else -1
    stronger = CHEAPEST_FIRST[weaker + 1 :]
    # The strongest says whether recomputation helps at all.
    for each in (*stronger[-1:], *stronger[:-1]):
        yield _set(config, f"training.remat={each.value}")


def _accumulating(config: RunConfig) -> Iterator[Trial[RunConfig]]:
    for factor in (2, 4, 8):
        parts = factor * config.training.accumulation
        if config.training.batch_size % (parts * config.mesh.num_data_shards) == 0:
            yield _set(config, f"training.accumulation={parts}")


def _sharding(config: RunConfig) -> Iterator[Trial[RunConfig]]:
    mesh, sharding = config.mesh, config.sharding
    if mesh.shards_state and sharding.zero < 3:
        yield _set(config, "sharding.zero=3")
    if jax.process_count() > 1:
        return  # the job's devices are all in use
    for factor in (2, 4, 8):
        if factor * mesh.num_devices > jax.device_count():
            return
        wider = mesh.with_more_shards(factor)
        yield ("--mesh", wider.option), dataclasses.replace(config, mesh=wider)


def _set(config: RunConfig, setting: str) -> Trial[RunConfig]:
    """Returns a changed setting, in the form that counts after whatever else a command names."""
    return (f"--set={setting}",), codec.override(config, [setting])


def fixed_remat(config: RunConfig) -> RunConfig:
    """Returns the config with ``auto`` and ``optimal`` recomputation replaced by ``full``."""
    if not config.training.remat.is_open:
        return config
    named = dataclasses.replace(config.training, remat=Remat.FULL, memory_budget_gib=None)
    return dataclasses.replace(config, training=named)
