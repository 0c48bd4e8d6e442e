"""Draws a server under load: tokens per second, and what clients wait, by load."""

import pathlib
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

_PERCENTILES = {"p50": "#0072b2", "p95": "#e69f00", "p99": "#d55e00"}


def draw(document: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the picture of what ``jaxinfra bench serve`` measured as SVG."""
    with rc_context({"svg.hashsalt": "jaxinfra", "svg.fonttype": "none"}):
        figure(document).savefig(path, metadata={"Date": None})


def figure(document: dict[str, Any]) -> Figure:
    """Throughput, time to the first token and time per token, a bar or a point for each load."""
    rows = document["rows"]
    made = Figure(figsize=(11, 3.6), layout="constrained")
    speed, first, token = made.subplots(1, 3)
    places, names = range(len(rows)), [row["load"] for row in rows]
    speed.bar(places, [row["new_tokens_s"] for row in rows], color="#009e73")
    speed.set_title("new tokens/s")
    for axis, key, title in (
        (first, "first_token_ms", "time to first token, ms"),
        (token, "per_token_ms", "time per token, ms"),
    ):
        for name, color in _PERCENTILES.items():
            axis.plot(places, [row[key][name] for row in rows], "o-", color=color, label=name)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.legend()
    for axis in (speed, first, token):
        axis.set_xticks(places, names, rotation=20)
    lengths = document["lengths"]
    made.suptitle(
        f"{document['environment']['device']}: prompts of {lengths['prompt']} tokens, answers of "
        f"{lengths['new']}"
    )
    return made
