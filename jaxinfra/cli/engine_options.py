"""The options of commands that make an engine, or look at one."""

import argparse

from jaxinfra.serving.engine.options import EngineOptions

_DEFAULTS = EngineOptions()
_OPTIONS: tuple[tuple[str, int | None, str], ...] = (
    ("max_running", _DEFAULTS.max_running, "requests that have pages at a time"),
    ("max_context", None, "tokens of a request; by default the model's positions"),
    ("max_step_tokens", _DEFAULTS.max_step_tokens, "tokens of a step, chunks of prompts too"),
    ("page_size", _DEFAULTS.page_size, "tokens of a page of the cache"),
    ("num_pages", None, "pages; by default enough for --max-running of the longest"),
    ("num_drafts", 0, "tokens proposed ahead in each step"),
)


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares them."""
    for name, default, text in _OPTIONS:
        said = f"{text} ({default})" if default is not None else text
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=int, default=default, metavar="N", help=said)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What they say."""
    return EngineOptions(**{name: getattr(args, name) for name, _, _ in _OPTIONS})
