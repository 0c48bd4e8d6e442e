"""A run directory is shown as it stands, in a terminal, as a page and beside others."""

import dataclasses
import json
import re

import pytest

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.diagnostics.drift import drift_delays, slow_interval
from jaxinfra.diagnostics.run_page import draw_curves
from jaxinfra.diagnostics.run_view import differing_settings, read_view
from jaxinfra.runtime.recorder import Event, RankRecord, record_incident


@pytest.fixture
def runs(tmp_path):
    """Two runs that differ in a setting; the second has met something."""
    found = []
    for name, rate in (("one", "0.001"), ("two", "0.002")):
        config = codec.override(run_preset("tiny"), [f"optimizer.learning_rate={rate}"])
        run = RunDirectory(tmp_path / name)
        run.create(config)
        records = [{"step": n, "loss": 5 - n / 10, "step_s": 0.1} for n in range(1, 21)]
        lines = [*records, {"step": 20, "heldout_loss": 3.25}]
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        snapshot = {"session": 1, "began": 0.0, "time": 4.0, "step": 20}
        seconds = {"compute": 3.0, "compile": 1.0}
        run.goodput_file.write_text(json.dumps(snapshot | {"seconds": seconds}) + "\n")
        found.append(run.path)
    record_incident(found[1] / "incidents.jsonl", "slow rank", step=7, text="rank 1 <is> slow")
    return found


def test_a_view_says_how_a_run_stands(runs):
    view = read_view(runs[1])
    tokens = view.tokens_per_step / 0.1
    head = view.headline()
    assert head["step"] == f"20/{view.num_steps}"
    assert (head["loss"], head["held-out"]) == ("3.0000", "3.2500")
    assert head["tokens/s"] == f"{tokens:,.0f}"
    assert (head["goodput"], head["incidents"]) == ("75.0%", "1: slow rank")


def test_a_report_begins_with_what_happened(runs, capsys):
    """A killed rank, a full disk and steps that became slow are in its first lines."""
    run = RunDirectory(runs[1])
    records = [{"step": n, "loss": 2.0, "step_s": 0.21 if n >= 80 else 0.1} for n in range(1, 161)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in records))
    killed = "rank 1 was ended by SIGKILL (exit 137) first; restart 1 of 3 in 1 s"
    record_incident(run.incidents_file, "rank ended", step=12, text=killed)
    for step in (20, 40):
        record_incident(run.incidents_file, "not saved", step=step, text="No space left on device")
    assert main(["report", str(run.path)]) == 0
    first = capsys.readouterr().out.splitlines()[1:5]
    page = (run.path / "report.html").read_text().partition("<h2>")[0]
    for said in ("\n".join(first), page):
        assert "rank 1 was ended by SIGKILL" in said
        assert "2 times, steps 20 to 40, the last: No space left on device" in said
        assert re.search(r"steps take 2.1x of the (others'|others&#39;) 100 ms since step 80", said)
    assert main(["compare", *map(str, runs)]) == 0
    assert "not saved x 2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([1.0] * 60, None),
        ([1.0, 1.3] * 30, None),
        ([1.0] * 30 + [2.0] * 10 + [1.0] * 20, "from step 31 to 40"),
        ([3.0] * 20 + [1.0] * 40, "until step 20"),
        ([1.0] * 900 + [1.8] * 101, "since step 901"),
        ([1.0] * 56 + [9.0] * 4, None),  # too few to tell
    ],
)
def test_steps_that_become_slow_are_found(times, said):
    found = slow_interval([{"step": n, "step_s": s} for n, s in enumerate(times, 1)])
    assert (found is None) == (said is None)
    assert found is None or found.describe().endswith(said)


def test_the_cause_of_slow_steps_is_named_where_it_is_known():
    lines = [{"step": n, "step_s": 0.5 if n > 40 else 0.1} for n in range(1, 81)]
    events, before = [], 0.0
    for step in range(1, 81):
        for name, seconds in (("input", 0.4 if step > 40 else 0.0), ("step", 0.1)):
            # An event's value is what the phase before it took.
            events.append(Event(time=0.0, name=name, step=step, value=before))
            before = seconds
    record = RankRecord(
        rank=3, pid=1, host="a", beats=0, beat_time=0.0, phase="step", since=0.0, step=80,
        events=tuple(events),
    )  # fmt: skip
    (found,) = drift_delays(lines, [record], [], [])
    assert "since step 41; the host's phase 'input' takes 400 ms more" in found.text
    slow = {"kind": "slow rank", "step": 50, "text": "rank 2 computes slowly"}
    (found,) = drift_delays(lines, [record], [slow], [])
    assert found.text.endswith("since step 41; rank 2 computes slowly")
    (found,) = drift_delays(lines, [], [], [])
    assert "no rank's host says why" in found.text


def test_settings_that_differ_are_named(runs):
    found = differing_settings([read_view(each) for each in runs])
    assert found == {"optimizer.learning_rate": ["0.001", "0.002"]}


def test_a_run_on_a_mixture_has_no_source_beside_it(runs, tmp_path):
    """A mixture takes the place of ``data.source``, whose default would be shown as read."""
    mixture = 'data.mixture=[{"name": "web", "source": "web/"}]'
    run = RunDirectory(tmp_path / "mixed")
    run.create(codec.override(run_preset("tiny"), ["optimizer.learning_rate=0.001", mixture]))
    found = differing_settings([read_view(each) for each in (runs[0], run.path)])
    assert found["data.source"] == ["stdlib", "-"]
    assert found["data.mixture.0.source"] == ["-", "web/"]


def test_the_page_holds_everything_in_one_file(runs, capsys):
    assert main(["report", str(runs[1])]) == 0
    page = (runs[1] / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "rank 1 &lt;is&gt; slow" in page
    assert "learning_rate" in page
    assert "report.html" in capsys.readouterr().out


def test_a_curve_of_pairs_says_what_its_loss_is_of(runs):
    """Beside one of text both are named."""
    text, pairs = (read_view(each) for each in runs)
    records = [each | {"preferences/accuracy": 0.5} for each in pairs.records]
    pairs = dataclasses.replace(pairs, records=records)
    labels = [draw_curves(views).axes[0].get_ylabel() for views in ([text], [pairs], [text, pairs])]
    assert labels == [
        "loss, nats per token (points: held-out)",
        "loss, per pair (points: held-out)",
        "loss, nats per token; loss, per pair (points: held-out)",
    ]


def test_runs_are_compared_and_watched(runs, capsys, tmp_path):
    words = [str(each) for each in runs]
    assert main(["compare", *words, "--json", "--picture", str(tmp_path / "c.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 2
    assert found["settings"]
    assert (tmp_path / "c.png").stat().st_size > 5_000
    assert main(["watch", words[1], "--once"]) == 0
    said = capsys.readouterr().out
    assert "compute 75%" in said
    assert "slow rank: step 7" in said
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert "no run directory" in capsys.readouterr().err


def test_what_a_run_says_of_its_layers_is_drawn(runs):
    """Statistics, experts, memory, spikes and sessions; what a kill or a disk has cut is left out.

    A number that is not finite is null in these files.
    """
    run = RunDirectory(runs[0])
    places = run.read_config().model.layer_positions
    each = [1.0] * len(places)
    site = {"rms": [None, *each[1:]], "largest": each, "zeros": each, "nonfinite": each}
    weight = {"gradient_rms": each, "update_ratio": each}
    line = {
        "activations": {"blocks/0/stream": site},
        "parameters": {"blocks/0/mlp/up/weight": weight, "final_norm/scale": {}},
    }
    lines = [json.dumps({"step": step, **line}) for step in (2, 4, 2)]
    (run.path / "statistics.jsonl").write_text("\n".join([*lines, '{"step": 6, "act']))
    records = run.metrics_file.read_text().splitlines()
    said = {"layers/tokens/imbalance": 1.5, "layers/router_z": None, "peak_bytes": 2**30}
    changed = [json.dumps({**json.loads(each), **said}) for each in records]
    run.metrics_file.write_text("\n".join(changed))
    run.environments_file.write_text('{"step": 0, "device_kind": "cpu", "mesh": {"fsdp": 2}}\nx\n')
    run.spike_file(3).parent.mkdir()
    sample = {"sample": 7, "loss": None, "text": "<b>"}
    spike = {"step": 3, "text": "layer 1", "done": "left out", "samples": [sample]}
    run.spike_file(3).write_text(json.dumps(spike))
    run.spike_file(4).write_text('{"step": 4')
    assert [each["step"] for each in read_view(run.path).layer_statistics] == [2, 4]
    assert main(["report", str(run.path)]) == 0
    page = (run.path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    for words in ("Statistics of layers", "Balance of experts", "Step 3: layer 1", "fsdp=2"):
        assert words in page
    assert "&lt;b&gt;" in page


def test_a_run_that_has_done_nothing_is_shown_too(tmp_path):
    run = RunDirectory(tmp_path / "new")
    run.create(run_preset("tiny"))
    view = read_view(run.path)
    assert view.headline()["loss"] == "-"
    assert main(["report", str(run.path)]) == 0
