"""Loss, perplexity and bits per byte of a model on held-out text."""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxinfra.api.models import evaluate
from jaxinfra.checkpoint.finite import ALLOW_HELP, nonfinite_allowed
from jaxinfra.checkpoint.hub import model_path
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.compile_cache import keep_compiled_programs
from jaxinfra.runtime.files import user_cache
from jaxinfra.serving.harness import evaluate_tasks
from jaxinfra.serving.load import load
from jaxinfra.serving.program_store import ProgramStore
from jaxinfra.training.evaluation import Evaluation
from jaxinfra.training.metrics import finite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra evaluate``."""
    parser.add_argument(
        "run", type=Path, help="run directory, or a Hugging Face model: directory or name"
    )
    parser.add_argument("--data", help="text to use instead of the run's own held-out documents")
    parser.add_argument(
        "--text-field",
        metavar="NAME",
        help="field of the rows of --data that holds the text (default: the run's, or text)",
    )
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest good one)")
    parser.add_argument("--mesh", default="", metavar="AXES", help="such as fsdp=4,tensor=2")
    parser.add_argument(
        "--cache",
        type=Path,
        help="directory of tokenized texts and compiled programs (default: user cache)",
    )
    parser.add_argument(
        "--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, such as arc_easy,piqa"
    )
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="most questions of each task")
    parser.add_argument(
        "--task-directory",
        type=Path,
        metavar="DIR",
        help="directory with YAML files of your own tasks",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the tasks' questions into the model's chat template",
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluates a model on held-out text and prints a table or JSON."""
    args.run = model_path(args.run)
    if args.tasks is not None:
        return _run_tasks(args)
    of_tasks = ("shots", "limit", "task_directory", "chat")
    for name in of_tasks:
        if getattr(args, name) not in (None, False):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is of tasks: name them with --tasks, or leave it out")
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        result = evaluate(
            args.run,
            data=args.data,
            text_field=args.text_field,
            step=args.step,
            mesh=parse_mesh(args.mesh),
            cache_dir=args.cache,
        )
    evaluation, baseline = result.evaluation, result.baseline
    values = {} if result.step is None else {"step": result.step}
    values |= _figures(evaluation)
    if evaluation.num_bytes:
        values |= {
            "gzip_bits_per_byte": baseline.gzip_each,
            "xz_bits_per_byte": baseline.xz_all,
        }
    sets = {name: finite(_figures(each)) for name, each in result.sets.items()}
    if args.json:
        values = finite(values) | ({"sets": sets} if sets else {})
        print(json.dumps(values, allow_nan=False))
    else:
        for name, value in values.items():
            shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
            print(f"{name:20s} {shown}")
        _print_sets(result.sets)
    if not math.isfinite(evaluation.loss):
        raise CheckpointError(
            f"{args.run}: the loss is {evaluation.loss}; its weights, or what they make of this "
            "text, are not finite: evaluate an earlier checkpoint with --step, or another precision"
        )
    return 0


def _run_tasks(args: argparse.Namespace) -> int:
    if args.data is not None:
        raise ConfigError(f"--tasks beside --data {args.data}: a task has its own text")
    mesh = parse_mesh(args.mesh) if args.mesh else None
    cache = args.cache or user_cache()
    keep_compiled_programs(cache)
    store = ProgramStore(cache / "programs") if jax.process_count() == 1 else None
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        model = load(args.run, step=args.step, mesh=mesh)
        found = evaluate_tasks(
            dataclasses.replace(model, store=store),
            args.tasks.split(","),
            shots=args.shots,
            limit=args.limit,
            task_directory=args.task_directory,
            chat_template=args.run if args.chat else None,
        )
    if args.json:
        print(json.dumps({task: finite(values) for task, values in found.items()}))
        return 0
    for task, values in found.items():
        print(task)
        for name, value in values.items():
            print(f"  {name:28s} {value:,.4f}")
    return 0


def _figures(evaluation: Evaluation) -> dict[str, float]:
    if evaluation.pairs and not evaluation.num_bytes:  # of scores or single answers
        return {"heldout_loss": evaluation.loss, **evaluation.pairs}
    return {
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.num_tokens,
        "bytes": evaluation.num_bytes,
        **evaluation.pairs,
    }


def _print_sets(sets: Mapping[str, Evaluation]) -> None:
    for name, evaluation in sets.items():
        figures = (
            f"{what} {value:,.4f}" if isinstance(value, float) else f"{what} {value:,}"
            for what, value in _figures(evaluation).items()
        )
        print(f"{name:20s} {', '.join(figures)}")
