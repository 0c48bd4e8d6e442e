"""Recomputation chosen by a memory budget: the cheapest policy whose compiled step fits.

Each candidate step is compiled as it will run, so its bytes are those of XLA's own buffer
assignment. The program of the chosen policy stays in the compilation cache and is not compiled
again.
"""

import dataclasses
from collections.abc import Callable

import jax

from jaxinfra.checkpoint import processes
from jaxinfra.config.run import KeptValues, Remat, RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hlo.buffers import step_bytes

CHEAPEST_FIRST = (Remat.NONE, Remat.DOTS, Remat.MLP, Remat.NAMED, Remat.FULL)
"""Remat policies; each recomputes all that the one before it does, and more."""

FREE_SHARE = 0.05
"""Fraction of device memory left free for batches in flight and fragmentation."""
NEED_LESS = (
    "more training.accumulation, a smaller batch_size or more devices on the fsdp or tensor axis "
    "need less (jaxinfra plan)"
)
"""The remedies where a budget is below the least that is possible."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen remat policy, and the bytes per device of the step with it and with each policy
    that was tried before it.
    """

    remat: Remat
    budget_bytes: int
    needs: dict[Remat, int]  # bytes per device of the step, in the order tried
    kept: tuple[KeptValues, ...] = ()  # always empty: the policy decides what is kept

    def describe(self) -> str:
        """Describes the chosen remat policy in one line for the log."""
        others = [f"{r.value} {in_gib(n)}" for r, n in self.needs.items() if r is not self.remat]
        too_much = f" (too much: {', '.join(others)})" if others else ""
        return (
            f"remat={self.remat.value}: a step needs {in_gib(self.needs[self.remat])} of a budget "
            f"of {in_gib(self.budget_bytes)}{too_much}"
        )


def choose_remat(*, budget_bytes: int, need: Callable[[Remat], int]) -> Choice:
    """Returns the first remat policy whose step fits the budget, in order of increasing
    recomputation.

    Args:
        need: returns the bytes per device of the step with a policy, training state included.

    Raises:
        ConfigError: no policy fits.
    """
    needs: dict[Remat, int] = {}
    for remat in CHEAPEST_FIRST:
        needs[remat] = need(remat)
        if needs[remat] <= budget_bytes:
            return Choice(remat=remat, budget_bytes=budget_bytes, needs=needs)
    least = min(needs, key=needs.__getitem__)
    raise ConfigError(
        f"remat=auto: a device needs {in_gib(needs[least])} at least (remat={least.value}), and "
        f"its budget is {in_gib(budget_bytes)}; {NEED_LESS}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatherChoice:
    """The choice whether gathered weights are kept for the backward pass. ``needs_bytes`` are the
    step's bytes per device if they are.
    """

    needs_bytes: int
    budget_bytes: int

    @property
    def keeps(self) -> bool:
        """Whether the step fits the budget if gathered weights are kept."""
        return self.needs_bytes <= self.budget_bytes

    def describe(self) -> str:
        """Describes the choice about gathered weights in one line for the log."""
        both = f"{in_gib(self.needs_bytes)} of a budget of {in_gib(self.budget_bytes)}"
        if self.keeps:
            return f"gathered weights stay for the backward pass: a step needs {both}"
        return f"weights are gathered again: to stay, a step would need {both}"


def with_keep_gathered(config: RunConfig, *, gathered: bool | None) -> RunConfig:
    """Returns the config with this value of ``sharding.keep_gathered``."""
    sharding = dataclasses.replace(config.sharding, keep_gathered=gathered)
    return dataclasses.replace(config, sharding=sharding)


def budget_bytes(gib: float | None, device: jax.Device) -> int | None:
    """Returns a memory budget in bytes. Without ``gib`` it is the device memory that JAX may use,
    less ``FREE_SHARE`` of it; None if the device does not report it.
    """
    if gib is not None:
        return int(gib * 2**30)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int((1 - FREE_SHARE) * limit)


def agreed_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the first process's ``step_bytes`` of a program, on all processes: so they all make
    the same choice."""
    size = step_bytes(compiled)
    return processes.on_first(lambda: size)


def in_gib(size: int) -> str:
    """Formats bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"
