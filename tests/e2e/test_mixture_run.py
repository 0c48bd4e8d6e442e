"""A run on a mixture with several validation sets: killed, resumed, evaluated, shown."""

import json
import signal

import pytest
from e2e.runs import (
    assert_same_run,
    checkpoints,
    killed_at_the_second_save,
    make_text,
    metrics,
)

import jaxinfra
from jaxinfra.cli.main import main


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_happened(bench, capsys):
    """To the bit, with what was read of each source; and its sets are evaluated by name."""
    texts = {name: make_text(bench / name, seed=seed) for seed, name in enumerate("abv")}
    mixture = [
        {"name": "a", "source": str(texts["a"]), "weight": [[0, 0.9], [10, 0.2]]},
        {"name": "b", "source": str(texts["b"]), "weight": 1},
    ]
    settings = {
        "data__source": "stdlib",  # the mixture's instead
        "data__mixture": json.dumps(mixture),
        "data__validation": json.dumps([{"name": "v", "source": str(texts["v"])}]),
        "data__best_by": "v",
    }

    def new(name: str) -> list[object]:
        arguments = bench.new(name, **settings)
        where = arguments.index("--data")
        return arguments[:where] + arguments[where + 2 :]

    ended = bench.run(new("whole"))
    assert (ended.code, ended.stderr) == (0, ""), ended
    assert "source  wanted" in ended.stdout
    killed = bench.run(new("killed"), before=killed_at_the_second_save)
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(bench / "killed") == [4]
    resumed = bench.run(bench.resume("killed"))
    assert resumed.code == 0, resumed
    assert_same_run(bench / "killed", bench / "whole")

    last = metrics(bench / "whole")[-1]
    assert last["heldout_loss"] == last["heldout/v/loss"] != last["heldout/a/loss"]
    summary = json.loads((bench / "whole" / "summary.json").read_text())
    assert set(summary["heldout_sets"]) == {"a", "b", "v"}
    read = jaxinfra.read_mixture(bench / "whole")
    assert [each["sequences"] for each in summary["mixture"]] == [each.sequences for each in read]
    assert sum(each.sequences for each in read) == 20 * 8
    capsys.readouterr()
    assert main(["evaluate", str(bench / "whole"), "--json", "--cache", str(bench.cache)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heldout_loss"] == pytest.approx(last["heldout_loss"], rel=1e-6)
    assert found["sets"]["b"]["heldout_loss"] == pytest.approx(last["heldout/b/loss"], rel=1e-6)
    assert main(["report", str(bench / "whole")]) == 0
    assert "<h2>Sources</h2>" in (bench / "whole" / "report.html").read_text()
