"""The options of commands that make an engine, or look at one."""

import argparse
import dataclasses
import math
from typing import Any

import jax

from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.options import EngineOptions, Preemption, options_on

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
    group.add_argument(
        "--preemption",
        choices=[each.value for each in Preemption],
        help="where answers need more pages than there are: the youngest request computes its "
        f"tokens again later, or the host keeps its pages ({_CPU.preemption.value})",
    )
    group.add_argument(
        "--host-gib",
        type=float,
        metavar="N",
        help=f"memory of the host for --preemption host ({_CPU.host_bytes / 2**30:g})",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Engine options of the command line, with this device's defaults."""
    given: dict[str, Any] = {name: getattr(args, name) for name, _ in _OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    if args.preemption is not None:
        given["preemption"] = Preemption(args.preemption)
    if args.host_gib is not None:
        if args.preemption != Preemption.HOST or not 0 < args.host_gib < math.inf:
            raise ConfigError(
                f"--host-gib {args.host_gib:g}: a size above 0, with --preemption host"
            )
        given["host_bytes"] = int(args.host_gib * 2**30)
    return dataclasses.replace(options_on(jax.default_backend()), **given)
