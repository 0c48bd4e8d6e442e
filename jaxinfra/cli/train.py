"""Train a model, or continue a run.

jaxinfra train                                 tiny, on the standard library source
jaxinfra train small --data /texts --mesh fsdp=8
jaxinfra train small --mesh fsdp=4,tensor=2 --zero 1 --sequence-parallel true --dry-run
jaxinfra train --resume runs/small-1
jaxinfra train --init DIR --data chats.jsonl --chat --lora rank=8,alpha=16,targets=query+value
jaxinfra train tiny --set optimizer.learning_rate=1e-3 --set training.steps=100
jaxinfra train --config runs/tiny-1/config.json --seed 2
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.checkpoint.run_directory import RunDirectory, read_config
from jaxinfra.cli.out_of_memory import explain_out_of_memory
from jaxinfra.cli.terminal import printable
from jaxinfra.config import codec
from jaxinfra.config.finetune import parse_lora
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.core.errors import ConfigError, DeviceMemoryError
from jaxinfra.core.signals import RESUMABLE_EXIT
from jaxinfra.launch.cluster import detect_cluster
from jaxinfra.launch.connect import leave
from jaxinfra.serving.generate import generate_text
from jaxinfra.serving.load import load_run
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.describe import placement_table
from jaxinfra.training.initialize import finetuning_config, require_same_start
from jaxinfra.training.job import make_job
from jaxinfra.training.profile import parse_profile_range
from jaxinfra.training.session import train

_SAMPLE_PROMPT = "def "

# Option to the setting it is short for.
_SHORTHANDS = {
    "steps": "training.steps",
    "batch_size": "training.batch_size",
    "sequence_length": "training.sequence_length",
    "accumulation": "training.accumulation",
    "remat": "training.remat",
    "attention": "training.attention",
    "seed": "training.seed",
    "evaluate_every": "training.evaluate_every",
    "learning_rate": "optimizer.learning_rate",
    "policy": "precision.policy",
    "schedule": "pipeline.schedule",
    "data": "data.source",
    "checkpoint_every": "checkpoint.every",
    "zero": "sharding.zero",
    "sequence_parallel": "sharding.sequence_parallel",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("preset", nargs="?", help="a preset's name; tiny by default")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="instead of a preset: a run's config.json"
    )
    parser.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this model: Hugging Face, ours, a run"
    )
    parser.add_argument(
        "--lora", metavar="SPEC", help="train adapters only, rank=8,alpha=16,targets=query+value"
    )
    parser.add_argument(
        "--chat", action="store_true", help="data are conversations, for the model's chat template"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue this run directory")
    parser.add_argument("--run", type=Path, metavar="DIR", help="new run directory (runs/PRESET-N)")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="continued",
        help="with --run: continue the run there if there is one, for jobs that are restarted",
    )
    parser.add_argument("--mesh", metavar="AXES", help="such as fsdp=4,tensor=2")
    for option, path in _SHORTHANDS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", metavar="X", help=f"sets {path}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="any setting of config.json, such as optimizer.clip_norm=none",
    )
    parser.add_argument("--profile", metavar="START:STOP", help="trace these steps")
    parser.add_argument(
        "--cache", type=Path, help="corpora and compiled programs (default: user cache)"
    )
    parser.add_argument("--no-sample", action="store_true", help="end without a sample of text")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the config and what each device would hold of each tensor, and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Trains; prints the outcome, compressors' figures beside it, and a sample."""
    if args.continued and args.run is None:
        raise ConfigError("--continue needs --run DIR: which run is to be continued or begun?")
    resume = args.resume is not None or (
        args.continued and RunDirectory(args.run).config_file.is_file()
    )
    config = config_of(args)
    profile = None if args.profile is None else parse_profile_range(args.profile)
    if args.dry_run:
        job = make_job(config)
        print(f"{codec.to_json(job.config)}\n{placement_table(job)}")
        return 0
    cluster = detect_cluster(os.environ)
    if cluster is not None and not (args.resume or args.run):
        raise ConfigError(
            f"{cluster.num_processes} processes ({cluster.source}) must share one run directory: "
            "name it with --run"
        )
    preset = args.config.stem if args.config else args.preset or "tiny"
    name = args.init.resolve().name if args.init else preset
    directory = args.resume or args.run or new_directory(name)
    try:
        outcome = train(
            config,
            directory,
            resume=resume,
            cache_dir=args.cache or user_cache(),
            profile=profile,
        )
    except DeviceMemoryError as error:
        if cluster is None or cluster.process_id == 0:
            print(explain_out_of_memory(config, directory, error), file=sys.stderr)
        raise
    if outcome.summary is None:
        # All is saved, and threads that read ahead may be waiting for a disk that hangs.
        return leave(RESUMABLE_EXIT, together=outcome.together, wait=False)
    if not outcome.was_complete and (cluster is None or cluster.process_id == 0):
        _report(outcome.summary)
        if cluster is None and not args.no_sample:
            _sample(directory)
        print(f"\nrun: {directory}   loss picture: {RunDirectory(directory).picture_file}")
    return leave(0, together=outcome.together)


def config_of(args: argparse.Namespace) -> RunConfig:
    """The config that the options describe."""
    begins = {"--init": args.init, "--lora": args.lora, "--chat": args.chat or None}
    given = [name for name, value in begins.items() if value is not None]
    if args.resume is not None:
        if args.preset or args.config or args.run or given:
            raise ConfigError(
                "--resume continues a run with its own config: give no preset, no --config, no "
                f"--run, no {', no '.join(begins)}"
            )
        return _with_options(RunDirectory(args.resume).read_config(), args)
    if args.preset and args.config:
        raise ConfigError(f"preset {args.preset!r} beside --config {args.config}: give one of them")
    if args.init is None:
        if given:
            raise ConfigError(f"{given[0]} is for a model that is trained already: add --init DIR")
        start = read_config(args.config) if args.config else run_preset(args.preset or "tiny")
        if start.init is not None:
            raise ConfigError(
                f"{args.config} is of a run that began with the weights of {start.init.path}: give "
                f"--init {start.init.path} instead of it, and its other settings with --set"
            )
        return _with_options(start, args)
    if args.preset or args.config:
        named = f"preset {args.preset!r}" if args.preset else f"--config {args.config}"
        raise ConfigError(
            f"{named} beside --init {args.init}: the model is that of the directory; leave it out, "
            "and change training with --set"
        )
    lora = None if args.lora is None else parse_lora(args.lora)
    start = finetuning_config(read_initial(args.init), lora=lora, chat=args.chat)
    config = _with_options(start, args)
    require_same_start(config, start)
    return config


def _with_options(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    settings = [
        f"{path}={getattr(args, option)}"
        for option, path in _SHORTHANDS.items()
        if getattr(args, option) is not None
    ]
    config = codec.override(config, [*settings, *args.set])
    if args.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(args.mesh))
    return config


def new_directory(name: str) -> Path:
    """The first of runs/NAME-1, -2, ... that is not there."""
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path


def user_cache() -> Path:
    """Where tokenized corpora are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfra"


def _report(summary: dict) -> None:
    bits = summary["heldout_bits_per_byte"]
    print(
        "\nheld-out text, bits per byte: this model "
        f"{'not finite' if bits is None else format(bits, '.3f')}, "
        f"gzip -9 of each file {summary['gzip_bits_per_byte']:.3f}, "
        f"xz -9 of all together {summary['xz_bits_per_byte']:.3f}"
    )
    causes = summary["wall_s_by_cause"]
    whole = sum(causes.values())
    shares = sorted(((seconds, cause) for cause, seconds in causes.items()), reverse=True)
    parts = [f"{cause} {seconds / whole:.1%}" for seconds, cause in shares if seconds > 0]
    print(
        f"wall time {whole:.1f} s: {', '.join(parts)}; saves kept steps waiting for "
        f"{summary['stall_s']:.3f} s in all"
    )


def _sample(directory: Path) -> None:
    sampling = SamplingConfig(temperature=0.8, top_p=0.95)
    print(f"\nsample after {_SAMPLE_PROMPT!r}:\n")
    pieces = generate_text(
        load_run(directory), _SAMPLE_PROMPT, max_new_tokens=120, sampling=sampling, seed=0
    )
    print(_SAMPLE_PROMPT + "".join(printable(piece.text) for piece in pieces))
