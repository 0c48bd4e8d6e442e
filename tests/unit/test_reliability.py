"""What ranks record, how a standing job is read, who is slow, whose copy is wrong."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.errors import ConfigError
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.runtime import injected_faults as faults
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.goodput import CAUSES, Goodput, goodput, read_sessions, sum_causes
from jaxinfra.runtime.hashes import StateHash, describe, minority_indices
from jaxinfra.runtime.host_exchange import ProcessRow, RowAllGather, Stragglers
from jaxinfra.runtime.recorder import (
    CAPACITY,
    EXCLUDED,
    Recorder,
    excluded_steps,
    read_record,
    read_records,
    record_file,
    record_incident,
)
from jaxinfra.runtime.watchdog import find_absent

ROOT = Path(__file__).parents[2]


def test_a_ring_keeps_the_newest_events(tmp_path):
    recorder = Recorder(tmp_path, 3)
    for step in range(CAPACITY + 10):
        recorder.event("tick", step=step, value=step / 2)
    recorder.phase("input", step=77)
    recorder.beat()
    record = read_record(record_file(tmp_path, 3))
    assert (record.rank, record.pid, record.phase, record.step, record.beats) == (
        3,
        os.getpid(),
        "input",
        77,
        1,
    )
    assert len(record.events) == CAPACITY
    assert [event.step for event in record.events[:-1]] == list(range(11, CAPACITY + 10))
    assert record.events[-2].value == (CAPACITY + 9) / 2
    assert record.events[-1].name == "input"


def test_seconds_are_those_of_phases(tmp_path):
    recorder = Recorder(tmp_path, 0)
    time.sleep(0.02)
    assert recorder.phase("input", step=1) >= 0.02
    time.sleep(0.03)
    assert recorder.phase("step", step=1) >= 0.03
    seconds = recorder.seconds()
    assert seconds["setup"] >= 0.02
    assert seconds["input"] >= 0.03
    assert set(seconds) == {"setup", "input", "step"}


def test_the_ring_of_a_killed_process_is_there(tmp_path):
    program = (
        "import os, sys; from pathlib import Path\n"
        "from jaxinfra.runtime.recorder import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 0); recorder.phase('step', step=9)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment)
    assert ended.returncode == -signal.SIGKILL
    (record,) = read_records(tmp_path)
    assert (record.phase, record.step) == ("step", 9)


def test_what_is_no_ring_is_not_read(tmp_path):
    (tmp_path / "rank-00000.ring").write_bytes(b"something else")
    assert read_records(tmp_path) == []
    assert read_record(tmp_path / "none") is None


def records(tmp_path, *places: tuple[str, int]):
    for rank, (phase, step) in enumerate(places):
        Recorder(tmp_path, rank).phase(phase, step=step)
    return read_records(tmp_path)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("wait", 8), ("input", 8), ("wait", 8)], "rank 1 is absent"),
        ([("wait", 9), ("wait", 9), ("place", 8)], "rank 2 is absent: for 0 s in place of step 8"),
        ([("wait", 8), ("wait", 8), ("wait", 8)], "no rank is behind"),
        ([("wait", 8), ("done", 7), ("wait", 9)], "rank 0 is absent"),
        ([("wait", 8), ("wait", 8)], "rank 2 never began"),
    ],
)
def test_the_absent_rank_is_the_one_behind(tmp_path, places, words):
    found = find_absent(records(tmp_path, *places), num_ranks=3, now=time.time())
    assert found.startswith(words)


def test_a_rank_that_does_not_run_is_absent_wherever_it_is(tmp_path):
    there = records(tmp_path, ("wait", 8), ("input", 8), ("wait", 9))
    found = find_absent(there, num_ranks=3, not_running=[2], now=time.time())
    assert found == (
        "rank 2 does not run: its process is stopped, dead or cut off, last in wait of step 9"
    )


def find_slow(rows, *, step_s=0.3, steps=20):
    stragglers = Stragglers()
    return [found for _ in range(steps) for found in stragglers.add(rows, step_s=step_s)]


def test_slow_ranks_are_named_once_with_their_cause():
    row = ProcessRow(input_s=0.001, host_s=0.004, probe_s=0.003)
    assert find_slow([row] * 4) == []
    late = dataclasses.replace(row, host_s=0.2)
    ((rank, cause, text),) = find_slow([row, row, late, row])
    assert (rank, cause) == (2, "host")
    assert "200 ms where the others take 4 ms" in text
    ((rank, cause, _),) = find_slow([row, dataclasses.replace(row, input_s=0.4)])
    assert (rank, cause) == (1, "input")
    ((rank, cause, _),) = find_slow([dataclasses.replace(row, probe_s=0.006), row, row])
    assert (rank, cause) == (0, "device")


def test_a_few_milliseconds_of_a_shared_core_are_no_slow_device():
    row = ProcessRow(host_s=0.004, probe_s=0.003)
    shared = Stragglers(probe_margin_s=0.05)
    table = [row, dataclasses.replace(row, probe_s=0.007)]
    assert [found for _ in range(20) for found in shared.add(table, step_s=0.3)] == []


def test_a_slow_device_is_named_by_rare_probes():
    stragglers, row, found = Stragglers(), ProcessRow(host_s=0.004), []
    for step in range(1, 210):
        probed = [0.004, 0.009] if step % 50 == 0 else [0.0, 0.0]
        rows = [dataclasses.replace(row, probe_s=seconds) for seconds in probed]
        found += [(step, *each[:2]) for each in stragglers.add(rows, step_s=0.1)]
    assert found == [(200, 1, "device")]


def test_a_contended_core_is_no_slow_device():
    """Some probes of every rank take twice as long where other work shares its core."""
    stragglers = Stragglers()
    for step in range(40):
        busy = step % 3
        rows = [
            ProcessRow(input_s=0.001, host_s=0.004, probe_s=0.007 if rank == busy else 0.003)
            for rank in range(2)
        ]
        assert stragglers.add(rows, step_s=0.05) == []


def test_a_little_slower_is_not_slow():
    row = ProcessRow(input_s=0.01, host_s=0.004)
    assert find_slow([row, dataclasses.replace(row, input_s=0.05)]) == [], "less than 50 ms"
    long = find_slow([row, dataclasses.replace(row, input_s=0.3)], step_s=10.0)
    assert long == [], "3% of a step"


def test_one_slow_step_is_not_a_slow_rank():
    stragglers, row = Stragglers(), ProcessRow(host_s=0.01)
    found = []
    for step in range(40):
        late = dataclasses.replace(row, host_s=3.0 if step % 10 == 0 else 0.01)
        found += stragglers.add([row, late], step_s=0.1)
    assert found == []


def test_all_processes_see_one_table():
    sent = ProcessRow(stop=15.0, input_s=0.25, host_s=0.5, probe_s=0.125)
    assert RowAllGather().start(sent).rows() == [sent]


@pytest.mark.parametrize(
    ("sums", "odd", "is_tie"),
    [
        ([5, 5, 5], [], False),
        ([5, 6, 5], [1], False),
        ([5, 6], [1], True),
        ([5, 6, 7, 5], [1, 2], False),
        ([5, 5, 6, 6], [2, 3], True),
        ([5], [], False),
    ],
)
def test_votes(sums, odd, is_tie):
    assert minority_indices(sums) == (odd, is_tie)


SPECS = {
    "whole": (PartitionSpec(), (6,), np.float32),
    "sharded": (PartitionSpec("fsdp"), (4, 3), np.float32),
    "half": (PartitionSpec(None, "fsdp"), (3, 4), jnp.bfloat16),
    "counts": (PartitionSpec(), (), np.int32),
    "flags": (PartitionSpec(), (5,), np.bool_),
    "keys": (PartitionSpec(), (2,), np.uint32),
}


def a_state():
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2))
    rng = np.random.default_rng(0)
    state = {}
    for name, (spec, shape, dtype) in SPECS.items():
        values = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
        state[name] = jax.device_put(values, NamedSharding(mesh, spec))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    return state, StateHash(abstract)


def with_flip(array: jax.Array, row: int, bit: int, devices) -> jax.Array:
    """One bit differs in the copy of one device."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == devices[row]:
            data.reshape(-1).view(np.uint8)[bit // 8 % data.nbytes] ^= 1 << bit % 8
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def test_equal_copies_have_equal_sums():
    state, state_hash = a_state()
    assert state_hash.compares
    assert state_hash.compare(np.asarray(state_hash(state))) == []


@pytest.mark.parametrize("name", [name for name in SPECS if name != "flags"])
def test_a_flipped_bit_of_any_tensor_is_found_and_its_device_named(name):
    state, state_hash = a_state()
    rng = np.random.default_rng(1)
    for _ in range(5):
        row, bit = int(rng.integers(8)), int(rng.integers(64))
        flipped = with_flip(state[name], row, bit, state_hash.devices)
        (found,) = state_hash.compare(np.asarray(state_hash(state | {name: flipped})))
        assert (found.tensor, found.odd, found.is_tie) == (name, (row,), False)


def test_without_copies_there_is_nothing_to_compare():
    mesh = make_mesh(MeshConfig(fsdp=8))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    assert not StateHash({"x": jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)}).compares


def test_the_program_of_the_minority_is_named():
    text = describe("program", ["a", "a", "b"], [2])
    assert "the program of rank 2 (b) is not that of rank 0 (a)" in text


def test_incidents_outlive_a_cut_line(tmp_path):
    file = tmp_path / "incidents.jsonl"
    assert read_log(file, holds=dict)[0] == []
    record_incident(file, EXCLUDED, step=7, text="bad", samples=[48, 55])
    record_incident(file, "slow rank", step=9, text="slow")
    with file.open("a") as lines:
        lines.write('{"kind": "batch ex')
    assert [found["step"] for found in read_log(file, holds=dict)[0]] == [7, 9]
    assert excluded_steps(file) == {7}
    # The next session's line must not be joined to the cut one.
    record_incident(file, EXCLUDED, step=11, text="bad too")
    assert [found["step"] for found in read_log(file, holds=dict)[0]] == [7, 9, 11]
    assert excluded_steps(file) == {7, 11}


def test_wall_time_is_accounted_for_over_sessions(tmp_path):
    file, prometheus = tmp_path / "goodput.jsonl", tmp_path / "metrics.prom"
    first = Goodput(file, prometheus, began=time.time() - 10, lost_s=0.0)
    spent = {"setup": 1.0, "compile": 2.0, "input": 0.5, "step": 1.0, "wait": 5.0, "host": 0.5}
    first.snapshot(spent, step=3, gauges={"loss": 2.5}, now=True)
    first.snapshot(spent | {"wait": 6.0}, step=4, gauges={"loss": 2.25}, now=False)
    assert read_sessions(file)[0]["step"] == 3, "not twice in two seconds"
    second = Goodput(file, prometheus, began=time.time() + 4, lost_s=1.5)
    second.snapshot({"save": 0.25, "wait": 4.0}, step=8, gauges={}, now=True)
    total = sum_causes(read_sessions(file))
    assert set(total) == set(CAUSES)
    assert total["compute"] == pytest.approx(6.0 + 4.0 - 1.5)
    assert (total["lost"], total["checkpoint"], total["other"]) == (1.5, 0.25, 0.5)
    assert 3.9 < total["restart"] < 4.5
    assert goodput(total) == pytest.approx(total["compute"] / sum(total.values()))
    text = prometheus.read_text()
    assert 'jaxinfra_run_seconds_total{cause="lost"} 1.500' in text
    assert "jaxinfra_step 8" in text


def target_of_faults(value):
    return [value]


def tripled(result, plan):
    return result * plan["times"]


def test_the_hook_does_what_is_planned_and_nothing_else(monkeypatch):
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "target_of_faults", target_of_faults)  # undoes what arm does
    monkeypatch.setitem(sys.modules, "tests_of_faults", this)
    plans = [
        {"rank": 1, "target": "tests_of_faults:target_of_faults", "action": "raise", "value": 28},
        {"attempt": 1, "target": "tests_of_faults:target_of_faults", "action": "raise", "value": 5},
        {
            "target": "tests_of_faults:target_of_faults",
            "call": 2,
            "action": "tests_of_faults:tripled",
            "times": 3,
        },
    ]
    environment = {faults.VARIABLE: json.dumps(plans)}
    assert faults.arm({}, rank=0, attempt=0) == 0
    assert faults.arm(environment, rank=0, attempt=0) == 1
    assert [this.target_of_faults(n) for n in (1, 2, 3)] == [[1], [2, 2, 2], [3]]
    assert faults.arm(environment, rank=1, attempt=0) == 2
    with pytest.raises(OSError, match="No space left"):
        this.target_of_faults(1)
    with pytest.raises(ConfigError, match="cannot be armed"):
        faults.arm({faults.VARIABLE: '[{"target": "no.such:thing"}]'}, rank=0, attempt=0)


WATCHED = """
import sys, time, threading
from pathlib import Path
from jaxinfra.runtime.recorder import Recorder, read_record, record_file
from jaxinfra.runtime.watchdog import Watchdog
directory, rank, stuck = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
recorder = Recorder(directory, rank)
while read_record(record_file(directory, 1 - rank)) is None:
    time.sleep(0.02)
with Watchdog(recorder, directory, num_ranks=2, hang_s=2.0, heartbeat_s=3.0, launcher=None):
    recorder.phase("wait", step=5)
    if rank == 1:
        recorder.phase("input", step=5)
        if stuck == "gil":
            import ctypes
            ctypes.PyDLL(None).sleep(60)
    def somewhere_deep():
        time.sleep(60)
    somewhere_deep()
"""


@pytest.mark.slow_cases("halted")  # what is read of such a rank: see above
@pytest.mark.parametrize("stuck", ["python", "gil", "halted"])
def test_a_job_that_stands_still_is_ended_with_stacks_and_a_name(tmp_path, stuck):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "said").open("w") as said:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WATCHED, str(tmp_path), str(rank), stuck],
                env=environment,
                stderr=said,
            )
            for rank in range(2)
        ]
    try:
        if stuck == "halted":
            while not (record := read_record(record_file(tmp_path, 1))) or record.phase != "input":
                time.sleep(0.02)
            ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(90) == 74
        if stuck == "python":
            assert ranks[1].wait(30) == 74
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith("rank 1 "), text
    assert text.splitlines()[0] in (tmp_path / "said").read_text()
    assert "input of step 5" in text.splitlines()[0]
    assert text.count("step 5       wait") == 2, "the last events of each"
    stacks = [(tmp_path / f"rank-0000{rank}.stacks").read_text() for rank in range(2)]
    assert "somewhere_deep" in stacks[0]
    if stuck != "halted":
        assert ("somewhere_deep" if stuck == "python" else "<module>") in stacks[1]
