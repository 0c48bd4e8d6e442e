"""Where a compiled step's memory goes: the roles are all of it, and live arrays never overlap."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfra.cli.main import main
from jaxinfra.cli.out_of_memory import explain_out_of_memory
from jaxinfra.cli.price import step_price
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.diagnostics.memory.picture import draw_memory
from jaxinfra.diagnostics.memory.remedies import compiled_bytes, find_remedies
from jaxinfra.diagnostics.memory.report import (
    ACTIVATIONS,
    COLLECTIVES,
    FRAGMENTATION,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    argument_name,
    gib,
    report_program,
)
from jaxinfra.errors import DeviceMemoryError
from jaxinfra.hlo import wire
from jaxinfra.hlo.buffers import Lives, read_program, step_bytes
from jaxinfra.training.job import lower_step, make_job

SMALL = (
    "optimizer.muon=none",
    "training.batch_size=8",
    "training.sequence_length=64",
    "model.vocab_size=256",
    "model.stacks.0.repeats=2",
)
UNROLLED = ("training.unroll=2", "training.remat=full")
STEPS = {
    "scanned": (),
    "sharded": ("mesh.fsdp=4", "mesh.tensor=2"),
}


@functools.cache
def step(name):
    """A compiled step with its program and report."""
    job = make_job(codec.override(run_preset("tiny"), [*SMALL, *STEPS[name]]))
    lowered = lower_step(job)
    program = read_program(lowered)
    lives = Lives(program)
    return lowered, program, lives, report_program(program, lives)


@pytest.mark.slow_cases("sharded")
@pytest.mark.parametrize("name", STEPS)
def test_roles_add_up_to_the_programs_total(name):
    lowered, _, _, report = step(name)
    assert sum(part.bytes for part in report.parts) == report.total_bytes
    assert report.total_bytes == step_bytes(lowered.compile())
    assert min(part.bytes for part in report.parts) > 0
    roles = report.by_role()
    assert {WEIGHTS, OPTIMIZER, ACTIVATIONS} <= roles.keys()
    # What is alive when memory is fullest is nearly all that the compiler took.
    assert roles.get(FRAGMENTATION, 0) <= 0.1 * report.total_bytes


@pytest.mark.slow_cases("sharded")
@pytest.mark.parametrize("name", STEPS)
def test_arrays_that_live_at_once_never_overlap(name):
    """The compiler's places are the proof of the lives: one taken as too long would share bytes
    with a stranger's. Arrays made in place share all of theirs.
    """
    _, program, lives, _ = step(name)
    require_apart(program, lives)


def require_apart(program, lives):
    fixed = {i for i, each in program.allocations.items() if each.is_parameter or each.is_local}
    mine = [life for life in lives.lives.values() if life.buffer.allocation not in fixed]
    mine.sort(key=lambda life: (life.buffer.allocation, life.buffer.offset))
    compared = 0
    for place, first in enumerate(mine):
        end = first.buffer.offset + first.buffer.size
        for other in mine[place + 1 :]:
            if other.buffer.allocation != first.buffer.allocation or other.buffer.offset >= end:
                break
            if other.buffer.offset == first.buffer.offset:
                continue
            compared += 1
            together = min(first.dies, other.dies) > max(first.born, other.born)
            assert not together, (first.operation.name, other.operation.name)
    assert compared > 50  # the places of arrays that do not live at once are shared a lot


def test_arguments_are_the_state():
    """Weights to the byte, moments twice them."""
    report = step("scanned")[3]
    job = make_job(codec.override(run_preset("tiny"), SMALL))
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(job.model.shapes))
    found = [part for part in report.parts if part.role == WEIGHTS]
    assert sum(part.bytes for part in found) == weights
    assert "blocks/0/mlp/up/weight" in {part.name for part in found}
    assert report.by_role()[OPTIMIZER] >= 2 * weights


def test_activations_have_names():
    """By the scopes of the source program."""
    kept = {part.name: part.bytes for part in step("scanned")[3].parts if part.role == ACTIVATIONS}
    assert kept["mlp"] > kept["attention"] > 0


@pytest.mark.slow
def test_recomputation_keeps_less():
    """Of an unrolled step with everything recomputed little is kept, and its lives hold too."""
    job = make_job(codec.override(run_preset("tiny"), [*SMALL, *UNROLLED]))
    program = read_program(lower_step(job))
    lives = Lives(program)
    require_apart(program, lives)
    again = report_program(program, lives).by_role()[ACTIVATIONS]
    assert again < 0.5 * step("scanned")[3].by_role()[ACTIVATIONS]


@pytest.mark.slow
def test_gradients_and_collectives_are_found():
    assert any(GRADIENTS in report.timeline for _, _, _, report in map(step, STEPS))
    assert COLLECTIVES in step("sharded")[3].timeline


def test_the_peak_is_explained_and_drawn(tmp_path):
    report = step("scanned")[3]
    assert re.search(r"fullest in [\w/ ]+ \(.+\): activations \d+%", report.explained())
    totals = [sum(values) for values in zip(*report.timeline.values(), strict=True)]
    assert totals[report.peak_moment] == max(totals)
    draw_memory(report, tmp_path / "memory.png", limit_bytes=report.total_bytes)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_a_donated_argument_counts_once():
    """w - gradient in w's place: the total is w, x and what lies between."""

    def step(parameters, batch):
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(parameters)
        return parameters - gradient, value

    lowered = jax.jit(step, donate_argnums=0).lower(jnp.ones((64, 64)), jnp.ones((8, 64)))
    program = read_program(lowered)
    report = report_program(program, Lives(program))
    assert sum(part.bytes for part in report.parts) == step_bytes(lowered.compile())
    assert report.by_role()[WEIGHTS] == 64 * 64 * 4


def test_the_wire_format_is_read():
    data = b"\x08\x96\x01" + b"\x12\x07testing" + b"\x1a\x03\x03\x8e\x02" + b"\x25\x01\x00\x00\x00"
    found = wire.message(data)
    assert wire.number(found, 1) == 150
    assert wire.text(found, 2) == "testing"
    assert wire.numbers(found, 3) == [3, 270]
    assert wire.blob(found, 4) == b"\x01\0\0\0"
    for broken in (data[:-1], data[:2], b"\x0b"):
        with pytest.raises(ValueError):
            wire.message(broken)


def test_names_of_arguments():
    assert argument_name("state.parameters['mlp']['up']") == "mlp/up"
    assert argument_name("batch.tokens") == "batch.tokens"
    assert [gib(size) for size in (5, 3 << 20, 5 << 29)] == ["5 B", "3.00 MiB", "2.50 GiB"]


@pytest.mark.slow
def test_remedies_fit_and_are_compiled():
    """Each that is said to fit does, and the first costs no more than the others."""
    config = codec.override(run_preset("tiny"), SMALL)
    total = step("scanned")[3].total_bytes
    found = find_remedies(config, limit_bytes=int(0.75 * total), price=step_price)
    assert len(found) == 3
    assert found[0].fits
    for remedy in found:
        assert remedy.fits == (remedy.bytes <= int(0.75 * total))
        assert compiled_bytes(remedy.case) == remedy.bytes
    shares = [each.figures["time_share"] for each in found if each.fits]
    assert shares == sorted(shares)
    assert len({each.options[0].split("=")[1] for each in found}) >= 2


@pytest.mark.slow
def test_the_report_of_an_error(tmp_path, monkeypatch):
    """What the device was asked for, and what is held, without a remedy where no limit is known."""
    config = codec.override(run_preset("tiny"), SMALL)
    error = DeviceMemoryError("Out of memory while trying to allocate 1.50GiB.")
    text = explain_out_of_memory(config, tmp_path, error)
    assert "asked for: 1.50 GiB" in text
    report = json.loads((tmp_path / "out-of-memory.json").read_text())
    assert report["remedies"] == []
    assert sum(report["by_role"].values()) == report["total_bytes"]


def test_the_command_has_no_options_of_a_run_that_nothing_reads(capsys):
    with pytest.raises(SystemExit):
        main(["memory", "tiny", "--dry-run"])
    assert "unknown option '--dry-run'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    words = ["memory", "tiny", *(f"--set={each}" for each in SMALL)]
    assert main([*words, "--json", "--picture", str(tmp_path / "m.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_role"].values()) == found["total_bytes"]
    assert (tmp_path / "m.png").exists()
    assert main([*words, "--limit", "-1"]) == 1
