"""Finds docstrings, help texts and errors that a reader has to read twice.

``python tools/words.py`` counts them by package and fails where there are more than ALLOWED;
``--list [PATH ...]`` prints each with its place and what to write instead.
"""

import argparse
import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
# Findings by package that wait to be mended. Lower them with the count; never raise them.
ALLOWED = {"jaxinfra": 0, "pallas_kernels": 0, "experiments": 0, "tools": 0}

# Words that only the builders of this code use, with the ones that their readers know.
PRIVATE = {
    r"copy engines?": "TMA",
    r"multiprocessors?": "SM",
    r"(in|of|with) few bits|few-bit": "quantized",
    r"turned(?! (on|off|into|out))": "rotated (RoPE)",
    r"drawn(?!:)": "sampled (a picture: plotted)",
    r"straight": "unrolled",
    r"folded ahead": "fused ahead",
    r"(is|are|in) doubt|doubted|doubts": "suspect",
    r"judged|judges": "verdict, compared, checked",
    r"nobody": "no + the noun",
    r"so many": "the name of the number",
    r"every how many": "the interval in",
    r"(is|are|be) told(?! (apart|from))": "gets, is reported, is named",
    r"likewise": "a sentence of its own",
    r"turns": "rounds; interleaved",
    r"lies|lie|lay": "is stored, is",
    r"(bytes|tokens|rows|pages|seconds|milliseconds|GB|MB|GiB|us|ms) an? "
    r"(device|second|GPU|slot|token|step|row|page|block|layer|sequence|request)": "per",
}
WORDS = {re.compile(rf"\b({word})\b", re.IGNORECASE): better for word, better in PRIVATE.items()}
# Beginnings of a docstring that continue its name or hide the subject.
FRAGMENT = re.compile(
    r"(Of|As|What|Who|Whose|That|Those|These|It|Its|Their|They|Likewise|In words|By|From|To|For|"
    r"With|Within|Without|At|On|Before|After|Until|Since|And|Or|Else|Not|None|Then|Here|There|"
    r"Asks for|Does so|Such|The same|The others?|Also|(How|When|Where|Which|Why)(?![^.]*\?))\b"
)
CODE = re.compile(r"``[^`]*``|`[^`]*`|^ +\w+:(?= )", re.MULTILINE)  # names of arguments, too
NUM_WORDS_FIRST, NUM_WORDS = 25, 30


def sentences(text: str) -> list[str]:
    """Sentences of a docstring's prose: no indented lines, and each piece of code as one word."""
    prose = "\n".join(line for line in text.splitlines() if not re.match(" |jaxinfra |#", line))
    found = []
    for paragraph in re.split(r"\n\s*\n|\n- ", CODE.sub("CODE", prose)):
        found += re.split(r"(?<=[.?!])\s+(?=[A-Z(\[\d])", " ".join(paragraph.split()))
    return [each for each in found if each]


def private_words(text: str) -> Iterator[str]:
    """Each private word of a text, with a better one."""
    for pattern, better in WORDS.items():
        for match in pattern.finditer(CODE.sub("CODE", text)):
            yield f'"{match[0]}": write {better}'


def findings_in_docstring(text: str) -> Iterator[str]:
    """Findings in one docstring."""
    every = sentences(text)
    if FRAGMENT.match(every[0]):
        yield f'fragment: "{every[0][:60]}"'
    elif len(every[0].split()) < 2:
        yield f'fragment: "{every[0]}" alone says no more than the name'
    for index, sentence in enumerate(every):
        if re.match(r"Dims\b|.*\|", sentence):
            continue  # a legend of letters, or a table
        most = NUM_WORDS if index else NUM_WORDS_FIRST
        size = max(len(part.split()) for part in re.split(r"[;:]\s", sentence + " ."))
        if size > most:
            yield f'{size} words (at most {most}): "{sentence[:60]}..."'
    yield from private_words(text)


def findings_in(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line and finding, for each of a file: docstrings, help texts and messages of errors.

    Docstrings are those of private objects and of constants, too.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        read: list[ast.expr] = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(text := node.value.value, str):
                text = text.replace("\n" + " " * node.col_offset, "\n")
                yield from ((node.lineno, each) for each in findings_in_docstring(text))
        elif isinstance(node, ast.Call):
            read = [each.value for each in node.keywords if each.arg in ("help", "epilog")]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            read = node.exc.args
        for part in (part for expression in read for part in ast.walk(expression)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield from ((part.lineno, each) for each in private_words(part.value))


def main() -> int:
    """Counts or lists the findings; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each finding with its line")
    parser.add_argument("paths", nargs="*", type=pathlib.Path, help="folders or files (all)")
    args = parser.parse_args()
    counts, rooms = collections.Counter(), collections.Counter()
    for folder in args.paths or [ROOT / package for package in ALLOWED]:
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            relative = path.resolve().relative_to(ROOT)
            for line, finding in sorted(findings_in(path)):
                counts[relative.parts[0]] += 1
                rooms["/".join(relative.parts[:2])] += 1
                if args.list:
                    print(f"{relative}:{line}: {finding}")
    print(*(f"{count:6d}  {room}" for room, count in sorted(rooms.items())), sep="\n")
    too_many = [package for package in counts if counts[package] > ALLOWED[package]]
    for package in too_many:
        print(f"{package}: {counts[package]} findings, {ALLOWED[package]} allowed: see --list")
    return bool(too_many)


if __name__ == "__main__":
    sys.exit(main())
