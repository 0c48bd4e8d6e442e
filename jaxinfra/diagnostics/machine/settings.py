"""Versions, environment variables and XLA flags that cost speed or change results silently."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxinfra.diagnostics.machine.finding import Finding, Grade, graded


def installed() -> dict[str, str]:
    """Returns ``{name: version}`` of JAX, jaxlib and the CUDA plugins that are installed."""
    series = [f"jax-cuda{number}-{part}" for number in (13, 12) for part in ("plugin", "pjrt")]
    found = {}
    for name in ("jax", "jaxlib", *series):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def software_findings(versions: Mapping[str, str], *, num_gpus: int) -> list[Finding]:
    """Checks that versions of JAX and its CUDA packages match each other and the machine.

    Args:
        versions: package versions by name, from ``installed``.
        num_gpus: number of GPUs that the driver has.
    """
    jax = versions.get("jax", "")
    found = [
        graded(
            "software: Python",
            platform.python_version(),
            ok=tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 12),
            rule="3.12 or newer",
            remedy="make a new environment: make clean && make train",
            otherwise=Grade.FAIL,
        ),
        graded(
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
        graded(
            "software: jaxlib and plugins",
            ", ".join(f"{name} {text}" for name, text in plugins.items()),
            ok=not others,
            rule=f"all of JAX's version {jax}: others fail at start, or in a kernel",
            remedy=f"install one version of all; not it: {', '.join(others)}",
            otherwise=Grade.FAIL,
        )
    )
    return [*found, *(_cuda_findings(versions) if num_gpus else ())]


def _cuda_findings(versions: Mapping[str, str]) -> list[Finding]:
    """Checks that JAX's CUDA plugin is installed, with packages of one series."""
    has_plugin = any("pjrt" in name for name in versions)
    both = [series for series in ("12", "13") if f"jax-cuda{series}-pjrt" in versions]
    return [
        graded(
            "software: CUDA plugin",
            "installed" if has_plugin else "not installed",
            ok=has_plugin,
            rule="JAX reaches GPUs through its CUDA plugin",
            remedy="install jaxinfra[cuda]",
            otherwise=Grade.FAIL,
        ),
        graded(
            "software: one CUDA",
            f"CUDA {' and '.join(both) or 'of neither series'}",
            ok=len(both) < 2,
            rule="one series of CUDA libraries: of two, the wrong one may be loaded",
            remedy="remove jax-cuda12-plugin, jax-cuda12-pjrt and their nvidia-*-cu12",
        ),
    ]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")


class _Setting(NamedTuple):
    is_bad: Callable[[str], bool]
    rule: str
    grade: Grade = Grade.WARN
    remedy: str = ""  # empty: unset the variable, or leave the flag out


def _among(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _set(value: str) -> bool:
    return bool(value.strip())


_TRUE, _FALSE = _among("1", "true", "yes", "on"), _among("0", "false", "no", "off")
_SLOW, _CHANGES = "costs speed", "changes results"

# Variables of the environment, and flags of XLA_FLAGS.
_SETTINGS: dict[str, _Setting] = {
    "JAX_DISABLE_JIT": _Setting(_TRUE, f"{_SLOW}: nothing is compiled", Grade.FAIL),
    "JAX_DEBUG_NANS": _Setting(_TRUE, f"{_SLOW}: every result is fetched and checked"),
    "JAX_ENABLE_X64": _Setting(_TRUE, f"{_CHANGES}: 64-bit integers and floats"),
    "JAX_DEFAULT_MATMUL_PRECISION": _Setting(
        _set, f"{_CHANGES}: the policy names precisions", remedy="set precision.policy"
    ),
    "JAX_DEFAULT_PRNG_IMPL": _Setting(
        lambda value: value.strip() not in ("", "threefry2x32"),
        f"{_CHANGES}: other initial weights and dropout",
    ),
    "JAX_THREEFRY_PARTITIONABLE": _Setting(_FALSE, f"{_CHANGES}: draws depend on the mesh"),
    "JAX_ENABLE_COMPILATION_CACHE": _Setting(_FALSE, f"{_SLOW}: every start compiles again"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": _Setting(
        _among("platform"), f"{_SLOW}: every buffer is a cudaMalloc"
    ),
    "XLA_PYTHON_CLIENT_PREALLOCATE": _Setting(_FALSE, "memory fragments as the pool grows"),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _Setting(
        lambda value: bool(value) and _number(value) < 0.7,
        "less than 70% of a GPU's memory can be used",
        remedy="unset it, or raise it",
    ),
    "NVIDIA_TF32_OVERRIDE": _Setting(
        _set, f"{_CHANGES}: fp32 products of libraries in TF32 or not"
    ),
    "CUDA_LAUNCH_BLOCKING": _Setting(_TRUE, f"{_SLOW}: the host waits for every kernel"),
    "NCCL_P2P_DISABLE": _Setting(_TRUE, f"{_SLOW}: GPUs talk through the host, not NVLink"),
    "NCCL_SHM_DISABLE": _Setting(_TRUE, f"{_SLOW}: processes of a node talk by sockets"),
    "NCCL_IB_DISABLE": _Setting(_TRUE, f"{_SLOW}: nodes talk by sockets, not InfiniBand"),
    "NCCL_ALGO": _Setting(_set, f"{_SLOW} and {_CHANGES}: order of sums is fixed"),
    "NCCL_PROTO": _Setting(_set, f"{_SLOW}: NCCL no longer chooses"),
    "NCCL_DEBUG": _Setting(_among("trace"), f"{_SLOW}: a line per call", remedy="set it to WARN"),
    "TF_CPP_MIN_LOG_LEVEL": _Setting(_among("2", "3"), "hides XLA's warnings and errors"),
    "LD_PRELOAD": _Setting(_set, f"{_CHANGES}: replaces functions"),
    "xla_gpu_autotune_level": _Setting(_among("0", "1"), f"{_SLOW}: matmuls keep untuned tiles"),
    "xla_gpu_enable_command_buffer": _Setting(
        lambda value: not value.strip(), f"{_SLOW}: no CUDA graphs"
    ),
    "xla_backend_optimization_level": _Setting(_among("0", "1"), f"{_SLOW}: code is not optimized"),
    "xla_gpu_enable_triton_gemm": _Setting(_FALSE, f"{_SLOW} (8% with others, four H200s)"),
    "xla_gpu_enable_latency_hiding_scheduler": _Setting(
        _FALSE, f"{_SLOW}: communication is not hidden"
    ),
    "xla_gpu_deterministic_ops": _Setting(_TRUE, f"{_SLOW}: scatters and some matmuls"),
    "xla_gpu_exclude_nondeterministic_ops": _Setting(_TRUE, f"{_SLOW}: scatters and some matmuls"),
    "xla_gpu_force_compilation_parallelism": _Setting(
        _among("1"), f"{_SLOW}: compiles on one core"
    ),
    "xla_cpu_enable_fast_math": _Setting(_TRUE, f"{_CHANGES}: NaN and infinity are assumed away"),
    "xla_gpu_enable_fast_min_max": _Setting(_TRUE, f"{_CHANGES}: min and max may lose NaN"),
    "xla_allow_excess_precision": _Setting(_FALSE, f"{_SLOW} and {_CHANGES}: rounds more often"),
    "xla_disable_hlo_passes": _Setting(_set, f"{_SLOW}: the compiler leaves passes out"),
    "xla_dump_to": _Setting(_set, f"{_SLOW}: every program is written to disk"),
    "xla_dump_hlo_as_text": _Setting(_TRUE, f"{_SLOW}: every program is written to disk"),
}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def xla_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """Parses ``XLA_FLAGS`` into ``{name: value}``; a flag without a value is "true"."""
    flags = {}
    for word in shlex.split(environment.get("XLA_FLAGS", "")):
        name, separator, value = word.lstrip("-").partition("=")
        flags[name] = value if separator else "true"
    return flags


def setting_findings(environment: Mapping[str, str], *, num_gpus: int) -> list[Finding]:
    """Reports wrong or unhelpful settings; returns one ``ok`` finding if there are none.

    Args:
        environment: variables of the process; its ``XLA_FLAGS`` are checked by name and value.
        num_gpus: number of GPUs in the node, including any that variables hide.
    """
    given = [(name, name, value, "unset it") for name, value in environment.items()]
    given += [
        (name, f"XLA_FLAGS {name}", value, "leave it out")
        for name, value in xla_flags(environment).items()
    ]
    found = [
        Finding(
            subject=subject,
            grade=setting.grade,
            value=value or "(empty)",
            rule=setting.rule,
            remedy=setting.remedy or remedy,
        )
        for name, subject, value, remedy in given
        if (setting := _SETTINGS.get(name)) is not None and setting.is_bad(value)
    ]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    named = [part for part in (visible or "").split(",") if part.strip()]
    if visible is not None and len(named) < num_gpus:
        found.append(
            Finding(
                subject="CUDA_VISIBLE_DEVICES",
                grade=Grade.WARN,
                value=visible or "(empty)",
                rule=f"hides {num_gpus - len(named)} of {num_gpus} GPUs",
                remedy="unset it, unless another job has them",
            )
        )
    if num_gpus and environment.get("JAX_PLATFORMS", "").strip() == "cpu":
        found.append(
            Finding(
                subject="JAX_PLATFORMS",
                grade=Grade.FAIL,
                value="cpu",
                rule=f"JAX leaves {num_gpus} GPUs unused",
                remedy="unset it",
            )
        )
    rule = "no variable or flag that costs speed or changes results"
    return found or [graded("settings", "none", ok=True, rule=rule, remedy="")]


def unknown_flag_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Reports XLA flags that this XLA does not know, which would abort JAX at startup.

    A separate process tests the flags by starting JAX on the CPU.
    """
    flags = xla_flags(environment)
    rule = "this XLA knows every flag; an unknown one ends the process"
    if not flags:
        return [graded("XLA_FLAGS", "not set", ok=True, rule=rule, remedy="")]
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, **environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    match = _UNKNOWN.search(done.stderr)
    if match or done.returncode == 0:
        text = f"unknown: {match[1].strip()}" if match else f"{len(flags)} flags, all known"
    else:
        text = (done.stderr.strip().splitlines() or ["JAX did not start with them"])[-1]
    return [
        graded(
            "XLA_FLAGS",
            text,
            ok=done.returncode == 0,
            rule=rule,
            remedy="leave it out; options of one run go into training.xla_options",
            otherwise=Grade.FAIL,
        )
    ]
