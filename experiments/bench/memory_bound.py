"""Softmax and RMSNorm beside XLA and a copy: errors first, then GB/s of the fewest bytes.

python -m experiments.bench.memory_bound --out experiments/results/memory-bound-h200.json

"check" rows give relative errors against fp32 or fp64 beside those of XLA's bf16 form. Other rows
are CUPTI kernel times; GB/s counts each input read once and each output written once, and "of_copy"
divides it by the copy of the same process and shape. A variant that fails, or comes after --budget
seconds, is recorded as such and the table goes on; the file is written after every row.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.environment import environment
from pallas_kernels.common.hopper_rows import Config
from pallas_kernels.norm import hopper as norm
from pallas_kernels.softmax import hopper as softmax

SHAPES = ((32768, 4096), (8192, 32768), (4096, 131072))
OTHER_SHAPES = ((1048576, 128), (131072, 1024), (65536, 2048))
EPSILON = 1e-6
# In order of importance: what comes late may find no time left.
FORWARD_VARIANTS = {
    (32768, 4096): {
        "8 warpgroups": Config(num_warpgroups=8, num_stages=3),
        "3 stages": Config(num_stages=3),
    },
    (8192, 32768): {
        "8 warpgroups, 1 block": Config(num_warpgroups=8, group=8, num_stages=3),
        "4 stages": Config(group=4, cluster=2, num_stages=4),
        "cluster 4": Config(group=2, cluster=4, num_stages=6),
    },
    (4096, 131072): {
        "8 warpgroups, cluster 4": Config(num_warpgroups=8, group=8, cluster=4, num_stages=3),
        "4 stages": Config(group=4, cluster=8, num_stages=4),
    },
}


@dataclasses.dataclass
class Table:
    """Rows as they come, kept on disk."""

    out: pathlib.Path | None
    deadline: float
    rows: list[dict] = dataclasses.field(default_factory=list)

    def add(self, name: str, measure: Callable[[], dict]) -> dict:
        """Runs one variant; its failure is a row too."""
        if time.monotonic() > self.deadline:
            row = {"skipped": "out of time"}
        else:
            try:
                row = measure()
            except Exception as error:  # one variant's failure must not end the table
                row = {"failed": repr(error)[:300]}
        self.rows.append({"name": name, **row})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.out:
            document = {**environment(), "rows": self.rows}
            self.out.write_text(json.dumps(document, indent=1) + "\n")
        return row


def xla_softmax(x):
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def xla_softmax_gradient(y, d_y):
    y, d_y = y.astype(jnp.float32), d_y.astype(jnp.float32)
    return (y * (d_y - jnp.sum(y * d_y, axis=-1, keepdims=True))).astype(jnp.bfloat16)


def xla_rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (wide * root * scale[None, :]).astype(x.dtype)


def xla_rms_norm_gradient(x, scale, d_y):
    return jax.vjp(xla_rms_norm, x, scale)[1](d_y)


# name: (kernel, XLA, arguments by name, streams of [R, C] through memory)
OPS = {
    "softmax": (softmax.softmax, xla_softmax, "x", 2),
    "rms_norm": (functools.partial(norm.rms_norm, epsilon=EPSILON), xla_rms_norm, "xs", 2),
    "rms_norm_gradient": (
        functools.partial(norm.rms_norm_gradient, epsilon=EPSILON),
        xla_rms_norm_gradient,
        "xsd",
        3,
    ),
    "softmax_gradient": (softmax.softmax_gradient, xla_softmax_gradient, "yd", 3),
}


@functools.partial(jax.jit, static_argnums=0)
def make_inputs(shape: tuple[int, int]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = 3 * jax.random.normal(keys[0], shape, jnp.bfloat16)
    return {
        "x": x,
        "d": jax.random.normal(keys[1], shape, jnp.bfloat16),
        "s": 1.0 + 0.1 * jax.random.normal(keys[2], shape[1:], jnp.float32),
        "y": xla_softmax(x),
    }


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(name: str, shape: tuple[int, int], config: Config | None = None) -> dict:
    """Errors against the fp32 form, beside those of XLA's bf16 form."""
    kernel, xla, letters, _ = OPS[name]
    arrays = make_inputs(shape)
    args = [arrays[letter] for letter in letters]
    kernel = functools.partial(kernel, config=config)
    got = jax.tree.leaves(jax.jit(kernel)(*args))
    plain = jax.tree.leaves(jax.jit(xla)(*args))
    wide = (x.astype(jnp.float32) for x in args)
    if name == "softmax_gradient":
        y, d_y = wide
        want = [y * (d_y - jnp.sum(y * d_y, axis=-1, keepdims=True))]
    else:
        want = jax.tree.leaves(jax.jit(xla)(*wide))
    errors = [relative(g, w) for g, w in zip(got, want, strict=True)]
    plain_errors = [relative(p, w) for p, w in zip(plain, want, strict=True)]
    # Sums in fp32 of the same numbers: XLA's own may be its oracle to the last bit.
    ok = all(e <= 2 * p + 1e-6 for e, p in zip(errors, plain_errors, strict=True))
    again = jax.tree.leaves(jax.jit(kernel)(*args))
    same = all(bool(jnp.array_equal(a, b)) for a, b in zip(got, again, strict=True))
    return {"errors": errors, "xla": plain_errors, "ok": ok, "repeats": same}


def rate(f: Callable, args: list[jax.Array], num_bytes: int, copy: float | None) -> dict:
    _, times = profiler.measure(jax.jit(f), iterations=9)(*args)
    assert times is not None, "the call launched no kernel"
    ms = statistics.median(times)
    row = {"ms": round(ms, 5), "gb_s": round(num_bytes / ms / 1e6, 1)}
    return row | ({"of_copy": round(row["gb_s"] / copy, 4)} if copy else {})


def measure_shape(
    table: Table, shape: tuple[int, int], names: tuple[str, ...], *, variants: bool
) -> None:
    """Copy, XLA and kernels at one shape."""
    arrays = make_inputs(shape)
    stream = shape[0] * shape[1] * 2
    label = f"{shape[0]}x{shape[1]}"
    copied = table.add(
        f"copy {label}", lambda: rate(lambda x: x + 1, [arrays["x"]], 2 * stream, None)
    ).get("gb_s")
    for name in names:
        kernel, xla, letters, streams = OPS[name]
        args, size = [arrays[letter] for letter in letters], streams * stream
        forms = {"hopper": kernel, "xla": xla}
        if variants:
            chosen = FORWARD_VARIANTS[shape] if streams == 2 else {}
            forms = {n: functools.partial(kernel, config=c) for n, c in chosen.items()}
            if letters == "xs":
                forms = {
                    n: functools.partial(kernel, config=dataclasses.replace(c, vector=4))
                    for n, c in chosen.items()
                    if c.num_warpgroups == 4
                }
        for form, f in forms.items():
            measure = functools.partial(rate, f, args, size, copied)
            table.add(f"{name} {label} {form}", measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=55.0, help="seconds for all variants")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    main_ops = ("softmax", "rms_norm", "rms_norm_gradient")
    for shape in SHAPES:
        for name in main_ops:
            few_rows = (1056, shape[1])
            table.add(f"check {name} {few_rows}", functools.partial(check, name, few_rows))
        measure_shape(table, shape, main_ops, variants=False)
    for shape in SHAPES:
        measure_shape(table, shape, ("softmax", "rms_norm"), variants=True)
    for columns in (4096, 131072):
        check_one = functools.partial(check, "softmax_gradient", (1056, columns))
        table.add(f"check softmax_gradient 1056x{columns}", check_one)
    for shape in SHAPES:
        measure_shape(table, shape, ("softmax_gradient",), variants=False)
    for shape in OTHER_SHAPES:
        for name in main_ops:
            few_rows = (1056, shape[1])
            table.add(f"check {name} {few_rows}", functools.partial(check, name, few_rows))
        measure_shape(table, shape, main_ops, variants=False)


if __name__ == "__main__":
    main()
