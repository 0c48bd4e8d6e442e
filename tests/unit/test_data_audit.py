"""Odd documents are counted and named; ordinary text raises no alarm."""

import dataclasses
import json
import random

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.mixture import MixtureSource
from jaxinfra.config.presets import run_preset
from jaxinfra.data.readers import Document
from jaxinfra.diagnostics.data_audit import audit
from jaxinfra.diagnostics.machine.finding import Grade

WORDS = ("the", "model", "reads", "a", "token", "of", "text", "and", "writes", "one")


def documents(count=200):
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=rng.randrange(20, 90))) + ".\n" for _ in range(count))
    return [Document(name=f"{number}.txt", text=text) for number, text in enumerate(texts)]


def alarms(found):
    return [each.subject for each in found.findings() if each.grade is not Grade.OK]


def test_ordinary_text_raises_no_alarm():
    found = audit(documents())
    assert alarms(found) == []
    assert sum(found.lengths.values()) == found.documents == 200
    assert alarms(audit([])) == []


def test_each_oddity_is_named():
    texts = documents()
    twice = [Document(name=f"again-{d.name}", text=d.text.replace(" ", "  ")) for d in texts[:9]]
    cut = [Document(name=f"cut-{n}", text=f"{n}" + "word " * 160 + "wor") for n in range(5)]
    odd = [Document(name=f"odd-{n}", text=f"{n} \ufffd\ufffd\x01 text " * 8) for n in range(4)]
    empty = [Document(name=f"empty-{n}", text=" \n") for n in range(4)]
    found = audit([*texts, *twice, *cut, *odd, *empty])
    kinds = ("duplicates", "cut documents", "unreadable documents", "empty documents")
    assert alarms(found) == [f"data: {kind}" for kind in kinds]
    assert found.duplicates[0] == ("again-0.txt", "0.txt")
    assert found.cut == [each.name for each in cut]
    assert found.unreadable == [each.name for each in odd]
    assert found.empty == [each.name for each in empty]


def test_the_command_reads_a_source(tmp_path, capsys):
    for each in documents(4):
        (tmp_path / each.name).write_text(each.text)
    (tmp_path / "copy.txt").write_text(documents(4)[0].text)
    assert main(["doctor", "data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grade"] == "warn"
    assert "copy.txt is 0.txt" in found["findings"][0]["value"]


def test_the_command_reads_what_a_run_reads(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.txt").write_text("a text of two sources\n")
    parts = tuple(MixtureSource(name=n, source=str(tmp_path / n), weight=1) for n in ("one", "two"))
    start = run_preset("tiny")
    config = dataclasses.replace(start, data=dataclasses.replace(start.data, mixture=parts))
    (tmp_path / "config.json").write_text(codec.to_json(config))
    assert main(["doctor", "data", str(tmp_path)]) == 0
    assert "1 of 2 documents" in capsys.readouterr().out
