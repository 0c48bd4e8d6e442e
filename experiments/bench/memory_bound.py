"""Softmax and RMSNorm beside XLA and a copy: errors first, then GB/s of the fewest bytes.

python -m experiments.bench.memory_bound --out experiments/results/memory-bound-h200.json

"check" and "variant" rows give relative errors against fp32 beside those of XLA's bf16 form. Other
rows are CUPTI kernel times; GB/s counts each input read once and each output written once, and
"of_copy" divides it by the copy of the same process and shape (``as_words``). What fails, or comes
after --budget seconds, is recorded as such and the table goes on; the file is written after every
row.
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
from pallas_kernels.common import hopper_rows_config as rows_config
from pallas_kernels.common import hopper_wide
from pallas_kernels.common.rows import BARS, OTHERS, Workload
from pallas_kernels.norm import hopper as norm
from pallas_kernels.norm.reference import rms_norm_reference
from pallas_kernels.norm.workloads import EPSILON, arrays
from pallas_kernels.softmax import hopper as softmax
from pallas_kernels.softmax.reference import softmax_gradient_reference, softmax_reference

CHECKED_ROWS = 1056
# In order of importance: what comes late may find no time left.
VARIANTS: dict[tuple[str, int], dict[str, rows_config.Config | hopper_wide.Config]] = {
    ("softmax", 32768): {
        "5 slots": hopper_wide.Config(tiles=2, chunks=2, slots=5),
        "4 slots, ahead": hopper_wide.Config(tiles=2, chunks=2, slots=4, ahead=True),
        "4 slots": hopper_wide.Config(tiles=2, chunks=2, slots=4),
    },
    ("rms_norm", 32768): {
        "1 block": hopper_wide.Config(chunks=4, slots=6),
        "1 block, 3 slots": hopper_wide.Config(tiles=2, chunks=2, slots=3),
        "2 blocks, ahead": hopper_wide.Config(cluster=2, tiles=2, slots=5, ahead=True),
    },
    ("rms_norm", 131072): {"4 blocks": hopper_wide.Config(cluster=4, chunks=4, slots=6)},
    ("softmax", 4096): {"streamed": rows_config.Config(num_stages=3)},
    ("rms_norm", 4096): {"streamed": rows_config.Config(num_stages=3, vector=4)},
    ("rms_norm_gradient", 4096): {
        "4 warpgroups": rows_config.Config(num_stages=3, vector=4),
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


xla_rms_norm = functools.partial(rms_norm_reference, epsilon=EPSILON)


def xla_rms_norm_gradient(x, scale, d_y):
    return jax.vjp(xla_rms_norm, x, scale)[1](d_y)


# name: (kernel, XLA, arguments by name, streams of [R, C] through memory)
OPS = {
    "softmax": (softmax.softmax, softmax_reference, "x", 2),
    "rms_norm": (functools.partial(norm.rms_norm, epsilon=EPSILON), xla_rms_norm, "xs", 2),
    "rms_norm_gradient": (
        functools.partial(norm.rms_norm_gradient, epsilon=EPSILON),
        xla_rms_norm_gradient,
        "xsd",
        3,
    ),
    "softmax_gradient": (softmax.softmax_gradient, softmax_gradient_reference, "yd", 3),
}


@functools.partial(jax.jit, static_argnums=0)
def make_inputs(workload: Workload) -> dict[str, jax.Array]:
    made = arrays(workload, jax.random.key(0))
    x = made["x"]
    return {"x": x, "d": made["d_y"], "s": made["scale"], "y": softmax_reference(x)}


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(
    name: str,
    columns: int,
    config: rows_config.Config | hopper_wide.Config | None = None,
) -> dict:
    """Errors against the fp32 form, beside those of XLA's bf16 form."""
    kernel, xla, letters, _ = OPS[name]
    made = make_inputs(Workload(rows=CHECKED_ROWS, columns=columns))
    args = [made[letter] for letter in letters]
    kernel = functools.partial(kernel, config=config)
    got = jax.tree.leaves(jax.jit(kernel)(*args))
    plain = jax.tree.leaves(jax.jit(xla)(*args))
    want = jax.tree.leaves(jax.jit(xla)(*(x.astype(jnp.float32) for x in args)))
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


def as_words(x: jax.Array) -> jax.Array:
    """bf16 [R, C] as int32 [R, C / 2]: what XLA copies at the rate of the memory.

    It adds 1 to bf16 at 78% of that.
    """
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.int32)


def measure_shape(table: Table, workload: Workload) -> None:
    """Copy, XLA, kernels and their variants at one shape."""
    made = make_inputs(workload)
    stream = workload.rows * workload.columns * 2
    label = workload.name
    words = jax.jit(as_words)(made["x"])
    copied = table.add(
        f"copy {label}", lambda: rate(lambda x: x + 1, [words], 2 * stream, None)
    ).get("gb_s")
    for name, (kernel, xla, letters, streams) in OPS.items():
        args: list[jax.Array] = [made[letter] for letter in letters]
        variants = VARIANTS.get((name, workload.columns), {})
        forms = {"hopper": kernel, "xla": xla}
        forms |= {n: functools.partial(kernel, config=c) for n, c in variants.items()}
        for form, f in forms.items():
            if form in variants:
                check_one = functools.partial(check, name, workload.columns, variants[form])
                table.add(f"variant {name} {CHECKED_ROWS}x{workload.columns} {form}", check_one)
            measure = functools.partial(rate, f, args, streams * stream, copied)
            table.add(f"{name} {label} {form}", measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    for workload in (*BARS, *OTHERS):
        for name in OPS:
            check_one = functools.partial(check, name, workload.columns)
            table.add(f"check {name} {CHECKED_ROWS}x{workload.columns}", check_one)
        measure_shape(table, workload)


if __name__ == "__main__":
    main()
