"""The options of commands that make an engine, or look at one."""

import argparse
import dataclasses

import jax

from jaxinfra.serving.engine.options import EngineOptions, options_on

_CPU, _GPU = options_on("cpu"), options_on("gpu")
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("max_running", "requests that have pages at a time"),
    ("max_context", "tokens of a request; by default the model's positions"),
    ("max_step_tokens", "tokens of a step, chunks of prompts too"),
    ("page_size", "tokens of a page of the cache"),
    ("num_pages", "pages; by default enough for --max-running of the longest"),
    ("num_drafts", "tokens proposed ahead in each step"),
)


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares them."""
    for name, text in _OPTIONS:
        default, on_gpu = getattr(_CPU, name), getattr(_GPU, name)
        said = text
        if default is not None:
            said += f" ({default}{'' if on_gpu == default else f', on GPUs {on_gpu}'})"
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=int, metavar="N", help=said)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What they say, and this device's defaults."""
    given = {name: getattr(args, name) for name, _ in _OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(options_on(jax.default_backend()), **given)
