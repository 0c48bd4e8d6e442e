"""Decoder layers' step of one row in one launch, and in one launch per product.

python -m experiments.bench.kernels.decode_layer --out experiments/results/decode-layer-h200.json

Each row has 2,048 tokens in its pages. "check" rows hold a form to the formula in fp32, and to its
own bits over many calls. Other rows are microseconds per layer of as many layers as have a gigabyte
of weights, one after another, so that L2 serves none: CUDA graphs on the host's clock, in rounds
that take turns. "floor_us" is weights, keys and values once at the rate of a copy in the same
process.
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

from experiments.bench.serving.decode import copied
from experiments.bench.table import Table
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import LayerImplementation, LayerWeights, decode_layers

FORMS: tuple[LayerImplementation, ...] = ("apart", "hopper")
BYTES, LENGTH, PAGE = 1 << 30, 2048, 64
ROUNDS, CALLS, REPEATS = 7, 20, 20
LARGEST_ERROR = 3e-2
"""Of what all layers add, to its norm: roundings to bfloat16 are 1.7e-3 each, seven a layer."""

GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
    "xla_gpu_graph_min_graph_size": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layers."""

    D: int
    N: int
    K: int
    H: int
    F: int

    @property
    def floor_bytes(self) -> int:
        """That a layer reads."""
        heads = self.D * (2 * self.N + 2 * self.K) * self.H
        return 2 * (heads + 3 * self.D * self.F + 2 * LENGTH * self.K * self.H)

    @property
    def num_layers(self) -> int:
        """As many as have a gigabyte."""
        return -(-BYTES // self.floor_bytes)

    def arguments(self) -> tuple[Any, ...]:
        """The stream, pools and weights of all layers, and where the new token goes."""
        keys, L = iter(jax.random.split(jax.random.key(0), 20)), self.num_layers

        def drawn(*shape: int, size: float = 1.0) -> jax.Array:
            return (size * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

        def weight(*shape: int) -> jax.Array:
            return drawn(L, *shape, size=shape[0] ** -0.5)

        def norm() -> RmsNorm:
            return RmsNorm(scale=1 + drawn(L, self.D, size=0.1), epsilon=1e-5)

        D, A = self.D, self.N * self.H
        weights = LayerWeights(
            attention_norm=norm(), qkv=weight(D, A + 2 * self.K * self.H), out=weight(A, D),
            mlp_norm=norm(), gate_up=weight(D, 2 * self.F), down=weight(self.F, D),
        )  # fmt: skip
        pool = L, LENGTH // PAGE, PAGE, self.K, self.H
        pools = drawn(*pool), drawn(*pool)
        table = jax.random.permutation(next(keys), LENGTH // PAGE)[None].astype(jnp.int32)
        angles = jax.random.uniform(next(keys), (1, self.H // 2), maxval=6.0)
        place = table, jnp.full(1, LENGTH - 1, jnp.int32), (jnp.cos(angles), jnp.sin(angles))
        return drawn(1, D), pools, weights, place


MODELS = {
    "1b": Shape(D=2048, N=32, K=8, H=64, F=8192),
    "8b": Shape(D=4096, N=32, K=8, H=128, F=14_336),
}


def compiled(shape: Shape, form: LayerImplementation) -> jax.stages.Compiled:
    """All layers as one program."""
    f = jax.jit(functools.partial(run, form=form), donate_argnums=1)
    return f.lower(*jax.eval_shape(shape.arguments)).compile(compiler_options=GRAPHS)


def run(x, pools, weights, place, *, form: LayerImplementation) -> tuple:
    """All layers."""
    tables, positions, rope = place
    return decode_layers(x, weights, pools, tables, positions, rope, implementation=form)


kept = jax.jit(run, static_argnames="form")


def check(arguments: tuple[Any, ...], form: LayerImplementation) -> dict[str, Any]:
    """All layers against the formula, and against themselves."""
    x, pools, weights, place = arguments
    got, y, each = kept(*arguments, form=form), x, []
    for i in range(len(pools[0])):  # compiled once for all
        one = jax.tree.map(lambda stack, i=i: stack[i : i + 1], (pools, weights))
        y, after = kept(y, *one, place, form="reference")
        each.append(after)
    want = y, tuple(jnp.concatenate(layers) for layers in zip(*each, strict=True))
    wrong = sum(not bool(jnp.all(kept(*arguments, form=form)[0] == got[0])) for _ in range(REPEATS))

    def error(a, b) -> float:
        a, b = (each.astype(jnp.float32) for each in (a, b))
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    added = [y.astype(jnp.float32) - x.astype(jnp.float32) for y, _ in (got, want)]
    pools = max(jax.tree.leaves(jax.tree.map(error, got[1], want[1])))
    return {
        "ok": error(*added) < LARGEST_ERROR and pools < LARGEST_ERROR and wrong == 0,
        "error": error(*added), "error_of_pages": pools, "calls": REPEATS, "other_bits": wrong,
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


def measure(table: Table, name: str, arguments: list[Any], bytes_per_s: float) -> None:
    """Both forms, which take turns."""
    shape = MODELS[name]
    with concurrent.futures.ThreadPoolExecutor(len(FORMS)) as pool:
        found = {form: pool.submit(compiled, shape, form) for form in FORMS}
        for form in FORMS:
            job = functools.partial(check, tuple(arguments), form)
            if not table.add(f"{name}: check {form}", job).get("ok"):
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
            "floor_us": round(1e6 * shape.floor_bytes / bytes_per_s, 2),
            "layers": shape.num_layers,
        }
        table.add(f"{name}: {form}", lambda row=row: row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    bytes_per_s = 1e9 * table.add("copy", lambda: {"gb_s": round(copied() / 1e9, 1)})["gb_s"]
    for name in args.models:
        arguments = list(jax.block_until_ready(jax.jit(MODELS[name].arguments)()))
        measure(table, name, arguments, bytes_per_s)


if __name__ == "__main__":
    main()
