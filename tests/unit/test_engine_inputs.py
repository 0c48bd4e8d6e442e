"""What programs are given at a step, and the shapes that they are listed for."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.cli.engine_options import add_engine_arguments, engine_options
from jaxinfra.config.presets import MODELS
from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.inputs import RowWriter
from jaxinfra.serving.engine.options import EngineOptions, Preemption, options_on
from jaxinfra.serving.engine.plan import PlannedRow, SchedulerLimits
from jaxinfra.serving.engine.programs import NamedArrays
from jaxinfra.serving.engine.requests import GenerationRequest, RequestStream
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingRows
from tests.engine_models import OPTIONS, model

LIMITS = SchedulerLimits(
    num_pages=9,
    page_size=4,
    max_running=4,
    max_step_tokens=64,
    max_positions=8,
    row_sizes=(1, 4),
    chunk_sizes=(2,),
    max_piece_rows=1,
)


def a_row(*, slot, number=0, **said):
    request = GenerationRequest(
        prompt_ids=(1, 2), max_new_tokens=4, seed=2**32 - 5, choice=1, adapter=said.pop("adapter")
    )
    stream = RequestStream(number=number, request=request, tokens=[1, 2], limit=6)
    told = dict(pages=(), start=7, ids=(), count=2, is_sampled=True, context=9)
    return PlannedRow(stream=stream, slot=slot, **(told | said))


@jax.jit
def read(rows):
    names = ("slot", "start", "count", "context", "choice", "adapter", "key_position")
    fields = [rows.field(name) for name in (*names, "is_masked", "is_counted")]
    seeds = jax.lax.bitcast_convert_type(rows.field("seed"), jnp.uint32)
    return fields, seeds, rows.field("is_sampled") != 0, rows.tables_BM, rows.ids_BT


def test_one_array_holds_what_was_said_of_the_rows():
    writer = RowWriter(LIMITS, adapters=("other", "mine"))
    rows = [
        a_row(slot=3, adapter="mine", pages=(5, 6), ids=(7, 8), num_drafts=1),
        a_row(slot=1, adapter=None, is_sampled=False, start=0, context=2),
    ]
    written = writer.write(
        rows, size=3, length=2, sampling=SamplingRows.of([GREEDY] * 3), masks={1: None}, counted=[0]
    )
    fields, seeds, is_sampled, tables, ids = read(written)
    assert [x.tolist() for x in fields] == [
        [3, 1, 4], [7, 0, 0], [2, 2, 0], [9, 2, 0], [1, 1, 0], [2, 0, 0], [8, 2, 0],
        [False, True, False], [True, False, False],
    ]  # fmt: skip
    assert seeds.dtype == jnp.uint32
    assert seeds.tolist() == [2**32 - 5, 2**32 - 5, 0]
    assert is_sampled.tolist() == [True, False, False]
    np.testing.assert_array_equal(tables, [[5, 6], [0, 0], [0, 0]])
    np.testing.assert_array_equal(ids, [[7, 8], [-1, 0], [0, 0]])


def test_a_slot_keeps_nothing_of_who_was_in_it_before():
    writer, sampling = RowWriter(LIMITS, adapters=("other",)), SamplingRows.of([GREEDY])

    def told(row):
        (slots, *_, adapters, _, _, _), _, _, tables, ids = read(
            writer.write([row], size=1, length=1, sampling=sampling)
        )
        return slots.tolist(), adapters.tolist(), tables.tolist(), ids.tolist()

    first = a_row(slot=2, adapter="other", pages=(5, 6))
    assert told(first) == ([2], [1], [[5, 6]], [[-1]])
    assert told(first._replace(pages=(5,), ids=(3,))) == ([2], [1], [[5, 0]], [[3]])
    assert told(a_row(slot=2, adapter=None, pages=(5,))) == ([2], [0], [[5, 0]], [[-1]])


def test_settings_of_equal_rows_are_packed_once_for_any_number():
    runner = Engine(model(), num_ids=257, options=OPTIONS).runner
    warm = SamplingConfig(temperature=0.5)
    known = runner._sampling_rows([warm] * 3, 3)
    assert runner._sampling_rows([warm] * 2, 3) is known
    assert runner._sampling_rows([warm, GREEDY], 3).temperature_B.tolist() == [0.5, 0.0, 0.0]


def test_named_arrays_are_the_state():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    named = NamedArrays.of(state)
    assert sorted(named.arrays) == ["bias/value", "kernel/value"]
    again = jax.jit(lambda named: named.state)(named)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, state))


def test_sizes_of_calls_are_few_and_reach_all_requests():
    def sizes(options):
        limits = options.limits(MODELS["tiny"]())
        return limits.row_sizes

    assert sizes(EngineOptions(max_running=1)) == (1,)
    assert sizes(EngineOptions(max_running=3)) == (1, 3)
    large = (4, 16, 64, 128, 256, 300)
    assert sizes(EngineOptions(max_running=300, max_step_tokens=900)) == (1, 2, *large)
    assert sizes(EngineOptions(max_running=300, max_step_tokens=1900)) == (1, *large)
    assert sizes(options_on("gpu")) == (1, 4, 16, 64)
    assert options_on("cpu") == EngineOptions(max_piece_rows=1)


def test_room_for_pages_in_the_hosts_memory():
    limits = EngineOptions().limits(MODELS["tiny"]())

    def room(options, *sizes):
        page_bytes, state_bytes = sizes
        found = options.with_host(limits, page_bytes=page_bytes, state_bytes=state_bytes)
        return found.num_host_pages, found.num_host_states

    assert room(EngineOptions(), 1000, 0) == (0, 0), "unless it is asked for"
    kept = EngineOptions(preemption=Preemption.HOST, host_bytes=2500)
    assert room(kept, 1000, 0) == (2, 0)
    assert room(kept, 100, 600) == (13, 2)
    most = limits.max_running + limits.num_pages, limits.max_running * limits.num_pages
    assert room(kept, 0, 1) == (most[1], 1250)
    assert room(dataclasses.replace(kept, host_bytes=1 << 30), 0, 1) == (most[1], most[0])
    with pytest.raises(ConfigError, match="host_bytes=2500 has no room for a page of 3000 bytes"):
        room(kept, 3000, 0)


def test_options_of_the_command_line():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)

    def told(*words):
        return engine_options(parser.parse_args(words))

    cpu = options_on("cpu")
    assert told() == cpu
    kept = told("--preemption", "host", "--host-gib", "0.5", "--num-pages", "9")
    expected = {"preemption": Preemption.HOST, "host_bytes": 1 << 29, "num_pages": 9}
    assert kept == dataclasses.replace(cpu, **expected)
    for words in (("--host-gib", "1"), ("--preemption", "host", "--host-gib", "nan")):
        with pytest.raises(ConfigError, match="a size above 0, with --preemption host"):
            told(*words)
