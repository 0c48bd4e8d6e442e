"""Writes the index of the result files: ``python -m experiments.results_index``.

A line has the file, what was measured, the device and the command. What was measured is the first
line of the benchmark's docstring, or the file's own ``question``.
"""

import ast
import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
MOST = 60
HEAD = """# Measurements

Written by `python -m experiments.results_index`. A file has the rows, the device, the versions and
the whole command. `-h200-x4` in a name says four H200s. [Results](../../docs/results.md) says what
they show.

| file | what | device | command |
|---|---|---|---|
"""


def environment_of(document: dict[str, Any]) -> dict[str, Any]:
    """The machine, versions and command of a file; of its first run where it has several."""
    if "runs" in document:
        return document["runs"][0]
    return document.get("environment", document)


def module_of(command: str) -> pathlib.Path | None:
    """The benchmark that a command runs."""
    found = re.search(r"-m (experiments\.[\w.]+)|jaxinfra bench (\w+)", command)
    if found is None:
        return None
    if found[1] and "bench" in found[1]:
        return ROOT / (found[1].replace(".", "/") + ".py")
    if found[1]:
        return None
    (path,) = (ROOT / "experiments" / "bench").glob(f"*/{found[2]}.py")
    return path


def line_of(path: pathlib.Path) -> str:
    """A file's line of the index."""
    document = json.loads(path.read_text())
    environment = environment_of(document)
    command = environment["command"]
    module = module_of(command)
    if "question" in document:
        what = document["question"]
    elif module is not None:
        what = (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")[0]
    else:
        raise ValueError(f"{path.name}: its command names no benchmark; give it a question")
    short = " ".join(re.split(r" (?=--)|;", command)[0].split()[:4])
    device = str(environment.get("device", environment.get("cpu"))).partition(",")[0]
    number = environment.get("num_devices", 1)
    cells = [f"`{path.name}`", what, f"{number} x {device}" if number > 1 else device, f"`{short}`"]
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |\n"


def index() -> str:
    """The text of experiments/results/README.md."""
    return HEAD + "".join(line_of(path) for path in sorted(RESULTS.glob("*.json")))


def unnamed() -> list[str]:
    """Result files that neither a page nor a docstring names."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [*pages, *(ROOT / "pallas_kernels").rglob("*.md")]
    for package in ("experiments", "jaxinfra", "pallas_kernels"):
        sources += (ROOT / package).rglob("*.py")
    text = "\n".join(path.read_text() for path in sources)
    stems = (path.stem for path in sorted(RESULTS.glob("*.json")))
    return [stem for stem in stems if not re.search(rf"(?<![\w-]){stem}(?![\w-])", text)]


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(index())
