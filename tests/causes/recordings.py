"""Made-up traces and machines, in the form in which real ones are recorded.

A trace is written as the profiler writes it, with the files that training lays beside it, so that
``jaxinfra trace`` reads it as any other. Its healthy step is one of 1.2B parameters on an H200: 16
layers, 4 x 4096 tokens, about 260 ms.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.hlo.program import MatmulShape
from jaxinfra.training.profile import COLLECTIVES_FILE, STEP_FILE, TracedStep, rank_directory

H200 = "NVIDIA H200"
_RATE = 620e12  # FLOP/s of a large bf16 matmul under the power limit
_TOKENS = 4 * 4096
_LAYERS = 16
_STEPS = 2
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TracePart:
    """All launches of one instruction in a step."""

    kernel: str
    hlo_op: str
    op_name: str
    ms: float  # of all launches
    launches: int = 1
    matmul: MatmulShape | None = None
    beside: bool = False  # on a stream of its own, under what follows


def matmul_part(
    name: str,
    scope: str,
    sizes: tuple[int, int, int],
    *,
    launches: int = _LAYERS,
    rate: float = _RATE,
    dtype: str = "bf16",
    kernel: str = "nvjet_sm90_tst_128x256_64x4",
) -> TracePart:
    """A matmul of [rows, depth] by [depth, columns] at ``rate`` FLOP/s."""
    rows, depth, columns = sizes
    flops, width = 2.0 * rows * depth * columns, 4 if dtype == "f32" else 2
    shape = MatmulShape(
        instruction=name,
        dtype=dtype,
        batch=1,
        rows=rows,
        depth=depth,
        columns=columns,
        flops=flops,
        bytes=float(width * (rows * depth + depth * columns + rows * columns)),
    )
    ms = 1e3 * launches * flops / rate
    return TracePart(
        kernel=kernel, hlo_op=name, op_name=scope, ms=ms, launches=launches, matmul=shape
    )


def other_part(
    kernel: str, hlo_op: str, op_name: str, ms: float, *, launches: int = 1, beside: bool = False
) -> TracePart:
    """Any other kernel."""
    return TracePart(
        kernel=kernel, hlo_op=hlo_op, op_name=op_name, ms=ms, launches=launches, beside=beside
    )


def idle_part(ms: float) -> TracePart:
    """Time in which nothing runs."""
    return TracePart(kernel="", hlo_op="", op_name="", ms=ms)


_FORWARD, _BACKWARD = "jit(train_step)/jvp(layer)", "jit(train_step)/transpose(jvp(layer))"


def healthy_step(
    *, tokens: int = _TOKENS, launches: int = _LAYERS, **rates: Any
) -> list[TracePart]:
    """The step of 1.2B parameters: its parts in order.

    Args:
        tokens: of a launch; ``launches`` of the layers' matmuls.
        rates: ``rate``, ``dtype`` and ``kernel`` of those matmuls.
    """
    times: dict[str, Any] = {"launches": launches, **rates}
    layers = launches / _LAYERS  # micro-batches
    share = layers * tokens / _TOKENS
    sizes = {
        "qkv": (2048, 3072),
        "out": (2048, 2048),
        "gate_up": (2048, 16384),
        "down": (8192, 2048),
    }
    parts = [other_part("loop_gather_fusion", "fusion.1", "jit(train_step)/embedding/take", 0.4)]
    for name, (depth, columns) in sizes.items():
        scope = "attention" if name in ("qkv", "out") else "mlp"
        ways = {
            "": (_FORWARD, (tokens, depth, columns)),
            ".dx": (_BACKWARD, (tokens, columns, depth)),
            ".dw": (_BACKWARD, (depth, tokens, columns)),
        }
        for way, (where, shape) in ways.items():
            parts.append(matmul_part(f"{name}{way}", f"{where}/{scope}/dot", shape, **times))
    core = "body_mosaic_gpu_kernel"
    return [
        *parts,
        other_part(core, "call.1", f"{_FORWARD}/attention/core/f", 9 * share, launches=launches),
        other_part(core, "call.2", f"{_BACKWARD}/attention/core/f", 22 * share, launches=launches),
        other_part("loop_multiply_fusion", "fusion.2", f"{_FORWARD}/mlp/mul", 9 * share),
        other_part("input_reduce_fusion", "fusion.3", f"{_BACKWARD}/mlp/reduce_sum", 12 * share),
        other_part("MemcpyD2D", "copy.1", "", 1.5),
        other_part(core, "call.3", "jit(train_step)/jvp(loss)/f", 30 * share),
        other_part("loop_multiply_fusion", "fusion.4", "jit(train_step)/optimizer/mul", 14),
        idle_part(2.0),
    ]


def changed(parts: Iterable[TracePart], *names: str, **values: Any) -> list[TracePart]:
    """The parts, those of some instructions with other values."""
    return [dataclasses.replace(p, **values) if p.hlo_op in names else p for p in parts]


def slower(parts: Iterable[TracePart], times: float) -> list[TracePart]:
    """The same kernels on a device whose clock is lower."""
    return [dataclasses.replace(each, ms=times * each.ms) for each in parts]


def write_trace(
    directory: Path,
    *devices: Sequence[TracePart],
    rank: int = 0,
    axes: Mapping[str, str] | None = None,
    used_gib: float = 90,
    accumulation: int = 1,
    xla_options: Sequence[str] = (),
) -> Path:
    """Writes a trace of two steps of every device; returns its directory.

    Args:
        devices: parts of each GPU of the rank.
        axes: mesh axes by the instruction of a collective.
        used_gib: of the 141 that the step could have.
        accumulation: micro-batches per step.
        xla_options: "name=value", of the compiled step.
    """
    place = rank_directory(directory, rank)
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(_plane(number, parts) for number, parts in enumerate(devices))
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (place / "host.xplane.pb").write_bytes(data)
    if rank:
        return directory
    shapes = {p.matmul["instruction"]: p.matmul for p in devices[0] if p.matmul is not None}
    step = TracedStep(
        device_kind=H200,
        limit_bytes=141 * _GIB,
        step_bytes=int(used_gib * _GIB),
        accumulation=accumulation,
        matmuls=list(shapes.values()),
        xla_options=list(xla_options),
    )
    (directory / STEP_FILE).write_text(json.dumps(step))
    if axes is not None:
        found = [
            {
                "instruction": p.hlo_op,
                "kind": p.hlo_op.partition(".")[0],
                "scope": p.op_name,
                "axes": [axes[p.hlo_op]],
                "sent_bytes": 1e9,
            }
            for p in devices[0]
            if p.hlo_op in axes
        ]
        (directory / COLLECTIVES_FILE).write_text(json.dumps(found))
    return directory


def _plane(number: int, parts: Sequence[TracePart]) -> str:
    lines: dict[int, list[str]] = {1: [], 2: []}
    names = {name: place for place, name in enumerate(dict.fromkeys(p.kernel for p in parts), 1)}
    now = 0.0
    for _ in range(_STEPS):
        for part in parts:
            one = part.ms / part.launches
            for turn in range(part.launches):
                if part.kernel:
                    lines[2 if part.beside else 1].append(
                        f"events {{ metadata_id: {names[part.kernel]} "
                        f"offset_ps: {round(1e9 * (now + turn * one))} "
                        f"duration_ps: {round(1e9 * one)} "
                        f'stats {{ metadata_id: 1 str_value: "{part.hlo_op}" }} '
                        f'stats {{ metadata_id: 2 str_value: "{part.op_name}" }} '
                        'stats { metadata_id: 3 str_value: "jit_train_step" } }'
                    )
            now += 0.0 if part.beside else part.ms
    streams = "".join(
        f'lines {{ id: {stream} name: "Stream #{stream}" timestamp_ns: 1000 {" ".join(events)} }}\n'
        for stream, events in lines.items()
        if events
    )
    kernels = "".join(
        f'event_metadata {{ key: {place} value {{ id: {place} name: "{name}" }} }}\n'
        for name, place in names.items()
    )
    stats = "".join(
        f'stat_metadata {{ key: {place} value {{ id: {place} name: "{name}" }} }}\n'
        for place, name in enumerate(("hlo_op", "name", "hlo_module"), 1)
    )
    return f'planes {{ name: "/device:GPU:{number}"\n{streams}{kernels}{stats}}}\n'
