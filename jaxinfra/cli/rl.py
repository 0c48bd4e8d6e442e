"""Train a model by reinforcement learning: it samples completions, a function rewards them.

jaxinfra rl --init runs/start --prompts prompts.jsonl --reward exact_match
jaxinfra rl --init DIR --prompts FILE --reward my_rewards:score --algorithm dapo --lora rank=16
jaxinfra rl mine.toml --run runs/learned       a config with [rl] and init.path
jaxinfra rl --resume runs/learned
jaxinfra rl --init DIR --prompts FILE --reward pattern --set rl.group_size=16 --set rl.kl=0.04
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.hub import model_name, model_path
from jaxinfra.cli.train import add_set_argument
from jaxinfra.config import codec
from jaxinfra.config.files import read_run_config
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.rl import Algorithm, RlConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import validate, with_warmup
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import local_path, new_run_directory
from jaxinfra.runtime.signals import RESUMABLE_EXIT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra rl``."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="config file: TOML, YAML or JSON"
    )
    parser.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="start from this model: a Hugging Face name, or a model's or run's directory",
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="rows with prompt, with --init (rl.prompts)"
    )
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="exact_match, pattern, math_equal, unit_tests, zero, or module:function (rl.reward)",
    )
    parser.add_argument(
        "--algorithm",
        metavar="{" + ",".join(Algorithm) + "}",
        help="advantages and loss, with --init (rl.algorithm)",
    )
    parser.add_argument(
        "--lora",
        metavar="SPEC",
        help="train adapters only, with --init: rank=8,alpha=16,targets=query+value",
    )
    parser.add_argument("--resume", type=local_path, metavar="RUN", help="continue this run")
    parser.add_argument(
        "--run", type=local_path, metavar="DIR", help="new run directory (default: runs/NAME-N)"
    )
    parser.add_argument("--cache", type=Path, help="directory of compiled programs")
    add_set_argument(parser, example="rl.kl=0.04")


def run(args: argparse.Namespace) -> int:
    """Checks the config, then trains; prints the last reward."""
    config = _config(args)
    validate(with_warmup(config))
    name = model_name(args.init).rpartition("/")[2] if args.init else "rl"
    name = args.config.stem if args.config else name
    directory = args.resume or args.run or new_run_directory(name)
    outcome = _imported("jaxinfra.reinforcement.session").rl(
        config, directory, resume=args.resume is not None, cache_dir=args.cache
    )
    end = _imported("jaxinfra.runtime.rendezvous").end_process
    if outcome.summary is None:
        return end(RESUMABLE_EXIT, together=outcome.together, wait=False)
    print(f"\nrun: {directory}   completions to read: {Path(directory) / 'samples'}")
    return end(0, together=outcome.together)


def _imported(name: str) -> Any:
    """Imports a module that loads JAX, after the options are checked."""
    return importlib.import_module(name)


def _config(args: argparse.Namespace) -> RunConfig:
    given = [name for name in ("config", "init", "resume") if getattr(args, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"give one of CONFIG, --init DIR and --resume RUN, not {' and '.join(given) or 'none'}"
        )
    of_init = ("prompts", "reward", "algorithm", "lora")
    if args.init is None:
        if extra := [name for name in of_init if getattr(args, name) is not None]:
            raise ConfigError(f"--{extra[0]} goes with --init; change settings with --set instead")
        if args.resume is not None:
            directory = _imported("jaxinfra.checkpoint.run_directory").RunDirectory(args.resume)
            config = codec.override(directory.read_config(), args.set)
            if config.rl is None:
                raise ConfigError(
                    f"--resume {args.resume}: a run without rl; continue it with jaxinfra train "
                    f"--resume, or begin from its model with --init {args.resume}"
                )
            return config
        config = codec.override(read_run_config(args.config), args.set)
        if config.rl is None:
            raise ConfigError(f"{args.config} has no rl; give [rl] with prompts and reward")
        return config
    for name in ("prompts", "reward"):
        if getattr(args, name) is None:
            raise ConfigError(f"--init without --{name}: what is it to learn from?")
    learn = RlConfig(prompts=args.prompts, reward=args.reward)
    lora = None if args.lora is None else codec.parse_record(LoraConfig, args.lora, what="lora")
    args.init = model_path(args.init)
    start = _imported("jaxinfra.api.models").start_from(args.init, lora=lora, rl=learn)
    named = [] if args.algorithm is None else [f"rl.algorithm={args.algorithm}"]
    config = codec.override(start, [*named, *args.set])
    _imported("jaxinfra.training.start").require_same_start(config, start)
    return config
