"""Routed experts' layer in 8 bits beside the same in bf16: forward and backward, fp32 masters.

python -m experiments.bench.fp8_experts --out experiments/results/fp8-experts-h200.json

Sustained, in turns, as ``grouped_matmul``. A row has milliseconds of a layer's value and gradients
in tokens and weights, tokens spread evenly over experts at random, and how far the 8-bit ones are
from the bf16 ones (relative, of all elements). TFLOP/s count the nine products. "kernels" are the
milliseconds of the 8-bit layer's kernels by name, the ten longest, of one call.
"""

import argparse
import functools
import pathlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.grouped_matmul import Run, compiled, in_tflops, take_turns
from experiments.bench.scaled_matmul import KernelClock
from experiments.bench.table import Table
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.precision import Fp8Matmuls, PolicyName, PrecisionConfig, Site
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops.experts import ExpertWeights, apply_experts

FP8 = Fp8Matmuls(sites=(Site.EXPERTS,))
FORMS = {"bf16": None, "hopper": FP8}
LAYERS = {
    "Qwen3-30B-A3B": (8192, 8, 128, 2048, 768),
    "32 experts of DeepSeek-V3": (8192, 8, 32, 7168, 2048),
}
"""Tokens, experts of a token, experts, model width, hidden width."""


def gradients(form: Fp8Matmuls | None, x, expert, weight, experts, d):
    """The layer's value, and its gradients in x and the experts' weights."""
    recipe = policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=form)).recipe(Site.EXPERTS)

    def layer(x, experts):
        kind = MlpKind.SWIGLU
        return apply_experts(x, expert, weight, experts, kind=kind, recipe=recipe)[0]

    y, pull = jax.vjp(layer, x, experts)
    return y, pull(d)


def arrays(sizes: tuple[int, ...]):
    """Arguments of ``gradients``."""
    N, top_k, E, D, F = sizes
    keys = jax.random.split(jax.random.key(0), 7)
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    experts = ExpertWeights(
        gate_EDF=normal(keys[0], (E, D, F)) * D**-0.5,
        up_EDF=normal(keys[1], (E, D, F)) * D**-0.5,
        down_EFD=normal(keys[2], (E, F, D)) * F**-0.5,
    )
    _, expert = jax.lax.top_k(jax.random.normal(keys[3], (N, E)), top_k)
    weight = jax.nn.softmax(normal(keys[4], (N, top_k)))
    x, d = (normal(key, (N, D)).astype(jnp.bfloat16) for key in keys[5:])
    return x, expert.astype(jnp.int32), weight, experts, d


@jax.jit
def apart(got, want):
    """Relative distances of two trees' leaves."""
    norm = jnp.linalg.norm

    def distance(a, b):
        a, b = (each.astype(jnp.float32).reshape(-1) for each in (a, b))
        return norm(a - b) / norm(b)

    return [distance(*each) for each in zip(*map(jax.tree.leaves, (got, want)), strict=True)]


def longest(call: Run, count: int = 10) -> dict[str, float]:
    """Milliseconds of the kernels of one call, those that take longest."""
    once, wait = call
    totals: dict[str, float] = {}
    for name, ms in KernelClock().kernels(lambda: wait(once())):
        totals[name[:60]] = totals.get(name[:60], 0.0) + ms
    return dict(sorted(totals.items(), key=lambda each: -each[1])[:count])


def measure(sizes: tuple[int, ...], programs: dict[str, Future], args) -> dict:
    given = jax.jit(arrays, static_argnums=0)(sizes)
    runs: dict[str, Run] = {
        name: (functools.partial(program.result(), *given), jax.block_until_ready)
        for name, program in programs.items()
    }
    distances = apart(runs["hopper"][0](), runs["bf16"][0]())
    N, top_k, _, D, F = sizes
    row = in_tflops(take_turns(runs, turn=args.turn, rounds=args.rounds), 18 * N * top_k * D * F)
    row["of_bf16"] = row["ms"]["bf16"] / row["ms"]["hopper"]
    row["apart"] = dict(zip(("y", "x", "gate", "up", "down"), map(float, distances), strict=True))
    row["kernels"] = longest(runs["hopper"])
    return {**row, "ok": bool(np.max(list(row["apart"].values())) < 0.1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=75.0, help="seconds for all rows")
    parser.add_argument("--turn", type=float, default=0.2, help="seconds of a contender's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    with ThreadPoolExecutor(16) as pool:
        programs = {
            layer: {
                name: pool.submit(
                    compiled,
                    functools.partial(gradients, form),
                    *jax.eval_shape(functools.partial(arrays, sizes)),
                )
                for name, form in FORMS.items()
            }
            for layer, sizes in LAYERS.items()
        }
    for layer, each in programs.items():
        table.add(layer, functools.partial(measure, LAYERS[layer], each, args))
    for row in table.rows:
        figures = {n: row[n] for n in ("ms", "of_bf16", "apart", "ok", "failed") if n in row}
        print(row["name"], figures, flush=True)


if __name__ == "__main__":
    main()
