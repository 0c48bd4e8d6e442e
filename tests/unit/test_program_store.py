"""A second engine compiles nothing; a damaged, missing or foreign program is compiled again."""

import argparse
import dataclasses
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from jaxinfra.cli import compile as compile_programs
from jaxinfra.errors import DeviceMemoryError, UnsupportedError
from jaxinfra.planning import receipt
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.fit import device_bytes, temporary_bytes
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.program_set import (
    COPY,
    EMPTY,
    MASK,
    Prepared,
    ProgramKey,
    ProgramSet,
    ScratchRoom,
    first_programs,
    listed_programs,
)
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.engine.runner import ModelRunner
from jaxinfra.serving.program_store import Noted, ProgramStore, described, program_name
from tests.engine_models import OPTIONS, alone, model

KEYS = [ProgramKey(name="step", rows=rows) for rows in (1, 2, 4)]
DEVICES = jax.local_devices()[:1]


def prepare(key: ProgramKey) -> Prepared:
    return Prepared(lambda x: {"sum": x + key.rows}, (jnp.zeros(key.rows),))


def made(store: ProgramStore | None, model: str = "a") -> ProgramSet:
    return ProgramSet(prepare, devices=DEVICES, model=[model], store=store)


def test_a_second_set_compiles_nothing_and_computes_the_same(tmp_path):
    first, second = (made(ProgramStore(tmp_path)) for _ in range(2))
    for programs in (first, second):
        programs.make(KEYS)
    assert (first.num_compiled, first.num_loaded) == (3, 0)
    assert (second.num_compiled, second.num_loaded) == (0, 3)
    assert second.get(KEYS[2])(jnp.ones(4))["sum"].tolist() == [5.0] * 4
    other = made(ProgramStore(tmp_path), model="b")
    other.make(KEYS[:1])
    assert other.num_compiled == 1


def test_progress_is_told_while_further_programs_are_traced():
    told, known = [], []

    def noted(key: ProgramKey) -> Prepared:
        if key == KEYS[-1]:
            while not told:  # until the first one is compiled
                time.sleep(0.001)
            known.extend(told)
        return prepare(key)

    programs = ProgramSet(noted, devices=DEVICES)
    programs.make(KEYS, lambda number, count: told.append((number, count)))
    assert known[0] == (1, 3)
    assert sorted(told) == [(1, 3), (2, 3), (3, 3)]


def test_a_name_follows_from_flags_but_not_from_what_importing_mosaic_sets(monkeypatch):
    name = program_name(DEVICES, "a")
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", "/elsewhere")
    assert program_name(DEVICES, "a") == name
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert program_name(DEVICES, "a") != name


def test_a_name_is_that_of_an_absent_device_too():
    here = "NamedSharding(mesh=Mesh('fsdp': 1), spec=P(), memory_kind=device)"
    assert described(here) == "NamedSharding(mesh=Mesh('fsdp': 1), spec=P())"
    assert "host" in described(here.replace("=device", "=pinned_host"))


def test_programs_for_an_absent_gpu_need_its_plugin(monkeypatch, tmp_path):
    monkeypatch.setattr(receipt, "_PLUGINS", ())
    parser = argparse.ArgumentParser()
    compile_programs.add_arguments(parser)
    with pytest.raises(UnsupportedError, match=r"install jaxinfra\[cuda\]"):
        compile_programs.run(parser.parse_args([str(tmp_path), "--device", "h200"]))
    with pytest.raises(UnsupportedError, match="chips described here are h100, h200"):
        compile_programs.run(parser.parse_args([str(tmp_path), "--device", "a100"]))


def test_a_damaged_file_is_compiled_again_and_said(tmp_path, caplog):
    made(ProgramStore(tmp_path)).make(KEYS[:1])
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = made(ProgramStore(tmp_path))
    again.make(KEYS[:1])
    assert again.num_compiled == 1
    assert f"{file} is damaged" in caplog.text
    third = made(ProgramStore(tmp_path))
    third.make(KEYS[:1])
    assert third.num_loaded == 1


_LOADS = """
import functools, pathlib, sys
import jax, jax.numpy as jnp
from jaxinfra.serving.engine.program_set import Prepared, ProgramKey, ProgramSet
from jaxinfra.serving.program_store import ProgramStore
from pallas_kernels.few_rows_matmul import few_rows_matmul
key = ProgramKey(name="step", rows=8)
if sys.argv[2] == "kernel":
    given = jnp.ones((8, 1024), jnp.bfloat16), jnp.ones((1024, 1024), jnp.bfloat16)
    prepared = Prepared(functools.partial(few_rows_matmul, implementation="hopper"), given)
else:
    given = jnp.eye(3), jnp.full((3, 1), 2.0)
    prepared = Prepared(functools.partial(jax.lax.linalg.triangular_solve, left_side=True), given)
store, devices = ProgramStore(pathlib.Path(sys.argv[1])), jax.local_devices()[:1]
programs = ProgramSet(lambda _: prepared, devices=devices, model=["a"], store=store)
programs.make([key])
print(programs.num_loaded, float(programs.get(key)(*given)[0, 0]))
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        pytest.param(
            "kernel",
            "1024.0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(DEVICES[0].platform != "gpu", reason="needs a Hopper GPU"),
            ],
        ),
        pytest.param("system", "2.0", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_traces_no_call_of_a_library_loads_one(tmp_path, what, number):
    command = [sys.executable, "-c", _LOADS, str(tmp_path), what]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert said == [["0", number], ["1", number]]


def test_the_files_used_longest_ago_are_deleted(tmp_path):
    store = ProgramStore(tmp_path, limit_bytes=120)
    for name in "abc":
        store.note(name, 1)  # 33 bytes
    assert store.recall("a") == 1
    store.note("d", 1)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "c", "d"}


def test_a_store_that_cannot_be_written_says_so(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = ProgramStore(tmp_path / "file" / "programs")
    programs = made(store)
    programs.make(KEYS[:1])
    assert programs.num_compiled == 1
    assert "cannot be" in caplog.text


def test_names_depend_on_settings_and_not_on_addresses(monkeypatch):
    name = program_name(DEVICES, "x")
    assert name == program_name(DEVICES, "x") != program_name(DEVICES, "y")
    assert " at 0x" not in described(prepare)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    assert name != program_name(DEVICES, "x")


LIMITS = SchedulerLimits(
    num_pages=9,
    page_size=4,
    max_running=16,
    max_step_tokens=64,
    max_positions=64,
    row_sizes=(1, 4, 16),
    chunk_sizes=(4, 16, 32),
    max_piece_rows=4,
)


@pytest.mark.parametrize("verify_length", [None, 3])
def test_the_first_programs_cover_all_others_but_scores(verify_length):
    keys = listed_programs(LIMITS, verify_length=verify_length)
    first = first_programs(keys)
    assert len(set(keys)) == len(keys)
    assert set(keys[: len(first)]) == set(first)
    assert all(key.name == "score" or any(each.covers(key) for each in first) for key in keys)
    for one, other in itertools.permutations(first, 2):
        assert not one.covers(other)


def test_a_program_that_is_not_made_yet_is_covered_by_a_larger_one():
    programs = made(None)
    programs.make(KEYS[1:])
    assert programs.ready(KEYS[0]) == KEYS[0]  # nothing is under way: it would be made now
    programs.begin([])
    programs._waited = {KEYS[0]}
    assert programs.ready(KEYS[0]) == KEYS[1]
    assert programs.ready(KEYS[2]) == KEYS[2]


def test_scores_alone_have_a_program_of_their_own_where_none_with_all_settings_is_made():
    programs = made(None)
    plain, wide = KEYS[0], dataclasses.replace(KEYS[2], is_full=True)
    scored, full = (dataclasses.replace(plain, **{name: True}) for name in ("is_scored", "is_full"))
    programs.make([plain, wide, dataclasses.replace(full, length=16)])
    assert programs.ready(scored) == scored
    assert not plain.covers(scored)
    programs.make([full])
    assert programs.ready(scored) == full


def test_many_greedy_rows_have_programs_that_every_other_of_their_rows_replaces():
    limits = dataclasses.replace(LIMITS, max_running=256, max_step_tokens=512, row_sizes=(64, 256))
    keys = [key for key in listed_programs(limits, verify_length=None) if key.length == 1]
    (greedy,) = [key for key in keys if key.is_greedy]
    plain = [key for key in keys if key.name == "step" and not key.is_greedy]
    assert greedy.rows == 256
    assert [key.covers(greedy) for key in plain] == [key.rows == 256 for key in plain]
    assert not any(greedy.covers(key) for key in plain)


def test_scratch_memory_beyond_the_estimate_is_noted_for_the_next_start(tmp_path, caplog):
    store, key = ProgramStore(tmp_path), KEYS[0]

    def room() -> ScratchRoom:
        found = ScratchRoom(Noted(store, DEVICES, "scratch"), estimated=100)
        found.spare_bytes = 50
        return found

    first = room()
    first.check(key, 100)
    assert room().bytes == 100
    first.check(key, 140)
    assert "the next start takes fewer pages" in caplog.text
    assert room().bytes == 140
    with pytest.raises(DeviceMemoryError, match="start again"):
        first.check(key, 151)
    second = room()
    second.check(key, 151)
    assert second.bytes == 151


def test_nearly_as_many_pages_take_the_programs_that_are_kept(tmp_path):
    def runner() -> ModelRunner:
        engine = Engine(model(), num_ids=257, options=OPTIONS, store=ProgramStore(tmp_path))
        return engine.runner

    limits = dataclasses.replace(LIMITS, num_pages=1000)
    assert runner().shared_limits(limits) == limits
    for pages, taken in ((1010, 1000), (990, 990), (995, 990), (1100, 1100)):
        asked = dataclasses.replace(limits, num_pages=pages)
        assert runner().shared_limits(asked).num_pages == taken


def test_the_engine_estimates_more_scratch_memory_than_its_programs_need():
    runner = Engine(model(), num_ids=257, options=OPTIONS).runner
    key = max((k for k in runner.keys if k.name == "step"), key=lambda k: k.rows * k.length)
    assert temporary_bytes(runner.lowered(key).compile()) <= runner.scratch.bytes


def pools_given_up(runner: ModelRunner, keys: Sequence[ProgramKey]) -> None:
    """Each of these programs returns its pools in the memory in which they came."""
    pools = device_bytes(jax.tree.leaves(runner._state.pools))
    for key in keys:
        memory = runner.programs.get(key).memory_analysis()
        assert memory.alias_size_in_bytes >= pools, key
        assert memory.temp_size_in_bytes < pools, key


def test_kept_programs_return_pools_in_place(tmp_path):
    many = dataclasses.replace(OPTIONS, num_pages=20_001)
    for is_second in (False, True):
        engine = Engine(model(), num_ids=257, options=many, store=ProgramStore(tmp_path))
        pools_given_up(engine.runner, [COPY, MASK])
        assert (engine.runner.programs.num_compiled == 0) is is_second


@pytest.mark.slow
def test_all_programs_return_pools_in_place(tmp_path):
    many = dataclasses.replace(OPTIONS, num_pages=20_001)
    for _ in range(2):
        runner = Engine(model(), num_ids=257, options=many, store=ProgramStore(tmp_path)).runner
        runner.warm_up()
        pools_given_up(runner, [key for key in runner.keys if key != EMPTY])


def test_a_failed_compilation_ends_the_others(monkeypatch):
    programs = made(None)
    monkeypatch.setattr(programs, "_compile", lambda *_: 1 / 0)
    programs.begin(KEYS)
    with pytest.raises(ZeroDivisionError):
        programs.wait(KEYS, 60)


def test_few_programs_are_traced_ahead_of_those_that_compile(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    traced, ahead = 0, []

    def traces(key: ProgramKey) -> Prepared:
        nonlocal traced
        ahead.append(traced - len(programs))
        traced += 1
        return prepare(key)

    programs = ProgramSet(traces, devices=DEVICES)
    programs.make([ProgramKey(name="step", rows=rows) for rows in range(1, 6)])
    assert max(ahead) <= 1


def test_the_background_makes_all_and_tells_how_many_are_left():
    programs = made(None)
    programs.begin(KEYS)
    assert programs.wait(KEYS, 60)
    assert programs.progress.ready == programs.progress.all == 3


def test_a_closed_set_compiles_nothing_more():
    programs = made(None)
    programs.close()
    programs.make(KEYS)
    assert programs.num_compiled == 0


def test_a_failure_of_the_background_is_raised_where_it_is_waited_for():
    def fail(key: ProgramKey) -> Prepared:
        raise RuntimeError("no such program")

    programs = ProgramSet(fail, devices=DEVICES)
    programs.begin(KEYS)
    with pytest.raises(RuntimeError, match="no such program"):
        programs.wait(KEYS, 60)


@pytest.mark.slow
def test_an_engine_serves_with_padding_while_its_programs_are_made(tmp_path):
    """And a second one with kept programs alone; both as each request alone."""
    options = dataclasses.replace(OPTIONS, chunk_sizes=(4, 8))
    prompts = [(7, 250, 3), (1, 2, 3, 4, 6, 9, 11, 30, 2, 8)]
    want = [alone(prompt) for prompt in prompts]
    for is_second in (False, True):
        engine = Engine(model(), num_ids=257, options=options, store=ProgramStore(tmp_path))
        runner = engine.runner
        runner.warm_up(keys=first_programs(runner.keys))
        runner.programs._waited = {*runner.keys} - {*first_programs(runner.keys)}
        got = engine.run([GenerationRequest(prompt_ids=p, max_new_tokens=10) for p in prompts])
        assert [[t for each in one for t in each.tokens] for one in got] == want
        assert runner.programs.num_late == 0
        assert (runner.programs.num_compiled == 0) is is_second
