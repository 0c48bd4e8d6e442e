"""Times tile variants of the Hopper attention kernels beside cuDNN, each against cuDNN's values.

python -m experiments.bench.attention_tune --dims 128 --out results.json
"""

import argparse
import faulthandler
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp

from experiments.bench.attention import profiled
from pallas_kernels.flash_attention import hopper_backward, hopper_forward
from pallas_kernels.flash_attention.hopper_config import BackwardConfig, ForwardConfig
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec

FORWARD = {
    64: [
        ForwardConfig(block_kv=128, num_warpgroups=3),
        ForwardConfig(block_kv=128, num_warpgroups=3, overlap=False),
        ForwardConfig(block_kv=128, num_warpgroups=3, lazy_rescale=False),
    ],
    128: [
        ForwardConfig(block_kv=128),
        ForwardConfig(block_kv=128, overlap=False),
        ForwardConfig(block_kv=128, ping_pong=False),
        ForwardConfig(block_kv=128, lazy_rescale=False),
    ],
    256: [ForwardConfig(block_kv=64), ForwardConfig(block_kv=64, overlap=False)],
}
BACKWARD = {64: [BackwardConfig()], 128: [BackwardConfig()], 256: []}
NO_MASKS = AttentionMasks()


def qkv(B, T, N, K, H, Hv=None, S=None, seed=0, dtype=jnp.bfloat16):
    S, Hv = S or T, Hv or H
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def relative(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def times_of(f, *args, iterations=8):
    """Median kernel time of each kernel of one call, in ms."""
    runs = profiled(f, *args, iterations=iterations, aggregate=False)
    names = [name for name, _ in runs[0]]
    return {
        f"{i}:{name[:80]}": statistics.median(run[i][1] for run in runs)
        for i, name in enumerate(names)
    }


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def cudnn_vjp(q, k, v, d_out, causal):
    out, pull = jax.vjp(functools.partial(cudnn, causal=causal), q, k, v)
    return out, pull(d_out)


def measure_case(d, causal, with_backward, emit):
    spec = AttentionSpec(scale=d**-0.5, right=0 if causal else None)
    N = 16 if d == 256 else 32
    K = 8 if d == 128 else N
    small, big = qkv(2, 1000, 4, 2, d), qkv(4, 4096, N, K, d)
    want_out, want = jax.jit(functools.partial(cudnn_vjp, causal=causal))(*small)
    flop = 4 * 4 * N * 4096**2 * d / (2 if causal else 1)
    ms = sum(times_of(functools.partial(cudnn, causal=causal), *big[:3]).values())
    emit(d, causal, "fwd", "cudnn", 0.0, ms, flop / ms / 1e9)
    for config in FORWARD[d]:
        f = functools.partial(hopper_forward.forward, masks=NO_MASKS, spec=spec, config=config)
        try:
            err = relative(jax.jit(f)(*small[:3])[0], want_out)
            ms = sum(times_of(f, *big[:3]).values())
            emit(d, causal, "fwd", str(config), err, ms, flop / ms / 1e9)
        except Exception as e:
            emit(d, causal, "fwd", str(config), repr(e)[:200])
    if not with_backward:
        return
    parts = times_of(functools.partial(cudnn_vjp, causal=causal), *big)
    ms = sum(parts.values())
    emit(d, causal, "fwd+bwd", "cudnn", 0.0, ms, 3.5 * flop / ms / 1e9, parts)
    forward = functools.partial(
        hopper_forward.forward, masks=NO_MASKS, spec=spec, config=FORWARD[d][0]
    )
    for config in BACKWARD[d]:

        def f(q, k, v, do, out, lse, config=config):
            return hopper_backward.backward(
                q, k, v, NO_MASKS, out, lse, do, None, spec=spec, config=config
            )

        try:
            got = jax.jit(f)(*small, *jax.jit(forward)(*small[:3]))
            err = max(relative(g, w) for g, w in zip(got, want, strict=True))
            parts = times_of(f, *big, *jax.jit(forward)(*big[:3]))
            ms = sum(parts.values())
            emit(d, causal, "bwd", str(config), err, ms, 2.5 * flop / ms / 1e9, parts)
        except Exception as e:
            emit(d, causal, "bwd", str(config), repr(e)[:200])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 64, 256])
    parser.add_argument("--forward_only", action="store_true")
    parser.add_argument("--stall_s", type=int, default=50)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    start = time.time()
    faulthandler.dump_traceback_later(args.stall_s, exit=True)
    rows = []

    def emit(*row):
        rows.append(row)
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row), sep=" | ", flush=True)

    for d in args.dims:
        for causal in (False, True):
            measure_case(d, causal, not args.forward_only, emit)
    if args.out:
        with open(args.out, "w") as f:
            json.dump(rows, f)
    print("seconds", round(time.time() - start, 1))


if __name__ == "__main__":
    main()
