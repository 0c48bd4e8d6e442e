"""Options of the commands that load a model, build its serving engine or show its memory."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint.finite import ALLOW_HELP, nonfinite_allowed
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.precision import Numerics, PolicyName
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.compile_cache import keep_compiled_programs
from jaxinfra.runtime.files import user_cache
from jaxinfra.serving.engine.options import EngineOptions, Preemption, options_on
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.serving.program_store import ProgramStore

_CPU, _GPU = options_on("cpu"), options_on("gpu")
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("max_running", "most requests that are computed at the same time"),
    ("max_context", "most tokens of a request; default: the model's positions"),
    ("max_step_tokens", "most tokens per step, chunks of prompts included"),
    ("page_size", "tokens per page of the KV cache"),
    (
        "num_pages",
        "pages in the KV cache; default: those that fit, at most --max-running requests' of the "
        "most tokens",
    ),
    (
        "num_snapshots",
        "copies of layers' states after prefixes, from which requests go on; default: twice "
        "--max-running",
    ),
    ("num_drafts", "draft tokens per step of speculative decoding"),
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of commands that load a model onto a mesh and generate with it."""
    parser.add_argument(
        "--policy",
        choices=[name.value for name in PolicyName],
        help="compute dtype; default: that of the training run",
    )
    parser.add_argument(
        "--mesh",
        default="",
        metavar="AXES",
        help="mesh of devices that share the model, such as tensor=2",
    )
    parser.add_argument(
        "--cache",
        choices=[form.value for form in CacheFormat],
        default=CacheFormat.PLAIN.value,
        help="format of the KV cache; plain: the compute dtype; bf16-states: of layers' states, "
        "which are fp32 otherwise (default: plain)",
    )
    parser.add_argument(
        "--numerics",
        choices=[name.value for name in Numerics],
        default=Numerics.FAST.value,
        help="exact: log-probabilities equal those of training to the last bit, at a cost in time "
        "(default: fast)",
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_HELP)


def one_copy_mesh(option: str) -> MeshConfig:
    """Returns the mesh that ``--mesh`` names, over which one copy of a model generates.

    Raises:
        ConfigError: the mesh divides a batch, which generation does not.
    """
    mesh = parse_mesh(option)
    if (shards := mesh.num_data_shards // mesh.expert) > 1:
        raise ConfigError(
            f"--mesh {option}: it splits a batch over {shards} replica or fsdp devices, and each "
            "would hold the pages of all requests; give it tensor devices, or fsdp ones that all "
            "share experts (fsdp=2,expert=2), and others a server of their own (serve --replicas)"
        )
    return mesh


def load_models(
    args: argparse.Namespace,
    *paths: Path,
    step: int | None = None,
    read: Callable[..., LoadedModel] = load,
) -> list[LoadedModel]:
    """Loads models as ``add_model_arguments`` says; of a run the newest checkpoint or ``step``.

    Args:
        read: ``load``, or ``describe`` for shapes in place of weights.
    """
    mesh = one_copy_mesh(args.mesh)
    policy = None if args.policy is None else PolicyName(args.policy)
    keep_compiled_programs(user_cache())
    # Processes of one model would have to find the same programs.
    store = ProgramStore.of_user() if jax.process_count() == 1 else None
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        models = [read(path, policy=policy, step=step, mesh=mesh) for path in paths]
    cache, numerics = CacheFormat(args.cache), Numerics(args.numerics)
    # A draft model has no states.
    forms = [cache, *[cache.of_entries] * (len(models) - 1)]
    models = [
        each.with_cache(form).with_numerics(numerics)
        for each, form in zip(models, forms, strict=True)
    ]
    return [dataclasses.replace(each, store=store) for each in models]


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares the command-line options of a serving engine."""
    for name, text in _OPTIONS:
        default, on_gpu = getattr(_CPU, name), getattr(_GPU, name)
        said = text
        if default is not None:
            said += f" (default: {default}{'' if on_gpu == default else f', on GPUs {on_gpu}'})"
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=int, metavar="N", help=said)
    group.add_argument(
        "--memory-fraction",
        type=float,
        metavar="F",
        help="share of JAX's device memory for weights, programs and pages "
        f"(default: {_CPU.memory_fraction})",
    )
    group.add_argument(
        "--preemption",
        choices=[each.value for each in Preemption],
        help="what happens to the youngest request when the pages run out: its tokens are "
        f"recomputed later, or the host keeps its pages (default: {_CPU.preemption.value})",
    )
    group.add_argument(
        "--host-gib",
        type=float,
        metavar="N",
        help=f"GiB of host memory for --preemption host (default: {_CPU.host_bytes / 2**30:g})",
    )


def engine_options(args: argparse.Namespace, platform: str | None = None) -> EngineOptions:
    """Returns the serving engine's options as given; others have the platform's defaults.

    Args:
        platform: JAX's name of it; by default that of this machine's devices.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name, _ in _OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    if args.memory_fraction is not None:
        given["memory_fraction"] = args.memory_fraction
    if args.preemption is not None:
        given["preemption"] = Preemption(args.preemption)
    if args.host_gib is not None:
        if args.preemption != Preemption.HOST or not 0 < args.host_gib < math.inf:
            raise ConfigError(
                f"--host-gib {args.host_gib:g}: a size above 0, with --preemption host"
            )
        given["host_bytes"] = int(args.host_gib * 2**30)
    return dataclasses.replace(options_on(platform or jax.default_backend()), **given)
