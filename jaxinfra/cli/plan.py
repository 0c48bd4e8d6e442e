"""Find what fits, which mesh, how fast it trains and what it costs.

jaxinfra plan llama3_70b --devices 64 --device h100          search the best mesh
jaxinfra plan llama3_8b --devices 8 --mesh fsdp=8            predict this mesh
jaxinfra plan llama3_8b --inference --context 4096 --brief   how to serve it, in ten lines
jaxinfra plan qwen3_4b --rl --length 1088 --batch 512         rollouts and training of GRPO
jaxinfra plan path/to/config.json --devices 16 --json
jaxinfra plan llama32_1b --devices 8 --mesh fsdp=8 --compile cpu
jaxinfra plan --schedule 1f1b -p 8 -m 16           a pipeline schedule; --pictures DIR draws it
jaxinfra plan formats                                        number formats and recipes
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from jaxinfra.api.analysis import TOKENS_A_STEP
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.limits import require_within
from jaxinfra.config.mesh import parse_axes, parse_mesh
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.planning import answer, table
from jaxinfra.planning.devices import (
    NAMES,
    Device,
    find_device,
    with_bench_results,
    with_measurements,
)
from jaxinfra.planning.formats import CORRESPONDENCES, FORMATS, RECIPES
from jaxinfra.planning.inference import WEIGHTS, Serving, stored_format, summary
from jaxinfra.planning.layout import BY_STRENGTH, UNROLLED, Layout, Traits
from jaxinfra.planning.memory import CACHE_BITS
from jaxinfra.planning.model import PlannedModel, find_model
from jaxinfra.planning.picture import draw_formats, draw_plan, draw_serving
from jaxinfra.planning.pipeline_schedule import report
from jaxinfra.planning.plan import Plan, make_plan
from jaxinfra.planning.receipt import compile_for_gpu, compile_on_cpu
from jaxinfra.planning.rollouts import plan_rollouts
from jaxinfra.planning.search import Found, Question, search
from jaxinfra.quantize.recipes import DEFAULT_GROUP
from jaxinfra.runtime.files import read_json, user_cache

_CONTEXT = 8192  # tokens of --inference


def formats(args: argparse.Namespace) -> int:
    """Prints number formats and the training recipes that use them."""
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
    """Prints a pipeline schedule's bubble and memory, and draws it."""
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


# Of the options that are no counts: beyond these, products of them would not be finite.
_SMALLEST, _LARGEST = 1e-9, 1e18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra plan``."""
    add = parser.add_argument
    add("model", nargs="?", help="a preset, a run, a config.json or its directory; or: formats")
    add("--devices", type=_count, default=1, help="number of GPUs (default: 1)")
    add("--device", default="h200", help=f"GPU type: {', '.join(NAMES)} (default: h200)")
    add("--nodes", type=_count, help="number of nodes (default: 8 GPUs per node)")
    add("--node-bandwidth", type=_positive, metavar="GB/S", help="bus bandwidth within a node")
    add("--network-bandwidth", type=_positive, metavar="GB/S", help="bandwidth per GPU")
    add("--bench", type=Path, metavar="DIR", help="your bench results (~/.cache/jaxinfra/bench)")
    add("--constants", type=Path, metavar="FILE", help="JSON file of your own constants")
    add("--memory", type=float, metavar="GB", help="memory per GPU to use (default: all)")
    add("--mesh", help="such as fsdp=8,tensor=2,expert=4 (default: search)")
    add("--fix", default="", metavar="AXES", help="axes that the search keeps, such as tensor=8")
    add("--length", type=_count, help="tokens per sequence (default: the model's, at most 8192)")
    add("--batch", type=_count, help="sequences per step (default: about 4M tokens)")
    add("--accumulation", type=_count, help="micro-batches per step, with --mesh (default: 1)")
    add("--chunks", type=_count, default=1, help="chunks per stage, interleaved (default: 1)")
    add("--zero", type=int, choices=range(4), help="ZeRO stage of the fsdp axis (default: 3)")
    add(
        "--keep-gathered",
        choices=("yes", "no"),
        help="keep gathered weights for the backward pass (default: if they fit)",
    )
    add("--sequence-parallel", action="store_true", help="shard norms over the tensor axis too")
    add("--remat", choices=list(map(str, BY_STRENGTH)), help="recomputation")
    add("--room", type=_positive, metavar="FACTOR", help="exchange.room_factor of experts")
    add("--node-size", type=_count, metavar="N", help="exchange.node_size of experts")
    add("--unroll", action="store_true", help="unroll the loop over layers")
    add(
        "--recipe",
        default="bf16",
        help=f"precision and bytes per parameter: {', '.join(RECIPES)} (default: bf16); a search "
        "takes several, separated by commas, or all",
    )
    add("--tokens", type=_positive, help="tokens of the whole run, for days and cost")
    add("--dollars", type=_positive, help="price of a GPU per hour")
    add("--inference", action="store_true", help="plan serving instead of training")
    add("--rl", action="store_true", help="also plan rollouts of reinforcement learning")
    add("--weights", help=f"with --inference: {', '.join(WEIGHTS)} (default: the files', or bf16)")
    add("--group-size", type=_count, metavar="N", help=f"inputs per scale ({DEFAULT_GROUP})")
    add("--cache", default="bf16", help=f"KV cache: {', '.join(CACHE_BITS)} (default: bf16)")
    add(
        "--context",
        type=_count,
        help=f"cached tokens of --inference (default: {_CONTEXT}, at most the model's positions)",
    )
    add("--compile", choices=("cpu", "gpu"), help="compile the real step and compare with it")
    add("--pictures", type=Path, metavar="DIR", help="directory for pictures of the plan")
    add("--schedule", choices=list(map(str, PipelineSchedule)), help="show a pipeline schedule")
    add("-p", type=_count, default=4, metavar="STAGES", help="stages of --schedule (default: 4)")
    add("-m", type=_count, default=8, metavar="MICRO", help="micro-batches (default: 8)")
    add("--brief", action="store_true", help="print the answer in ten lines, without tables")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Predicts a model's memory and speed, or searches a mesh, and prints the plan."""
    try:
        return _run(args)
    except ArithmeticError as error:
        raise ConfigError(
            f"a figure of this plan is no number ({error}); the sizes given, --constants or the "
            "results in --bench do not fit together"
        ) from error


def _run(args: argparse.Namespace) -> int:
    require_within(devices=args.devices, stages=args.p, micro_batches=args.m)
    require_within(accumulation=args.accumulation or 1, batch_size=args.batch or 1)
    require_within(sequence_length=max(args.length or 1, args.context or 1))
    if args.schedule is not None:
        return schedule(args)
    if args.model is None:
        raise ConfigError("no model: name a preset, a config.json, or formats")
    if args.model == "formats":
        return formats(args)
    model, device = find_model(args.model), _device(args)
    if args.rl and (args.inference or args.compile is not None):
        raise ConfigError(
            "--rl plans rollouts beside the training step; leave --inference and --compile out"
        )
    if args.inference:
        if args.mesh is not None or args.compile is not None:
            raise ConfigError(
                "--inference splits weights and caches evenly over --devices and compiles nothing; "
                "leave --mesh and --compile out"
            )
        return _inference(args, model, device)
    if args.mesh is None:
        if args.compile is not None:
            raise ConfigError("--compile needs a --mesh: one program is compiled, not a search")
        found = search(model, _question(args, model), device)
        return _report(args, found.best, found)
    plan = make_plan(model, _layout(args, model), device)
    if args.compile is not None:
        return _receipt(args, plan)
    return _report(args, plan, None)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not _SMALLEST <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text} must be a number from {_SMALLEST:g} to {_LARGEST:g}"
        )
    return value


def _device(args: argparse.Namespace) -> Device:
    directory = args.bench or user_cache() / "bench"
    if args.bench is not None and not args.bench.is_dir():
        raise ConfigError(f"--bench {args.bench} is no directory of jaxinfra bench's results")
    device = with_bench_results(find_device(args.device), directory)
    if args.constants is not None:
        measured = read_json(args.constants)
        device = with_measurements(device, measured, source=str(args.constants))
    changes: dict = {}
    if args.nodes is not None:
        if args.devices % args.nodes:
            raise ConfigError(f"--devices {args.devices} do not divide over --nodes {args.nodes}")
        changes["node_devices"] = args.devices // args.nodes
    if args.node_bandwidth is not None:
        changes["node_bytes_per_s"] = args.node_bandwidth * 1e9
    if args.network_bandwidth is not None:
        changes["network_bytes_per_s"] = args.network_bandwidth * 1e9
    if args.memory is not None:
        if not 0 < args.memory * 1e9 <= device.hbm_bytes:
            raise ConfigError(
                f"--memory {args.memory:g}: a {device.name} has {device.hbm_bytes / 1e9:g} GB"
            )
        changes["hbm_bytes"] = round(args.memory * 1e9)
    if args.dollars is not None:
        changes["dollars_per_hour"] = args.dollars
    return with_measurements(device, changes, source="the command line") if changes else device


def _recipes(args: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(RECIPES) if args.recipe == "all" else tuple(args.recipe.split(","))
    for name in names:
        if name not in RECIPES:
            raise ConfigError(f"unknown --recipe {name!r}{nearest(name, RECIPES)}")
    return names


def _common(args: argparse.Namespace, model: PlannedModel) -> dict[str, Any]:
    """Fields that a layout and a search's question have in common."""
    gathered = None if args.keep_gathered is None else args.keep_gathered == "yes"
    return {
        "length": args.length or min(model.config.max_positions, 8192),
        "exchange": ExchangeConfig(room_factor=args.room, node_size=args.node_size),
        "keep_gathered": gathered,
        "traits": UNROLLED if args.unroll else Traits(),
    }


def _layout(args: argparse.Namespace, model: PlannedModel) -> Layout:
    layout = Layout(
        mesh=parse_mesh(args.mesh),
        batch=1,
        zero=3 if args.zero is None else args.zero,
        chunks=args.chunks,
        sequence_parallel=args.sequence_parallel,
        accumulation=args.accumulation or 1,
        remat=Remat(args.remat or Remat.DOTS),
        recipe=_recipes(args)[0],
        **_common(args, model),
    )
    if args.fix or len(_recipes(args)) > 1:
        raise ConfigError("--fix and several recipes are for a search; leave --mesh out")
    if layout.devices != args.devices:
        raise ConfigError(
            f"mesh {layout.describe()} needs {layout.devices} devices, --devices is "
            f"{args.devices}; the product of the axes (expert is a part of the data axes) must "
            "equal it"
        )
    rows = layout.data * layout.accumulation
    return dataclasses.replace(layout, batch=args.batch or rows)


def _question(args: argparse.Namespace, model: PlannedModel) -> Question:
    common = _common(args, model)
    rows = TOKENS_A_STEP // common["length"] // args.devices * args.devices
    return Question(
        devices=args.devices,
        batch=args.batch or max(args.devices, rows),
        recipes=_recipes(args),
        remat=None if args.remat is None else Remat(args.remat),
        zero=args.zero,
        fixed=tuple(parse_axes(args.fix).items()),
        **common,
    )


def _report(args: argparse.Namespace, plan: Plan, found: Found | None) -> int:
    if args.pictures is not None:
        draw_plan(plan, args.pictures, found=found)
    rollouts = plan_rollouts(plan) if args.rl else None
    if args.json:
        values = plan.as_dict(tokens=args.tokens)
        if rollouts is not None:
            values["rollouts"] = rollouts.as_dict()
        if found is not None:
            values["search"] = {
                "tried": found.tried,
                "fitting": found.fitting,
                "runners_up": [_other(other, why) for other, why in found.runners_up],
                "alternatives": [
                    {"choice": each.choice, "value": each.value, **_other(each.plan, each.why)}
                    for each in found.alternatives
                ],
                "pareto": [
                    {"step_s": each.seconds, "bytes": each.bytes_total, **_form(each.layout)}
                    for each in found.pareto
                ],
            }
        _print_json(values)
        return 0
    print("\n".join(answer.training_lines(plan, searched=found is not None)))  # unbroken commands
    if rollouts is not None:
        print("\n".join(rollouts.lines()))
    if args.brief:
        print("\n".join(answer.brief_lines(plan, [] if found is None else found.runners_up)))
        return 0
    tables = table.plan_tables(plan, tokens=args.tokens)
    print()
    table.show(*(table.ranking(found) if found is not None else []), *tables)
    return 0


def _print_json(values: dict[str, Any]) -> None:
    try:
        print(json.dumps(values, allow_nan=False))
    except ValueError as error:
        raise ArithmeticError(str(error)) from error


def _form(layout: Layout) -> dict[str, Any]:
    """Returns text that tells the layouts of one search apart."""
    return {
        "mesh": layout.axes,
        "micro_batch_rows": layout.micro_rows,
        "accumulation": layout.accumulation,
        "chunks": layout.chunks,
        "zero": layout.zero,
        "remat": layout.remat.value,
        "recipe": layout.recipe,
        "keep_gathered": layout.keep_gathered,
    }


def _other(plan: Plan, why: str) -> dict[str, Any]:
    return {
        **_form(plan.layout),
        "step_s": plan.time.total_s,
        "bytes": plan.memory.total,
        "why": why,
    }


def _receipt(args: argparse.Namespace, plan: Plan) -> int:
    jax.config.update("jax_platforms", "cpu")
    if args.compile == "cpu":
        jax.config.update("jax_num_cpu_devices", plan.layout.devices)
        receipt = compile_on_cpu(plan.model.config, plan.layout)
    else:
        receipt = compile_for_gpu(plan.model.config, plan.layout, plan.device)
    if args.json:
        values = {**plan.as_dict(tokens=args.tokens), "receipt": receipt.as_dict()}
        _print_json(values)
    else:
        table.show(*table.receipt_tables(receipt))
    return 0 if receipt.arguments_equal and receipt.axes_equal and receipt.fits else 1


def _inference(args: argparse.Namespace, model: PlannedModel, device: Device) -> int:
    weights, group = args.weights, DEFAULT_GROUP
    if weights is None:
        weights, group = stored_format(args.model)
    serving = Serving(
        devices=args.devices,
        weights=weights,
        group=args.group_size or group,
        cache=args.cache,
    )
    batch, context = args.batch or 1, args.context or min(_CONTEXT, model.config.max_positions)
    if args.pictures is not None:
        draw_serving(model, device, serving, args.pictures, context=context)
    figures = summary(model, device, serving, context=context, batch=batch)
    if args.json:
        _print_json(figures)
        return 0
    print("\n".join(answer.serving_lines(model, device, serving, figures)))
    if not args.brief:
        print()
        table.show(*table.serving_tables(model, device, figures))
    return 0
