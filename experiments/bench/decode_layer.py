"""A decoder layer's step of one row in one launch, and in one launch per product.

python -m experiments.bench.decode_layer --out experiments/results/decode-layer-h200.json

"tail" is what follows attention; "layer" is all, with 2,048 tokens in the row's pages. "check" rows
hold a form to the formula in fp32, and to its own bits over many calls. Other rows are microseconds
per layer of as many layers as have a gigabyte of weights, one after another, so that L2 serves
none: CUDA graphs on the host's clock, in rounds that take turns. "floor_us" is weights, keys and
values once at the rate of a copy in the same process.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments.bench.append_and_attend import GRAPHS
from experiments.bench.decode import copied
from experiments.bench.table import Table
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import (
    LayerImplementation,
    LayerWeights,
    decode_layer,
    layer_tail,
)

FORMS: tuple[LayerImplementation, ...] = ("apart", "hopper")
BYTES, LENGTH, PAGE = 1 << 30, 2048, 64
ROUNDS, CALLS, REPEATS = 7, 20, 30
LARGEST_ERROR = 6e-3
"""Of the result's norm: three roundings to bfloat16 are 1.7e-3 each."""

type Part = Literal["tail", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layers."""

    D: int
    N: int
    K: int
    H: int
    F: int

    def floor_bytes(self, part: Part) -> int:
        """That a layer reads."""
        elements = self.N * self.H * self.D + 3 * self.D * self.F
        if part == "layer":
            elements += self.D * (self.N + 2 * self.K) * self.H + 2 * LENGTH * self.K * self.H
        return 2 * elements

    @property
    def num_layers(self) -> int:
        """As many as have a gigabyte."""
        return -(-BYTES // self.floor_bytes("tail"))

    def arguments(self) -> tuple[Any, ...]:
        """The stream, pages of all layers, their weights, and where the new token goes."""
        keys = iter(jax.random.split(jax.random.key(0), 200))

        def drawn(*shape: int, size: float = 1.0) -> jax.Array:
            return (size * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

        def weight(*shape: int) -> jax.Array:
            return drawn(*shape, size=shape[0] ** -0.5)

        def norm() -> RmsNorm:
            return RmsNorm(scale=1 + drawn(self.D, size=0.1), epsilon=1e-5)

        D, A = self.D, self.N * self.H
        weights = [
            LayerWeights(
                attention_norm=norm(), qkv=weight(D, A + 2 * self.K * self.H), out=weight(A, D),
                mlp_norm=norm(), gate_up=weight(D, 2 * self.F), down=weight(self.F, D),
            )
            for _ in range(self.num_layers)
        ]  # fmt: skip
        pool = LENGTH // PAGE, PAGE, self.K, self.H
        pools = [(drawn(*pool), drawn(*pool)) for _ in weights]
        table = jax.random.permutation(next(keys), LENGTH // PAGE)[None].astype(jnp.int32)
        angles = jax.random.uniform(next(keys), (1, self.H // 2), maxval=6.0)
        place = table, jnp.full(1, LENGTH - 1, jnp.int32), (jnp.cos(angles), jnp.sin(angles))
        return drawn(1, D), pools, weights, place


MODELS = {
    "1b": Shape(D=2048, N=32, K=8, H=64, F=8192),
    "8b": Shape(D=4096, N=32, K=8, H=128, F=14_336),
}


@functools.partial(jax.jit, static_argnames=("part", "form"))
def layer(x, pools, w: LayerWeights, place, counter, *, part: Part, form: LayerImplementation):
    """One layer; lowered once for all."""
    if part == "layer":
        k, v = pools
        tables, positions, rope = place
        x, k, v, counter = decode_layer(
            x, w, k, v, tables, positions, rope, counter, implementation=form
        )
        return x, (k, v), counter
    attended = jnp.tile(x, (1, w.out.shape[0] // x.shape[1]))
    x, counter = layer_tail(
        x, attended, w.out, w.mlp_norm, w.gate_up, w.down, counter, implementation=form
    )
    return x, pools, counter


def layers(x, pools, weights, place, *, part: Part, form: LayerImplementation) -> tuple:
    """All layers."""
    counter, after = jnp.zeros(1, jnp.int32), []
    for pool, w in zip(pools, weights, strict=True):
        x, pool, counter = layer(x, pool, w, place, counter, part=part, form=form)
        after.append(pool)
    return x, after


def compiled(shape: Shape, part: Part, form: LayerImplementation) -> jax.stages.Compiled:
    """All layers as one program."""
    f = jax.jit(functools.partial(layers, part=part, form=form), donate_argnums=1)
    return f.lower(*jax.eval_shape(shape.arguments)).compile(compiler_options=GRAPHS)


def check(arguments: tuple[Any, ...], part: Part, form: LayerImplementation) -> dict[str, Any]:
    """One layer against the formula, and against itself."""
    x, pools, weights, place = arguments
    run = functools.partial(layer, x, pools[0], weights[0], place, part=part)
    counter = jnp.zeros(1, jnp.int32)
    want, wanted_pools, _ = run(counter, form="reference")
    got, got_pools, counter = run(counter, form=form)
    wrong = 0
    for _ in range(REPEATS):
        again, _, counter = run(counter, form=form)
        wrong += not bool(jnp.all(again == got))

    def error(a, b) -> float:
        a, b = (each.astype(jnp.float32) for each in (a, b))
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    branch = [y.astype(jnp.float32) - x.astype(jnp.float32) for y in (got, want)]
    errors = [error(*branch), *map(error, got_pools, wanted_pools)]
    return {
        "ok": max(errors) < LARGEST_ERROR and wrong == 0, "errors": errors, "calls": REPEATS,
        "other_bits": wrong,
    }  # fmt: skip


def spent(program: jax.stages.Compiled, arguments: list[Any]) -> float:
    """Seconds of a call, of several in a row."""
    x, pools, weights, place = arguments
    y, start = x, time.perf_counter()
    for _ in range(CALLS):
        y, pools = program(x, pools, weights, place)
    y.block_until_ready()
    arguments[1] = pools
    return (time.perf_counter() - start) / CALLS


def measure(table: Table, name: str, part: Part, arguments: list[Any], bytes_per_s: float) -> None:
    """Both forms of a part, which take turns."""
    shape = MODELS[name]
    with concurrent.futures.ThreadPoolExecutor(len(FORMS)) as pool:
        found = {form: pool.submit(compiled, shape, part, form) for form in FORMS}
        for form in FORMS:
            run = functools.partial(check, tuple(arguments), part, form)
            if not table.add(f"{name} {part}: check {form}", run).get("ok"):
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
            "floor_us": round(1e6 * shape.floor_bytes(part) / bytes_per_s, 2),
            "layers": shape.num_layers,
        }
        table.add(f"{name} {part}: {form}", lambda row=row: row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--parts", nargs="+", default=["tail", "layer"], choices=["tail", "layer"])
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    bytes_per_s = 1e9 * table.add("copy", lambda: {"gb_s": round(copied() / 1e9, 1)})["gb_s"]
    for name in args.models:
        arguments = list(jax.block_until_ready(jax.jit(MODELS[name].arguments)()))
        for part in args.parts:
            measure(table, name, part, arguments, bytes_per_s)


if __name__ == "__main__":
    main()
