"""Record of a measurement's surroundings: device, clocks, versions, command."""

import datetime
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Device, clock, versions and command, for the head of every results file."""
    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        "clocks": clocks(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")
        },
        "python": sys.version.split()[0],
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def clocks() -> str | None:
    """SM and memory clock, power draw and temperature now; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={gpu}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else sys.argv[0]
