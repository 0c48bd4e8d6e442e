"""What follows attention in a decoder layer, in one launch and in three, of one row.

python -m experiments.bench.decode_layer --out experiments/results/decode-layer-h200.json

"check" rows hold a form to the formula in fp32, and to its own bits over many calls. Other rows are
microseconds per layer of as many layers as have a gigabyte of weights, one after another, so that
L2 serves none: CUDA graphs on the host's clock, in rounds that take turns. "floor_us" is weights
once at the rate of a copy in the same process.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.append_and_attend import GRAPHS
from experiments.bench.decode import copied
from experiments.bench.table import Table
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import LayerImplementation, layer_tail

MODELS = {"1b": (2048, 8192), "8b": (4096, 14_336)}  # width of the stream and of heads, hidden
FORMS: tuple[LayerImplementation, ...] = ("apart", "hopper")
BYTES = 1 << 30
ROUNDS, CALLS, REPEATS = 7, 20, 30
LARGEST_ERROR = 6e-3
"""Of the result's norm: three roundings to bfloat16 are 1.7e-3 each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layers."""

    width: int
    hidden: int

    @property
    def weight_bytes(self) -> int:
        """Of a layer."""
        return 2 * (self.width**2 + 3 * self.width * self.hidden)

    @property
    def num_layers(self) -> int:
        """As many as have a gigabyte."""
        return -(-BYTES // self.weight_bytes)

    def arguments(self) -> tuple[Any, ...]:
        """The stream, what attention gave, and each layer's weights."""
        D, F, keys = self.width, self.hidden, iter(jax.random.split(jax.random.key(0), 100))

        def drawn(*shape: int) -> jax.Array:
            x = jax.random.normal(next(keys), shape, jnp.float32)
            return (x * shape[0] ** -0.5 if len(shape) > 1 else 1 + x / 8).astype(jnp.bfloat16)

        layers = [
            (drawn(D, D), drawn(D), drawn(D, 2 * F), drawn(F, D)) for _ in range(self.num_layers)
        ]
        return drawn(1, D), drawn(1, D), layers


@functools.partial(jax.jit, static_argnames="form")
def layer(x, attended, weights, counter, *, form: LayerImplementation):
    """One layer; lowered once for all."""
    out, scale, gate_up, down = weights
    norm = RmsNorm(scale=scale, epsilon=1e-5)
    return layer_tail(x, attended, out, norm, gate_up, down, counter, implementation=form)


def layers(x, attended, weights, *, form: LayerImplementation) -> jax.Array:
    """All layers; attention is the same in each."""
    counter = jnp.zeros(1, jnp.int32)
    for each in weights:
        x, counter = layer(x, attended, each, counter, form=form)
        x = x / 2  # so that the stream stays of one size
    return x


def compiled(shape: Shape, form: LayerImplementation, options: Any) -> jax.stages.Compiled:
    """All layers as one program."""
    f = jax.jit(functools.partial(layers, form=form))
    return f.lower(*jax.eval_shape(shape.arguments)).compile(compiler_options=options)


def check(arguments: tuple[Any, ...], form: LayerImplementation) -> dict[str, Any]:
    """One layer against the formula, and against itself."""
    x, attended, (first, *_) = arguments
    counter = jnp.zeros(1, jnp.int32)
    want = layer(x, attended, first, counter, form="reference")[0].astype(jnp.float32)
    got, later = layer(x, attended, first, counter, form=form)
    wrong = 0
    for _ in range(REPEATS):
        again, later = layer(x, attended, first, later, form=form)
        wrong += not bool(jnp.all(again == got))
    error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    is_right = bool(error < LARGEST_ERROR) and wrong == 0
    return {
        "ok": is_right, "error": float(error), "calls": REPEATS, "other_bits": wrong,
        "counter": int(later[0]),
    }  # fmt: skip


def spent(program: jax.stages.Compiled, arguments: tuple[Any, ...]) -> float:
    """Seconds of a call, of several in a row."""
    start = time.perf_counter()
    for _ in range(CALLS):
        x = program(*arguments)
    x.block_until_ready()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    bytes_per_s = 1e9 * table.add("copy", lambda: {"gb_s": round(copied() / 1e9, 1)})["gb_s"]
    for name in args.models:
        shape = Shape(width=MODELS[name][0], hidden=MODELS[name][1])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = {f: pool.submit(compiled, shape, f, GRAPHS) for f in FORMS}
            arguments = jax.block_until_ready(jax.jit(shape.arguments)())
            for form in FORMS:
                run = functools.partial(check, arguments, form)
                if not table.add(f"{name}: check {form}", run).get("ok"):
                    del found[form]
            programs = {form: each.result() for form, each in found.items()}
        times: dict[str, list[float]] = {form: [] for form in programs}
        for program in programs.values():
            spent(program, arguments)
        for _ in range(ROUNDS):
            for form, program in programs.items():
                times[form].append(1e6 * spent(program, arguments) / shape.num_layers)
        for form, taken in times.items():
            row = {
                "us_per_layer": round(statistics.median(taken), 2),
                "least_us": round(min(taken), 2),
                "floor_us": round(1e6 * shape.weight_bytes / bytes_per_s, 2),
                "layers": shape.num_layers,
            }
            table.add(f"{name}: {form}", lambda row=row: row)


if __name__ == "__main__":
    main()
