"""Flash attention on a Hopper GPU: error against fp32, and time beside cuDNN in one process.

python -m experiments.bench.attention --check --time --out experiments/results/attention-h200.json

FLOPs of causal cases count half; a backward counts 2.5 forwards. Times are kernel times, medians.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec

SHAPES = ((8, 2048), (4, 4096), (1, 16384))
HEADS = {64: 32, 128: 32, 256: 16}
GROUP = 4
NO_MASKS = AttentionMasks()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and mask of one call; query and key equally long."""

    B: int
    T: int
    N: int
    K: int
    H: int
    Hv: int
    causal: bool
    window: int | None = None

    @property
    def name(self) -> str:
        """As the table shows it."""
        mask = "causal" if self.causal else "full"
        window = f" window{self.window}" if self.window else ""
        width = f"d{self.H}/{self.Hv}"
        return f"b{self.B} s{self.T} h{self.N}/{self.K} {width} {mask}{window}"

    @property
    def spec(self) -> AttentionSpec:
        """The static part of the call."""
        left = None if self.window is None else self.window - 1
        return AttentionSpec(scale=self.H**-0.5, left=left, right=0 if self.causal else None)

    @property
    def flop(self) -> float:
        """Of the forward; a window counts as the causal call it replaces."""
        return 2 * self.B * self.N * self.T**2 * (self.H + self.Hv) / (2 if self.causal else 1)

    def arrays(self, seed: int = 0) -> list[jax.Array]:
        """q, k, v and the output's cotangent."""
        keys = jax.random.split(jax.random.key(seed), 4)
        heads, widths = (self.N, self.K, self.K, self.N), (self.H, self.H, self.Hv, self.Hv)
        return [
            jax.random.normal(key, (self.B, self.T, n, w), jnp.bfloat16)
            for key, n, w in zip(keys, heads, widths, strict=True)
        ]


def grid(dims: list[int]) -> list[Case]:
    """The cases that the bars are about."""
    return [
        Case(B=B, T=T, N=HEADS[H], K=HEADS[H] // group, H=H, Hv=H, causal=causal)
        for H in dims
        for causal in (False, True)
        for B, T in SHAPES
        for group in (1, GROUP)
    ]


EXTRA = (
    Case(B=1, T=16384, N=32, K=8, H=128, Hv=128, causal=True, window=1024),
    Case(B=2, T=8192, N=32, K=32, H=192, Hv=128, causal=True),
)


def ours(q, k, v, *, spec):
    return hopper.forward(q, k, v, NO_MASKS, spec=spec)[0]


def ours_both(q, k, v, d_out, *, spec, deterministic=False):
    out, lse = hopper.forward(q, k, v, NO_MASKS, spec=spec)
    gradients = hopper.backward(
        q, k, v, NO_MASKS, out, lse, d_out, None, spec=spec, deterministic=deterministic
    )
    return out, gradients[:3]


def cudnn(q, k, v, *, spec):
    window = None if spec.left is None else (spec.left, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.right is not None,
        local_window_size=window,
        implementation="cudnn",
    )


def both_by_vjp(f, q, k, v, d_out):
    out, pull = jax.vjp(f, q, k, v)
    return out, pull(d_out.astype(out.dtype))


def plain(q, k, v, *, spec):
    """Attention from the definition in the dtype of its arguments, with fp32 softmax."""
    (B, T, N, H), K = q.shape, k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest").astype(jnp.float32)
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    seen = distance >= 0 if spec.right == 0 else jnp.ones_like(distance, bool)
    seen &= True if spec.left is None else distance <= spec.left
    p = jax.nn.softmax(jnp.where(seen[None, None, None], s * spec.scale, -jnp.inf))
    return jnp.einsum("bkgts,bskh->btkgh", p.astype(q.dtype), v, precision="highest").reshape(
        B, T, N, -1
    )


def relative(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(cases: list[Case]) -> list[dict]:
    """Errors against fp32, beside those of the plain bf16 implementation."""
    rows = []
    for case in cases:
        arrays = case.arrays()
        arrays[0] = arrays[0].at[:, ::97].mul(8)  # outliers
        exact = [x.astype(jnp.float32) for x in arrays]
        f = functools.partial(plain, spec=case.spec)
        want = jax.tree.leaves(jax.jit(functools.partial(both_by_vjp, f))(*exact))
        rough = jax.tree.leaves(jax.jit(functools.partial(both_by_vjp, f))(*arrays))
        for deterministic in (False, True):
            both = jax.jit(
                functools.partial(ours_both, spec=case.spec, deterministic=deterministic)
            )
            got, again = jax.tree.leaves(both(*arrays)), jax.tree.leaves(both(*arrays))
            same = all(bool((a == b).all()) for a, b in zip(got, again, strict=True))
            errors = [relative(g, w) for g, w in zip(got, want, strict=True)]
            limits = [2 * relative(r, w) for r, w in zip(rough, want, strict=True)]
            ok = all(e <= limit for e, limit in zip(errors, limits, strict=True))
            rows.append(
                {"case": case.name, "deterministic": deterministic, "errors": errors,
                 "limits": limits, "repeats": same, "ok": ok and (same or not deterministic)}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def milliseconds(f, *args, iterations: int) -> float:
    _, times = profiler.measure(jax.jit(f), iterations=iterations)(*args)
    assert times is not None
    return statistics.median(times)


def measure(cases: list[Case], iterations: int) -> list[dict]:
    """Rows of case, direction, implementation, ms, tflops."""
    rows = []
    for case in cases:
        arrays, spec = case.arrays(), case.spec
        library = functools.partial(cudnn, spec=spec)
        runs = {
            ("fwd", "cudnn"): (library, arrays[:3]),
            ("fwd", "hopper"): (functools.partial(ours, spec=spec), arrays[:3]),
            ("fwd+bwd", "cudnn"): (functools.partial(both_by_vjp, library), arrays),
            ("fwd+bwd", "hopper"): (functools.partial(ours_both, spec=spec), arrays),
        }
        for (direction, implementation), (f, args) in runs.items():
            row = {"case": case.name, "direction": direction, "implementation": implementation}
            try:
                ms = milliseconds(f, *args, iterations=iterations)
            except Exception as error:  # one implementation's refusal must not end the table
                print({**row, "refused": repr(error)[:160]}, flush=True)
                continue
            flop = case.flop * (1 if direction == "fwd" else 3.5)
            rows.append({**row, "ms": ms, "tflops": flop / ms / 1e9})
        print_ratios(rows[-4:])
    return rows


def print_ratios(rows: list[dict]) -> None:
    """One line a case and direction: both rates, and ours over cuDNN's."""
    rates = {(r["case"], r["direction"], r["implementation"]): r["tflops"] for r in rows}
    for case, direction in dict.fromkeys((r["case"], r["direction"]) for r in rows):
        mine, other = (rates.get((case, direction, name)) for name in ("hopper", "cudnn"))
        ratio = f"{mine / other:.3f}" if mine and other else "-"
        print(f"{case:36} {direction:8} {mine or 0:7.0f} {other or 0:7.0f} {ratio}", flush=True)


def print_means(rows: list[dict]) -> None:
    """Geometric mean and least of ours over cuDNN, per direction."""
    for direction in ("fwd", "fwd+bwd"):
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["direction"] == direction:
                times.setdefault(row["case"], {})[row["implementation"]] = row["ms"]
        ratios = [t["cudnn"] / t["hopper"] for t in times.values() if len(t) == 2]
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            print(f"{direction}: {len(ratios)} cases, mean {mean:.3f}, least {min(ratios):.3f}")


def clock_mhz() -> str:
    """Current and greatest clock of the multiprocessors."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--dims", type=int, nargs="*", default=list(HEADS))
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "backend": jax.devices()[0].client.platform_version,
        "command": " ".join(["python", "-m", "experiments.bench.attention", *sys.argv[1:]]),
    }
    if args.check:
        small = [
            Case(B=2, T=1000, N=4, K=2, H=H, Hv=H, causal=causal, window=window)
            for H in args.dims
            for causal, window in ((False, None), (True, None), (True, 300))
        ]
        result["errors"] = check(small)
    if args.time:
        result["rows"] = measure([*grid(args.dims), *EXTRA], args.iterations)
        result["clock_mhz_after"] = clock_mhz()
        print_means(result["rows"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
