"""What arrays cost the host in a program's call, whatever their size.

    python -m experiments.bench.call_arrays --out experiments/results/call-arrays-h200.json

The program adds 1 to a small array. Beside it, it is given arrays that it does not look at, and
arrays that it returns as they are, in their own memory (donated), as a decode step has weights and
pages. "us": the call's time on the host's clock, "cpu_us" the calling thread's, medians; the device
has nothing else to do, and is waited for in between. "numpy" gives the small array from the host's
memory at each call, as an engine does.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.table import Table

CASES = ((0, 0), (8, 0), (98, 0), (0, 36), (8, 6), (98, 36), (195, 68))
"""Arrays that are read, and that are updated: the last three are a 1B's by stacks and by layers,
and an 8B's by layers."""
SMALL = (64, 46)


def timed(reads: int, updates: int, *, from_host: bool, calls: int) -> dict[str, float]:
    """Medians of a call."""

    def program(
        read: list[jax.Array], updated: list[jax.Array], x: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        del read
        return x + 1, updated

    def arrays(count: int) -> list[jax.Array]:
        return [jnp.full((256, 8), i, jnp.bfloat16) for i in range(count)]

    read, updated = arrays(reads), arrays(updates)
    x = np.zeros(SMALL, np.int32)
    given = x if from_host else jax.device_put(x)
    jitted = jax.jit(program, donate_argnums=1, keep_unused=True)
    call = jitted.lower(read, updated, given).compile()
    times: list[float] = []
    spent: list[float] = []
    for _ in range(calls):
        begun, cpu = time.perf_counter(), time.thread_time()
        y, updated = call(read, updated, given)
        spent.append(time.thread_time() - cpu)
        times.append(time.perf_counter() - begun)
        jax.block_until_ready((y, updated))

    def median(values: Sequence[float]) -> float:
        return round(1e6 * statistics.median(values), 1)

    return {"us": median(times), "cpu_us": median(spent)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + 120)
    for reads, updates in CASES:
        for from_host in (False, True):
            name = f"{reads} read, {updates} updated" + ", numpy" * from_host

            def measure(reads=reads, updates=updates, from_host=from_host) -> dict[str, float]:
                return timed(reads, updates, from_host=from_host, calls=args.calls)

            table.add(name, measure)


if __name__ == "__main__":
    main()
