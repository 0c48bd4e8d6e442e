"""Append and attention of a decode step in three launches and in two, in turn and overlapped.

python -m experiments.bench.append_and_attend --out experiments/results/append-and-attend-h200.json

"check" rows hold every form to three launches in turn, bit for bit, over many calls. Other rows are
microseconds per layer of 16 layers one after another, each with a cache of its own: on the host's
clock, as the profiler's sums do not know of overlapping. Launches wait behind a long product, so
that the host has issued them all when the first begins; what the product and the first calls take
is subtracted. Forms of a shape take turns. "floor_us" is keys and values once at 4.3 TB/s.
--graphs adds the same programs as CUDA graphs. Ends after --budget seconds.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.table import Table
from pallas_kernels import append_and_attend, append_heads, paged_attention
from pallas_kernels.hopper.launch import Launches

LAYERS, LENGTH, PAGE = 16, 2048, 64
MODELS = {"1b": (32, 8, 64), "8b": (32, 8, 128)}  # query heads, kv heads, width
ROWS = (1, 16, 64, 4)
FORMS: dict[str, tuple[bool, Launches]] = {  # appends within, launches
    "three launches": (False, "in-turn"),
    "three overlapped": (False, "overlapped"),
    "two launches": (True, "in-turn"),
    "two overlapped": (True, "overlapped"),
}
GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
    "xla_gpu_graph_min_graph_size": 1,
}
STREAM: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
ROUNDS, FEW, MANY, REPEATS = 5, 2, 12, 30
BYTES_PER_S = 4.3e12


@functools.partial(jax.jit, static_argnames=("within", "launches"))
def layer(heads, k, v, tables, positions, rope, *, within: bool, launches: Launches):
    """One layer; lowered once for all."""
    if within:
        return append_and_attend(
            heads, k, v, tables, positions, rope, implementation="hopper", launches=launches
        )
    q, k, v = append_heads(
        heads, k, v, tables, positions, rope, implementation="hopper", launches=launches
    )
    out = paged_attention(
        q, k, v, tables, positions[:, 0] + 1, implementation="hopper", launches=launches
    )
    return out, k, v


def layers(heads, k, v, tables, positions, rope, *, within: bool, launches: Launches):
    """All layers: pools of one follow those of another, as in a server."""
    outs = []
    for mine in tables:
        out, k, v = layer(heads, k, v, mine, positions, rope, within=within, launches=launches)
        outs.append(out)
    return outs, k, v


class Shape:
    """A model's heads and so many rows of 2,048 tokens."""

    def __init__(self, model: str, rows: int):
        self.title = f"{model} x {rows}"
        self.heads = MODELS[model]
        self.rows = rows
        self.per_layer = rows * LENGTH // PAGE

    @property
    def floor_us(self) -> float:
        """Keys and values once."""
        _, num_kv, width = self.heads
        return 1e6 * 4 * self.rows * LENGTH * num_kv * width / BYTES_PER_S

    def arguments(self) -> tuple:
        """The last position of every row is new."""
        num_q, num_kv, width = self.heads
        keys = jax.random.split(jax.random.key(0), 4)
        pool = (LAYERS * self.per_layer, PAGE, num_kv, width)
        heads, k, v = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(
                keys[:3],
                ((self.rows, 1, num_q + 2 * num_kv, width), pool, pool),
                strict=True,
            )
        )
        order = np.random.default_rng(0).permutation(self.per_layer).astype(np.int32)
        tables = [
            jnp.asarray(order.reshape(self.rows, -1) + i * self.per_layer) for i in range(LAYERS)
        ]
        positions = jnp.full((self.rows, 1), LENGTH - 1, jnp.int32)
        angles = jax.random.uniform(keys[3], (self.rows, 1, width // 2), maxval=6.0)
        return heads, k, v, tables, positions, (jnp.cos(angles), jnp.sin(angles))

    def programs(self, pool, wanted: list[str], graphs: bool) -> dict[str, Any]:
        """Every form, compiled."""
        shapes = jax.eval_shape(self.arguments)

        def compiled(name: str) -> dict[str, Any]:
            within, launches = FORMS[name]
            f = functools.partial(layers, within=within, launches=launches)
            lowered = jax.jit(f, donate_argnums=(1, 2)).lower(*shapes)
            found = {name: lowered.compile(compiler_options=STREAM)}
            if graphs:
                found[f"{name}, graph"] = lowered.compile(compiler_options=GRAPHS)
            return found

        return {n: f for each in pool.map(compiled, wanted) for n, f in each.items()}


@jax.jit
def alike(got, want) -> jax.Array:
    """Whether all bits are."""
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jnp.all(jnp.stack([jnp.all(bits(a) == bits(b)) for a, b in pairs]))


def check(program, first, arguments) -> dict:
    """Whether a form gives the bits of three launches, every time."""
    heads, k, v, *rest = arguments
    want = first(heads, jnp.copy(k), jnp.copy(v), *rest)
    same = [alike(program(heads, jnp.copy(k), jnp.copy(v), *rest), want) for _ in range(REPEATS)]
    wrong = sum(not bool(x) for x in same)
    return {"ok": wrong == 0, "calls": REPEATS, "wrong": wrong}


@jax.jit
def product(x):
    """Some milliseconds of work, in whose time the host issues the rest."""
    return jax.lax.fori_loop(0, 8, lambda _, y: (y @ x) * 0.01, x)


def spent(program, arguments: list, x, calls: int) -> float:
    """Seconds of so many calls behind the product; the pools go from call to call."""
    heads, k, v, *rest = arguments
    jax.block_until_ready((x, k, v))
    start = time.perf_counter()
    y = product(x)
    for _ in range(calls):
        _, k, v = program(heads, k, v, *rest)
    jax.block_until_ready((y, k, v))
    arguments[1], arguments[2] = k, v
    return time.perf_counter() - start


def measure(table: Table, shape: Shape, programs: dict[str, Any], arguments: list, x) -> None:
    """Medians of all forms, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        spent(program, arguments, x, FEW)
    for _ in range(ROUNDS):
        for name, program in programs.items():
            few, many = (spent(program, arguments, x, calls) for calls in (FEW, MANY))
            times[name].append(1e6 * (many - few) / (MANY - FEW) / LAYERS)
    for name, taken in times.items():
        row = {
            "us_per_layer": round(statistics.median(taken), 2),
            "least_us": round(min(taken), 2),
            "floor_us": round(shape.floor_us, 2),
        }
        table.add(f"{shape.title}: {name}", lambda row=row: row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--graphs", action="store_true")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    x = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    jax.block_until_ready(product(x))
    forms = [*dict.fromkeys(["three launches", *args.forms])]
    with concurrent.futures.ThreadPoolExecutor(len(forms)) as pool:
        for rows in args.rows:
            for model in args.models:
                if time.monotonic() > table.deadline:
                    continue
                shape = Shape(model, rows)
                programs = shape.programs(pool, forms, args.graphs)
                arguments = list(jax.block_until_ready(jax.jit(shape.arguments)()))
                first = programs["three launches"]
                for name, program in programs.items():
                    run = functools.partial(check, program, first, arguments)
                    if rows < 64:  # copies of the pools are a second each
                        table.add(f"{shape.title}: check {name}", run)
                measure(table, shape, programs, arguments, x)
                del arguments
    for row in table.rows:
        print(f"{row['name']:40} {row.get('us_per_layer', row.get('ok', row))}")


if __name__ == "__main__":
    main()
