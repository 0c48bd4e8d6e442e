"""Train a model, or continue a run.

jaxinfra train                                 tiny, on the standard library source
jaxinfra train small --data /texts --mesh fsdp=8
jaxinfra train small --mesh fsdp=4,tensor=2 --zero 1 --sequence-parallel true --dry-run
jaxinfra train --resume runs/small-1
jaxinfra train --init DIR --data chats.jsonl --chat --lora rank=8,alpha=16,targets=query+value
jaxinfra train --init DIR --data pairs.jsonl --chat --preferences dpo,beta=0.1
jaxinfra train tiny --set optimizer.learning_rate=1e-3 --set training.steps=100
jaxinfra train --config mine.toml --seed 2     preset = "tiny" and changes to it; or a whole config

Such a file may also set data.mixture (several sources with weights) and data.validation (further
texts to evaluate on).
"""

import argparse
import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.hub import model_path
from jaxinfra.cli.template_option import add_template_argument, template_settings
from jaxinfra.config import codec
from jaxinfra.config.files import read_run_config
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import AttentionImplementation, Remat, RunConfig
from jaxinfra.config.validate import describe_warmup, validate, with_warmup
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import local_path

_SHORTHANDS = {
    "steps": ("training.steps", "optimizer steps of the run"),
    "batch_size": ("training.batch_size", "sequences per step, over all devices"),
    "sequence_length": ("training.sequence_length", "tokens per sequence"),
    "accumulation": ("training.accumulation", "micro-batches per step"),
    "remat": ("training.remat", "what the backward pass recomputes"),
    "attention": ("training.attention", "attention kernel"),
    "seed": ("training.seed", "random seed of weights and data order"),
    "evaluate_every": ("training.evaluate_every", "steps between evaluations"),
    "learning_rate": ("optimizer.learning_rate", "peak learning rate"),
    "policy": ("precision.policy", "compute dtype"),
    "schedule": ("pipeline.schedule", "pipeline schedule, with a pipe axis"),
    "data": ("data.source", "directory, file or glob of texts"),
    "checkpoint_every": ("checkpoint.every", "steps between checkpoints"),
    "zero": ("sharding.zero", "ZeRO stage: what the fsdp axis shards"),
    "sequence_parallel": ("sharding.sequence_parallel", "shard norms over the tensor axis too"),
}
"""Options to the settings that they are short for, and their help."""

_CHOICES = {
    option: "{" + ",".join(values) + "}"
    for option, values in {
        "remat": Remat,
        "attention": AttentionImplementation,
        "policy": PolicyName,
        "schedule": PipelineSchedule,
        "zero": ("1", "2", "3"),
        "sequence_parallel": ("true", "false"),
    }.items()
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra train``."""
    add_config_arguments(parser)
    parser.add_argument("--resume", type=local_path, metavar="RUN", help="continue this run")
    parser.add_argument(
        "--run", type=local_path, metavar="DIR", help="new run directory (default: runs/PRESET-N)"
    )
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="continued",
        help="with --run: continue an existing run there, for jobs that are restarted",
    )
    parser.add_argument("--profile", metavar="START:STOP", help="steps to trace with the profiler")
    parser.add_argument(
        "--cache",
        type=Path,
        help="directory of tokenized texts and compiled programs (default: user cache)",
    )
    parser.add_argument("--no-sample", action="store_true", help="print no text sample at the end")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the config and each tensor's bytes per device, and stop",
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that say what a run computes, which ``config_of`` reads."""
    parser.set_defaults(resume=None, run=None)  # for commands without these options
    parser.add_argument("preset", nargs="?", help="name of a preset (default: tiny)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config file instead of a preset: TOML, YAML or JSON",
    )
    parser.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="start from this model: a Hugging Face name, or a model's or run's directory",
    )
    parser.add_argument(
        "--lora",
        metavar="SPEC",
        help="train adapters only: rank=8,alpha=16,targets=query+value,kind=lora|dora,...",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the data are conversations for the model's chat template",
    )
    parser.add_argument(
        "--preferences",
        metavar="SPEC",
        help="the data are good and bad answers; loss dpo, ipo, simpo, orpo, cpo, kto or reward, "
        "such as dpo,beta=0.1",
    )
    _add_settings(parser)


def add_set_argument(parser: argparse._ActionsContainer, *, example: str) -> None:
    """Declares ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help=f"any setting of config.json, such as {example}",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("settings of the run (default: the preset's)")
    settings.add_argument("--mesh", metavar="AXES", help="mesh of devices: fsdp=4,tensor=2")
    for option, (path, text) in _SHORTHANDS.items():
        settings.add_argument(
            f"--{option.replace('_', '-')}",
            metavar=_CHOICES.get(option, "X"),
            help=f"{text} ({path})",
        )
    add_template_argument(settings)
    add_set_argument(settings, example="optimizer.clip_norm=none")


def run(args: argparse.Namespace) -> int:
    """Checks the config before it imports JAX, then trains."""
    if args.continued and args.run is None:
        raise ConfigError("--continue needs --run DIR: which run is to be continued or begun?")
    config = config_of(args)
    validate(config)
    return _job().run(args, config)


def _job() -> Any:
    """Imports the module that loads JAX."""
    return importlib.import_module("jaxinfra.cli.train_job")


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the run config that the command-line options describe."""
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
        return with_options(_job().resumed_config(args.resume), args)
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
        return _with_warmup(with_options(start, args), args)
    if args.preset or args.config:
        named = f"preset {args.preset!r}" if args.preset else f"--config {args.config}"
        raise ConfigError(
            f"{named} beside --init {args.init}: the model is that of the directory; leave it out, "
            "and change training with --set"
        )
    lora = pairs = None
    if args.lora is not None:
        lora = codec.parse_record(LoraConfig, args.lora, what="lora")
    if args.preferences is not None:
        pairs = codec.parse_record(
            PreferenceConfig, args.preferences, what="preferences", first="loss"
        )
    change = functools.partial(with_options, args=args)
    args.init = model_path(args.init)
    config = _job().initial_config(args.init, lora, args.chat, pairs, change)
    return _with_warmup(config, args)


def with_options(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """Returns the config with the settings that options change."""
    settings = [
        f"{path}={getattr(args, option)}"
        for option, (path, _) in _SHORTHANDS.items()
        if getattr(args, option) is not None
    ]
    config = codec.override(config, [*settings, *args.set])
    if args.template:
        data = dataclasses.replace(config.data, template_settings=template_settings(args))
        config = dataclasses.replace(config, data=data)
    if args.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(args.mesh))
    return config


def _with_warmup(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """Shortens the warm-up of a run that is shorter than it to a tenth of the run; prints that."""
    if any(each.startswith("optimizer.warmup_steps=") for each in args.set):
        validate(config)
    shorter = with_warmup(config)
    if shorter is not config:
        print(describe_warmup(config, shorter))
    return shorter
