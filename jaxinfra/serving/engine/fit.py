"""Number of KV-cache pages that fit into a device's memory beside weights and programs."""

import dataclasses
import os
from collections.abc import Sequence

import jax

from jaxinfra.errors import DeviceMemoryError
from jaxinfra.serving.engine.plan import SchedulerLimits

JAX_FRACTION = 0.95
"""Share of a GPU's memory that serving commands let JAX allocate."""

_STEP_BYTES = 256 << 20  # of what else is in use, so that two starts find the same number of pages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """Bytes of one device that a server needs besides its KV cache, and the bytes of a page."""

    weight_bytes: int
    temporary_bytes: int  # of the program that needs most: scratch memory and results
    state_bytes: int  # the engine's arrays besides pages
    page_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of pages."""
        return self.weight_bytes + self.temporary_bytes + self.state_bytes

    def pages(self, budget_bytes: float) -> int:
        """Returns how many pages fit into a device's budget beside all else; at least 0."""
        return max(0, int((budget_bytes - self.fixed_bytes) // max(1, self.page_bytes)))


def fitted_limits(
    limits: SchedulerLimits, needs: MemoryNeeds, *, budget_bytes: float
) -> SchedulerLimits:
    """Returns the limits with as many pages as fit, and no more than before.

    Args:
        limits: limits whose pages hold the longest requests, as many as may run.
        budget_bytes: bytes of a device that the server may use.

    Raises:
        DeviceMemoryError: one request of the full context does not fit.
    """
    pages = min(limits.num_pages, needs.pages(budget_bytes))
    one = 1 + limits.table_width  # a page is kept empty
    if pages < one:
        gib = 1 / 2**30
        tokens = max(0, pages - 1) * limits.page_size
        remedy = "spread the model with --mesh, or quantize it"
        if tokens >= limits.page_size:
            remedy = f"give --max-context {tokens}, --cache int8 or more devices (--mesh)"
        raise DeviceMemoryError(
            f"one request of {limits.context:,} tokens does not fit: weights "
            f"{needs.weight_bytes * gib:.2f} GiB, temporaries of programs "
            f"{(needs.temporary_bytes + needs.state_bytes) * gib:.2f} GiB and its pages "
            f"{one * needs.page_bytes * gib:.2f} GiB exceed {budget_bytes * gib:.2f} GiB, the "
            f"share of a device's memory that --memory-fraction leaves; {remedy}"
        )
    return dataclasses.replace(limits, num_pages=pages)


def let_jax_allocate() -> None:
    """Lets JAX allocate ``JAX_FRACTION`` of a GPU, unless its environment variable says otherwise;
    to be called before a device is used.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(JAX_FRACTION))


def memory_limit() -> int | None:
    """Returns the bytes that JAX may allocate on a device here; None for CPUs."""
    return memory_stats(jax.local_devices()[0]).get("bytes_limit")


def memory_stats(device: jax.Device) -> dict[str, int]:
    """Returns a device's memory statistics; empty for CPUs."""
    return device.memory_stats() or {}


def budget_bytes(device: jax.Device, *, fraction: float, held_bytes: int = 0) -> float:
    """Returns the bytes of a device that an engine may use.

    Args:
        fraction: share of the memory that JAX may allocate.
        held_bytes: bytes on the device now that belong to the engine.
    """
    stats = memory_stats(device)
    others = max(0, stats["bytes_in_use"] - held_bytes)
    return stats["bytes_limit"] * fraction - others // _STEP_BYTES * _STEP_BYTES


def device_bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of one device that hold its shards of arrays of these shapes."""
    total = 0
    for leaf in arrays:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for each in shape:
            size *= each
        total += size
    return total


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a program needs besides its arguments, on each device."""
    stats = compiled.memory_analysis()
    assert stats is not None, "CPUs and GPUs have it"
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)
