"""Finds the fastest tiles on this GPU, for ``SHIPPED`` of ``flash_attention/hopper/config.py``.

    python -m experiments.bench.kernels.attention_tune --widths 128/128 \\
        --directions forward backward

Every candidate of a small declared space is run on a full and a causal call, checked against the
shipped tiles' values, and timed beside them in one process.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import timing
from pallas_kernels.common import device
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.hopper.config import (
    SHIPPED,
    UNGROUPED,
    WIDTHS,
    BackwardConfig,
    ForwardConfig,
    TileConfig,
    exceeds_shared_memory,
)
from pallas_kernels.flash_attention.hopper.gradients import WIDEST_BY_KEYS
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec, BackwardOperands

SPACE: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {
        "block_kv": (64, 128),
        "num_warpgroups": (2, 3),
        "overlap": (True, False),
    },
    "backward": {
        "num_stages": (2, 3),
        "register_ds": (False, True),
        "dq_warpgroup": (False, True),
        "own_copies": (False, True),
    },
}
"""Search space: all combinations that fit in shared memory and in registers are timed."""

ALLOWED_ERROR = 2.0**-6
"""Largest relative error of a candidate against the shipped tiles. The two add one sum in different
orders, in 16 bits."""
B, T, N = 2, 4096, 16

type Times = Callable[[list[TileConfig]], dict[TileConfig, float]]
"""Milliseconds of each configuration that computes the right values."""


def candidates(direction: str, key: str) -> list[TileConfig]:
    """The shipped configuration first, then the space's others.

    Raises:
        InputError: no kernel of this direction has such widths.
    """
    H, V = widths(key)
    shipped = SHIPPED.get((direction, key))
    if direction == "backward":
        by_keys = f"{H}/{V}" in WIDTHS and max(H, V) <= WIDEST_BY_KEYS
        shipped = (shipped or BackwardConfig()) if by_keys else None
    if shipped is None:
        raise InputError(f"--widths {key}: no {direction} of these widths takes tiles")
    space = SPACE[direction]
    found = [shipped]
    for values in itertools.product(*space.values()):
        config = dataclasses.replace(shipped, **dict(zip(space, values, strict=True)))
        if config not in found and _fits(config, H, V):
            found.append(config)
    return found


def widths(key: str) -> tuple[int, int]:
    """Head widths of query and value of a table's key."""
    try:
        H, V = (int(width) for width in key.removesuffix(UNGROUPED).split("/"))
    except ValueError as error:
        raise InputError(f"--widths {key} is not two widths as 128/128") from error
    return H, V


def _fits(config: TileConfig, H: int, V: int) -> bool:
    if exceeds_shared_memory(config, H, V):
        return False
    if isinstance(config, BackwardConfig):
        try:
            config.check(H)
        except UnsupportedError:
            return False
    return True


def on_this_gpu(direction: str, key: str) -> Times:
    """Times by running: kernel time of a full and a causal call together."""
    H, V = widths(key)
    K = N if key.endswith(UNGROUPED) else N // 4
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, (B, T, heads, width), jnp.bfloat16)
        for key, heads, width in zip(keys, (N, K, K, N), (H, H, V, V), strict=True)
    )
    masks = AttentionMasks()

    def run(config: TileConfig, right: int | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        spec = AttentionSpec(scale=H**-0.5, right=right)
        if isinstance(config, ForwardConfig):
            forward = functools.partial(hopper.forward, masks=masks, spec=spec, config=config)
            return forward, (q, k, v)
        out, lse = jax.jit(functools.partial(hopper.forward, masks=masks, spec=spec))(q, k, v)

        def backward(q, k, v, out, lse, d_out):
            operands = BackwardOperands(
                q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=None
            )
            return hopper.backward(operands, spec=spec, config=config)[:3]

        return backward, (q, k, v, out, lse, d_out)

    def times(configs: list[TileConfig]) -> dict[TileConfig, float]:
        total = dict.fromkeys(configs, 0.0)
        for right in (None, 0):
            work = {config: run(config, right) for config in total}
            jitted = {config: (jax.jit(f), args) for config, (f, args) in work.items()}
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(pool.map(lambda item: item[0].lower(*item[1]).compile(), jitted.values()))
            want = jitted[configs[0]][0](*jitted[configs[0]][1])
            for config, (f, args) in jitted.items():
                if (error := _error(f(*args), want)) > ALLOWED_ERROR:
                    print(f"left out, error {error:.3g}: {config}", flush=True)
                    del total[config]
            named = {str(config): jitted[config] for config in total}
            taken = timing.measure(named, rounds=3, iterations=3)
            for config in total:
                total[config] += taken[str(config)].median_ms
        return total

    return times


def _error(got: Any, want: Any) -> float:
    errors = [
        jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return float(jnp.max(jnp.stack(errors)))


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", nargs="+", default=["64/64", "128/128"], metavar="H/V")
    parser.add_argument("--directions", nargs="+", default=[*SPACE], choices=[*SPACE])
    args = parser.parse_args(arguments)
    facts = device.target()
    if facts.capability != (9, 0):
        raise UnsupportedError(
            f"tuning needs the GPU it is for, of compute capability 9.0 (Hopper), not {facts.kind}"
        )
    for direction, width in itertools.product(args.directions, args.widths):
        keys = [width, width + UNGROUPED] if direction == "backward" else [width]
        for key in keys:
            times = on_this_gpu(direction, key)(candidates(direction, key))
            for config, ms in sorted(times.items(), key=lambda each: each[1]):
                print(f"{direction} {key} {ms:.3f} ms {config}", flush=True)


if __name__ == "__main__":
    main()
