"""Facts about the device a kernel is traced for."""

import dataclasses
import re

import jax


def target() -> jax.Device:
    """The device that computation without placed arguments goes to.

    A trace does not know its device; this is JAX's default one, as set by ``jax.default_device``
    or by ``JAX_PLATFORMS``.
    """
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default
    return jax.devices(default)[0]


def compute_capability(device: jax.Device | None = None) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA GPU, (9, 0) for Hopper; None of any other device."""
    device = device or target()
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def cuda_version(device: jax.Device | None = None) -> int | None:
    """CUDA's version as CUDA counts it, 1000 * major + 10 * minor: 13000 for 13.0."""
    device = device or target()
    found = re.search(r"cuda (\d+)", device.client.platform_version)
    return int(found.group(1)) if found else None


def kind_slug(device: jax.Device | None = None) -> str:
    """The device kind as a file name: ``nvidia-h200``, ``cpu``."""
    return re.sub(r"[^a-z0-9]+", "-", (device or target()).device_kind.lower()).strip("-")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Miscompilation:
    """CUDA versions whose ptxas makes wrong code of something."""

    first: int  # inclusive, counted as in ``cuda_version``
    fixed: int  # the first version that is right again
    what: str


MISCOMPILATIONS = (Miscompilation(first=12080, fixed=12091, what="causal attention kernels"),)
"""A kernel refuses these rather than return wrong numbers (CUDA 12.8.0 to 12.9.0)."""


def miscompiled(what: str, device: jax.Device | None = None) -> str | None:
    """Why the installed CUDA cannot be trusted with something; None if it can.

    Args:
        what: one of ``MISCOMPILATIONS``.
        device: default the target.
    """
    version = cuda_version(device)
    for known in MISCOMPILATIONS:
        if known.what == what and version is not None and known.first <= version < known.fixed:
            return f"ptxas of CUDA {version} miscompiles {what}; {known.fixed} or later is needed"
    return None
