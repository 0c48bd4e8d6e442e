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


def kind_slug(device: jax.Device | None = None) -> str:
    """The device kind as a file name: ``nvidia-h200``, ``cpu``."""
    return re.sub(r"[^a-z0-9]+", "-", (device or target()).device_kind.lower()).strip("-")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BrokenCompiler:
    """A range of CUDA versions whose ptxas miscompiles something."""

    first: int  # inclusive, as CUDA counts: 1000 * major + 10 * minor
    last: int  # inclusive
    what: str


MISCOMPILERS = (BrokenCompiler(first=12080, last=12090, what="causal attention kernels"),)
"""Compilers whose output cannot be trusted; a kernel refuses rather than return wrong numbers."""
