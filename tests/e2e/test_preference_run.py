"""A run on pairs of answers from a trained run: killed, resumed, evaluated."""

import json
import random
import signal

import pytest
from e2e.runs import (
    assert_same_run,
    checkpoints,
    killed_at_the_second_save,
    make_text,
    metrics,
)

from jaxinfra.cli.main import main


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lora", [(), ("--lora", "rank=2")], ids=["full", "lora"])
def test_a_killed_run_ends_as_if_nothing_had_happened(bench, capsys, lora):
    """To the bit; what the reference says of the pairs is computed once and kept."""
    arguments = bench.new("start", training__steps=4, training__evaluate_every=4)
    arguments[arguments.index("--data") + 1] = make_text(bench / "text")
    assert bench.run(arguments).code == 0
    rng = random.Random(3)
    rows = [
        {"prompt": f"{n}: ", "chosen": f"{n} words", "rejected": rng.choice(["some", "a few"])}
        for n in rng.sample(range(100, 999), 60)
    ]
    pairs = bench / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "training.steps": 20,
        "training.batch_size": 4,
        "training.sequence_length": 64,
        "training.accumulation": 2,
        "training.evaluate_every": 8,
        "checkpoint.every": 4,
        "data.heldout_fraction": 0.2,
        "optimizer.learning_rate": 3e-3,
        "model.dropout_rate": 0.1,
    }

    def new(name: str) -> list[object]:
        settings = [f"--set={path}={value}" for path, value in options.items()]
        where = ["--init", bench / "start", "--run", bench / name, "--cache", bench.cache]
        return ["train", *where, "--data", pairs, "--preferences", "dpo", *lora, *settings]

    ended = bench.run([*new("whole"), "--no-sample"])
    assert (ended.code, ended.stderr) == (0, ""), ended
    assert "% right" in ended.stdout
    killed = bench.run([*new("killed"), "--no-sample"], before=killed_at_the_second_save)
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(bench / "killed") == [4]
    kept = {file.name: file.stat().st_mtime_ns for file in (bench / "killed/reference").iterdir()}
    assert len(kept) == 2
    resumed = bench.run(bench.resume("killed"))
    assert resumed.code == 0, resumed
    after = {file.name: file.stat().st_mtime_ns for file in (bench / "killed/reference").iterdir()}
    assert after == kept
    assert_same_run(bench / "killed", bench / "whole")

    records = [each for each in metrics(bench / "whole") if "loss" in each]
    assert records[0]["preferences/margin"] == pytest.approx(0.0, abs=0.05)  # but for dropout
    assert records[-1]["preferences/margin"] > 0.1
    last = metrics(bench / "whole")[-1]
    assert last["heldout_preferences/accuracy"] > 0.9
    capsys.readouterr()
    where = ["--cache", str(bench.cache)]
    assert main(["evaluate", str(bench / "whole"), "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heldout_loss"] == pytest.approx(last["heldout_loss"], rel=1e-6)
    assert found["preferences/accuracy"] == last["heldout_preferences/accuracy"]
    # Of another text the reference is computed from the model that the run started from.
    assert main(["evaluate", str(bench / "whole"), "--data", str(pairs), "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["preferences/accuracy"] > 0.9
