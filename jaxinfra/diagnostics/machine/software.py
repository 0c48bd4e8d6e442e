"""Versions of what computes, against each other and against what is known of them."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping

from jaxinfra.diagnostics.machine.finding import Finding, Grade, judged

NAMES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "flax",
    "optax",
    "numpy",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
"""Distributions whose versions count."""


def installed() -> dict[str, str]:
    """``{name: version}`` of those of ``NAMES`` that are installed here."""
    found = {}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def software_findings(versions: Mapping[str, str], *, num_gpus: int) -> list[Finding]:
    """Whether versions go together and with the machine.

    Args:
        versions: as ``installed`` gives them.
        num_gpus: that the driver has.
    """
    jax = versions.get("jax", "")
    found = [
        judged(
            "software: Python",
            platform.python_version(),
            ok=tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 12),
            rule="3.12 or newer",
            remedy="make a new environment: make clean && make train",
            otherwise=Grade.FAIL,
        ),
        judged(
            "software: JAX",
            jax or "not installed",
            ok=(0, 11, 2) <= _parts(jax) < (0, 13),
            rule="0.11.2 to 0.12: kernels and readers of programs are tested with these",
            remedy="install the locked versions (make train does)",
            otherwise=Grade.FAIL,
        ),
    ]
    plugins = {name: text for name, text in versions.items() if name.startswith(("jaxlib", "jax-"))}
    others = [f"{name} {text}" for name, text in plugins.items() if text != jax]
    found.append(
        judged(
            "software: jaxlib and plugins",
            ", ".join(f"{name} {text}" for name, text in plugins.items()),
            ok=not others,
            rule=f"all of JAX's version {jax}: others fail at start, or in a kernel",
            remedy=f"install one version of all; not it: {', '.join(others)}",
            otherwise=Grade.FAIL,
        )
    )
    has_plugin = any("pjrt" in name for name in versions)
    if num_gpus:
        found.append(
            judged(
                "software: CUDA plugin",
                "installed" if has_plugin else "not installed",
                ok=has_plugin,
                rule="JAX reaches GPUs through its CUDA plugin",
                remedy="install jaxinfra[cuda]",
                otherwise=Grade.FAIL,
            )
        )
        both = [series for series in ("12", "13") if f"jax-cuda{series}-pjrt" in versions]
        found.append(
            judged(
                "software: one CUDA",
                f"CUDA {' and '.join(both) or 'of neither series'}",
                ok=len(both) < 2,
                rule="one series of CUDA libraries: of two, the wrong one may be loaded",
                remedy="remove jax-cuda12-plugin, jax-cuda12-pjrt and their nvidia-*-cu12",
            )
        )
    return found


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
