"""What delays a step is said first, each cause by name; a healthy step raises no alarm."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxinfra.cli.main import main
from jaxinfra.diagnostics.delays import (
    checkpoint_delays,
    explain_step,
    incident_delays,
)
from jaxinfra.diagnostics.difference import compare_steps
from jaxinfra.diagnostics.host_delays import evaluation_delays, host_delays, phase_ms
from jaxinfra.diagnostics.trace import TraceEvent, scope_of
from jaxinfra.diagnostics.traced_run import read_launches, with_names
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.hlo.program import launches
from jaxinfra.runtime.recorder import (
    BUSY_READERS,
    READY_BATCHES,
    RECOMPILED,
    Event,
    RankRecord,
    record_incident,
)

MLP = ("nvjet_128x256", "gemm.1", "jit(step)/jvp(layer)/mlp/dot")
MLP_BACK = ("nvjet_256x128", "gemm.2", "jit(step)/transpose(jvp(layer))/mlp/dot")
CORE = ("body_mosaic_gpu_kernel", "call.1", "jit(step)/jvp(layer)/attention/core/f")
LOSS = ("body_mosaic_gpu_kernel", "call.2", "jit(step)/jvp(loss)/f")
ADAM = ("loop_multiply_fusion", "fusion.1", "jit(step)/optimizer/mul")
HEALTHY = ((MLP, 30), (CORE, 20), (LOSS, 15), (MLP_BACK, 30), (ADAM, 5))


def step(*parts, hlo=None) -> list[TraceEvent]:
    """One step of events one after the other; None is idle time."""
    events, now = [], 0.0
    for what, ms in parts:
        if what is not None:
            kernel, op, name = what
            events.append(
                TraceEvent(
                    kernel=kernel,
                    hlo_op=hlo or op,
                    op_name=name,
                    program="jit_step",
                    start_ns=now * 1e6,
                    duration_ns=ms * 1e6,
                )
            )
        now += ms
    return events


def waterfall(*parts, axes=None):
    return explain(step(*parts), steps=1, axes=axes)


def test_a_remedy_wins_no_more_than_the_step_lost():
    """A loss of 13 ms more, of whose neighbor 5 fall away with it; recomputation in two places."""
    second = [
        (("nvjet_big", "gemm.9", LOSS[2]), 28) if each == LOSS else (each, ms)
        for each, ms in HEALTHY
    ]
    second = [(each, 25 if each == MLP_BACK else ms) for each, ms in second]
    found = compare_steps(waterfall(*HEALTHY), waterfall(*second))
    assert "which makes no array of all logits (wins 8.0 ms)." in found.paragraph()
    where = "jit(step)/transpose(jvp(layer))/rematted_computation"
    again = [
        (("gemm", f"gemm.{scope}", f"{where}/{scope}/dot"), ms)
        for scope, ms in (("mlp", 20), ("attention", 10))
    ]
    found = compare_steps(waterfall(*HEALTHY), waterfall(*HEALTHY, *again))
    assert [each.gain_ms for each in found.changes] == pytest.approx([30.0, 30.0])


def test_the_only_remedy_wins_what_its_neighbors_lose_but_no_idle_time():
    """XLA's fusions in a kernel's place, 13 ms more; matmuls 4 ms slower beside them, 9 ms idle."""
    second = [
        (("nvjet_big", "gemm.9", LOSS[2]), 28) if each == LOSS else (each, ms)
        for each, ms in HEALTHY
    ]
    second = [(each, 34 if each == MLP_BACK else ms) for each, ms in second]
    found = compare_steps(waterfall(*HEALTHY), waterfall(*second[:2], (None, 9), *second[2:]))
    assert "which makes no array of all logits (wins 17.0 ms)." in found.paragraph()


def test_a_kernel_that_stays_is_not_what_its_part_lacks():
    """Fusions beside the loss's own kernel: what differs are flags, not the loss."""
    beside = ("loop_fusion", "fusion.9", LOSS[2])
    found = compare_steps(waterfall(*HEALTHY), waterfall(*HEALTHY, (beside, 10)))
    assert [each.remedy.split(" as in")[0] for each in found.changes] == ["XLA's flags"]


def test_options_that_differ_are_said_first():
    known = {
        "device_kind": "H200",
        "limit_bytes": None,
        "step_bytes": 1,
        "accumulation": 1,
        "matmuls": [],
    }
    first, second = (known | {"xla_options": ["a=1", each]} for each in ("b=2", "b=3"))
    slower = [(each, 45 if each == MLP else ms) for each, ms in HEALTHY]
    steps = waterfall(*HEALTHY), waterfall(*slower)
    said = compare_steps(*steps, first, second).paragraph()
    assert "(+15.0%); XLA's options differ: b=2 in the first, b=3 in the second. mlp takes" in said
    assert "Remedy: XLA's options as in the first run (wins 15.0 ms)." in said
    assert "options differ" not in compare_steps(*steps, first, first).paragraph()
    assert "options differ" not in compare_steps(*steps, known, second).paragraph()


@pytest.fixture(scope="module")
def program():
    """A compiled program of a loop over layers and what follows, and its launches."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    def function(x, w):
        x, _ = jax.lax.scan(layer, x, w)
        with jax.named_scope("loss"):
            return jnp.sum(jnp.exp(x) + 1)

    compiled = jax.jit(function).lower(jnp.ones((8, 16)), jnp.ones((3, 16, 16))).compile()
    return launches(compiled)


def replayed(program, *, turns: int) -> tuple[list[TraceEvent], list[str]]:
    """The events of a CUDA graph of a program, and whose they are."""
    loop = [each for each in program if each["loops"]]
    first = program.index(loop[0])
    order = [each for each in program[:first] if not each["loops"]]
    order += turns * loop + [each for each in program[first:] if not each["loops"]]
    parts = []
    for each in order:
        if not each["kernel"]:
            parts.append((("Memset 0", "", ""), 1))  # what a library clears before it starts
        parts.append(((each["kernel"] or "nvjet_64x64", "", ""), 1))
    whose = [name for each in order for name in [each["instruction"]] * (1 + (not each["kernel"]))]
    return step(*parts, hlo="command_buffer_1"), whose


def test_kernels_of_a_graph_find_their_instructions(program):
    """Two runs of the program, each with three turns of its loop."""
    events, whose = replayed(program, turns=3)
    last = events[-1].end_ns
    again = [dataclasses.replace(each, start_ns=each.start_ns + last) for each in events]
    named = with_names([*events, *again], program)
    assert [each.hlo_op for each in named] == 2 * whose
    scopes = {scope_of(each.op_name) for each in named}
    assert {"mlp", "loss"} <= scopes


def test_events_that_name_their_instruction_keep_it(program):
    """Outside graphs they do, and only lack where in the source they come from."""
    known = next(each for each in program if scope_of(each["op_name"]) == "loss")
    (event,) = step((("any", known["instruction"], ""), 1))
    (named,) = with_names([event], program)
    assert (named.hlo_op, named.op_name) == (known["instruction"], known["op_name"])
    assert with_names([event], []) == [event]


def test_instructions_that_compute_alike_may_share_a_kernel():
    """XLA emits one kernel for equal fusions: the next of them is meant."""

    def function(x):
        for layer in range(3):
            with jax.named_scope(f"layer{layer}"):
                x = jnp.cumsum(jnp.tanh(x) * 2, axis=0)
        return x

    found = launches(jax.jit(function).lower(jnp.ones((4, 8))).compile())
    alike = [each["alike"] for each in found if each["kernel"]]
    assert len(set(alike)) < len(alike)


def test_a_list_of_launches_is_read(program, tmp_path):
    assert read_launches(tmp_path) == []
    (tmp_path / "launches.json").write_text(json.dumps(program))
    assert read_launches(tmp_path) == program


def record(rank=0, *, steps=12, devices=None, **ms) -> RankRecord:
    """A rank whose every step has phases of these milliseconds; the loop waits for the step before.

    Args:
        devices: milliseconds that the last wait takes, which is for the step just launched.
    """
    usual = {"input": 1, "place": 1, "step": 2, "wait": 90, "host": 1} | ms
    events, last = [], 0.0
    phases = [(name, number - (name in ("wait", "host")), usual[name])
              for number in range(1, steps + 1) for name in usual]  # fmt: skip
    if devices is not None:  # which compute beside what the host does meanwhile
        beside = usual["host"]
        phases[-2:] = [("wait", steps - 1, 0.0), ("host", steps - 1, beside)]
        phases += [("wait", steps, max(0.0, devices - 2 - beside)), ("host", steps, 0.0)]
    for name, number, value in phases:
        events.append(Event(time=0.0, name=name, step=number, value=last))
        last = value / 1e3
    events.append(Event(time=0.0, name="done", step=steps, value=last))
    events.append(Event(time=0.0, name="evaluate", step=steps, value=last))
    return RankRecord(
        rank=rank, pid=1, host="a", beats=1, beat_time=0.0, phase="done", since=0.0, step=steps,
        events=tuple(events),
    )  # fmt: skip


LATE = {"input": 60, "wait": 1}


def test_phases_of_a_rank_are_read():
    assert phase_ms(record())["wait"] == pytest.approx(90)
    assert phase_ms(record(input=25))["input"] == pytest.approx(25)


def test_no_alarm_on_healthy_ranks():
    assert host_delays([record(rank) for rank in range(4)], step_ms=95, steps=12) == []
    # A batch that is waited for while the devices work costs nothing.
    assert host_delays([record(input=40, wait=50)], step_ms=95, steps=12) == []
    # Nor does a rank's host that is done before its devices are.
    ranks = [record(0, host=60, wait=31, devices=93), record(1, devices=93)]
    assert host_delays(ranks, step_ms=95, steps=12) == []
    # One that is ready and handed over late, on a busy host, is no matter of its readers.
    late = record(**LATE)
    ready = [Event(time=0.0, name=READY_BATCHES, step=n, value=3) for n in range(1, 13)]
    late = dataclasses.replace(late, events=(*late.events, *ready))
    assert host_delays([late], step_ms=65, steps=12) == []


@pytest.mark.parametrize(
    ("ranks", "step_ms", "cause", "ms"),
    [
        ([record(**LATE)], 65, "waiting for input", 60),
        # Without the wait the devices, which take 50 ms, decide.
        ([record(**LATE, devices=50)], 65, "waiting for input", 15),
        ([record(**LATE, devices=5)], 65, "waiting for input", 61),
        ([record(place=40, wait=1)], 45, "placing batches", 40),
        ([record(host=400, wait=1, devices=30)], 405, "host work between steps", 400),
        (
            [record(0), record(1), record(2, input=50, wait=41), record(3)],
            *(95, "rank 2, which is slow", 49),
        ),
        ([record(0), record(1, step=42, wait=50)], 95, "rank 1, which is slow", 40),
        (
            [record(0, devices=93), record(1, input=90, wait=1, devices=20)],
            *(95, "rank 1, which is slow", 75),
        ),
    ],
    ids=["input", "input-bounded", "input-all", "place", "host", "loader", "dispatch", "bounded"],
)
def test_what_delays_the_host_is_named_with_what_is_won(ranks, step_ms, cause, ms):
    (found,) = host_delays(ranks, step_ms=step_ms, steps=12)
    assert found.cause == cause
    assert found.ms == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize(("share", "computes"), [(0.9, True), (0.02, False)])
def test_readers_that_compute_are_told_from_those_that_wait(share, computes):
    late = record(**LATE)
    busy = Event(time=0.0, name=BUSY_READERS, step=5, value=share)
    (found,) = host_delays(
        [dataclasses.replace(late, events=(*late.events, busy))], step_ms=65, steps=12
    )
    assert found.cause.startswith("waiting for input")
    assert ("compute for 90%" in found.text) == computes


def test_a_step_that_waits_for_completions_is_not_told_to_read_ahead():
    (found,) = host_delays([record(**LATE)], step_ms=65, steps=12, samples=True)
    assert found.cause == "sampling"
    assert found.ms == pytest.approx(60, rel=0.1)
    (other,) = host_delays([record(place=40, wait=1)], step_ms=45, steps=12, samples=True)
    assert other.cause == "placing batches"


def evaluating(every: int, ms: float) -> RankRecord:
    """The first evaluation compiles; each is of two batches."""
    events, last = [], 0.0
    for number in range(1, 25):
        phases = [("input", 1), ("step", 2), ("wait", 90)]
        if number % every == 0:
            phases += [("evaluate", 30 * ms if number == every else ms / 2), ("evaluate", ms / 2)]
        for name, value in phases:
            events.append(Event(time=0.0, name=name, step=number, value=last))
            last = value / 1e3
    events.append(Event(time=0.0, name="finish", step=24, value=last))
    return dataclasses.replace(record(), events=tuple(events))


def test_evaluations_that_take_too_long_are_named():
    (found,) = evaluation_delays([evaluating(2, 300)], step_ms=95)
    assert found.cause == "evaluations"
    assert found.remedy.startswith("training.evaluate_every=200,")
    assert found.ms == pytest.approx(300 / 2 - 300 / 200)
    assert evaluation_delays([evaluating(2, 10)], step_ms=95) == []
    assert evaluation_delays([evaluating(12, 300)], step_ms=95) == []  # two, one of which compiles
    assert evaluation_delays([], step_ms=95) == []


def test_checkpoints_that_stand_in_the_way_are_named():
    lines = [
        {"step": n, "step_s": 0.5, "stall_s": 2.0 if n % 4 == 0 else 0.0} for n in range(1, 13)
    ]
    (found,) = checkpoint_delays(lines, step_ms=500)
    assert (found.cause, found.ms) == ("checkpoints", pytest.approx(500 - 2000 / 200))
    assert found.remedy.startswith("checkpoint.every=200,")
    quick = [line | {"stall_s": line["stall_s"] / 100} for line in lines]
    assert checkpoint_delays(quick, step_ms=500) == []


def test_recompilation_names_the_argument_and_its_shapes(tmp_path, capsys):
    times = [0.1] * 11 + [4.1]
    text = "batch.tokens was int32[8, 128] and is int32[8, 96]"
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number, seconds in enumerate(times, start=1):
            file.write(json.dumps({"step": number, "step_s": seconds}) + "\n")
    record_incident(tmp_path / "incidents.jsonl", RECOMPILED, step=12, text=text)
    explained = explain_step(tmp_path)
    assert explained is not None
    (found,) = explained.delays
    assert found.cause == "recompilation"
    assert found.ms == pytest.approx(4000 / 12)
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A step takes 100.0 ms. It loses")
    assert text in said
    assert incident_delays([], steps_ms=[100.0]) == []
    assert explain_step(tmp_path / "nowhere") is None
