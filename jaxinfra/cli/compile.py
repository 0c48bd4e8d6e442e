"""Compile a server's programs ahead, so that jaxinfra serve starts without compiling.

jaxinfra compile /models/llama
jaxinfra compile /models/llama --max-running 64 --cache int8

Run it on a machine with the server's kind of GPU, with the options that serve will have. Weights
are not read. Copy ~/.cache/jaxinfra/programs to share what was compiled; servers with the same code
and packages find it.
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
from jaxinfra.serving.engine.fit import let_jax_allocate

_SAY_S = 5.0  # between lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra compile``: those of ``jaxinfra serve``."""
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles the programs that a server of these options needs, and keeps them."""
    if args.model is None:
        raise ConfigError("name the model whose programs are to be compiled")
    begun = told = time.monotonic()
    let_jax_allocate()
    if jax.process_count() > 1:
        raise UnsupportedError(
            "programs over several processes are not kept; compile on one machine, or let serve "
            "compile them as it starts"
        )
    read = serve.read_models(args, model_path(args.model), parse_mesh(args.mesh))

    def tell(number: int, count: int) -> None:
        nonlocal told
        if time.monotonic() - told > _SAY_S:
            told = time.monotonic()
            left = (told - begun) / number * (count - number)
            print(f"{number} of {count} programs, {left:.0f} s left", flush=True)

    engine = Engine.of(
        read.model,
        options=engine_options(args, read.model.platform),
        draft=read.draft,
        bank=read.bank,
    )
    engine.warm_up(tell)
    made = engine.runner.programs
    print(
        f"{len(made)} programs for {engine.runner.device.device_kind}: {made.num_compiled} "
        f"compiled, {made.num_loaded} were kept; {time.monotonic() - begun:.0f} s"
    )
    return 0
