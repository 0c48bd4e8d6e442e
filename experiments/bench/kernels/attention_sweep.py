"""Attention at random shapes of what models use: ours, cuDNN and XLA, and which `auto` takes.

python -m experiments.bench.kernels.attention_sweep --seed 1 --out sweep.json
python -m experiments.bench.kernels.attention_sweep --summary sweep.json more.json # of Hopper GPUs

Contenders of a shape alternate in one process: kernel times, medians, random normal operands.
``auto`` is one of them in each direction: its time is that of the one it takes. A forward
and backward is one program where cuDNN differentiates itself, and the sum of two elsewhere. XLA is
timed where a forward has at most ``XLA_FLOP``: beyond, it is several times slower than both others.
A sweep goes on where it was stopped: shapes that --out has are left out.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.kernels.attention import both_by_vjp, compiled, profiled
from pallas_kernels import UnsupportedError, flash_attention, flash_attention_gradient
from pallas_kernels.common import device
from pallas_kernels.flash_attention import dispatch, validate
from pallas_kernels.flash_attention.spec import AttentionCall

LARGEST_FLOP = 1.5e12  # FLOPs of the largest forward pass, so that the budget holds many shapes
XLA_FLOP = 4e9
POOL = 1 << 27  # random numbers; all operands are slices of them
ROUNDS, ITERATIONS = 3, 4
AT_ONCE = 12  # shapes that compile side by side
LONG = 2048
WIDTHS = {
    (64, 64): 6, (128, 128): 8, (256, 256): 2, (96, 96): 1, (80, 80): 1, (72, 72): 1,
    (112, 112): 1, (160, 160): 1, (192, 128): 1,
}  # fmt: skip
"""Head widths of query and value, with the weights they are sampled by."""
HEADS = (
    (4, 4), (6, 6), (8, 1), (8, 2), (8, 8), (12, 12), (16, 2), (16, 4), (16, 8), (16, 16), (20, 20),
    (24, 8), (28, 4), (32, 4), (32, 8), (32, 32), (40, 8), (48, 8), (64, 8),
)  # fmt: skip
WINDOWS = (128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One random call, query and key equally long."""

    B: int
    T: int
    N: int
    K: int
    H: int
    Hv: int
    mask: str  # "full", "causal" or "window", which is causal
    window: int | None = None  # keys that a query sees

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Shape":
        """A measured row's."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    @property
    def name(self) -> str:
        """Name of the shape in the table's rows."""
        mask = f"window{self.window}" if self.mask == "window" else self.mask
        return f"b{self.B} s{self.T} h{self.N}/{self.K} d{self.H}/{self.Hv} {mask}"

    @property
    def flop(self) -> float:
        """FLOPs of the forward pass over the unmasked scores."""
        keys = self.T if self.window is None else min(self.window, self.T)
        seen = keys * self.T - keys * (keys - 1) / 2 if self.mask != "full" else self.T**2
        return 2 * self.B * self.N * seen * (self.H + self.Hv)

    @property
    def options(self) -> dict[str, Any]:
        """Mask arguments of ``flash_attention``."""
        window = None if self.window is None else (self.window - 1, 0)
        return {"is_causal": self.mask != "full", "local_window_size": window}

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """q, k, v, the output, the logsumexp and the output's cotangent."""
        rows = (self.B, self.T)
        q, out = (*rows, self.N, self.H), (*rows, self.N, self.Hv)
        shapes = (q, (*rows, self.K, self.H), (*rows, self.K, self.Hv), out, (*rows, self.N), out)
        return [
            jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 3 else jnp.bfloat16)
            for shape in shapes
        ]

    @property
    def size(self) -> int:
        """Elements of all operands."""
        return sum(math.prod(each.shape) for each in self.arrays())

    def call(self) -> AttentionCall:
        """Description of the call that "auto" dispatches on."""

        def make(q, k, v):
            calls.append(
                validate.make_call(
                    q, k, v, scale=None, q_segment_ids=None, kv_segment_ids=None,
                    logit_soft_cap=None, return_residual=False, mesh_axes=None, **self.options,
                )
            )  # fmt: skip

        calls: list[AttentionCall] = []
        jax.eval_shape(make, *self.arrays()[:3])
        return calls[0]


def draw(seed: int, count: int) -> list[Shape]:
    """Different shapes, the same for a seed; a greater count begins with the same ones."""
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        shapes[_draw_one(rng)] = None
    return list(shapes)


def _draw_one(rng: np.random.Generator) -> Shape:
    pairs, weights = list(WIDTHS), np.array(list(WIDTHS.values()), float)
    H, Hv = pairs[rng.choice(len(pairs), p=weights / weights.sum())]
    N, K = HEADS[rng.choice(len(HEADS))]
    if Hv != H:
        K = N  # latent attention, expanded
    T = int(2 ** rng.uniform(7, 15))
    step = rng.choice((0, 128, 2), p=(0.5, 0.3, 0.2))
    T = 2 ** round(math.log2(T)) if step == 0 else max(128, T // step * step)
    mask = str(rng.choice(("causal", "full", "window"), p=(0.6, 0.2, 0.2)))
    windows = [w for w in WINDOWS if w < T]
    if mask == "window" and not windows:
        mask = "causal"
    window = int(rng.choice(windows)) if mask == "window" else None
    B = max(1, round(2 ** rng.uniform(11, 15.5) / T))
    shape = Shape(B=B, T=int(T), N=N, K=K, H=H, Hv=Hv, mask=mask, window=window)
    while shape.flop > LARGEST_FLOP or shape.size > POOL:
        # A smaller batch, then a device's share of the heads.
        if shape.B > 1:
            shape = dataclasses.replace(shape, B=shape.B // 2)
        elif shape.K > 1 and shape.K % 2 == 0:
            shape = dataclasses.replace(shape, N=shape.N // 2, K=shape.K // 2)
        elif shape.N > shape.K and (shape.N // shape.K) % 2 == 0:
            shape = dataclasses.replace(shape, N=shape.N // 2)
        else:
            shape = dataclasses.replace(shape, N=max(1, shape.N // shape.K // 2), K=1)
            if shape.N == 1 and shape.flop > LARGEST_FLOP:
                shape = dataclasses.replace(shape, T=shape.T // 4 * 2)
    return shape


def programs(shape: Shape) -> dict[tuple[str, str], Any]:
    """Functions of the arrays, by direction and implementation, of those that can."""
    found: dict[tuple[str, str], Any] = {}
    for name in ("hopper", "cudnn", "xla"):
        if name == "xla" and shape.flop > XLA_FLOP:
            continue
        try:
            dispatch.choose(name, shape.call())
        except UnsupportedError:
            continue
        options = {"implementation": name, **shape.options}
        one = functools.partial(flash_attention, **options)
        found["fwd", name] = one
        if name == "cudnn":
            found["fwd+bwd", name] = functools.partial(both_by_vjp, one)
        else:
            found["bwd", name] = functools.partial(flash_attention_gradient, **options)
    return found


def operands(direction: str, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any) -> list[Any]:
    """Operands of a direction's programs, picked from arrays or from their shapes."""
    if direction == "fwd":
        return [q, k, v]
    return [q, k, v, d_out] if direction == "fwd+bwd" else [q, k, v, out, lse, d_out]


def compile_shape(shape: Shape) -> dict[tuple[str, str], jax.stages.Compiled | str]:
    """Compiled programs, or what was raised instead."""
    done: dict[tuple[str, str], jax.stages.Compiled | str] = {}
    for key, f in programs(shape).items():
        try:
            done[key] = compiled(f, *operands(key[0], *shape.arrays()))
        except Exception as error:  # one refusal does not end the others
            done[key] = repr(error)[:200]
    return done


def chosen(shape: Shape) -> dict[str, str]:
    """Implementations that "auto" picks for a forward pass, alone and differentiated."""
    call = shape.call()
    return {
        "fwd": dispatch.choose("auto", call, gradient=False),
        "fwd+bwd": dispatch.choose("auto", call),
    }


def measure(shape: Shape, ready: dict[tuple[str, str], Any], pool: np.ndarray) -> dict[str, Any]:
    """A row: milliseconds by direction and implementation, and what ``auto`` takes."""
    arrays, start = [], 0
    for each in shape.arrays():
        if each.dtype == jnp.float32:  # a logsumexp that no probability exceeds 1 with
            arrays.append(jnp.full(each.shape, 9.0, each.dtype))
            continue
        arrays.append(jax.device_put(pool[start : start + each.size].reshape(each.shape)))
        start += each.size
    times: dict[tuple[str, str], list[float]] = {}
    failed = {"/".join(key): each for key, each in ready.items() if isinstance(each, str)}
    for _ in range(ROUNDS):
        for key, f in ready.items():
            if isinstance(f, str) or "/".join(key) in failed:
                continue
            args = operands(key[0], *arrays)
            try:
                times.setdefault(key, []).extend(profiled(f, *args, iterations=ITERATIONS))
            except Exception as error:  # a failed shape must not end the sweep
                failed["/".join(key)] = repr(error)[:200]
    found = {
        key: statistics.median(each) for key, each in times.items() if "/".join(key) not in failed
    }
    ms: dict[str, dict[str, float]] = {"fwd": {}, "fwd+bwd": {}}
    for (direction, name), median in found.items():
        if direction != "bwd":
            ms[direction][name] = median
        elif ("fwd", name) in found:
            ms["fwd+bwd"][name] = found["fwd", name] + median
    row: dict[str, Any] = {"name": shape.name, **dataclasses.asdict(shape), "flop": shape.flop}
    row |= {"ms": ms, "auto": chosen(shape)}
    return row | ({"failed": failed} if failed else {})


def sweep(shapes: list[Shape], out: pathlib.Path, budget: float) -> None:
    """Adds rows to a file until the time is over."""
    deadline = time.monotonic() + budget
    document = json.loads(out.read_text()) if out.exists() else {"runs": [], "rows": []}
    document["runs"].append(environment())
    seen = {row["name"] for row in document["rows"]}
    left = [shape for shape in shapes if shape.name not in seen]
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32).astype(jnp.bfloat16)
    for some in itertools.batched(left, AT_ONCE):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            ready = list(threads.map(compile_shape, some))  # nothing is timed beside a compiler
        for shape, compiled_shape in zip(some, ready, strict=True):
            row = measure(shape, compiled_shape, pool)
            document["rows"].append(row)
            print(_line(row), flush=True)
            out.write_text(json.dumps(document, indent=1) + "\n")
        if time.monotonic() > deadline:
            break
    document["runs"][-1]["clocks_after"] = clocks()
    out.write_text(json.dumps(document, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['name']:44}"]
    for direction, ms in row["ms"].items():
        each = " ".join(f"{name} {time:.4f}" for name, time in ms.items())
        auto = f"{row['auto'][direction]} {of_best(row, direction):.3f}"
        parts.append(f"{direction}: {each} (auto {auto})")
    return " ".join(parts) + (f" FAILED {row['failed']}" if "failed" in row else "")


def of_best(row: dict[str, Any], direction: str) -> float:
    """The fastest contender's time over that of ``auto``'s choice."""
    ms, auto = row["ms"][direction], row["auto"][direction]
    return min(ms.values()) / ms[auto] if auto in ms else math.nan


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and least values, of ``auto`` over the best and of ours over cuDNN."""
    found: dict[str, Any] = {"shapes": len(rows)}
    for direction in ("fwd", "fwd+bwd"):
        auto = [(of_best(row, direction), row["name"]) for row in rows if row["ms"][direction]]
        long = [
            (row["ms"][direction]["cudnn"] / row["ms"][direction]["hopper"], row["name"])
            for row in rows
            if row["T"] >= LONG and {"cudnn", "hopper"} <= row["ms"][direction].keys()
        ]
        for what, each in (("auto over best", auto), (f"ours over cuDNN, s >= {LONG}", long)):
            if each:
                found[f"{direction}, {what}"] = spread(each)
    return found


def kept(path: pathlib.Path) -> list[dict[str, Any]]:
    """A file's rows, with what ``auto`` takes on its device by the table as it is now."""
    document = json.loads(path.read_text())
    facts = dataclasses.replace(device.H200, kind=document["runs"][-1]["device"])
    with device.compiling_for(facts):
        return [row | {"auto": chosen(Shape.of(row))} for row in document["rows"]]


def spread(each: list[tuple[float, str]]) -> dict[str, Any]:
    """Geometric mean and least of ratios, and the names of what is slow."""
    mean = math.exp(statistics.fmean(math.log(value) for value, _ in each))
    return {
        "cases": len(each),
        "mean": round(mean, 4),
        "least": round(min(each)[0], 4),
        "under 0.95": [f"{name} {value:.3f}" for value, name in sorted(each) if value < 0.95],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("attention-sweep.json"))
    parser.add_argument("--summary", type=pathlib.Path, nargs="+", help="of files, measuring none")
    args = parser.parse_args()
    if args.summary:
        print(json.dumps(summary([row for path in args.summary for row in kept(path)]), indent=1))
    else:
        sweep(draw(args.seed, args.count), args.out, args.budget)


if __name__ == "__main__":
    main()
