"""Compile a server's programs ahead, so that jaxinfra serve starts without compiling.

jaxinfra compile /models/llama
jaxinfra compile /models/llama --max-running 64 --cache int8
jaxinfra compile /models/llama --device h200      # on a machine without a GPU

Give the options that serve will have. Weights are not read. Copy ~/.cache/jaxinfra/programs to
share what was compiled; servers with the same code and packages find it.
"""

import argparse
import contextlib
import dataclasses
import importlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxinfra.checkpoint.hub import model_path
from jaxinfra.cli import serve
from jaxinfra.cli.engine_options import engine_options
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.ops.quantized import compiling_for
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.fit import JAX_FRACTION, let_jax_allocate

_SAY_S = 5.0  # between lines of progress
_LESS = 0.005  # of an absent device's memory is left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra compile``: those of ``jaxinfra serve``."""
    serve.add_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="GPU",
        help="h100 or h200, which this machine need not have; default: this machine's device",
    )


def run(args: argparse.Namespace) -> int:
    """Compiles the programs that a server of these options needs, and keeps them."""
    if args.model is None:
        raise ConfigError("name the model whose programs are to be compiled")
    begun = told = time.monotonic()
    target = _here() if args.device is None else _absent(args.device)  # before JAX has devices
    if jax.process_count() > 1:
        raise UnsupportedError(
            "programs over several processes are not kept; compile on one machine, or let serve "
            "compile them as it starts"
        )
    read = serve.read_models(
        args, model_path(args.model), parse_mesh(args.mesh), absent=target.devices
    )

    def tell(number: int, count: int) -> None:
        nonlocal told
        if time.monotonic() - told > _SAY_S:
            told = time.monotonic()
            left = (told - begun) / number * (count - number)
            print(f"{number} of {count} programs, {left:.0f} s left", flush=True)

    with target.selecting:
        engine = Engine.of(
            read.model,
            options=engine_options(args, read.model.platform),
            draft=read.draft,
            bank=read.bank,
            limit_bytes=target.limit_bytes,
        )
        engine.warm_up(tell)
    made = engine.runner.programs
    print(
        f"{len(made)} programs for {engine.runner.device.device_kind}: {made.num_compiled} "
        f"compiled, {made.num_loaded} were kept; {time.monotonic() - begun:.0f} s"
    )
    return 0


class _Target(NamedTuple):
    """Devices that programs are compiled for."""

    devices: Sequence[jax.Device]  # absent ones; empty: those of this machine
    limit_bytes: int | None  # that JAX may allocate on an absent one
    selecting: contextlib.AbstractContextManager[object]  # in which their kernels are chosen


def _here() -> _Target:
    let_jax_allocate()
    return _Target((), None, contextlib.nullcontext())


def _absent(name: str) -> _Target:
    receipt = importlib.import_module("jaxinfra.planning.receipt")
    device = importlib.import_module("jaxinfra.planning.devices").find_device(name)
    devices, facts = receipt.compile_only_devices(device, 1)
    # Somewhat less than what it will have, so that the pages fit there.
    limit_bytes = int(device.visible_bytes * JAX_FRACTION * (1 - _LESS))
    # cuDNN's attention, compiled without the GPU, has no scratch memory and writes to no address.
    facts = dataclasses.replace(facts, is_absent=True)
    return _Target(devices, limit_bytes, compiling_for(facts))
