"""Collective matmuls over two GPUs, beside the product alone and NCCL's collective with cuBLAS.

python -m experiments.bench.kernels.collective_matmul --out matmuls.json

Wall time per call of contenders that alternate in one process, each call a program of its own. With
--write, rows also go to the table that "auto" follows.
"""

import dataclasses
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench.environment import clocks
from experiments.bench.harness import options, relative, sustained_ms, table_of
from experiments.bench.tuned_table import add_rows
from pallas_kernels import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective_matmul import dispatch
from pallas_kernels.common.tables import Row

AXIS, NUM_SETS = "tensor", 3
POSITIONS, COLUMNS, WHOLE = P(None, AXIS, None), P(None, None, AXIS), P()
BLOCK = 8192  # rows of a sequence
WITHOUT_TRITON = {
    "xla_gpu_enable_triton_gemm": False
}  # else it tries dozens per shape, for minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one device's product, rows x depth x columns, summed over ``factors``."""

    name: str
    gathers: bool
    depth: int
    columns: int
    transposed: bool = False
    factors: int = 1
    rows: int = BLOCK

    @property
    def case(self) -> dict[str, Any]:
        """The case in the table of measurements."""
        op = "all_gather_matmul" if self.gathers else "matmul_reduce_scatter"
        depth = self.depth * self.factors
        return dict(op=op, devices=2, rows=self.rows, depth=depth, columns=self.columns)

    @property
    def specs(self) -> tuple[P, P]:
        """Partition specs of an x and of a weight."""
        weight = P(None, AXIS) if self.gathers != self.transposed else P(AXIS, None)
        return POSITIONS if self.gathers else COLUMNS, weight

    def draw(self, mesh: Mesh, seed: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """Random xs and weights of both devices."""
        depth, columns = self.depth * (1 if self.gathers else 2), self.columns
        columns *= 2 if self.gathers else 1
        weight_shape = (columns, depth) if self.transposed else (depth, columns)
        keys = iter(jax.random.split(jax.random.key(seed), 2 * self.factors))

        def drawn(shape: tuple[int, ...], spec: P, size: float) -> list[jax.Array]:
            @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, spec))
            def sample(key):
                return (jax.random.normal(key, shape) * size).astype(jnp.bfloat16)

            return [sample(next(keys)) for _ in range(self.factors)]

        inward, weight = self.specs
        xs = drawn((self.rows // BLOCK, BLOCK, depth), inward, 1.0)
        return xs, drawn(weight_shape, weight, depth**-0.5)

    def call(self, implementation: str) -> Any:
        """Function of one device: (xs, weights) -> result."""
        how: dict[str, Any] = dict(
            axis=AXIS, transposed=self.transposed, implementation=implementation
        )
        if self.gathers:
            return lambda xs, weights: all_gather_matmul(xs[0], weights, **how)
        return lambda xs, weights: matmul_reduce_scatter(
            tuple(zip(xs, weights, strict=True)), **how
        )

    def alone(self, xs: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        """The product of one device, without a collective; of several factors as one."""
        spec = "bmk,nk->bmn" if self.transposed else "bmk,kn->bmn"
        x = jnp.concatenate(xs, axis=-1)
        weight = jnp.concatenate(weights, axis=1 if self.transposed else 0)
        return jnp.einsum(spec, x, weight, preferred_element_type=x.dtype)


def _of_model(name: str, width: int, heads: int, hidden: int) -> list[Workload]:
    """Products of a layer over two devices; gradients of x are those with transposed weights."""
    inward = functools.partial(Workload, gathers=True, depth=width)
    outward = functools.partial(Workload, gathers=False, columns=width)
    return [
        inward(name=f"{name} query", columns=heads // 2),
        inward(name=f"{name} gate", columns=hidden // 2),
        outward(name=f"{name} out", depth=heads // 2),
        outward(name=f"{name} down", depth=hidden // 2),
        inward(name=f"{name} down backward", columns=hidden // 2, transposed=True),
        outward(name=f"{name} gate, up backward", depth=hidden // 2, transposed=True, factors=2),
    ]


WORKLOADS = [
    dataclasses.replace(each, rows=rows, name=f"{each.name} {rows}")
    for rows in (8192, 16_384)
    for each in (*_of_model("8b", 4096, 4096, 14_336), *_of_model("70b", 8192, 8192, 28_672))
]


def programs(w: Workload, mesh: Mesh, pool: ThreadPoolExecutor) -> dict[str, Future]:
    """Compiles the contenders."""
    xs, weights = jax.eval_shape(functools.partial(w.draw, mesh), 0)
    inward, outward = w.specs, COLUMNS if w.gathers else POSITIONS
    alone = (WHOLE, w.specs[1]) if w.gathers else inward
    calls = {
        "alone": (w.alone, alone, COLUMNS if w.gathers else WHOLE),
        "xla": (w.call("xla"), inward, outward),
        "hopper": (w.call("hopper"), inward, outward),
    }
    found = {}
    for name, (call, specs, out) in calls.items():
        f = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        placed = [
            [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)) for a in each]
            for each, s in zip((xs, weights), specs, strict=True)
        ]
        lowered = jax.jit(f).lower(*placed)
        found[name] = pool.submit(lowered.compile, compiler_options=WITHOUT_TRITON)
    return found


def compare(w: Workload, mesh: Mesh, compiled: dict[str, Future], args: Any) -> dict:
    """One workload, all contenders alternating."""
    sets = [w.draw(mesh, seed) for seed in range(NUM_SETS)]
    whole = [
        ([jax.device_put(x, NamedSharding(mesh, WHOLE)) for x in xs], weights)
        for xs, weights in sets
    ]
    given = {name: whole if name == "alone" and w.gathers else sets for name in compiled}
    calls, results = {}, {}
    for name, future in compiled.items():
        call, counts = future.result(), iter(range(10**9))
        results[name] = call(*given[name][0])
        calls[name] = (
            lambda call=call, name=name, counts=counts: call(*given[name][next(counts) % NUM_SETS]),
            jax.block_until_ready,
        )
    mine, theirs = (jax.tree.leaves(results[name])[0] for name in ("hopper", "xla"))
    again = jax.tree.leaves(compiled["hopper"].result()(*sets[0]))[0]
    row: dict[str, Any] = dict(
        from_xla=relative(mine, theirs), repeats=bool(np.array_equal(mine, again))
    )
    row["ms"] = ms = sustained_ms(calls, turn=args.turn, rounds=args.rounds)
    flop = 2.0 * w.rows * w.depth * w.factors * w.columns
    row["tflops"] = {name: flop / each / 1e9 for name, each in ms.items()}
    row["of_alone"], row["of_xla"] = ms["alone"] / ms["hopper"], ms["xla"] / ms["hopper"]
    if args.write:
        rows = [
            Row.of(case=w.case, choice={"implementation": name}, ms=ms[name])
            for name in ("hopper", "xla")
        ]
        add_rows(dispatch.TUNED, rows, op="collective_matmul", question="dispatch")
    return {**row, "clocks": clocks()}


def main() -> None:
    parser = options(__doc__, budget=200.0)
    parser.add_argument("--turn", type=float, default=0.05, help="seconds of one contender")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="into the table of auto")
    args = parser.parse_args()
    table = table_of(args)
    mesh = jax.make_mesh((2,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:2])
    chosen = [w for w in WORKLOADS if any(map(w.name.startswith, args.only))]
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(12) as pool:
        ready = {w.name: programs(w, mesh, pool) for w in chosen}
    for w in chosen:
        table.add(w.name, functools.partial(compare, w, mesh, ready[w.name], args))


if __name__ == "__main__":
    main()
