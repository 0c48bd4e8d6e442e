"""``plan`` predicts a run's memory and time; ``trace`` explains a profiled step's time."""

import dataclasses
from pathlib import Path

from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.diagnostics.traced_run import read_traced_run
from jaxinfra.diagnostics.waterfall import Waterfall
from jaxinfra.planning.devices import find_device, with_bench_results
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import find_model, plan_model
from jaxinfra.planning.plan import Plan, make_plan
from jaxinfra.planning.search import Question, search
from jaxinfra.runtime.files import user_cache

TOKENS_A_STEP = 4 * 2**20  # of a search, by default


def plan(
    model: str | ModelConfig,
    *,
    devices: int = 1,
    device: str = "h200",
    mesh: MeshConfig | None = None,
    batch: int | None = None,
    length: int | None = None,
) -> Plan:
    """Finds the fastest training layout that fits in memory; predicts its memory, time and MFU.

    Args:
        model: a preset, a directory with a Hugging Face config.json, or a config.
        devices: number of GPUs.
        device: kind of GPU: a100, h100, h200 or b200.
        mesh: plan this mesh only, with ZeRO stage 3; by default all meshes are searched.
        batch: sequences per step; by default about four million tokens, or one sequence per device
            if a mesh is given.
        length: tokens per sequence; by default the model's length, at most 8192.

    Returns:
        A plan: ``fits``, ``layout`` (mesh, ZeRO stage, micro-batches), ``memory.total`` in bytes
        per device, ``time.total_s`` in seconds per step, ``tokens_per_s_per_device``, and ``mfu``
        between 0 and 1.

    Raises:
        ConfigError: nothing fits, the mesh is impossible, or the model or device is unknown.

    Examples:
        >>> found = jaxinfra.plan("llama3_8b", devices=8, device="h100", length=2048)
        >>> found.fits, found.layout.mesh.num_devices
        (True, 8)
    """
    planned = (
        find_model(model)
        if isinstance(model, str)
        else plan_model(codec.normalized(model, ModelConfig))
    )
    kind = with_bench_results(find_device(device), user_cache() / "bench")
    length = length or min(planned.config.max_positions, 8192)
    if mesh is not None:
        layout = Layout(length=length, mesh=mesh, batch=1)
        return make_plan(planned, dataclasses.replace(layout, batch=batch or layout.data), kind)
    rows = max(devices, TOKENS_A_STEP // length // devices * devices)
    question = Question(devices=devices, length=length, batch=batch or rows)
    return search(planned, question, kind).best


def trace(run: str | Path, *, device: int = 0, steps: int | None = None) -> Waterfall:
    """Divides a profiled step's milliseconds on one GPU by cause, each moment counted once.

    Args:
        run: directory of a run that was trained with a profile, or any directory with a trace.
        device: index of the GPU among those of the traced process.
        steps: number of steps in the trace; detected by default.

    Returns:
        A waterfall of milliseconds per step: ``by_kind()``, ``by_scope()``, ``by_axis`` for
        communication, ``kernels`` with the longest first.

    Raises:
        DataError: the directory has no trace, or no trace of a GPU.

    Examples:
        >>> jaxinfra.trace("profiled", steps=1).by_kind()
        {'matmul': 4.0, 'idle': 1.0, 'elementwise': 2.0}
    """
    return read_traced_run(Path(run), device=device, steps=steps).waterfall
