"""lm-evaluation-harness itself, where it is installed, on tasks whose data lie here."""

import json
import sys

import pytest
from e2e.runs import make_text

from jaxinfra.cli.main import main

TASK = """
dataset_path: json
test_split: test
dataset_kwargs: {data_files: {test: FILE}}
"""
CHOICE = """
task: own_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
task: own_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of its packages
def test_tasks_of_the_package(bench, capsys, monkeypatch):
    """Bits per byte of a task are those that evaluate finds in the same text."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(bench / "hf"))
    arguments = bench.new("run", training__steps=8, training__evaluate_every=8)
    assert bench.run(arguments).code == 0
    texts = sorted(make_text(bench / "texts", num_documents=6, seed=7).iterdir())
    rows = [
        {"question": "the model", "choices": [" reads", " zzzzz"], "text": file.read_text()}
        for file in texts
    ]
    tasks = bench / "tasks"
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING)):
        whole = text + TASK.replace("FILE", str(tasks / "data.jsonl"))
        (tasks / f"{name}.yaml").write_text(whole)
    where = [str(bench / "run"), "--cache", str(bench.cache), "--json"]
    names = ["--tasks", "own_choice,own_rolling", "--task-directory", str(tasks)]
    capsys.readouterr()
    assert main(["evaluate", *where, *names]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["own_choice"]["acc,none"] == 1.0
    assert main(["evaluate", *where, "--data", str(bench / "texts")]) == 0
    want = json.loads(capsys.readouterr().out.splitlines()[-1])["bits_per_byte"]
    assert found["own_rolling"]["bits_per_byte,none"] == pytest.approx(want, rel=1e-3)
    assert "torch" not in sys.modules
