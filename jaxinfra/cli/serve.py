"""Serve a model through OpenAI's API, with a chat page for browsers.

jaxinfra serve runs/small-1
jaxinfra serve /models/llama --port 8000 --max-running 64 --api-key "$KEY" --host 0.0.0.0
jaxinfra serve /models/llama --adapters law=adapters/law poems=runs/poems
jaxinfra serve /models/llama --replicas 4 --mesh tensor=2    # eight GPUs, one address
jaxinfra serve                   # the newest run of `make train`, trained first if there is none
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.checkpoint.hub import model_name, model_path
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.engine_options import (
    add_engine_arguments,
    add_model_arguments,
    engine_options,
    load_models,
    one_copy_mesh,
)
from jaxinfra.cli.template_option import add_template_argument, template_settings
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.errors import (
    ConfigError,
    DeviceMemoryError,
    JaxinfraError,
    UnsupportedError,
    is_out_of_memory,
)
from jaxinfra.runtime import injected_faults as faults
from jaxinfra.runtime.cluster import Cluster, attempt, detect_cluster
from jaxinfra.runtime.files import whole_number
from jaxinfra.runtime.rendezvous import connect, end_process
from jaxinfra.runtime.signals import noted_signals
from jaxinfra.serving.adapter_bank import MAX_RANK, AdapterBank, load_bank
from jaxinfra.serving.draft_head import is_head_directory, with_head
from jaxinfra.serving.engine.fit import let_jax_allocate, memory_limit
from jaxinfra.serving.engine.options import EngineOptions, Preemption
from jaxinfra.serving.load import LoadedModel, describe, load
from jaxinfra.serving.replicas.processes import REPLICA, end_with_front, environments
from jaxinfra.serving.tools.forms import TOOL_FORMS

_EXTRA = ("fastapi", "uvicorn", "prometheus_client", "pydantic", "llguidance")
_HANG_S = 60.0
_RUNS, _PRESET = Path("runs"), "tiny"  # where ``jaxinfra train`` leaves what it trains


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra serve``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        nargs="?",
        help="a run directory, or a Hugging Face model: its directory or name, ORG/NAME@REVISION",
    )
    parser.add_argument("--name", help="model name in the API; default: the directory's name")
    _add_network(parser)
    most = parser.add_argument_group("limits")
    add_engine_arguments(most)
    for option, default, text in (
        (
            "max-open",
            256,
            "most requests that run or wait; further ones are refused with status 429",
        ),
        ("max-new-tokens", None, "most tokens of an answer"),
        ("max-body-mb", 8, "most megabytes of a request's body"),
        ("drain-seconds", 30, "seconds that open requests may still take after a stop signal"),
    ):
        said = f"{text} (default: {default})" if default is not None else text
        most.add_argument(f"--{option}", type=int, default=default, metavar="N", help=said)
    _add_defaults(parser)
    _add_parsers(parser)
    _add_companions(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="server processes behind one address, each with its own --mesh; one that ends is "
        "restarted",
    )
    parser.add_argument(
        "--hang-seconds",
        type=float,
        metavar="S",
        help="seconds without a response after which a replica is killed and restarted "
        f"(default: {_HANG_S:g})",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("network")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 also serves other machines (default: 127.0.0.1)",
    )
    where.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: 8000)")
    where.add_argument(
        "--api-key",
        default=os.environ.get("JAXINFRA_API_KEY"),
        metavar="KEY",
        help="key that every client must send (default: JAXINFRA_API_KEY)",
    )
    where.add_argument(
        "--open-metrics", action="store_true", help="/metrics needs no key, for Prometheus"
    )


def _add_defaults(parser: argparse.ArgumentParser) -> None:
    said = parser.add_argument_group("defaults of requests")
    said.add_argument(
        "--sampling-defaults",
        choices=("model", "none"),
        default="model",
        help="source of temperature, top-k and top-p: model reads its generation_config.json "
        "(default: model)",
    )
    said.add_argument(
        "--special-tokens",
        choices=("tokens", "text"),
        default="tokens",
        help="how special tokens that a completion's prompt spells out are read (default: tokens)",
    )
    add_template_argument(said)


def _add_parsers(parser: argparse.ArgumentParser) -> None:
    """Declares how answers of chats are read."""
    read = parser.add_argument_group("reading of answers")
    read.add_argument(
        "--tool-parser",
        choices=("auto", "none", *TOOL_FORMS),
        default="auto",
        help="form of the model's tool calls; auto: the one that its chat template shows "
        "(default: auto)",
    )
    read.add_argument(
        "--reasoning-parser",
        choices=("auto", "none"),
        default="auto",
        help="auto sends reasoning as reasoning_content where the chat template marks it "
        "(default: auto)",
    )


def _add_companions(parser: argparse.ArgumentParser) -> None:
    """Declares adapters and the draft model, which are served with the model."""
    tuned = parser.add_argument_group("adapters")
    tuned.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="PEFT directories, or runs with --lora; a request selects one by its model name",
    )
    tuned.add_argument(
        "--max-adapter-rank",
        type=int,
        default=MAX_RANK,
        metavar="N",
        help=f"largest rank of an adapter (default: {MAX_RANK})",
    )
    tuned.add_argument(
        "--adapter-slots",
        type=int,
        default=0,
        metavar="N",
        help="adapters that clients may load beside these by /v1/load_lora_adapter, from any "
        "directory that the server can read (default: 0)",
    )
    ahead = parser.add_argument_group("speculative decoding")
    ahead.add_argument(
        "--draft",
        type=Path,
        metavar="MODEL",
        help="draft model or EAGLE-3 head that proposes --num-drafts tokens; without it, the "
        "model's multi-token prediction does or, if it has none, n-grams of the text",
    )


def _require_extra() -> None:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a server needs {', '.join(missing)}: install jaxinfra with its extra 'serve' "
            "(pip install 'jaxinfra[serve]'), or use make serve"
        )


def _options(args: argparse.Namespace, path: Path) -> Any:
    """Returns the ``ServeOptions`` of a command line."""
    start = importlib.import_module("jaxinfra.serving.http.start")
    service = importlib.import_module("jaxinfra.serving.http.service")
    return start.ServeOptions(
        path=path,
        name=args.name or model_name(path),
        engine=engine_options(args),
        server=_server(args),
        limits=service.ServiceLimits(
            max_new_tokens=args.max_new_tokens,
            max_body_bytes=args.max_body_mb << 20,
            special_tokens_in_prompts=args.special_tokens == "tokens",
            uses_defaults=args.sampling_defaults == "model",
            tool_parser=args.tool_parser,
            reads_reasoning=args.reasoning_parser == "auto",
            # A later request may come to another replica.
            **({"max_kept_responses": 0} if REPLICA in os.environ else {}),
        ),
        max_open=args.max_open,
        template=template_settings(args),
    )


def _server(args: argparse.Namespace) -> Any:
    server = importlib.import_module("jaxinfra.serving.http.server")
    return server.ServerOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        open_metrics=args.open_metrics,
        drain_s=args.drain_seconds,
        # Those that are told to come later have one, too.
        max_connections=max(1024, 2 * args.max_open * (args.replicas or 1)),
    )


def run(args: argparse.Namespace) -> int:
    """Serves a model until a signal stops it and all open requests have ended."""
    _require_extra()
    # What only a server needs is imported here: other commands do without.
    start = importlib.import_module("jaxinfra.serving.http.start")
    mesh = one_copy_mesh(args.mesh)
    _check_job(args, detect_cluster(os.environ))
    path = _trained() if args.model is None else model_path(args.model)
    if args.replicas is not None:
        return _run_replicas(args, path)
    if args.hang_seconds is not None:
        raise ConfigError("--hang-seconds is about replicas: give --replicas too")
    let_jax_allocate()
    cluster = connect()  # before JAX is asked for devices
    if cluster is not None and mesh.num_devices != jax.device_count():
        raise ConfigError(
            f"--mesh {args.mesh or '(one device)'}: the {cluster.num_processes} processes of this "
            f"job have {jax.device_count()} devices, and one model is spread over all of them; "
            f"say --mesh tensor={jax.device_count()}"
        )
    options = _options(args, path)
    number = os.environ.get(REPLICA)
    if number is not None:
        end_with_front()
    rank = whole_number(number or "0") or 0 if cluster is None else cluster.process_id
    faults.arm(os.environ, rank=rank, attempt=attempt())
    served = read_models(args, path, mesh)
    model = served.model

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        with noted_signals() as request:
            if rank > 0 and cluster is not None:
                start.serve_as_follower(model, options.engine, request, cluster)
            else:
                given: dict[str, Any] = {"draft": served.draft, "bank": served.bank}
                given |= {"read": served.read, "cluster": cluster}
                start.serve(model, options, request, **given, say=say)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(model, options.engine, mesh, error) from error
    return 0 if cluster is None else end_process(0, together=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedModels:
    """A model to serve with its companions; their weights may be yet to be read."""

    model: LoadedModel
    draft: LoadedModel | None
    bank: AdapterBank | None
    # Reads the weights of the model and the draft model; None: they are read.
    read: Callable[[], list[LoadedModel]] | None


def read_models(
    args: argparse.Namespace, path: Path, mesh: MeshConfig, *, absent: Sequence[jax.Device] = ()
) -> ServedModels:
    """Reads the models and adapters that a server's command line names.

    Of models on one device it reads only the shapes: programs can compile while weights are read.

    Args:
        absent: devices that are not here, to describe the models for.
    """
    if args.draft is not None and not args.num_drafts:
        raise ConfigError("--draft needs --num-drafts: how many tokens it is to propose")
    drafts = [] if args.draft is None else [model_path(args.draft)]
    heads = [each for each in drafts if is_head_directory(each)]

    def reading(read: Callable[..., LoadedModel] = load) -> list[LoadedModel]:
        model, *others = load_models(args, path, *(drafts if not heads else ()), read=read)
        if not heads:
            return [model, *others]
        with nonfinite_allowed(allowed=args.allow_nonfinite):
            return [with_head(model, heads[0])]

    # Adapters are added to weights.
    has_bank = bool(args.adapters or args.adapter_slots)
    is_ahead = jax.process_count() == 1 and not has_bank and mesh.num_devices == 1
    if absent and not is_ahead:
        raise UnsupportedError(
            "programs for an absent GPU are of one device and without adapters; leave --mesh and "
            "--adapters out, or compile on a machine that has the GPUs"
        )
    model, *others = reading(functools.partial(describe, devices=absent) if is_ahead else load)
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        bank = _bank(model, path, args)
    return ServedModels(
        model=model,
        draft=others[0] if others else None,
        bank=bank,
        read=reading if is_ahead else None,
    )


def _check_job(args: argparse.Namespace, cluster: Cluster | None) -> None:
    """Raises ConfigError for options that a server of several processes does not support."""
    if cluster is None:
        return
    if args.model is None:
        raise ConfigError("several processes serve one model: name it")
    refused = {
        "--replicas": args.replicas is not None,
        "--draft": args.draft is not None,
        "--adapters": bool(args.adapters or args.adapter_slots),
        "--preemption host": args.preemption == Preemption.HOST,
    }
    for option, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"{option} with one model over {cluster.num_processes} processes: a server of one "
                "process does it; leave it out, or serve from one process"
            )


def _bank(model: LoadedModel, path: Path, args: argparse.Namespace) -> AdapterBank | None:
    if args.adapter_slots < 0:
        raise ConfigError(f"--adapter-slots {args.adapter_slots} must be at least 0")
    if args.adapter_slots and REPLICA in os.environ:
        raise UnsupportedError(
            "--adapter-slots with --replicas: a request would load an adapter on one of them; name "
            "adapters with --adapters, or serve without replicas"
        )
    found: dict[str, Path] = {}
    for item in args.adapters:
        name, separator, directory = item.partition("=")
        if not (name and separator and directory):
            raise ConfigError(f"--adapters {item!r}: write NAME=DIR")
        if name in found:
            raise ConfigError(f"--adapters names {name!r} twice; each needs a name of its own")
        found[name] = Path(directory)
    if not found and not args.adapter_slots:
        return None
    limits = {"max_rank": args.max_adapter_rank, "num_free": args.adapter_slots}
    return load_bank(model, path, found, **limits)


def _too_large(
    model: LoadedModel, engine: EngineOptions, mesh: MeshConfig, error: Exception
) -> DeviceMemoryError:
    """Prints an engine's memory and changes that would fit; returns the error to raise."""
    said = "jaxinfra memory MODEL --serve says where it goes"
    report = importlib.import_module("jaxinfra.cli.out_of_memory")  # it draws, which takes a second
    serving = importlib.import_module("jaxinfra.diagnostics.memory.serving")
    try:
        case = serving.ServingCase(
            model=model.definition.config,
            policy=model.definition.execution.policy,
            engine=engine,
            mesh=mesh,
            cache=model.definition.execution.cache_format,
            num_ids=model.num_ids,
            is_unrolled=jax.default_backend() == "gpu",
            weights=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.parameters
            ),
        )
        case = serving.fitted_case(case, limit_bytes=memory_limit())
        print(report.explain_serving_out_of_memory(case, Path.cwd(), error), file=sys.stderr)
        said = "the lines above say what would"
    except JaxinfraError as other:
        print(f"no report of it: {other}", file=sys.stderr)
    return DeviceMemoryError(
        f"the engine does not fit into a device's memory ({str(error).splitlines()[0]}); {said}"
    )


def _run_replicas(args: argparse.Namespace, path: Path) -> int:
    front = importlib.import_module("jaxinfra.serving.replicas.front")
    hang_s = _HANG_S if args.hang_seconds is None else args.hang_seconds
    if not 0 < hang_s < math.inf:
        raise ConfigError(f"--hang-seconds {hang_s:g} must be a time above 0")
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for option in ("--replicas", "--hang-seconds", "--host", "--port", "--api-key"):
        own.add_argument(option)
    _, words = own.parse_known_args(args.command_line)
    if args.model is None:
        words.append(str(path))
    with noted_signals() as request:
        front.serve_replicas(
            words,
            environments(args.replicas, parse_mesh(args.mesh).num_devices),
            _server(args),
            request,
            name=args.name or model_name(path),
            max_body_bytes=args.max_body_mb << 20,
            hang_s=hang_s,
            say=lambda text: print(text, flush=True),
        )
    return 0


def _trained() -> Path:
    """The newest run of the preset that ``jaxinfra train`` takes by default, trained to its end."""
    found = [path for path in _RUNS.glob(f"{_PRESET}-*") if RunDirectory(path).checkpoints.is_dir()]
    if found:
        return max(found, key=lambda path: path.stat().st_mtime)
    path = _RUNS / f"{_PRESET}-1"
    print(f"no run of {_PRESET} in {_RUNS}/: training {path} first", flush=True)
    command = [sys.executable, "-m", "jaxinfra", "train", "--run", str(path), "--continue"]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ConfigError(f"training {path} ended with exit code {code}; see what it said above")
    return path
