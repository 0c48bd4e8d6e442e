"""Times tile variants of the Hopper attention kernels beside cuDNN, after checking each one.

python -m experiments.bench.attention_tune --plan forward --out results.json
"""

import argparse
import faulthandler
import json
import statistics
import time

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.flash_attention import hopper_backward, hopper_forward
from pallas_kernels.flash_attention.hopper_config import BackwardConfig, ForwardConfig
from pallas_kernels.flash_attention.spec import AttentionSpec


def qkv(B, T, N, K, H, Hv=None, S=None, seed=0, dtype=jnp.bfloat16):
    S, Hv = S or T, Hv or H
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


@jax.jit(static_argnames=("causal",))
def reference(q, k, v, causal):
    """Plain fp32 attention: out and logsumexp."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * H**-0.5
    if causal:
        s = jnp.where(jnp.arange(S)[None] <= jnp.arange(T)[:, None] + S - T, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None])
    out = jnp.einsum("bkgts,bskh->btkgh", p, v, precision="highest").reshape(B, T, N, -1)
    return out, lse.reshape(B, N, T).swapaxes(1, 2)


def relative(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def ms_of(f, *args, iterations=10):
    _, times = profiler.measure(f, iterations=iterations)(*args)
    return statistics.median(times)


FORWARD = {
    64: [dict(block_kv=128, num_warpgroups=3), dict(block_kv=128, num_warpgroups=3, ping_pong=False)],
    128: [dict(block_kv=128), dict(block_kv=128, ping_pong=False)],
    256: [dict(block_kv=64), dict(block_kv=64, ping_pong=False)],
}
BACKWARD = {64: [dict(block_q=128)], 128: [dict(block_q=64)]}


def plan_backward(args):
    rows = []
    for d in args.dims:
        for causal in (False, True):
            spec = AttentionSpec(scale=d**-0.5, right=0 if causal else None)
            N = 16 if d == 256 else 32
            K = 8 if d == 128 else N
            small, big = qkv(2, 1000, 4, 2, d), qkv(4, 4096, N, K, d)
            want_out, lse = reference(*small[:3], causal)
            want = jax.jit(
                lambda q, k, v, do, c=causal: jax.vjp(lambda *a: reference(*a, c)[0], q, k, v)[1](
                    do.astype(jnp.float32)
                )
            )(*small)
            both = jax.jit(lambda q, k, v, do, c=causal: vjp_of(lambda *a: cudnn(*a, c), q, k, v, do))
            plain = [relative(g, w) for g, w in zip(both(*small)[1], want, strict=True)]
            flop = 3.5 * 4 * 4 * N * 4096**2 * d / (2 if causal else 1)
            ms, fwd = ms_of(both, *big), ms_of(jax.jit(lambda q, k, v, c=causal: cudnn(q, k, v, c)), *big[:3])
            rows.append((d, causal, "cudnn", *plain, ms, flop / ms / 1e9, ms - fwd))
            print(rows[-1], flush=True)
            for kw in BACKWARD.get(d, []):
                config = BackwardConfig(**kw)
                f = ForwardConfig(**FORWARD[d][0])

                def ours(q, k, v, do, s=spec, c=config, f=f):
                    out, lse = hopper_forward.forward(q, k, v, spec=s, config=f)
                    return out, hopper_backward.backward(
                        q, k, v, out, lse, do, None, spec=s, config=c
                    )

                try:
                    got = jax.jit(ours)(*small)[1]
                    err = [relative(g, w) for g, w in zip(got, want, strict=True)]
                    print(err, flush=True)
                    ms = ms_of(jax.jit(ours), *big)
                    fwd = ms_of(jax.jit(lambda q, k, v, s=spec, f=f: hopper_forward.forward(q, k, v, spec=s, config=f)), *big[:3])
                    rows.append((d, causal, str(kw), *err, ms, flop / ms / 1e9, ms - fwd))
                except Exception as e:
                    rows.append((d, causal, str(kw), repr(e)[:300]))
                print(rows[-1], flush=True)
    return rows


def vjp_of(f, q, k, v, do):
    out, pull = jax.vjp(f, q, k, v)
    return out, pull(do)


def plan_forward(args):
    rows = []
    for d in args.dims:
        for causal in (False, True):
            spec = AttentionSpec(scale=d**-0.5, right=0 if causal else None)
            small = qkv(2, 1000, 4, 2, d)[:3]
            print("inputs", time.time(), flush=True)
            f = jax.jit(lambda q, k, v, s=spec, c=ForwardConfig(**FORWARD[d][0]): hopper_forward.forward(q, k, v, spec=s, config=c))
            out, lse = jax.block_until_ready(f(*small))
            print("ours", time.time(), jnp.isnan(out).sum(), flush=True)
            want, want_lse = jax.block_until_ready(reference(*small, causal))
            print("reference", time.time(), relative(out, want), flush=True)
            plain = relative(jnp.asarray(cudnn(*small, causal)), want)
            print("cudnn", time.time(), flush=True)
            N = 16 if d == 256 else 32
            K = 8 if d == 128 else N
            big = qkv(4, 4096, N, K, d)[:3]
            flop = 4 * 4 * N * 4096**2 * d / (2 if causal else 1)
            ms = ms_of(jax.jit(lambda q, k, v, c=causal: cudnn(q, k, v, c)), *big)
            rows.append((d, causal, "cudnn", plain, 0.0, ms, flop / ms / 1e9))
            print(rows[-1], flush=True)
            for kw in FORWARD[d]:
                name = " ".join(f"{k}={v}" for k, v in kw.items())
                try:
                    f = jax.jit(
                        lambda q, k, v, s=spec, c=ForwardConfig(**kw): hopper_forward.forward(
                            q, k, v, spec=s, config=c
                        )
                    )
                    out, lse = f(*small)
                    err, err_lse = relative(out, want), float(jnp.abs(lse - want_lse).max())
                    ms = ms_of(f, *big)
                    rows.append((d, causal, name, err, err_lse, ms, flop / ms / 1e9))
                    print(rows[-1], flush=True)
                except Exception as e:
                    rows.append((d, causal, name, repr(e)[:300]))
                    print(rows[-1], flush=True)
    return rows


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="forward")
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 64, 256])
    parser.add_argument("--out", default=None)
    parser.add_argument("--stall_s", type=int, default=50)
    args = parser.parse_args()
    start = time.time()
    faulthandler.dump_traceback_later(args.stall_s, exit=True)
    print('device', jax.devices()[0], round(time.time() - start, 1), flush=True)
    rows = globals()[f"plan_{args.plan}"](args)
    if args.out:
        with open(args.out, "w") as f:
            json.dump(rows, f)
    print("--- seconds", round(time.time() - start, 1))
    for r in rows:
        print(*(round(x, 5) if isinstance(x, float) else x for x in r), sep=" | ")


if __name__ == "__main__":
    main()
