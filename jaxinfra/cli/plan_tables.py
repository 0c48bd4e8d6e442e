"""Reports of ``jaxinfra plan`` that need no model: formats, the self-check, a schedule."""

import argparse
import dataclasses
import json

from jaxinfra.config.limits import require_within
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.planning import selfcheck, table
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


def self_check(args: argparse.Namespace) -> int:
    """The planner's formulas beside worked and measured cases; 1 where they disagree."""
    exact = list(selfcheck.exact_values())
    measured = selfcheck.measured_steps()
    mean = selfcheck.mean_error(measured)
    if args.json:
        values = {
            "exact": [{**dataclasses.asdict(each), "holds": each.holds} for each in exact],
            "measured": [{**dataclasses.asdict(each), "error": each.error} for each in measured],
            "mean_error": mean,
        }
        print(json.dumps(values))
    else:
        table.show(*table.check_tables(exact, measured, selfcheck.published_rates()))
    return 0 if all(each.holds for each in exact) and mean <= selfcheck.BOUND else 1


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
