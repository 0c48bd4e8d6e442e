"""Scaled matmuls on a Hopper GPU, beside XLA's and PyTorch's.

python -m experiments.bench.kernels.scaled_matmul --out experiments/results/scaled-matmul-h200.json

Kernel times by CUPTI of contenders that alternate in one process: our kernel with 1x128 by 128x128
scales, XLA's per-tensor FP8 matmul (cuBLASLt), and cuBLASLt's block-scaled one as PyTorch calls it,
where PyTorch is there. Each stays busy for --round-ms, long enough for the power limit.
"""

import functools
import importlib
import importlib.util
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import clocks
from experiments.bench.harness import Contender, compiled, kernel_ms, options, table_of
from experiments.bench.kernels.scaled_workloads import LARGE, SMALL, ScaledWorkload
from pallas_kernels.common.scales import Scaling
from pallas_kernels.fp8 import quantize, scaled_matmul

BLOCKS = (Scaling.BLOCK_OF_ROW, Scaling.BLOCK)
SUSTAINED_MS = 200.0
L2_BYTES = 60e6
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options of XLA's 8-bit product. With Triton, XLA times dozens of its kernels at each
shape, which takes minutes, and picks one of them over cuBLASLt's."""


def operands(w: ScaledWorkload, seed: int) -> tuple[jax.Array, ...]:
    """a, b, a_scale, b_scale of numbers whose rows and columns differ in size."""
    keys = jax.random.split(jax.random.key(seed), 4)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def operand(key, size_key, rows, scaling):
        x = jax.random.normal(key, (rows, w.K), jnp.float32)
        size = jnp.exp2(jax.random.randint(size_key, (rows, 1), -8, 0).astype(jnp.float32))
        return quantize(x * size, scaling, dtype=jnp.float8_e4m3fn, implementation="xla")

    a = operand(keys[0], keys[1], w.M, BLOCKS[0])
    b = operand(keys[2], keys[3], w.N, BLOCKS[1])
    return a.values, b.values, a.scale, b.scale


def num_sets(w: ScaledWorkload) -> int:
    """Sets whose bytes pass through L2 before one comes again; large products do so alone."""
    return max(1, math.ceil(2 * L2_BYTES / (w.M * w.K + w.N * w.K))) if w in SMALL else 1


def per_tensor(a, b):
    """cuBLASLt's FP8 matmul at its fastest: no scales, results in bf16."""
    return jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.bfloat16)


def by_torch(sets: list[tuple[jax.Array, ...]]) -> Contender:
    """cuBLASLt's block-scaled matmul of the same numbers."""
    torch: Any = importlib.import_module("torch")  # not everywhere
    functional: Any = torch.nn.functional
    kinds = functional.ScalingType

    def values(x: jax.Array):
        bits = np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8))
        return torch.from_numpy(bits.copy()).cuda().view(torch.float8_e4m3fn)

    def there(a, b, a_scale, b_scale):
        of_rows = torch.from_numpy(np.array(a_scale)).cuda().t()
        blocks = np.array(b_scale).T
        blocks = np.ascontiguousarray(np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % 4))))
        return values(a), values(b).t(), of_rows, torch.from_numpy(blocks).cuda().t()

    def call(a, b, of_rows, blocks):
        return functional.scaled_mm(
            a, b, of_rows, kinds.BlockWise1x128, blocks, kinds.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    return Contender(
        call=call, sets=[there(*each) for each in sets], wait=lambda _: torch.cuda.synchronize()
    )


def compare(w: ScaledWorkload, programs: dict[str, Future], round_ms: float) -> dict:
    """One shape, all contenders alternating."""
    sets = [operands(w, seed=i) for i in range(num_sets(w))]
    contenders = {
        "hopper": Contender(call=programs["hopper"].result(), sets=sets),
        "xla per tensor": Contender(
            call=programs["xla per tensor"].result(),
            sets=[(a, b) for a, b, *_ in sets],
        ),
    }
    row: dict[str, Any] = {}
    if importlib.util.find_spec("torch"):
        contenders["torch blocks"] = by_torch(sets)
        peer = contenders["torch blocks"].once(0).float().cpu().numpy()
        mine = np.asarray(contenders["hopper"].once(0).astype(jnp.float32))
        row["difference_from_torch"] = float(np.linalg.norm(peer - mine) / np.linalg.norm(mine))
    row["xla_calls_f8"] = "cublas$lt$matmul$f8" in programs["xla per tensor"].result().as_text()
    row["ms"] = kernel_ms(contenders, round_ms=round_ms)
    row["tflops"] = {name: w.flop / ms / 1e9 for name, ms in row["ms"].items()}
    return {**row, "clocks": clocks()}


def main() -> None:
    parser = options(__doc__, budget=200.0)
    parser.add_argument("--shapes", nargs="*", default=[w.name for w in (*LARGE, *SMALL)])
    parser.add_argument("--round-ms", type=float, default=SUSTAINED_MS)
    args = parser.parse_args()
    table = table_of(args)
    shapes = [w for w in (*LARGE, *SMALL) if w.name in args.shapes]
    ours = functools.partial(scaled_matmul, implementation="hopper", out_dtype=jnp.bfloat16)
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(12) as pool:
        programs = {
            w: {
                "hopper": pool.submit(compiled, ours, *w.arrays(*BLOCKS)),
                "xla per tensor": pool.submit(
                    compiled, per_tensor, *w.arrays(*BLOCKS)[:2], options=WITHOUT_TRITON
                ),
            }
            for w in shapes
        }
    for w in shapes:
        table.add(f"time {w.name}", functools.partial(compare, w, programs[w], args.round_ms))


if __name__ == "__main__":
    main()
