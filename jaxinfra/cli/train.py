"""Train a model, or continue a run.

jaxinfra train                                 tiny, on the standard library source
jaxinfra train small --data /texts --mesh fsdp=8
jaxinfra train small --mesh fsdp=4,tensor=2 --zero 1 --sequence-parallel true --dry-run
jaxinfra train --resume runs/small-1
jaxinfra train --init DIR --data chats.jsonl --chat --lora rank=8,alpha=16,targets=query+value
jaxinfra train --init DIR --data pairs.jsonl --chat --preferences dpo,beta=0.1
jaxinfra train tiny --set optimizer.learning_rate=1e-3 --set training.steps=100
jaxinfra train --config mine.toml --seed 2     preset = "tiny" and changes to it; or a whole config

Several sources with weights, and further texts to evaluate on, are data.mixture and data.validation
of such a file.
"""

import argparse
import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

from jaxinfra.config import codec
from jaxinfra.config.files import read_run_config
from jaxinfra.config.finetune import parse_lora
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.preferences import parse_preferences
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import local_path

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
        "--config", type=Path, metavar="FILE", help="instead of a preset: TOML, YAML or JSON"
    )
    parser.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this model: Hugging Face, ours, a run"
    )
    parser.add_argument(
        "--lora",
        metavar="SPEC",
        help="train adapters only: rank=8,alpha=16,targets=query+value,kind=lora|dora,...",
    )
    parser.add_argument(
        "--chat", action="store_true", help="data are conversations, for the model's chat template"
    )
    parser.add_argument(
        "--preferences",
        metavar="SPEC",
        help="data are pairs of answers: dpo, ipo, simpo, orpo or cpo, such as dpo,beta=0.1",
    )
    parser.add_argument(
        "--resume", type=local_path, metavar="RUN", help="continue this run directory"
    )
    parser.add_argument(
        "--run", type=local_path, metavar="DIR", help="new run directory (runs/PRESET-N)"
    )
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
    """Checks the config, and trains: what loads JAX is imported once it is known to be right."""
    if args.continued and args.run is None:
        raise ConfigError("--continue needs --run DIR: which run is to be continued or begun?")
    config = config_of(args)
    validate(config)
    return _job().run(args, config)


def _job() -> Any:
    """What loads JAX."""
    return importlib.import_module("jaxinfra.cli.train_job")


def config_of(args: argparse.Namespace) -> RunConfig:
    """The config that the options describe."""
    begins = {
        "--init": args.init,
        "--lora": args.lora,
        "--chat": args.chat or None,
        "--preferences": args.preferences,
    }
    given = [name for name, value in begins.items() if value is not None]
    if args.resume is not None:
        if args.preset or args.config or args.run or given:
            raise ConfigError(
                "--resume continues a run with its own config: give no preset, no --config, no "
                f"--run, no {', no '.join(begins)}"
            )
        return _with_options(_job().resumed_config(args.resume), args)
    if args.preset and args.config:
        raise ConfigError(f"preset {args.preset!r} beside --config {args.config}: give one of them")
    if args.init is None:
        if given:
            raise ConfigError(f"{given[0]} is for a model that is trained already: add --init DIR")
        start = read_run_config(args.config) if args.config else run_preset(args.preset or "tiny")
        if start.init is not None:
            raise ConfigError(
                f"{args.config} is of a run that began with the weights of {start.init.path}: give "
                f"--init {start.init.path} instead of it, and its other settings with --set"
            )
        return _with_warmup(_with_options(start, args), args)
    if args.preset or args.config:
        named = f"preset {args.preset!r}" if args.preset else f"--config {args.config}"
        raise ConfigError(
            f"{named} beside --init {args.init}: the model is that of the directory; leave it out, "
            "and change training with --set"
        )
    lora = None if args.lora is None else parse_lora(args.lora)
    pairs = None if args.preferences is None else parse_preferences(args.preferences)
    change = functools.partial(_with_options, args=args)
    config = _job().initial_config(args.init, lora, args.chat, pairs, change)
    return _with_warmup(config, args)


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


def _with_warmup(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """A run that was made shorter than its warm-up gets one of a tenth of it, and is told so."""
    steps, warmup = config.training.steps, config.optimizer.warmup_steps
    if warmup <= steps or any(each.startswith("optimizer.warmup_steps=") for each in args.set):
        return config
    shorter = steps // 10
    print(f"warm-up of {shorter} steps instead of {warmup}: the run has {steps}")
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=shorter)
    return dataclasses.replace(config, optimizer=optimizer)
