"""Reports on a training step or serving engine that did not fit in memory.

A report is ``out-of-memory.json`` and its picture.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint.run_directory import write_atomically
from jaxinfra.cli.price import step_price
from jaxinfra.config.run import RunConfig
from jaxinfra.diagnostics.memory.picture import OUT_OF_MEMORY_PICTURE, draw_memory
from jaxinfra.diagnostics.memory.remedies import Remedy, find_remedies, fixed_remat
from jaxinfra.diagnostics.memory.report import MemoryReport, gib, report_memory
from jaxinfra.diagnostics.memory.serving import ServingCase, serving_memory, serving_remedies
from jaxinfra.errors import JaxinfraError
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.recompute.budget import FREE_SHARE

REPORT = "out-of-memory.json"
PICTURE = OUT_OF_MEMORY_PICTURE

_ASKED = re.compile(r"allocat\w*(?: of)? ([\d.]+) ?(bytes|B|KiB|MiB|GiB|KB|MB|GB)")
_LIMIT = re.compile(r"limit of (\d+) bytes")
_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def explain_out_of_memory(config: RunConfig, directory: Path, error: JaxinfraError) -> str:
    """Compiles a step that did not fit; writes its memory and changes that would fit.

    Returns the report in a few lines.
    """
    config, remedies = fixed_remat(config), []
    report = report_memory(lower_step(make_job(config)))
    limit = _limit(str(error))
    if limit is not None and jax.process_count() == 1:
        remedies = find_remedies(config, limit_bytes=limit, price=step_price)
    found = {
        "asked_by": {"operation": report.peak_operation, "scope": report.peak_scope},
        "explained": report.explained(),
        **report.as_json(),
    }
    return _write(directory, report, found, remedies, error=error)


def explain_serving_out_of_memory(case: ServingCase, directory: Path, error: Exception) -> str:
    """Writes the memory of an engine that did not fit, and changes that would.

    Returns the report in a few lines.
    """
    needs, limits, remedies = serving_memory(case), case.limits, []
    limit = _limit(str(error))
    if limit is not None:
        remedies = serving_remedies(case, needs, limit_bytes=limit)
    held = limits.num_pages * needs.page_bytes
    pages = (
        f"pages: {limits.num_pages:,} of {limits.page_size} tokens hold {gib(held)}, "
        f"{gib(needs.page_bytes)} each"
    )
    found = {"pages": limits.num_pages, **needs.as_json()}
    return _write(
        directory, needs.report, found, remedies, error=error, of=f"{needs.program}: ", more=[pages]
    )


def _write(
    directory: Path,
    report: MemoryReport,
    found: dict[str, Any],
    remedies: Sequence[Remedy],
    *,
    error: Exception,
    of: str = "",
    more: Sequence[str] = (),
) -> str:
    """Writes ``found`` and the picture of the memory; returns both in a few lines."""
    asked, limit = _asked(str(error)), _limit(str(error))
    found |= {"error": str(error), "asked_bytes": asked, "limit_bytes": limit}
    found["remedies"] = [each.as_json() for each in remedies]
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / REPORT, json.dumps(found, indent=1) + "\n")
    draw_memory(report, directory / PICTURE, limit_bytes=limit)
    return "\n".join(
        [
            f"out of memory: {of}{report.explained()}",
            *([] if asked is None else [f"asked for: {gib(asked)}"]),
            *more,
            *(f"holds {gib(each.bytes)}: {each.shape} {each.name}" for each in report.largest[:3]),
            *(f"remedy: {each.describe()}" for each in remedies),
            f"report: {directory / REPORT}",
        ]
    )


def _asked(text: str) -> int | None:
    match = _ASKED.search(text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2][0].lower()])


def _limit(text: str) -> int | None:
    """Bytes of a device that a program may take; None where neither device nor error says."""
    if match := _LIMIT.search(text):
        return int(match[1])
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int((1 - FREE_SHARE) * limit)
