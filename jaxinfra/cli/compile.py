"""Compile a server's programs ahead, so that jaxinfra serve starts without compiling.

jaxinfra compile /models/llama
jaxinfra compile /models/llama --max-running 64 --cache int8

Give the options that serve will have. Programs are for the kind of device that this machine
has, since XLA measures kernels while it compiles. Weights are not read.
"""

import argparse
import time

import jax

from jaxinfra.checkpoint.hub import model_path
from jaxinfra.cli import serve
from jaxinfra.cli.engine_options import engine_options
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.serving.engine.engine import Engine

_SAY_S = 5.0  # between lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra compile``: those of ``jaxinfra serve``."""
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles the programs that a server of these options needs, and keeps them."""
    if args.model is None:
        raise ConfigError("name the model whose programs are to be compiled")
    if jax.process_count() > 1:
        raise UnsupportedError(
            "programs over several processes are not kept; compile on one machine, or let serve "
            "compile them as it starts"
        )
    begun = told = time.monotonic()
    served = serve.read_models(args, model_path(args.model), parse_mesh(args.mesh))
    options = engine_options(args)
    engine = Engine.of(served.model, options=options, draft=served.draft, bank=served.bank)

    def tell(number: int, count: int) -> None:
        nonlocal told
        if time.monotonic() - told > _SAY_S:
            told = time.monotonic()
            left = (told - begun) / number * (count - number)
            print(f"{number} of {count} programs, {left:.0f} s left", flush=True)

    engine.warm_up(tell)
    made = engine.runner.programs
    print(
        f"{len(made)} programs for {jax.local_devices()[0].device_kind}: {made.num_compiled} "
        f"compiled, {made.num_loaded} were kept; {time.monotonic() - begun:.0f} s"
    )
    return 0
