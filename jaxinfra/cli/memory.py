"""Show a step's memory by role, by name, and at its peak.

jaxinfra memory tiny                                  a preset, compiled for the devices here
jaxinfra memory runs/small-1 --picture memory.png     a run's config
jaxinfra memory small --serve --max-running 64        an engine: pages, weights and programs
jaxinfra memory --config rl.toml                      both phases of reinforcement learning
jaxinfra memory --init DIR --lora rank=16 --rl group_size=8,max_new_tokens=1024
jaxinfra memory /models/llama --serve                 of a model that serve could load
jaxinfra memory small --serve --weights rtn-int4      of one that jaxinfra quantize could make
jaxinfra memory small --remat none --limit 40         and, where that is too much, what would fit
jaxinfra memory small --remat optimal --set training.memory_budget_gib=8    what layers keep
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxinfra.checkpoint.load_pretrained import pretrained_shapes
from jaxinfra.checkpoint.model_directory import is_model_directory
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli import train
from jaxinfra.cli.engine_options import add_engine_arguments, engine_options
from jaxinfra.cli.price import step_price
from jaxinfra.config import codec
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.data import DataFormat, TokenizerKind
from jaxinfra.config.files import read_run_config
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import Remat, RunConfig
from jaxinfra.diagnostics.memory.picture import draw_memory
from jaxinfra.diagnostics.memory.remedies import Remedy, find_remedies, fixed_remat
from jaxinfra.diagnostics.memory.report import (
    MemoryReport,
    bytes_per_parameter,
    gib,
    report_memory,
)
from jaxinfra.diagnostics.memory.rollouts import rollout_memory
from jaxinfra.diagnostics.memory.serving import (
    ServingCase,
    fitted_case,
    serving_memory,
    serving_remedies,
)
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import Parameters
from jaxinfra.numerics.policy import POLICIES, Policy, as_kept, stored_as_computed
from jaxinfra.quantize.held import quantized_shapes
from jaxinfra.quantize.recipes import DEFAULT_GROUP, RECIPES, quantization_recipe
from jaxinfra.serving.engine.fit import let_jax_allocate, memory_limit
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.recompute.optimal import draw_choice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra memory``."""
    train.add_config_arguments(parser)
    parser.add_argument(
        "--rl",
        metavar="SPEC",
        help="show both phases of reinforcement learning, which these settings of rl describe: "
        "group_size=8,max_new_tokens=1024,...",
    )
    serving = parser.add_argument_group("engine that serves the model")
    serving.add_argument(
        "--serve", action="store_true", help="show the memory of the engine, not of a training step"
    )
    add_engine_arguments(serving)
    serving.add_argument(
        "--cache-format",
        choices=[form.value for form in CacheFormat],
        default=CacheFormat.PLAIN.value,
        help="format of the KV cache: serve's --cache (default: plain)",
    )
    serving.add_argument("--weights", help=f"format of quantized weights: {', '.join(RECIPES)}")
    serving.add_argument(
        "--group-size",
        type=int,
        default=DEFAULT_GROUP,
        metavar="N",
        help=f"inputs that share a scale, for weights in 4 bits (default: {DEFAULT_GROUP})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="GIB",
        help="memory per device; above it, changes that fit are searched",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw memory over time; with --remat optimal also FILE.recomputation.png, the cost of "
        "each budget",
    )
    parser.add_argument("--top", type=int, default=16, help="number of parts to list (default: 16)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compiles a step and prints its memory by role; returns 1 if it exceeds the limit."""
    limit = None
    if args.serve:
        let_jax_allocate()
    if args.limit is not None:
        if not args.limit > 0:
            raise ConfigError(f"--limit {args.limit} must be above 0 GiB")
        limit = int(args.limit * 2**30)
    found = (_of_engine if args.serve else _of_training)(args, limit)
    if args.picture is not None:
        draw_memory(found.report, args.picture, limit_bytes=limit)
    if args.json:
        remedies = [each.as_json() for each in found.remedies]
        values = found.values | {"limit_bytes": limit, "remedies": remedies}
        print(json.dumps(values, indent=1))
    else:
        _print(found, top=args.top)
    return 1 if limit is not None and found.bytes > limit else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The memory of a step or an engine, as it is printed."""

    report: MemoryReport
    values: dict[str, Any]  # of --json
    remedies: Sequence[Remedy]
    bytes: int  # per device, of all that is there at a time
    before: Sequence[str] = ()  # lines before the tables
    after: Sequence[str] = ()  # lines behind them


def _of_training(args: argparse.Namespace, limit: int | None) -> _Found:
    config = _config_of(args)
    return _of_step(config, args, limit) if config.rl is None else _of_rollouts(config, limit)


def _of_rollouts(config: RunConfig, limit: int | None) -> _Found:
    let_jax_allocate()
    limit = memory_limit() if limit is None else limit
    found = rollout_memory(fixed_remat(config), limit_bytes=limit)
    lines = [f"{name}: {gib(size)} per device" for name, size in found.phases.items()]
    if found.runs_at_once:
        lines.append(f"both at once: {gib(found.bytes)} per device")
    lines.append(f"pages: {found.pages:,} of {gib(found.engine.page_bytes)}")
    if found.kept_bytes:
        lines.append(f"of sampling, state that only training uses: {gib(found.kept_bytes)}")
    return _Found(
        report=found.report,
        bytes=found.bytes,
        values=found.as_json(),
        remedies=[],
        after=lines,
    )


def _of_step(config: RunConfig, args: argparse.Namespace, limit: int | None) -> _Found:
    if config.training.remat is not Remat.OPTIMAL:
        config = fixed_remat(config)
    job = make_job(config)
    report = report_memory(lower_step(job))
    arrays = bytes_per_parameter(job)
    if args.picture is not None:
        draw_choice(job.choice, args.picture.with_suffix(".recomputation.png"))
    counted = {"bytes_per_parameter": dataclasses.asdict(arrays)} if arrays else {}
    chosen = {} if job.choice is None else {"recomputation": dataclasses.asdict(job.choice)}
    remedies = []
    if limit is not None and report.total_bytes > limit:
        remedies = find_remedies(config, limit_bytes=limit, price=step_price)
    return _Found(
        report=report,
        bytes=report.total_bytes,
        values=report.as_json() | counted | chosen,
        remedies=remedies,
        before=[] if job.choice is None else [job.choice.describe()],
        after=[] if arrays is None else [arrays.describe()],
    )


def _config_of(args: argparse.Namespace) -> RunConfig:
    if args.preset is not None and Path(args.preset).is_dir():
        args.config, args.preset = RunDirectory(Path(args.preset)).config_file, None
    if args.rl is None:
        start = None if args.config is None else read_run_config(args.config)
        # The weights that it begins with are not read, so they need not be named again.
        if start is not None and start.rl is not None:
            return train.with_options(start, args)
        return train.config_of(args)
    # Neither prompts nor rewards nor a vocabulary's texts take memory of a device.
    learn = codec.parse_record(RlConfig, f"prompts=,reward=zero,{args.rl}".rstrip(","), what="rl")
    start = dataclasses.replace(train.config_of(args), rl=learn)
    tokenizer = start.data.tokenizer
    if tokenizer.kind is TokenizerKind.BPE:
        tokenizer = dataclasses.replace(tokenizer, kind=TokenizerKind.BYTES)
    data = dataclasses.replace(start.data, format=DataFormat.TEXT, tokenizer=tokenizer)
    return dataclasses.replace(start, data=data)


def _served(args: argparse.Namespace) -> tuple[ModelConfig, Policy, Parameters | None]:
    """Returns a served model's config, policy and weight shapes."""
    path = Path(args.preset or "")
    if args.preset is not None and is_model_directory(path):
        if args.set:
            raise ConfigError(
                f"--set {args.set[0]}: {path} is a model, which has no settings of a run; give "
                "the engine's own options"
            )
        if args.weights is not None:
            raise ConfigError(
                f"--weights {args.weights}: {path} has its weights as they are served; leave it "
                "out, or name a preset or a run"
            )
        model = pretrained_shapes(path)
        return model.definition.config, model.definition.execution.policy, model.parameters
    config = _config_of(args)
    policy = as_kept(POLICIES[config.precision.policy], config.precision)
    if args.weights is not None:
        if args.mesh:
            raise ConfigError(
                f"--weights {args.weights} with --mesh {args.mesh}: one device's are known; leave "
                "--mesh out"
            )
        recipe = quantization_recipe(args.weights, group=args.group_size)
        held = quantized_shapes(config.model, recipe, policy=config.precision.policy)
        return config.model, stored_as_computed(policy), held
    return config.model, stored_as_computed(policy) if config.lora else policy, None


def _of_engine(args: argparse.Namespace, limit: int | None) -> _Found:
    (model, policy, weights), engine = _served(args), engine_options(args)
    if model.mtp and not engine.num_drafts:
        model = dataclasses.replace(model, mtp=False)
        weights = weights and {name: each for name, each in weights.items() if name != "mtp"}
    case = ServingCase(
        model=model,
        policy=policy,
        engine=engine,
        cache=CacheFormat(args.cache_format),
        mesh=parse_mesh(args.mesh or ""),
        is_unrolled=jax.default_backend() == "gpu",
        weights=weights,
    )
    case = fitted_case(case, limit_bytes=memory_limit() if limit is None else limit)
    needs, remedies = serving_memory(case), []
    if limit is not None and needs.bytes > limit:
        remedies = serving_remedies(case, needs, limit_bytes=limit)
    lines = [f"program {name}: {gib(size)} in all" for name, size in needs.totals.items()]
    pages, size = case.limits.num_pages, case.limits.page_size
    tokens = (pages - 1) * size
    lines.append(f"pages: {pages:,} of {gib(needs.page_bytes)}, for {tokens:,} tokens")
    return _Found(
        report=needs.report,
        bytes=needs.bytes,
        values=needs.as_json(),
        remedies=remedies,
        after=lines,
    )


def _print(found: _Found, *, top: int) -> None:
    report, console = found.report, Console()
    for line in found.before:
        print(line)
    console.print(report.explained())
    roles = Table("role", "bytes", "share")
    for role, size in report.by_role().items():
        roles.add_row(role, gib(size), f"{size / report.total_bytes:.1%}")
    roles.add_row("total", gib(report.total_bytes), "")
    parts = Table("role", "name", "bytes", "share")
    for part in report.parts[:top]:
        parts.add_row(
            part.role, part.name, gib(part.bytes), f"{part.bytes / report.total_bytes:.1%}"
        )
    for table in (roles, parts):
        console.print(table)
    for line in found.after:
        print(line)
    for each in found.remedies:
        print(f"remedy: {each.describe()}")
