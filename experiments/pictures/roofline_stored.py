"""Draws docs/roofline.svg from what other benchmarks have stored, until the roofline's own run.

    python -m experiments.pictures.roofline_stored

Roofs are XLA's product and copy in the ladder's run; kernels are of the runs named in ``SOURCES``,
on machines of one kind and at other clocks, so shares of a roof are good to a few percent. Prefill
and decode are the planner's predictions: hollow. ``jaxinfra bench roofline`` measures everything in
one process; with its results, ``experiments.pictures.roofline`` draws this picture, and this file
can go.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any

from experiments.pictures.roofline import PICTURE, ROOT, draw
from jaxinfra.config.presets import MODELS
from jaxinfra.planning import roofline
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.roofline import Point, Work
from pallas_kernels.ladder import RUNGS

SOURCES = ("ladder", "attention", "memory-bound", "linear-cross-entropy")
THREADS = "fp32"
# 132 multiprocessors, 128 multiply-adds a cycle, at the 1980 MHz of the ladder's run: not measured.
THREADS_FLOPS = 132 * 128 * 2 * 1.98e9
PROMPTS, DECODES = (128, 2048), (1, 16, 256)
CONTEXT = 2048


def stored(name: str) -> list[dict[str, Any]]:
    """Rows of one benchmark."""
    return json.loads((ROOT / f"experiments/results/{name}-h200.json").read_text())["rows"]


def named(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(row for row in rows if row["name"] == name)


def document() -> dict[str, Any]:
    """In the form of ``jaxinfra bench roofline``."""
    ladder = stored("ladder")
    product = statistics.median(row["xla_tflops"] for row in ladder if row.get("size") == 8192)
    ceilings = {
        "bf16": 1e12 * product,
        THREADS: THREADS_FLOPS,
        "copy": 1e9 * named(ladder, "access")["width"]["xla"]["gb_s"],
    }
    device = roofline.with_ceilings(
        find_device("h200"),
        flops={"bf16": ceilings["bf16"], THREADS: THREADS_FLOPS},
        hbm_bytes_per_s=ceilings["copy"],
    )
    rows = [point.as_json(device) for point in (*rungs(ladder), *kernels(ladder))]
    rows += [{**point.as_json(device), "predicted": True} for point in phases()]
    return {"device": "NVIDIA H200", "ceilings": ceilings, "points": rows}


def rungs(ladder: list[dict[str, Any]]) -> Iterator[Point]:
    for rung in RUNGS:
        yield Point(
            name=rung.name,
            group="ladder",
            work=roofline.matmul_work(4096, 4096, 4096),
            seconds=named(ladder, f"rung {rung.name} 4096")["ms"] / 1e3,
            compute="bf16" if rung.tensor_cores else THREADS,
        )


def kernels(ladder: list[dict[str, Any]]) -> Iterator[Point]:
    """At shapes of their bars."""
    shape = {"batch": 4, "length": 4096, "q_heads": 32, "kv_heads": 8, "width": 128, "causal": True}
    forward, backward = roofline.attention_work(**shape), roofline.attention_backward_work(**shape)
    both = Work(
        flops=forward.flops + backward.flops,
        memory_bytes=forward.memory_bytes + backward.memory_bytes,
    )
    for name, direction, work in (
        ("attention", "fwd", forward),
        ("attention with backward", "fwd+bwd", both),
    ):
        (row,) = (
            row
            for row in stored("attention")
            if row["case"] == "b4 s4096 h32/8 d128/128 causal"
            and (row["direction"], row["implementation"]) == (direction, "hopper")
        )
        yield Point(name=name, group="kernel", work=work, seconds=row["ms"] / 1e3)
    loss = named(stored("linear-cross-entropy"), "loss: hopper")["kernels_ms"]["all"]
    yield Point(
        name="linear + cross entropy",
        group="kernel",
        work=roofline.linear_cross_entropy_work(tokens=16_384, width=2048, vocab=128_256),
        seconds=loss / 1e3,
    )
    R, C = 8192, 32_768
    rowwise = stored("memory-bound")
    for name, streams, flops_each in (("softmax", 2, 5), ("rms_norm", 2, 4)):
        yield Point(
            name=f"{name} {R} x {C}",
            group="kernel",
            work=roofline.elementwise_work(R * C, streams=streams, flops_each=flops_each),
            seconds=named(rowwise, f"{name} {R}x{C} hopper")["ms"] / 1e3,
            compute=THREADS,
        )
    elu = named(ladder, "elu")
    yield Point(
        name="elu and gradient",
        group="kernel",
        work=roofline.elementwise_work(elu["shape"][0] * elu["shape"][1], streams=4, flops_each=5),
        seconds=elu["rows"]["value and gradient by hand"]["ms"] / 1e3,
        compute=THREADS,
    )


def phases() -> Iterator[Point]:
    """Prefill and decode of Llama-3.2-1B in bf16, as the planner's rates have them."""
    device, shape = find_device("h200"), shape_of(MODELS["llama32_1b"](), name="1.2B")
    for length in PROMPTS:
        work = roofline.prefill_work(shape, device, batch=1, length=length)
        yield _predicted(f"1.2B prefill 1 x {length}", "prefill", work, device)
    for batch in DECODES:
        work = roofline.decode_work(shape, device, batch=batch, context=CONTEXT)
        yield _predicted(f"1.2B decode {batch} after {CONTEXT}", "decode", work, device)


def _predicted(name: str, group: str, work: Work, device: Device) -> Point:
    reached = dataclasses.replace(
        device,
        flops={"bf16": device.flops["bf16"] * device.matmul_efficiency["bf16"]},
        hbm_bytes_per_s=device.hbm_bytes_per_s * device.memory_efficiency,
    )
    point = Point(name=name, group=group, work=work, seconds=1.0)
    return dataclasses.replace(point, seconds=work.flops / point.attainable(reached))


if __name__ == "__main__":
    draw(document(), PICTURE)
