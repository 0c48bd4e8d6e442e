"""Schedules as tables: rules, bubbles, memory, slots, and that broken tables are found."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.errors import ConfigError
from jaxinfra.parallel.pipeline.schedule import Kind, make_schedule, violations
from jaxinfra.parallel.pipeline.slices import exchange_rounds, padded_layer_indices
from jaxinfra.parallel.pipeline.tick_program import (
    UNIT_TIMES,
    bubble_formula,
    live_chunks,
    make_tick_program,
    peak_activations,
    run,
)
from tests.pipeline_lifetimes import lifetime_violations

GPIPE, ONE, INTERLEAVED, ZB_H1, ZB_V = PipelineSchedule
CHUNKS = {GPIPE: [1], ONE: [1], INTERLEAVED: [2, 3, 4], ZB_H1: [1], ZB_V: [2]}
CASES = [(name, chunks) for name, options in CHUNKS.items() for chunks in options]


# Half of the usual number: the next test's programs are others, of the same few kinds.
FEWER = settings(max_examples=50)


@st.composite
def programs(draw):
    name, chunks = draw(st.sampled_from(CASES))
    stages, micro_batches = draw(st.integers(1, 7)), draw(st.integers(1, 20))
    return make_tick_program(
        make_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    )


@FEWER
@given(programs())
def test_any_schedule_is_complete_in_order_and_reads_what_was_written(program):
    assert not violations(program.schedule)
    assert not lifetime_violations(program)


@FEWER
@given(programs())
def test_no_stage_holds_more_than_it_has_slots_for(program):
    schedule = program.schedule
    held = live_chunks(schedule)
    assert held.min() >= 0
    assert np.all(held[-1] == 0)
    assert held.max() == program.num_saved
    if schedule.name != GPIPE.value:
        assert program.num_saved <= schedule.num_positions


@FEWER
@given(programs())
def test_each_round_of_the_layers_exchange_sends_and_receives_one_run_a_stage(program):
    schedule = program.schedule
    rounds = exchange_rounds(schedule)
    assert sum(map(len, rounds)) == schedule.num_positions
    for pairs in rounds:
        for end in (0, 1):
            stages = [pair[end][0] for pair in pairs]
            assert sorted(stages) == list(range(schedule.num_stages))
    places = {source: target for pairs in rounds for source, target in pairs}
    for j in range(schedule.num_positions):
        natural = divmod(j, schedule.num_chunks)
        assert places[natural] == (schedule.stage_of[j], schedule.chunk_of[j])


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("stages", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("multiple", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_bubble_is_the_formula(name, chunks, stages, multiple):
    micro_batches = stages * multiple
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    program = make_tick_program(make_schedule(name, **sizes))
    # The interleaved order of the formula is one of equal forwards and backwards.
    durations = UNIT_TIMES | ({Kind.BACKWARD: 1.0} if name is INTERLEAVED else {})
    bubble = run(program, durations=durations).bubble
    assert bubble == pytest.approx(bubble_formula(name, **sizes), rel=1e-12)


@pytest.mark.parametrize("name", [GPIPE, ONE])
@pytest.mark.parametrize("backward", [1.0, 2.0, 2.3, 3.0])
def test_bubble_does_not_depend_on_how_long_a_backward_takes(name, backward):
    """Stages wait only for whom they exchange with, so a tick has no common length."""
    program = make_tick_program(make_schedule(name, stages=4, micro_batches=16))
    timeline = run(program, durations={Kind.FORWARD: 1.0, Kind.BACKWARD: backward})
    assert timeline.bubble == pytest.approx(3 / 16, rel=1e-12)


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_peak_activations(name, chunks, stages):
    """GPipe's grow with the micro-batches; no other's do, from as many micro-batches as stages."""
    peaks = [
        peak_activations(
            make_schedule(name, stages=stages, micro_batches=stages * k, chunks=chunks)
        ).max()
        for k in (1, 2, 8)
    ]
    assert peaks == [stages * k if name is GPIPE else stages for k in (1, 2, 8)]


def test_1f1b_stage_s_holds_no_more_than_later_stages_need():
    """Stages - s micro-batches are between stage s and the end (Narayanan et al. 2019)."""
    schedule = make_schedule(ONE, stages=4, micro_batches=16)
    minimum = np.array([4, 3, 2, 1])
    assert np.all(peak_activations(schedule) >= minimum)
    assert peak_activations(schedule)[0] == 4
    assert peak_activations(schedule)[-1] == 1


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_a_moved_action_is_found(name, chunks):
    schedule = make_schedule(name, stages=4, micro_batches=8, chunks=chunks)
    table = schedule.kind.copy(), schedule.micro_batch.copy(), schedule.chunk.copy()
    first = int(np.argmax(np.isin(schedule.kind[:, 2], (Kind.BACKWARD, Kind.INPUT))))
    for column in table:  # stage 2's first backward and what it did a tick before change places
        column[[first - 1, first], 2] = column[[first, first - 1], 2]
    early = dataclasses.replace(
        schedule, **dict(zip(("kind", "micro_batch", "chunk"), table, strict=True))
    )
    assert any("needs" in message for message in violations(early))


def test_a_missing_and_a_repeated_action_are_found():
    schedule = make_schedule(ONE, stages=2, micro_batches=4)
    kind = schedule.kind.copy()
    kind[0, 0] = Kind.IDLE
    assert any("missing" in m for m in violations(dataclasses.replace(schedule, kind=kind)))
    tables = {
        name: np.concatenate([getattr(schedule, name), getattr(schedule, name)[-1:]])
        for name in ("kind", "micro_batch", "chunk")
    }
    repeated = violations(dataclasses.replace(schedule, **tables))
    assert any("twice" in message for message in repeated)


@pytest.mark.parametrize("table", ["read", "saved", "receive", "pending", "write"])
def test_a_wrong_slot_is_found(table):
    """The check must notice every kind of slot: each is shifted where it is used."""
    program = make_tick_program(make_schedule(ZB_V, stages=4, micro_batches=8, chunks=2))
    counts = {"saved": program.num_saved, "pending": program.num_pending}
    count = counts.get(table, program.num_inbox)
    slots = getattr(program, table).copy()
    used = np.argwhere(slots < count - 1)
    middle = tuple(used[len(used) // 2])
    slots[middle] = (slots[middle] + 1) % count
    assert lifetime_violations(dataclasses.replace(program, **{table: slots}))


def test_wrong_numbers_of_chunks_are_refused():
    with pytest.raises(ConfigError, match="1f1b has 1 chunk"):
        make_schedule(ONE, stages=2, micro_batches=2, chunks=2)
    with pytest.raises(ConfigError, match="zb_v has 2 chunk"):
        make_schedule(ZB_V, stages=2, micro_batches=2)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zb_h1_splits_only_the_backwards_that_fill_the_bubble(stages):
    schedule = make_schedule(ZB_H1, stages=stages, micro_batches=4 * stages)
    splits = np.count_nonzero(schedule.kind == Kind.WEIGHT, axis=0)
    assert list(splits) == [0] + [2 * (stages - 1)] * (stages - 1)


@given(st.integers(1, 12), st.integers(0, 40))
def test_layers_are_spread_evenly_and_in_order(runs, more):
    num_layers = runs + more
    places = padded_layer_indices(num_layers, runs).reshape(runs, -1)
    assert list(places[places >= 0]) == list(range(num_layers))
    sizes = np.count_nonzero(places >= 0, axis=1)
    assert np.all(np.diff(sizes) <= 0)
    assert sizes.max() - sizes.min() <= 1
    assert places.shape[1] == sizes.max()
