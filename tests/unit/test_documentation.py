"""What is written for people is true: settings, names, examples, links."""

import ast
import dataclasses
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import docs_pages
import pytest
import yaml

import jaxinfra
import pallas_kernels
from jaxinfra.config.run import RunConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


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
    assert not re.search(r"[^`]``[^`]|:func:|:class:", page)  # a terminal shows no markup
    assert "--sequence-parallel" in page


def test_every_field_of_a_public_record_says_what_it_means():
    silent = [
        f"{name}.{each.name}"
        for package in (jaxinfra, pallas_kernels)
        for name in docs_pages.public_names(package)
        if dataclasses.is_dataclass(record := getattr(package, name))
        for each in docs_pages.settings_of(record)
        if not each.text
    ]
    assert not silent


@pytest.mark.parametrize("package", [jaxinfra, pallas_kernels], ids=lambda each: each.__name__)
def test_every_public_name_has_a_section(package):
    text = docs_pages.kernels_page()
    if package is jaxinfra:
        text = "\n".join(docs_pages.api_pages().values())
    for name in docs_pages.public_names(package):
        assert text.count(f"::: {getattr(package, name).__module__}.{name}\n") == 1


def test_every_page_is_in_the_site(monkeypatch):
    monkeypatch.setattr(docs_pages, "presets_page", str)  # counts all models' parameters
    site = yaml.load((DOCS / "mkdocs.yml").read_text(), yaml.SafeLoader)

    def pages(entries):
        for entry in entries:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]

    listed = set(pages(site["nav"]))
    made = {f"reference/{name}" for name in docs_pages.pages()}
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} | made == listed


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("*.md"), *ROOT.glob(".github/*.md")], ids=lambda path: path.name
)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link and not link.removeprefix("../").startswith("reference/"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_programs_of_pages_name_what_there_is(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            is_ours = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxinfra"
            assert not is_ours or node.attr in jaxinfra.__all__, node.attr


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


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


def test_reports_from_elsewhere_name_tests_that_are_there():
    rows = [line for line in (DOCS / "elsewhere.md").read_text().splitlines() if "https://" in line]
    assert len(rows) >= 20
    for row in rows:
        assert (ROOT / "tests" / row.split("`")[-2]).is_file(), row
