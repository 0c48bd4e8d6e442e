"""Linear attention on a Hopper GPU: forward, gradient and a decode step, beside XLA's chunks.

python -m experiments.bench.kernels.linear_attention \\
    --out experiments/results/linear-attention-h200.json

Heads of 128, 16 of keys and 32 of values, bf16; also state spaces of 128 heads of 64 with 8 of
keys. Times are sums of a call's kernels (CUPTI). A gradient's time is that of the backward pass
alone, which computes the states again. Errors are relative to the formula in fp32, token after
token. A state space's floor is the larger of two times: each array once through memory at a copy's
rate, and the products of chunks of 64 at the peak rate. A decode step updates the fp32 states of 64
rows in slots, in place; "of_copy" is its kernel's rate over the states, beside that of a copy.
"""

import collections
import functools
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.harness import compiled, copied, options, relative, table_of
from jaxinfra.planning.devices import find_device
from pallas_kernels import linear_attention, linear_attention_in_slots
from pallas_kernels.linear_attention.reference import reference

KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
SMALL_HEADS = (8, 128, 64)  # of keys, of values, and their width: as in published state spaces
SHAPES = {"1 x 8192": (1, 8192), "1 x 32768": (1, 32768), "4 x 8192": (4, 8192)}
ROWS = 64  # of a decode step
STEPS = (("delta", 1), ("channels", 1), ("space", 1), ("delta", 4), ("delta", 8))
CHECKED = (1, 1024)
CHUNK = 64  # tokens whose pairs are products

type Arrays = dict[str, jax.Array]


def inputs(batch: int, length: int, kind: str = "delta") -> Arrays:
    """Keys of length 1, weak and strong decays, a state.

    Args:
        kind: "delta", "channels" (a decay per channel of the keys), "space" (without a beta) or
            "small space" (of small heads).
    """
    num_keys, num_values, width = KEY_HEADS, VALUE_HEADS, WIDTH
    if kind == "small space":
        num_keys, num_values, width = SMALL_HEADS
    keys = jax.random.split(jax.random.key(0), 6)
    heads = (batch, length, num_values)
    q, k = jax.random.normal(keys[0], (2, batch, length, num_keys, WIDTH))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[1], (*heads, width))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q * WIDTH**-0.5, k, v))
    decays = (*heads, WIDTH) if kind == "channels" else heads
    beta = {"beta": jax.random.uniform(keys[3], heads, minval=0.1)}
    return ({} if kind.endswith("space") else beta) | {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": -jnp.exp(1.5 * jax.random.normal(keys[2], decays) - 2.0),
        "state": jax.random.normal(keys[4], (batch, num_values, WIDTH, width)),
    }


def forward(given: Arrays, implementation: str) -> tuple[jax.Array, jax.Array]:
    return linear_attention(**given, implementation=implementation)


def backward(given: Arrays, cotangents: tuple[jax.Array, jax.Array], implementation: str) -> Arrays:
    """The gradient, whose compiled program drops the forward pass's results."""
    function = functools.partial(forward, implementation=implementation)
    (gradient,) = jax.vjp(function, given)[1](cotangents)
    return gradient


def floor_ms(given: Arrays, *, is_gradient: bool) -> float:
    """Least time of a state space's call."""
    tokens, num_values, width = given["k"].shape[:2], *given["v"].shape[2:]
    # Outputs and their cotangents are as values, and each gradient is as its operand.
    arrays = [given, given["v"], given["state"]] + [given] * is_gradient
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(arrays))
    # A token reads and writes the state; for the gradient also its cotangent, which is read twice.
    # It has pairs with half of a chunk.
    by_state, by_pair = (5, 5) if is_gradient else (2, 2)
    each = 2 * width * WIDTH * by_state + (width + WIDTH) * CHUNK // 2 * by_pair
    flops = float(tokens[0] * tokens[1] * num_values * each)
    return 1e3 * max(num_bytes / copied(), flops / find_device("h200").flops["bf16"])


def formula(given: Arrays) -> tuple[jax.Array, jax.Array]:
    """Outputs and state in fp32, token after token."""
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    q, k, v, log_decay, state = (wide[x] for x in ("q", "k", "v", "log_decay", "state"))
    document = jnp.zeros(v.shape[:2], jnp.int32)
    return reference(q, k, v, log_decay, wide.get("beta"), state, document)


def formula_gradient(given: Arrays, cotangents: tuple[jax.Array, jax.Array]) -> Arrays:
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    d_out, d_state = cotangents
    return jax.vjp(formula, wide)[1]((d_out.astype(jnp.float32), d_state))[0]


def kernels(f: Callable, *args: Any, rounds: int) -> dict[str, Any]:
    """Median of a call's kernel time in ms, and the kernels that take most of one."""
    jax.block_until_ready(f(*args))
    times, by_name = [], {}
    for _ in range(rounds):
        _, launches = profiler.measure(f, aggregate=False)(*args)
        assert launches is not None, "the call launched no kernel"
        total = collections.defaultdict[str, float](float)
        for name, ms in launches:
            total[name[:48]] += ms
        times.append(sum(total.values()))
        by_name = dict(sorted(total.items(), key=lambda item: -item[1])[:10])
    return {"ms": statistics.median(times), "kernels_ms": by_name}


def cotangents_of(given: Arrays) -> tuple[jax.Array, jax.Array]:
    noise = jax.random.normal(jax.random.key(9), given["v"].shape, jnp.bfloat16)
    return noise, jnp.roll(given["state"], 1, axis=1)


def arguments(shape: tuple[int, int], is_gradient: bool, kind: str = "delta") -> tuple[Any, ...]:
    given = inputs(*shape, kind)
    return (given, cotangents_of(given)) if is_gradient else (given,)


class Programs:
    """Programs of all rows, compiled side by side."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(8)
        self.compiled: dict[tuple, Future[jax.stages.Compiled]] = {}

    def add(
        self, which: str, shape: tuple[int, int], is_gradient: bool, kind: str = "delta"
    ) -> None:
        """Starts to compile; ``which`` is an implementation or "formula"."""
        f: Callable = (formula, formula_gradient)[is_gradient]
        if which != "formula":
            f = functools.partial((forward, backward)[is_gradient], implementation=which)
        shapes = jax.eval_shape(functools.partial(arguments, shape, is_gradient, kind))
        self.compiled[which, shape, is_gradient, kind] = self.pool.submit(compiled, f, *shapes)

    def run(self, which: str, is_gradient: bool, kind: str) -> Any:
        """A program's result of arrays of the checked shape."""
        program = self.compiled[which, CHECKED, is_gradient, kind].result()
        return program(*arguments(CHECKED, is_gradient, kind))

    def timed(
        self, which: str, shape: tuple[int, int], is_gradient: bool, kind: str = "delta"
    ) -> dict:
        """Time of a program and of its kernels."""
        program = self.compiled[which, shape, is_gradient, kind].result()
        given = arguments(shape, is_gradient, kind)
        found = kernels(program, *given, rounds=5 if which == "hopper" else 1)
        if kind.endswith("space"):
            floor = floor_ms(given[0], is_gradient=is_gradient)
            found |= {"floor_ms": floor, "of_floor": floor / found["ms"]}
        return found

    def errors(self, which: str, kind: str) -> dict[str, float]:
        """Relative errors of outputs, state and gradients."""
        got, true = (self.run(name, False, kind) for name in (which, "formula"))
        found = dict(zip(("out", "end"), map(relative, got, true), strict=True))
        mine, true = (self.run(name, True, kind) for name in (which, "formula"))
        return found | {f"d_{name}": relative(mine[name], true[name]) for name in true}


def decode_step(kind: str, length: int) -> dict[str, Any]:
    """A few tokens of each of 64 rows: the kernel's rate over the states, beside a copy's."""
    given = inputs(ROWS, length, kind)
    states, slots = given.pop("state"), jnp.arange(ROWS)
    step = jax.jit(
        functools.partial(linear_attention_in_slots, read=slots, written=slots),
        donate_argnames="states",
    )
    _, states = step(**given, states=states)
    times = []
    for _ in range(5):
        (_, states), launches = profiler.measure(functools.partial(step, **given), aggregate=False)(
            states=states
        )
        assert launches is not None, "the step launched no kernel"
        times.append(dict(launches))
    own = statistics.median(max(each.values()) for each in times)
    num_bytes = 2 * 4 * ROWS * VALUE_HEADS * WIDTH**2
    return {
        "ms": statistics.median(sum(each.values()) for each in times),
        "kernel_ms": own,
        "of_copy": num_bytes / own * 1e3 / copied(),
    }


def main() -> None:
    args = options(__doc__, budget=120.0).parse_args()
    table, programs = table_of(args), Programs()
    passes = ("forward", "backward")
    checked = [("hopper", kind) for kind in ("delta", "channels", "space")] + [("xla", "delta")]
    timed = [("hopper", kind, name) for kind in ("delta", "channels", "space") for name in SHAPES]
    timed += [("hopper", "small space", "1 x 8192")]
    timed += [("xla", kind, "1 x 8192") for kind in ("delta", "channels")]
    for is_gradient in (False, True):
        for which, kind in checked + [("formula", kind) for _, kind in checked[:3]]:
            programs.add(which, CHECKED, is_gradient, kind)
        for which, kind, name in timed:
            programs.add(which, SHAPES[name], is_gradient, kind)
    for which, kind in checked:
        call = functools.partial(programs.errors, which, kind)
        table.add(f"error of {kind}: {which}", call)
    for is_gradient in (False, True):
        for which, kind, name in timed:
            call = functools.partial(programs.timed, which, SHAPES[name], is_gradient, kind)
            table.add(f"{passes[is_gradient]} of {kind}: {which}, {name}", call)
    for kind, length in STEPS:
        table.add(f"decode step: {kind} x {length}", functools.partial(decode_step, kind, length))


if __name__ == "__main__":
    main()
