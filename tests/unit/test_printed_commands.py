"""Commands that pages print are ones that their parsers take."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxinfra.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[str]:
    """Lines of code blocks, and code within sentences, that call jaxinfra."""
    text = page.read_text()
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    inline = re.findall(r"`((?:[A-Z_]+=\S+ )?jaxinfra [^`\n]*)`", BLOCK.sub("", text))
    found = []
    for line in [*blocks.splitlines(), *inline]:
        call = re.match(r"^(?:\$ )?(?:[A-Z_]+=\S* )*jaxinfra (\S.*)$", line)
        if call is None or "..." in call[1] or ":" in call[1].split()[0]:
            continue
        # What a page says of a command stands apart from it.
        found.append(re.split(r" {2,}(?! *--)", re.sub(r" +(--)", r" \1", call[1]))[0].strip())
    return list(dict.fromkeys(found))


CALLS = [(page.name, command) for page in PAGES for command in commands_of(page)]


def test_pages_print_many_commands():
    assert len(CALLS) > 100


@pytest.mark.parametrize(("page", "command"), CALLS)
def test_a_printed_command_is_taken(page, command, monkeypatch, capsys):
    words = shlex.split(command, comments=True)
    if len(words) == 1 or words[0] not in COMMANDS:
        assert words[0] in {*COMMANDS, "COMMAND", "--version"}, page
        return
    module = importlib.import_module(f"jaxinfra.cli.{words[0]}")
    monkeypatch.setattr(module, "run", lambda args: 0)
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 0, (page, capsys.readouterr().err)
