"""Steps that go wrong, and end as if they had not: one process, several devices, the real command.

The reference of each is a run of the same devices without the fault; ``jaxinfra faults`` does
the same with several processes.
"""

import json
from pathlib import Path

import pytest
from e2e.processes import Ended
from e2e.runs import Bench, metrics, without_times

from jaxinfra.faults.arena import incidents, ledger, state_sums
from jaxinfra.runtime.injected_faults import VARIABLE

STEPS, BATCH = 12, 8
SETTINGS = {
    "training__steps": STEPS,
    "training__sequence_length": 16,
    "training__accumulation": 1,
    "training__evaluate_every": 6,
    "training__log_every": 100,
    "reliability__hash_every": 3,
    "model__stacks__0__repeats": 1,
    "model__dropout_rate": 0.0,
}
SPIKE = {"reliability__spike_factor": 1.2, "reliability__spike_window": 4}
BATCHES = "jaxinfra.data.packing:PackedWindows.batch"
STEP = "jaxinfra.training.loop:same_program"


# Of whose copies three outvote one. All runs have as many: they share their programs.
DEVICES = 4


def started(bench: Bench, name: str, *, faults: list[dict], **settings) -> Ended:
    environment = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        VARIABLE: json.dumps(faults),
    }
    arguments = [*bench.new(name, **SETTINGS, **settings), "--mesh", f"replica={DEVICES}"]
    return bench.run(arguments, environment=environment)


def train(bench: Bench, name: str, *, faults: list[dict], **settings) -> Ended:
    ended = started(bench, name, faults=faults, **settings)
    assert ended.code == 0, ended
    return ended


@pytest.fixture(scope="module")
def undisturbed(shared) -> Path:
    train(shared, "undisturbed", faults=[])
    return shared / "undisturbed"


def samples_of(step: int) -> list[int]:
    return list(range((step - 1) * BATCH, step * BATCH))


@pytest.fixture(scope="module")
def excluded(shared) -> Path:
    """A run that never trains on the batches of steps 3 and 10."""
    train(shared, "excluded", faults=[], reliability__exclude_steps="[3,10]")
    return shared / "excluded"


@pytest.fixture(scope="module")
def spoilt(shared) -> Path:
    """A run with a batch that is not finite in step 3, and one of wrong targets in step 10."""
    weights, targets = (f"jaxinfra.faults.corruption:poison_{x}" for x in ("weights", "targets"))
    faults = [
        {"target": BATCHES, "samples": samples_of(3)[-1:], "action": weights},
        {"target": BATCHES, "samples": samples_of(10)[:1], "action": targets, "token": 299},
    ]
    train(shared, "spoilt", faults=faults, **SPIKE)
    return shared / "spoilt"


def test_what_is_not_finite_is_skipped_and_located(spoilt):
    (found,) = incidents(spoilt, "not finite")
    assert (found["step"], found["ranks"], found["cause"]) == (3, [0], "batch")
    assert found["tensors"][0].startswith("layer 0: blocks/0/")


def test_a_bad_batch_is_found_and_left_out(spoilt):
    (found,) = incidents(spoilt, "batch excluded")
    assert (found["step"], found["samples"]) == (10, [72, 79])
    assert len(incidents(spoilt, "went back")) == 2, "to see it again, and to leave it out"
    explained(spoilt)
    # What was undone is not in the metrics, and is in the ledger of time.
    steps = [line["step"] for line in metrics(spoilt) if "heldout_loss" not in line]
    assert steps == list(range(1, STEPS + 1))
    assert json.loads((spoilt / "summary.json").read_text())["wall_s_by_cause"]["lost"] > 0


@pytest.mark.slow  # a run more; that nothing else is left out, the ledger says above
def test_the_state_is_that_of_the_run_without_the_batches(spoilt, excluded):
    """And the ledger lacks them."""
    assert state_sums(spoilt, STEPS) == state_sums(excluded, STEPS)
    assert ledger(spoilt) == ledger(excluded)
    assert [entry[0] for entry in ledger(spoilt) if not entry[-1]] == [3, 10]


def explained(run: Path) -> None:
    """The report names the samples, all of which are spoilt, and the layer that met them first."""
    (found,) = incidents(run, "loss spike")
    report = json.loads((run / "spikes" / "step-00000010.json").read_text())
    assert found["report"].endswith("step-00000010.json")
    assert (report["step"], report["compared_with"]) == (10, 9)
    assert sorted(each["sample"] for each in report["samples"]) == samples_of(10)
    losses = [each["loss"] for each in report["samples"]]
    assert losses == sorted(losses, reverse=True)
    text = (run / "spikes" / "step-00000010.json").read_text()
    assert "left out from now on" in text
    assert report["samples"][0]["text"]
    grown = {each["name"]: each["growth"] for each in report["layers"]}
    assert grown.keys() >= {"embedding", "layer 0", "final_norm"}
    assert max(grown.values()) > 1.5


@pytest.fixture(scope="module")
def disturbed(shared) -> Ended:
    """A run with two faults that pass: a weight flipped in step 5, a wrong gradient in step 10."""
    flip = {"target": STEP, "action": "jaxinfra.faults.corruption:flipping_step", "at": 5}
    # Its 12th call: after the flip, steps 5 and 6 ran again.
    poison = {"target": STEP, "action": "jaxinfra.faults.corruption:poisoning_step", "at": 12}
    faults = [flip | {"devices": [2]}, poison | {"token": 299}]
    return train(shared, "disturbed", faults=faults, **SPIKE)


@pytest.mark.slow  # a run more; a fault that stays is voted on below
def test_a_flipped_weight_is_voted_out(shared, disturbed):
    back, _ = incidents(shared / "disturbed", "went back")
    assert back["step"] == 6
    assert "on TFRT_CPU_2" in back["text"] or "cpu:2" in back["text"], back
    assert "is not what the other copies are" in back["text"]
    assert "TRANSIENT FAULT" in disturbed.stdout


@pytest.mark.slow  # a run more; the fault is named above
@pytest.mark.usefixtures("disturbed")
def test_a_fault_that_passes_is_told_from_a_bad_batch(shared, undisturbed):
    run = shared / "disturbed"
    found = incidents(run, "transient fault")
    assert [each["step"] for each in found] == [6, 10]
    assert not incidents(run, "batch excluded")
    assert state_sums(run, STEPS) == state_sums(undisturbed, STEPS)
    assert without_times(run) == without_times(undisturbed)


def test_a_fault_that_stays_ends_the_run_and_names_the_device(bench):
    flip = {"target": STEP, "action": "jaxinfra.faults.corruption:flipping_step"}
    ended = started(bench, "run", faults=[flip | {"devices": [1]}])
    assert ended.code == 1
    (line,) = ended.lines()
    assert "the fault is persistent" in line
    assert "cpu:1" in line or "TFRT_CPU_1" in line
