"""What a run leaves in its directory and shows meanwhile, and what reads it afterwards."""

import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import fast_compiling
import matplotlib.image
import pytest
from e2e.faults import signal_at, terminal
from e2e.runs import STEPS, make_text, metrics, without_times
from tensorboardX.proto.event_pb2 import Event, SessionLog

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_as_people_start_it(bench, whole):
    """``python -m jaxinfra``, with nothing imported before: the run of the other tests."""
    words = [sys.executable, "-m", "jaxinfra", *map(str, bench.new("run"))]
    flags = {**os.environ, "XLA_FLAGS": fast_compiling.FLAGS}  # as the other tests' processes
    ended = subprocess.run(words, cwd=ROOT, env=flags, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert without_times(bench / "run") == without_times(whole)


def test_starting_waits_for_no_compiler_of_kernels(bench):
    """Mosaic takes two thirds as long to import as JAX; only the trace of a kernel needs it."""
    assert bench.run(["--version"], before=nothing_of_mosaic).code == 0


def nothing_of_mosaic() -> None:
    """Called where everything that a command imports has been imported."""
    assert "pallas_kernels.flash_attention.hopper" in sys.modules
    assert "jax.experimental.mosaic.gpu" not in sys.modules


def test_directory(whole):
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoints",
        "config.json",
        "environments.jsonl",
        "goodput.jsonl",
        "loss.png",
        "metrics.jsonl",
        "metrics.prom",
        "recorder",
        "summary.json",
        "tensorboard",
        "tokenizer.json",
    ]
    config = json.loads((whole / "config.json").read_text())
    assert config["training"]["steps"] == STEPS
    assert config["model"]["dropout_rate"] == 0.1


def test_metrics_have_a_line_a_step_and_one_an_evaluation(whole):
    lines = metrics(whole)
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "heldout_loss" in line] == [8, 16, STEPS]
    assert len(lines) == STEPS + 3
    assert [line["step_s"] is None for line in training] == [True] + [False] * (STEPS - 1)
    # The line after a save says how long the save kept the step waiting.
    assert [line["step"] for line in training if line["stall_s"] > 0] == [5, 9, 13, 17]
    elapsed = [line["elapsed_s"] for line in training]
    assert elapsed == sorted(elapsed)
    assert training[-1]["loss"] < 0.7 * training[0]["loss"], "it learned"


def test_summary(whole):
    summary = json.loads((whole / "summary.json").read_text())
    lines = metrics(whole)
    heldout = next(line for line in reversed(lines) if "heldout_loss" in line)
    times = sorted(line["step_s"] for line in lines if line.get("step_s") is not None)
    config = json.loads((whole / "config.json").read_text())["training"]
    tokens = config["batch_size"] * config["sequence_length"]
    assert summary["final_loss"] == next(r["loss"] for r in reversed(lines) if "loss" in r)
    assert summary["heldout_loss"] == heldout["heldout_loss"]
    assert summary["heldout_bits_per_byte"] == heldout["heldout_bits_per_byte"]
    assert summary["heldout_perplexity"] == pytest.approx(math.exp(summary["heldout_loss"]))
    assert summary["tokens_per_s"] == pytest.approx(tokens / times[len(times) // 2])
    assert summary["mfu"] is None, "the peak of this processor is not in the table"
    assert (summary["steps"], summary["skipped"]) == (STEPS, 0)
    assert summary["wall_s"] > sum(times)
    assert 10**8 < summary["peak_bytes"] < 10**11
    # Untrained, 300 tokens cost log2(300) = 8.2 bits each, and each is a byte.
    assert 1.0 < summary["heldout_bits_per_byte"] < 7.0


def test_picture(whole):
    image = matplotlib.image.imread(whole / "loss.png")
    assert image.shape[0] > 300
    assert image.shape[1] > 500
    assert image.std() > 0.05, "not blank"


def test_tensorboard_events(whole):
    curves = defaultdict(dict)
    for event in events(whole / "tensorboard"):
        for value in event.summary.value:
            curves[value.tag][event.step] = value.simple_value
    for name in ("loss", "heldout_loss", "gradient_norm", "learning_rate"):
        want = {line["step"]: line[name] for line in metrics(whole) if name in line}
        assert curves[name] == pytest.approx(want, rel=1e-6)


def events(directory: Path) -> list[Event]:
    """TFRecords: length, its checksum, an event, its checksum."""
    found = []
    for file in sorted(directory.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def test_a_complete_run_resumes_to_nothing(bench, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    ended = bench.run(["train", "--resume", whole, "--cache", bench.cache])
    assert (ended.code, ended.stderr) == (0, ""), ended
    assert f"{whole} is complete: all of its {STEPS} steps are done" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_plain_lines_where_there_is_no_terminal(said_by_whole):
    assert "\x1b" not in said_by_whole
    # The first one waited for the compiler, and has no speed.
    assert shown_steps(said_by_whole) == list(range(2, STEPS + 1))
    assert re.search(r"this model [\d.]+, gzip -9 of each file [\d.]+, xz -9", said_by_whole)
    assert re.search(
        r"wall time [\d.]+ s: .*compile [\d.]+%.*saves kept steps waiting", said_by_whole
    )
    assert re.search(r"^step 4: saving; training stood still for [\d.]+ s", said_by_whole, re.M)
    assert "sample of a document:" in said_by_whole  # a prompt of code would not fit this text


def shown_steps(said: str) -> list[int]:
    line = r"^step (\d+)/\d+  loss [\d.]+ .*tokens/s [\d,]+  MFU n/a"
    return [int(step) for step in re.findall(line, said, re.M)]


@pytest.fixture(scope="module")
def shown_on_a_terminal(shared) -> str:
    """What the rest of a killed run shows there; the run is ``resumed``."""
    fault = signal_at("jaxinfra.training.metrics:MetricsLog.write", 9, call=8)
    shared.run(shared.new("resumed"), before=fault)
    reading, writing = pty.openpty()
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(reading, seen))
    reader.start()
    size = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    ended = shared.run(shared.resume("resumed"), before=terminal(writing), environment=size)
    os.close(writing)  # the reader's end of file
    reader.join()
    os.close(reading)
    shown = seen.decode(errors="replace")
    assert ended.code == 0, shown
    return shown


def test_live_panel_on_a_terminal(shown_on_a_terminal):
    assert "\x1b[2K" in shown_on_a_terminal, "lines are drawn over"
    for name in ("step", "loss", "grad norm", "lr", "tokens/s", "MFU", "left", "held-out"):
        assert name in shown_on_a_terminal
    assert f"{STEPS}/{STEPS}" in shown_on_a_terminal


def test_resumed_events_take_the_place_of_those_undone(shared, shown_on_a_terminal):
    starts = [
        event.step
        for event in events(shared / "resumed" / "tensorboard")
        if event.session_log.status == SessionLog.START
    ]
    assert starts in ([1, 5], [1, 1]), "the step after the checkpoint resumed from"


def read_all(descriptor: int, seen: bytearray) -> None:
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            return
        if not data:
            return
        seen += data


def test_dry_run_shows_the_placement_and_makes_nothing(bench):
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    arguments = [*bench.new("run"), "--mesh", "fsdp=2", "--dry-run"]
    ended = bench.run(arguments, environment=two)
    assert (ended.code, ended.stderr) == (0, ""), ended
    text, _, table = ended.stdout.partition("\n\n")
    assert json.loads(text)["mesh"]["fsdp"] == 2
    lies, held = "-, fsdp", "19,200 +19,200 +38,400"
    row = re.search(rf"^embedding/table +300 x 32 +float32 +{lies} +{lies} +{held}$", table, re.M)
    assert row, table
    # Parameters, gradients and two moments, on two devices.
    assert table.splitlines()[-1] == (
        f"26,144 parameters; bytes on each of 2 devices, activations apart: {26_144 * 4 * 4 // 2:,}"
    )
    assert not (bench / "run").exists()


def test_evaluate_gives_the_run_its_own_figure(bench, whole):
    ended = bench.run(["evaluate", whole, "--cache", bench.cache, "--json"])
    assert (ended.code, ended.stderr) == (0, ""), ended
    got, want = json.loads(ended.stdout), json.loads((whole / "summary.json").read_text())
    assert got["step"] == STEPS
    assert got["heldout_loss"] == want["heldout_loss"]
    assert got["bits_per_byte"] == want["heldout_bits_per_byte"]
    assert got["gzip_bits_per_byte"] == want["gzip_bits_per_byte"]


def test_evaluate_another_checkpoint_as_a_table(bench, whole):
    ended = bench.run(["evaluate", whole, "--cache", bench.cache, "--step", 16])
    want = next(r for r in metrics(whole) if r["step"] == 16 and "heldout_loss" in r)
    assert (ended.code, ended.stderr) == (0, ""), ended
    assert re.search(rf"^heldout_loss +{want['heldout_loss']:.4f}$", ended.stdout, re.M)


def test_evaluate_on_another_text(bench, whole, tmp_path):
    text = make_text(tmp_path / "other", num_documents=3, seed=5)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'body': p.read_text()})}\n" for p in text.iterdir()))
    arguments = ["evaluate", whole, "--cache", bench.cache, "--json", "--data", rows]
    got = json.loads(bench.run([*arguments, "--text-field", "body"]).stdout)
    assert got["bytes"] == sum(path.stat().st_size for path in text.iterdir()), "all of it"
    own = json.loads((whole / "summary.json").read_text())
    assert got["heldout_loss"] != own["heldout_loss"]
    assert got["heldout_loss"] == pytest.approx(own["heldout_loss"], rel=0.1), "words alike"


def test_profile_has_names_that_people_read(bench):
    fast = {"training__accumulation": 1, "model__stacks__0__repeats": 1}
    short = bench.new("run", training__steps=6, training__log_every=5, **fast)
    # Of one step: JAX writes the trace as JSON too, for longer than these steps take.
    arguments = [*short, "--profile", "3:4", "--mesh", "fsdp=2"]
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ended = bench.run(arguments, environment=two)
    assert ended.code == 0, ended
    assert shown_steps(ended.stdout) == [5, 6]
    (trace,) = (bench / "run" / "trace").rglob("*.xplane.pb")
    # The trace holds the program whose operations it timed, each with the scopes it came from.
    scopes = {
        part
        for name in re.findall(rb"jit\(train_step\)/[\x20-\x7e]+", trace.read_bytes())
        for part in re.findall(r"\w+", name.decode())
    }
    assert {"layer", "attention", "mlp", "loss", "optimizer", "embedding"} <= scopes
    (readable,) = (bench / "run" / "trace").rglob("perfetto_trace.json.gz")
    assert readable.stat().st_size > 1000
    sent = json.loads((bench / "run" / "trace" / "collectives.json").read_text())
    assert {tuple(each["axes"]) for each in sent} == {("fsdp",)}
    assert {"all-gather", "all-to-all"} <= {each["kind"] for each in sent}
