"""The report of a schedule: its figures and its picture; a trace read back into them."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments.bench.training import pipeline_trace
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.parallel.pipeline.schedule import Kind, make_schedule
from jaxinfra.parallel.pipeline.tick_program import make_tick_program, run
from jaxinfra.planning.pipeline_schedule import report


@pytest.mark.slow_cases("gpipe", "interleaved", "zb_h1")
@pytest.mark.parametrize("name", PipelineSchedule)
def test_report_names_the_bubble_and_draws_the_picture(name, tmp_path):
    file = tmp_path / "schedule.svg"
    result = report(name, stages=4, micro_batches=8, chunks=2, out=file)
    assert result.time >= 8 * (1 + result.bubble_formula) * (1 - 1e-12)
    assert result.time == pytest.approx(8 * (1 + result.bubble))
    assert max(result.peak_activations) == (8 if name is PipelineSchedule.GPIPE else 4)
    text = "\n".join(result.lines())
    assert f"{result.bubble:.1%}" in text
    assert file.read_text().count("<path") > 4 * 8 * 2  # a box an action, at least
    assert list(tmp_path.iterdir()) == [file]


def gpu_trace(timeline, kind) -> bytes:
    """A profile of GPUs that did nothing but a schedule's actions, a millisecond a unit of time."""
    names = ["loop/forward/cond", "loop/forward/dot", "", "loop/backward/dot", "loop/exchange/send"]
    asks, forward, unscoped, backward, exchange = range(1, 6)
    planes = []
    for stage in range(kind.shape[1]):
        events = []

        def event(name: int, start: float, end: float, events=events) -> None:
            offset, duration = round(start * 1e9), round((end - start) * 1e9)
            stat = f"stats {{ metadata_id: 1 ref_value: {10 + name} }}" if name != unscoped else ""
            events.append(
                f"events {{ metadata_id: 1 offset_ps: {offset} duration_ps: {duration} {stat} }}"
            )

        for tick in range(kind.shape[0]):
            start, end = timeline.start[tick, stage], timeline.end[tick, stage]
            event(asks, start, start + 1e-3)
            if kind[tick, stage] != Kind.IDLE:
                scope = forward if kind[tick, stage] == Kind.FORWARD else backward
                middle = (start + end) / 2
                event(scope, start + 1e-3, middle)
                event(unscoped, middle, middle + 0.1)
                event(scope, middle + 0.1, end)
            event(exchange, end, end + 1e-3)
        scopes = " ".join(
            f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
            for i, name in [(1, "name"), *enumerate(names, 11)]
        )
        planes.append(
            f'planes {{ name: "/device:GPU:{stage}" {scopes} '
            'event_metadata { key: 1 value { id: 1 name: "kernel" } } '
            f'lines {{ name: "Stream #1(Compute)" {" ".join(events)} }} }}'
        )
    return jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes))


def test_the_bubble_is_read_from_a_trace(tmp_path, monkeypatch):
    schedule = make_schedule(PipelineSchedule.ONE_F_ONE_B, stages=4, micro_batches=8)
    timeline = run(make_tick_program(schedule), head=0.5)
    directory = tmp_path / "1f1b-m=8"
    directory.mkdir()
    (directory / "t.xplane.pb").write_bytes(gpu_trace(timeline, schedule.kind))
    (directory / "environment.json").write_text('{"device": "made up"}')
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = [str(directory), "--picture", str(picture), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["pipeline_trace", *arguments])
    pipeline_trace.main()
    found = json.loads(out.read_text())
    assert found["environment"] == {"device": "made up"}
    assert [len(stage["actions"]) for stage in found["stages"]] == [16] * 4
    work = [stage["work_ms"] for stage in found["stages"]]
    np.testing.assert_allclose(work, [24, 24, 24, 28], rtol=0.01)
    assert found["bubble"] == pytest.approx(timeline.bubble, rel=0.01)
    assert found["table_bubble"] == pytest.approx(timeline.bubble, rel=0.01)
    assert picture.read_text().count("<path") >= 4 * 16
