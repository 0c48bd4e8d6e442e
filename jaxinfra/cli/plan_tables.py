"""Reports of ``jaxinfra plan`` that need no model: number formats and pipeline schedules."""

import argparse
import dataclasses
import json

from jaxinfra.config.limits import require_within
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.planning import table
from jaxinfra.planning.formats import CORRESPONDENCES, FORMATS, RECIPES
from jaxinfra.planning.picture import draw_formats
from jaxinfra.planning.pipeline_schedule import report


def formats(args: argparse.Namespace) -> int:
    """Number formats and recipes of training in them."""
    if args.pictures is not None:
        draw_formats(args.pictures)
    if args.json:
        fields = (
            "bits",
            "exponent_bits",
            "fraction_bits",
            "largest",
            "smallest_normal",
            "smallest",
            "epsilon",
            "decimal_digits",
        )
        by_name = {each.name: {name: getattr(each, name) for name in fields} for each in FORMATS}
        recipes = {
            each.name: {**dataclasses.asdict(each), "total": each.total}
            for each in RECIPES.values()
        }
        as_settings = [dataclasses.asdict(each) for each in CORRESPONDENCES]
        print(json.dumps({"formats": by_name, "recipes": recipes, "as_settings": as_settings}))
        return 0
    table.show(*table.format_tables())
    return 0


def schedule(args: argparse.Namespace) -> int:
    """A pipeline's schedule: its bubble, what it holds, its picture."""
    if args.schedule not in list(PipelineSchedule):
        known = nearest(args.schedule, map(str, PipelineSchedule))
        raise ConfigError(f"unknown --schedule {args.schedule!r}{known}")
    # Of the interleaved schedule; the others have one or two.
    chunks = max(args.chunks, 2)
    require_within(schedule_boxes=args.p * args.m * chunks)
    out = None
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        out = args.pictures / f"{args.schedule}-p{args.p}-m{args.m}.png"
    found = report(
        PipelineSchedule(args.schedule),
        stages=args.p,
        micro_batches=args.m,
        chunks=chunks,
        out=out,
    )
    print(json.dumps(dataclasses.asdict(found)) if args.json else "\n".join(found.lines()))
    return 0
