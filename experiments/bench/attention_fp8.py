"""FP8 attention on a Hopper GPU beside our bf16 kernel: error against fp32, and kernel time.

python -m experiments.bench.attention_fp8 --out experiments/results/attention-fp8-h200.json

FLOPs of causal cases count half; kernel times, medians, in turns within one process. Quantizing
is timed apart: a server quantizes keys and values once, when they enter the cache.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from experiments.bench.environment import environment
from pallas_kernels.common import timing
from pallas_kernels.flash_attention import hopper, hopper_fp8
from pallas_kernels.flash_attention.fp8_operands import quantize_fp8
from pallas_kernels.flash_attention.hopper_config import Fp8Config
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec

NO_MASKS = AttentionMasks()
CHECK_LENGTH = 4096  # of the error's cases: the oracle holds T x S scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and mask of one call."""

    B: int
    T: int
    N: int
    K: int
    H: int
    causal: bool

    @property
    def name(self) -> str:
        """As the table shows it."""
        mask = "causal" if self.causal else "full"
        return f"b{self.B} s{self.T} h{self.N}/{self.K} d{self.H} {mask}"

    @property
    def spec(self) -> AttentionSpec:
        """The static part of the call."""
        return AttentionSpec(scale=self.H**-0.5, right=0 if self.causal else None)

    @property
    def flop(self) -> float:
        """Of both products."""
        return 4 * self.B * self.N * self.T**2 * self.H / (2 if self.causal else 1)

    def arrays(self, *, outliers: bool = False) -> list[jax.Array]:
        """q, k, v."""
        keys = jax.random.split(jax.random.key(self.T), 4)
        arrays = [
            jax.random.normal(key, (self.B, self.T, n, self.H), jnp.bfloat16)
            for key, n in zip(keys[:3], (self.N, self.K, self.K), strict=True)
        ]
        if outliers:  # a few channels much larger than the rest, as trained models have
            large = jax.random.uniform(keys[3], (self.H,)) < 0.05
            arrays = [jnp.where(large, 8 * x, x).astype(x.dtype) for x in arrays]
        return arrays


CASES = [
    Case(B=B, T=T, N=32, K=K, H=H, causal=causal)
    for H, K in ((128, 8), (128, 32), (64, 8))
    for causal in (False, True)
    for B, T in ((4, 4096), (2, 8192), (1, 16384))
]
TABLE: dict[str, Fp8Config | None] = {"fp8": None}
VARIANTS: dict[str, Fp8Config | None] = {
    "kv192 never promoted": Fp8Config(block_kv=192, promote_every=0),
    "kv192": Fp8Config(block_kv=192),
    "kv192 every 8": Fp8Config(block_kv=192, promote_every=8),
    "kv192 no turns": Fp8Config(block_kv=192, ping_pong=False),
    "kv224 never promoted": Fp8Config(block_kv=224, promote_every=0),
    "kv224": Fp8Config(block_kv=224),
    "kv224 no turns": Fp8Config(block_kv=224, ping_pong=False),
    "kv128": Fp8Config(num_stages=3),
    "kv96 of 192": Fp8Config(block_kv=96, num_warpgroups=3),
}
CHECKED = ("fp8", "kv192 never promoted", "kv192", "kv192 every 8", "kv224", "kv96 of 192")
"""Of which errors are measured: the others add in the same order as one of these."""


def plain(q, k, v, *, spec):
    """Attention from the definition in fp32, one query head at a time."""
    T, N = q.shape[1:3]
    group = N // k.shape[2]

    def head(n):
        s = jnp.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group], precision="highest")
        if spec.right == 0:
            s = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], s, -jnp.inf)
        p = jax.nn.softmax(s * spec.scale)
        return jnp.einsum("bts,bsh->bth", p, v[:, :, n // group], precision="highest")

    return jnp.moveaxis(jax.lax.map(head, jnp.arange(N)), 0, 2)


def relative(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def bf16(q, k, v, *, spec):
    return hopper.forward(q, k, v, NO_MASKS, spec=spec)[0]


def fp8(operands, *, spec, config=None):
    return hopper_fp8.forward(operands, spec=spec, dtype=jnp.bfloat16, config=config)[0]


def errors(case: Case, configs: dict[str, Fp8Config | None], emit) -> None:
    """Of fp8 and of bf16, against fp32 from the same bf16 operands."""
    for outliers in (False, True):
        arrays = case.arrays(outliers=outliers)
        operands = jax.jit(quantize_fp8)(*arrays)
        exact = [x.astype(jnp.float32) for x in arrays]
        want = jax.jit(functools.partial(plain, spec=case.spec))(*exact)
        row = {"case": case.name, "outliers": outliers}
        error = relative(jax.jit(functools.partial(bf16, spec=case.spec))(*arrays), want)
        emit({**row, "implementation": "bf16", "relative_error": error})
        for name, config in configs.items():
            f = jax.jit(functools.partial(fp8, spec=case.spec, config=config))
            error = relative(f(operands), want)
            emit({**row, "implementation": name, "relative_error": error})


def times(case: Case, configs: dict[str, Fp8Config | None], pool, emit) -> None:
    """Kernel times of the case, all implementations in turns."""
    arrays = case.arrays()
    operands = jax.jit(quantize_fp8)(*arrays)
    spec = case.spec
    work = {
        "bf16": (jax.jit(functools.partial(bf16, spec=spec)), tuple(arrays)),
        "quantize": (jax.jit(quantize_fp8), tuple(arrays)),
    }
    for name, config in configs.items():
        work[name] = (jax.jit(functools.partial(fp8, spec=spec, config=config)), (operands,))
    list(pool.map(lambda item: item[0].lower(*item[1]).compile(), work.values()))
    for name, timed in timing.measure(work, rounds=3, iterations=4).items():
        row = {"case": case.name, "implementation": name, "ms": timed.median_ms}
        if name != "quantize":
            row["tflops"] = case.flop / timed.median_ms / 1e9
        emit(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", action="store_true", help="tiles other than the table's")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    configs = VARIANTS if args.variants else TABLE
    rows: list[dict] = []

    def emit(row: dict) -> None:
        rows.append(row)
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()), sep=" | ",
              flush=True)  # fmt: skip
        if args.out:
            result = {"environment": environment(), "rows": rows}
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    cases = [case for case in CASES if not args.only or args.only in case.name]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for case in cases:
            times(case, configs, pool, emit)
    for case in cases:
        if case.T <= CHECK_LENGTH or (args.variants and not case.causal):
            errors(case, {name: configs[name] for name in configs if name in CHECKED}, emit)


if __name__ == "__main__":
    main()
