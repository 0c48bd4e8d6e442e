"""Draws docs/roofline.svg from what other benchmarks have stored, until the roofline's own run.

    python -m experiments.pictures.roofline_stored

Roofs and prefill are of ``jaxinfra bench roofline``, a run that ended before decoding and the
ladder; kernels are of the runs named in ``SOURCES``, on machines of one kind and at other clocks,
so shares of a roof are good to a few percent. Decode is the planner's prediction: hollow. With
results of a whole run, ``experiments.pictures.roofline`` draws this picture, and this file can go.
"""

import dataclasses
import json
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
DECODES = (1, 16, 256)
CONTEXT = 2048


def stored(name: str) -> list[dict[str, Any]]:
    """Rows of one benchmark."""
    return json.loads((ROOT / f"experiments/results/{name}-h200.json").read_text())["rows"]


def named(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(row for row in rows if row["name"] == name)


def document() -> dict[str, Any]:
    """In the form of ``jaxinfra bench roofline``."""
    run = json.loads((ROOT / "experiments/results/roofline-h200.json").read_text())
    ceilings = run["ceilings"]
    device = roofline.with_ceilings(
        find_device("h200"),
        flops={name: peak for name, peak in ceilings.items() if name not in ("copy", "read")},
        hbm_bytes_per_s=max(ceilings["copy"], ceilings["read"]),
    )
    ladder = stored("ladder")
    rows = [point.as_json(device) for point in (*rungs(ladder), *kernels(ladder))]
    rows += [point for point in run["points"] if point.get("group") == "prefill"]
    rows += [{**point.as_json(device), "predicted": True} for point in decodes()]
    return {"device": run["device"], "ceilings": ceilings, "points": rows}


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


def decodes() -> Iterator[Point]:
    """Decode of Llama-3.2-1B in bf16, as the planner's rates have it."""
    device, shape = find_device("h200"), shape_of(MODELS["llama32_1b"](), name="1.2B")
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
