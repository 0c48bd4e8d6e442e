"""Grouped matmuls in 16 and in 8 bits, beside PyTorch's and beside one dense product.

python -m experiments.bench.kernels.grouped_matmul \\
    --out experiments/results/grouped-matmul-h200.json

Sustained TFLOP/s of contenders that alternate, on random normal operands and sizes from a
Dirichlet(4). The ratio "hot over even" compares half of the rows in one group with an even case.
The "gathered" rows read the rows of x by an index. In 8 bits scales are 1x128 by 128x128 here, and
per row and column in ``torch._scaled_grouped_mm``.
"""

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyrefly: ignore[missing-import]  # of the machine that measures

from experiments.bench.harness import Call, compiled, options, sustained_ms, table_of
from pallas_kernels import grouped_matmul, quantize, scaled_grouped_matmul
from pallas_kernels.common.scales import Scaling
from pallas_kernels.fp8.xla import quantize_xla
from pallas_kernels.grouped_matmul.hopper import calls

SHAPES = (
    (65536, 2048, 1536, 64),
    (32768, 4096, 14336, 8),
    (65536, 7168, 2048, 32),
    (65536, 2048, 768, 128),
)  # rows, width in, width out, groups
DIRECTIONS = ("forward", "input_gradient", "weight_gradient")
E4M3, LARGEST_E4M3 = jnp.float8_e4m3fn, 448.0


def sizes_of(num_rows: int, num_groups: int, *, hot: bool = False) -> np.ndarray:
    """Rows of each group."""
    shares = np.random.default_rng(1).dirichlet([4.0] * num_groups)
    if hot:
        shares *= 0.5 / (1.0 - shares[0])
        shares[0] = 0.5
    sizes = np.floor(shares * num_rows).astype(np.int32)
    sizes[-1] += num_rows - sizes.sum()
    return sizes


def ours(direction: str) -> Callable:
    """A function of (x, w, d, sizes)."""
    if direction == "forward":
        return lambda x, w, d, sizes: grouped_matmul(x, w, sizes, implementation="hopper")
    if direction == "input_gradient":
        return lambda x, w, d, sizes: calls.input_gradient(((d, w),), sizes)
    return lambda x, w, d, sizes: calls.weight_gradient(x, d, sizes, None, out_dtype=x.dtype)


def theirs(direction: str, x, w, d, ends) -> dict[str, Call]:
    """PyTorch's grouped and dense products."""
    grouped = {
        "forward": lambda: torch._grouped_mm(x, w, ends),
        "input_gradient": lambda: torch._grouped_mm(d, w.transpose(1, 2), ends),
        "weight_gradient": lambda: torch._grouped_mm(x.t(), d, ends),
    }
    dense = {
        "forward": lambda: x @ w[0],
        "input_gradient": lambda: d @ w[0].t(),
        "weight_gradient": lambda: x.t() @ d,
    }
    return {
        "torch": (grouped[direction], wait_for_torch),
        "dense": (dense[direction], wait_for_torch),
    }


def wait_for_torch(result) -> None:
    del result
    torch.cuda.synchronize()


def by_jax(program: Future, given: tuple) -> Call:
    """A call of ours."""
    return functools.partial(program.result(), *given), jax.block_until_ready


def in_tflops(ms: dict[str, float], flop: float) -> dict[str, Any]:
    """Times, rates, and ours over each of PyTorch's."""
    rates = {name: flop / taken / 1e9 for name, taken in ms.items()}
    over = {f"of_{name}": rates["hopper"] / rate for name, rate in rates.items()}
    return {"ms": ms, "tflops": rates, **over}


def operands(shape: tuple[int, ...]):
    """x, w and the result's cotangent in bf16, as PyTorch's arrays."""
    M, K, N, G = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    return tuple(
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size in ((M, K), (G, K, N), (M, N))
    )


def measure(shape, program: Future, direction: str, args: argparse.Namespace) -> dict:
    M, K, N, G = shape
    x, w, d = operands(shape)
    sizes = sizes_of(M, G)
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    runs = theirs(direction, x, w, d, ends)
    mine = tuple(jnp.from_dlpack(a) for a in (x, w, d))
    runs["hopper"] = by_jax(program, (*mine, jnp.asarray(sizes)))
    want, got = runs["torch"][0](), torch.from_dlpack(runs["hopper"][0]())
    some = slice(want.shape[0] // 8)
    error = torch.linalg.vector_norm(got[some].float() - want[some].float())
    row = {"from_torch": float(error / torch.linalg.vector_norm(want[some].float()))}
    del want, got
    row |= in_tflops(sustained_ms(runs, turn=args.turn, rounds=args.rounds), 2 * M * K * N)
    uneven = {
        name: by_jax(program, (*mine, jnp.asarray(sizes_of(M, G, hot=hot))))
        for name, hot in (("even", False), ("hot", True))
    }
    ms = sustained_ms(uneven, turn=args.turn, rounds=args.rounds)
    return {**row, "hot_over_even": ms["hot"] / ms["even"]}


def measure_gathered(shape, programs: dict[str, Future], args: argparse.Namespace) -> dict:
    """Eight rows of each token, in random order: gathered in the kernel, and copied first."""
    M, K, N, G = shape
    x, w, _ = operands(shape)
    rows = np.random.default_rng(2).permutation(np.arange(M) % (M // 8)).astype(np.int32)
    given = jnp.from_dlpack(x)[: M // 8], jnp.from_dlpack(w), jnp.asarray(rows)
    given = *given, jnp.asarray(sizes_of(M, G))
    runs = {name: by_jax(program, given) for name, program in programs.items()}
    return in_tflops(sustained_ms(runs, turn=args.turn, rounds=args.rounds), 2 * M * K * N)


def gathered(x, w, rows, sizes):
    return grouped_matmul(x, w, sizes, rows=rows, implementation="hopper")


def copied_first(x, w, rows, sizes):
    return grouped_matmul(x[rows], w, sizes, implementation="hopper")


@jax.jit
def quantized(x, w_GKN):
    """a, b, a_scale, b_scale of a product in 8 bits."""
    a = quantize(x, "1x128", dtype=E4M3, implementation="xla")
    w_GNK = jnp.swapaxes(w_GKN, 1, 2)
    b = quantize_xla(w_GNK, Scaling.BLOCK, dtype=jnp.dtype(E4M3), power_of_two=False)
    return a.values, b.values, a.scale, b.scale


def theirs_in_8_bits(x, w_GKN, ends) -> dict[str, Call]:
    """PyTorch's product of operands with a scale per row of a and per column of each w."""

    def by_rows(x):
        scale = x.abs().amax(dim=-1).float() / LARGEST_E4M3
        return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale

    (a, a_scale), (b, b_scale) = by_rows(x), by_rows(w_GKN.transpose(1, 2).contiguous())

    def call(*, fast: bool):
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), a_scale, b_scale, ends,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    return {
        name: (functools.partial(call, fast=fast), wait_for_torch)
        for name, fast in (("torch", False), ("torch, fast accumulation", True))
    }


def measure_in_8_bits(shape, programs: dict[str, Future], args: argparse.Namespace) -> dict:
    M, K, N, G = shape
    x, w, _ = operands(shape)
    sizes = sizes_of(M, G)
    runs = theirs_in_8_bits(x, w, torch.tensor(sizes.cumsum(), dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    x, w, sizes = jnp.from_dlpack(x), jnp.from_dlpack(w), jnp.asarray(sizes)
    runs["hopper"] = by_jax(programs["8 bits"], (*quantized(x, w), sizes))
    runs["bf16"] = by_jax(programs["bf16"], (x, w, x, sizes))
    return in_tflops(sustained_ms(runs, turn=args.turn, rounds=args.rounds), 2 * M * K * N)


def shaped(shape, third: jax.ShapeDtypeStruct, *, rows: int | None = None):
    """Shapes of a 16-bit product's operands, to compile it with."""
    M, K, N, G = shape
    struct, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    return struct((rows or M, K), bf16), struct((G, K, N), bf16), third, struct((G,), jnp.int32)


def name_of(shape: tuple[int, ...]) -> str:
    return f"{'x'.join(map(str, shape[:3]))} x{shape[3]}"


def main() -> None:
    parser = options(__doc__, budget=300.0)
    parser.add_argument("--turn", type=float, default=0.06, help="seconds that a contender is busy")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = table_of(args)
    struct, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    in_8_bits = functools.partial(scaled_grouped_matmul, implementation="hopper")
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(16) as pool:
        programs = {
            (shape, direction): pool.submit(
                compiled, ours(direction), *shaped(shape, struct((shape[0], shape[2]), bf16))
            )
            for shape in SHAPES
            for direction in DIRECTIONS
        }
        eights = {
            (M, K, N, G): {
                "8 bits": pool.submit(
                    compiled, in_8_bits,
                    *jax.eval_shape(quantized, struct((M, K), bf16), struct((G, K, N), bf16)),
                    struct((G,), jnp.int32),
                ),
                "bf16": pool.submit(
                    compiled, ours("forward"), *shaped((M, K, N, G), struct((M, K), bf16))
                ),
            }
            for M, K, N, G in SHAPES
        }  # fmt: skip
        M = SHAPES[-1][0]
        given = shaped(SHAPES[-1], struct((M,), jnp.int32), rows=M // 8)
        gathers = {
            name: pool.submit(compiled, f, *given)
            for name, f in (("hopper", gathered), ("copied first", copied_first))
        }
    for (shape, direction), program in programs.items():
        row = functools.partial(measure, shape, program, direction, args)
        table.add(f"{direction} {name_of(shape)}", row)
    for shape, each in eights.items():
        row = functools.partial(measure_in_8_bits, shape, each, args)
        table.add(f"8 bits {name_of(shape)}", row)
    table.add("gathered", functools.partial(measure_gathered, SHAPES[-1], gathers, args))


if __name__ == "__main__":
    main()
