"""Facts about the GPU or CPU device that kernels are traced for."""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts of a device that decide which kernels it can run and which of them are fast."""

    kind: str  # as JAX names it: "NVIDIA H200", "cpu"
    is_gpu: bool
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability: (9, 0) is Hopper
    cuda: int | None = None  # 1000 * major + 10 * minor: 13000 for CUDA 13.0
    is_absent: bool = False  # programs for it are compiled to be run elsewhere

    @property
    def slug(self) -> str:
        """The device's kind as part of a file name, such as ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")


H200 = Facts(kind="NVIDIA H200", is_gpu=True, capability=(9, 0), cuda=13000)

_compiling_for: contextvars.ContextVar[Facts | None] = contextvars.ContextVar(
    "compiling_for", default=None
)


@contextlib.contextmanager
def compiling_for(facts: Facts) -> Iterator[None]:
    """Context manager that replaces the device for which kernels are chosen.

    It allows lowering for a GPU on a machine without one. JAX's caches ignore this context: lower a
    function that this process has not traced before.
    """
    token = _compiling_for.set(facts)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def facts_of(device: jax.Device) -> Facts:
    """Returns the facts (kind, compute capability, CUDA version) of a JAX device."""
    version = device.client.platform_version
    cuda = re.search(r"cuda (\d+)", version)
    capability = None
    if device.platform == "gpu" and "cuda" in version:
        major, minor = device.compute_capability.split(".")
        capability = int(major), int(minor)
    return Facts(
        kind=device.device_kind,
        is_gpu=device.platform == "gpu",
        capability=capability,
        cuda=int(cuda.group(1)) if cuda else None,
    )


def target() -> Facts:
    """Returns the facts of the device that the current trace compiles for.

    A trace does not know its device. This function takes the device of ``compiling_for``, else
    JAX's default device (``jax.default_device`` or ``JAX_PLATFORMS``).
    """
    override = _compiling_for.get()
    if override is not None:
        return override
    default = jax.config.jax_default_device
    return facts_of(default if isinstance(default, jax.Device) else jax.devices(default)[0])


def why_not_one_hopper(num_devices: int = 1) -> str | None:
    """Returns why a kernel for one Hopper GPU cannot run here; None if it can.

    Args:
        num_devices: number of devices that the call is partitioned over.
    """
    facts = target()
    if facts.capability != (9, 0):
        return f"{facts.kind} is not a Hopper GPU (compute capability 9.0)"
    if num_devices > 1:
        return f"the call is spread over {num_devices} devices and the kernel runs on one"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Miscompilation:
    """A known compiler bug: the CUDA versions whose ptxas compiles a kernel wrongly."""

    first: int  # first CUDA version with the bug, numbered as ``Facts.cuda``
    fixed: int  # first later version without the bug
    what: str


CAUSAL_ATTENTION = Miscompilation(first=12080, fixed=12091, what="causal attention kernels")
"""CUDA 12.8.0 to 12.9.0. A kernel refuses these rather than return wrong numbers."""


def miscompiled(known: Miscompilation) -> str | None:
    """Returns why the target's CUDA version would miscompile a kernel; None if it does not."""
    version = target().cuda
    if version is None or not known.first <= version < known.fixed:
        return None
    return f"ptxas of CUDA {version} miscompiles {known.what}; {known.fixed} or later is needed"
