"""Collectives through our functions, in the manner of nccl-tests, beside the bare ones of JAX.

    jaxinfra bench collectives --out experiments/results/collectives-h200.json
    jaxinfra bench collectives --sizes 1 4 --backend cpu --devices 4

A size is nccl-tests' size: the larger of a device's input and output. Its algbw is size over time.
Its busbw is algbw times the share of the size that an ideal ring sends over a device's links. That
compares with the link's own rate at any number of devices.

Three times are taken. "queued": calls are dispatched one after another and waited for together,
as a training loop does. "alone": each is waited for before the next, so that dispatch and the way
back are in it. "inside": one program runs several, each after the one before, so that it is the
collective itself and the gap between two kernels.

Started on several processes by ``jaxinfra launch``, it measures across them.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.bench.environment import clocks, environment
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.parallel import collectives as ours
from jaxinfra.runtime.devices import device_peak
from jaxinfra.runtime.rendezvous import connect

AXIS = "x"
DTYPE = jnp.bfloat16
MIB = 2**20
INSIDE = 8  # collectives in one program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One collective: ours, what JAX offers for it, and what a size means."""

    gathers: bool = False  # a device's input is the size over N
    ours: Callable[[jax.Array], jax.Array]
    others: Mapping[str, Callable[[jax.Array], jax.Array]] = dataclasses.field(default_factory=dict)


def _shift(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % size) for i in range(size)])


KINDS = {
    "all_reduce": Kind(
        ours=functools.partial(ours.all_reduce, axis=AXIS),
        others={
            "lax": lambda x: jax.lax.psum(x, AXIS),
        },
    ),
    "all_gather": Kind(
        gathers=True,
        ours=functools.partial(ours.all_gather, axis=AXIS),
        others={
            "lax": lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
        },
    ),
    "reduce_scatter": Kind(
        ours=functools.partial(ours.reduce_scatter, axis=AXIS),
        others={
            "lax": lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        },
    ),
    "all_to_all": Kind(
        ours=functools.partial(ours.all_to_all, axis=AXIS),
        others={"lax": lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)},
    ),
    "shift": Kind(
        ours=functools.partial(ours.shift, axis=AXIS),
        others={"lax": _shift},
    ),
}


def on_mesh(function: Callable[[jax.Array], jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """The function on each device's block of an array cut along dim 0."""
    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def chained(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """``INSIDE`` collectives, each begun when the one before has ended."""

    def run(x: jax.Array) -> jax.Array:
        seen = jnp.zeros((1,), x.dtype)
        for _ in range(INSIDE):
            x, seen = jax.lax.optimization_barrier((x, seen))
            seen = seen + function(x).reshape(-1)[:1]
        return seen

    return run


def make_input(mesh: Mesh, num_bytes: int) -> jax.Array:
    """Small whole numbers, exact in sums; a block of these many bytes on each device."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    count = num_bytes // jnp.dtype(DTYPE).itemsize * mesh.size

    @functools.partial(jax.jit, out_shardings=sharding)
    def fill() -> jax.Array:
        return (jax.lax.iota(jnp.int32, count) % 7).astype(DTYPE)

    return jax.block_until_ready(fill())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation at one size, compiled."""

    name: str
    call: Callable[[], jax.Array]
    inside: Callable[[], jax.Array]


def measure(contenders: list[Contender], *, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Median seconds of one collective by contender and manner, interleaved."""
    times: dict[str, dict[str, list[float]]] = {
        each.name: {"queued": [], "alone": [], "inside": []} for each in contenders
    }
    for _ in range(rounds):
        for each in contenders:
            into = times[each.name]
            into["queued"].append(_seconds(each.call, calls) / calls)
            into["alone"] += [_seconds(each.call, 1) for _ in range(calls)]
            into["inside"].append(_seconds(each.inside, 1) / INSIDE)
    return {
        name: {manner: statistics.median(taken) for manner, taken in manners.items()}
        for name, manners in times.items()
    }


def _seconds(call: Callable[[], jax.Array], count: int) -> float:
    start = time.perf_counter()
    results = [call() for _ in range(count)]
    jax.block_until_ready(results)
    return time.perf_counter() - start


def rows_of(kind_name: str, size: int, mesh: Mesh, args: argparse.Namespace) -> list[dict]:
    """Rows of one collective at one size; ours and JAX's must return the same bits."""
    kind, num = KINDS[kind_name], mesh.size
    block = size // num if kind.gathers else size
    x = make_input(mesh, block)
    contenders, values = [], {}
    for name, function in {"ours": kind.ours, **kind.others}.items():
        run, inside = on_mesh(function, mesh), on_mesh(chained(function), mesh)
        values[name] = jax.block_until_ready(run(x))
        jax.block_until_ready(inside(x))
        contenders.append(
            Contender(
                name=name,
                call=functools.partial(run, x),
                inside=functools.partial(inside, x),
            )
        )
    same = jax.jit(lambda a, b: (a == b).all())
    wrong = [name for name, value in values.items() if not bool(same(value, values["ours"]))]
    assert not wrong, f"{kind_name}: {wrong} differ from ours"
    del values
    calls = max(2, min(args.calls, args.budget_mib * MIB // size))
    rows = []
    for name, seconds in measure(contenders, rounds=args.rounds, calls=calls).items():
        bus = sent_bytes(kind_name, 1.0, num)
        algbw = size / seconds["queued"]
        row: dict[str, Any] = {
            "collective": kind_name,
            "implementation": name,
            "size_bytes": size,
            "queued_us": 1e6 * seconds["queued"],
            "alone_us": 1e6 * seconds["alone"],
            "inside_us": 1e6 * seconds["inside"],
            "algbw_gb_per_s": algbw / 1e9,
            "busbw_gb_per_s": algbw * bus / 1e9,
            "inside_busbw_gb_per_s": size / seconds["inside"] * bus / 1e9,
        }
        if args.link_gb_per_s:
            row["fraction_of_link"] = row["busbw_gb_per_s"] / args.link_gb_per_s
        rows.append(row)
    return rows


HEAD = (
    f"{'collective':15s} {'by':5s} {'MiB':>8s} {'queued us':>10s} {'alone us':>10s} "
    f"{'inside us':>10s} {'algbw':>8s} {'busbw':>8s} {'inside':>8s} {'of link':>8s}"
)


def line(row: dict[str, Any]) -> str:
    share = row.get("fraction_of_link")
    return (
        f"{row['collective']:15s} {row['implementation']:5s} {row['size_bytes'] / MIB:8.2f} "
        f"{row['queued_us']:10.1f} {row['alone_us']:10.1f} {row['inside_us']:10.1f} "
        f"{row['algbw_gb_per_s']:8.1f} {row['busbw_gb_per_s']:8.1f} "
        f"{row['inside_busbw_gb_per_s']:8.1f} {'-' if share is None else f'{share:8.1%}':>8s}"
    )


def main() -> None:
    """Prints a table of GB/s (10^9 bytes) and writes the JSON."""
    parser = argparse.ArgumentParser(
        prog="jaxinfra bench collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 256, 1024], help="MiB")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each implementation")
    parser.add_argument("--calls", type=int, default=20, help="calls per round; fewer if large")
    parser.add_argument("--budget-mib", type=int, default=8192, help="most MiB per round")
    parser.add_argument("--devices", type=int, help="how many; with --backend cpu, virtual ones")
    parser.add_argument("--backend", choices=("cpu", "gpu"), help="instead of the default one")
    parser.add_argument("--link-gb-per-s", type=float, help="one direction; known for some GPUs")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    cluster = connect()
    if args.backend == "cpu" and args.devices and cluster is None:
        jax.config.update("jax_num_cpu_devices", args.devices)
    devices = jax.devices(args.backend)[: args.devices]
    peak = device_peak(devices[0].device_kind)
    if args.link_gb_per_s is None and peak is not None:
        args.link_gb_per_s = peak.link_bytes_per_s / 1e9
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    speaks = jax.process_index() == 0
    if speaks:
        print(f"{len(devices)} x {devices[0].device_kind}, {jnp.dtype(DTYPE)}; GB/s\n{HEAD}")
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        for size in args.sizes:
            # Whole bf16 elements in N^2 parts, so that blocks and their parts are equal.
            unit = 2 * mesh.size**2
            for row in rows_of(kind, max(unit, round(size * MIB) // unit * unit), mesh, args):
                rows.append(row)
                if speaks:
                    print(line(row), flush=True)
    if args.out is not None and speaks:
        result = {
            "environment": environment(),
            "num_devices": mesh.size,
            "num_processes": jax.process_count(),
            "link_gb_per_s": args.link_gb_per_s,
            "rows": rows,
            "clocks_after": clocks(),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
