"""What is written for people is true: settings, names, examples, links."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import docs_pages
import pytest
import yaml

import jaxinfra
from jaxinfra.config.run import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMES = sorted(name for name in jaxinfra.__all__ if not name.startswith("_"))


def test_every_setting_says_what_it_means():
    silent = [
        f"{record.__name__}.{each.name}"
        for record in docs_pages.records(RunConfig)
        for each in docs_pages.settings_of(record)
        if not each.text
    ]
    assert not silent


def test_the_settings_page_has_every_field():
    page = docs_pages.settings_page()
    for record in docs_pages.records(RunConfig):
        for each in docs_pages.settings_of(record):
            assert f"`{each.name}`" in page
    assert "`fp32`, `bf16`, `fp16`" in page  # choices are named


def test_commands_are_listed_with_their_options():
    page = docs_pages.commands_page()
    assert "## train" in page
    assert "--sequence-parallel" in page


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_described(name):
    thing = getattr(jaxinfra, name)
    assert inspect.getdoc(thing)
    assert f"::: {thing.__module__}.{name}\n" in docs_pages.api_page()


EXAMPLES = sorted({getattr(jaxinfra, name).__module__ for name in NAMES})


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_of_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.failed == 0


def test_some_examples_run():
    finder = doctest.DocTestFinder()
    examples = [
        each
        for module in EXAMPLES
        for test in finder.find(importlib.import_module(module))
        for each in test.examples
        if not each.options.get(doctest.SKIP)
    ]
    assert len(examples) >= 4


def test_every_page_is_in_the_site():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)

    def pages(entries):
        for entry in entries:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]

    listed = {page for page in pages(site["nav"]) if not page.startswith("reference/")}
    assert {page.name for page in PAGES} - {"index.md"} == listed - {"index.md"}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link and not link.startswith("reference/"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_programs_of_pages_name_what_there_is(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            is_ours = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxinfra"
            assert not is_ours or node.attr in jaxinfra.__all__, node.attr


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_the_readme_runs_as_printed(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "focal.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "focal.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bits per byte:" in done.stdout
    assert (tmp_path / "runs" / "focal" / "checkpoints").is_dir()
