"""Flash attention forward for Hopper: warp-specialized, two matmuls in flight, one persistent grid.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value. A tile is ``block_q`` queries of one head of one sequence.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.hopper_tile import exp2_tile, mask_tile, sum_strips
from pallas_kernels.flash_attention.hopper_rescale import scale_rows_if_needed

LOG2E = math.log2(math.e)
# Finite, so that exp2(old - new) of a row that has seen no key yet is 1 and not NaN.
L2_BYTES = 24 * 2**20
EMPTY_MAX = -1e30
WGMMA_ROW = plgpu.Layout.WGMMA.reduce(1)


def head_group(B, N, K, kv_head_bytes):
    q_heads = (N // K) * max(1, L2_BYTES // kv_head_bytes)
    return max(d for d in range(1, B * N + 1) if (B * N) % d == 0 and d <= max(q_heads, N // K))


def forward(q, k, v, *, spec, config, num_sms=132, stage_p=False):
    B, T, N, H = q.shape
    _, S, K, Hv = v.shape
    BM, BN, W, ST = config.block_q, config.block_kv, config.num_warpgroups, config.num_stages
    dtype = q.dtype
    group = N // K
    num_q_tiles = -(-T // BM)
    num_tiles = B * N * num_q_tiles
    diag = S - T
    causal = spec.right is not None
    scale2 = spec.scale * LOG2E

    hg = head_group(B, N, K, S * (H + Hv) * 2)

    def coords(tile):
        # Longest first inside a group of heads whose keys and values fit in L2 together.
        g = lax.div(tile, hg * num_q_tiles)
        r = lax.rem(tile, hg * num_q_tiles)
        qt = num_q_tiles - 1 - lax.div(r, hg)
        bh = g * hg + lax.rem(r, hg)
        return lax.div(bh, N), lax.rem(bh, N), qt

    def kv_range(qt):
        hi = jnp.int32(-(-S // BN))
        full_hi = jnp.int32(S // BN)
        if spec.right is not None:
            last = jnp.minimum((qt + 1) * BM, T) + diag + spec.right
            hi = jnp.clip(lax.div(last + BN - 1, BN), 1, hi)
            full_hi = jnp.clip(lax.div(qt * BM + diag + spec.right + 1, BN), 0, full_hi)
        return jnp.int32(0), full_hi, hi

    def kernel(q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, q_smem, k_smem, v_smem, lse_smem,
               q_full, k_full, v_full, q_empty, k_empty, v_empty, turn, pin_smem, p_smem=None):
        wg = lax.axis_index("wg")
        sm = lax.axis_index("sm")

        def loop_tiles(body, init):
            if config.persistent:
                rounds, rest = divmod(num_tiles, num_sms)

                def offset(i):  # snake: whoever has the longest of one round gets the shortest of the next
                    return jnp.where(lax.rem(i, 2) == 0, sm, num_sms - 1 - sm)

                mine = rounds + (offset(jnp.int32(rounds)) < rest).astype(jnp.int32)
                return lax.fori_loop(0, mine, lambda i, c: body(i * num_sms + offset(i), c), init)
            return body(sm, init)

        @pl.when(wg < W)
        def _compute():
            plgpu.set_max_registers(240 if W == 2 else 160, action="increase")
            my_q = q_smem.at[wg]
            my_lse = lse_smem.at[wg]
            plgpu.barrier_arrive(q_empty)
            for i in range(ST):
                plgpu.barrier_arrive(k_empty.at[i])
                plgpu.barrier_arrive(v_empty.at[i])
            if config.ping_pong:
                @pl.when(wg == W - 1)
                def _():
                    plgpu.barrier_arrive(turn.at[0])

            def tile_body(tile, step0):
                b, n, qt = coords(tile)
                lo, full_hi, hi = kv_range(qt)
                q0 = qt * BM + wg * 64

                def pv(o_acc, p, vslot):
                    if p_smem is None:
                        plgpu.wgmma(o_acc, p, v_smem.at[vslot])
                    else:
                        p_smem[wg] = p
                        plgpu.commit_smem()
                        def f(acc):
                            plgpu.wgmma(acc, p_smem.at[wg], v_smem.at[vslot])
                            return plgpu.wgmma_accumulator_load(acc, wait_n=0)
                        o_acc = [o_acc[0] + pl.run_scoped(f, plgpu.ACC((64, Hv), jnp.float32))]
                    return o_acc

                def my_turn():
                    if config.ping_pong:
                        plgpu.barrier_wait(turn.at[wg])

                def next_turn():
                    if config.ping_pong:
                        plgpu.barrier_arrive(turn.at[lax.rem(wg + 1, W)])

                def softmax(s, j, m, l, masked):
                    if masked:
                        s = mask_tile(
                            s,
                            fill=-jnp.inf,
                            diag_max=q0 + diag + spec.right - j * BN if causal else None,
                            num_cols=S - j * BN if S % BN else None,
                        )
                    m_new = jnp.maximum(m, s.max(axis=1) * scale2)
                    if config.lazy_rescale:
                        m_new = jnp.where(m_new - m > 8.0, m_new, m)
                    alpha = jnp.exp2(m - m_new)
                    x = s * scale2 - lax.broadcast_in_dim(m_new, s.shape, [0])
                    p = exp2_tile(x, num_polynomial=0 if masked else config.num_polynomial)
                    l = l * lax.broadcast_in_dim(alpha, l.shape, [0]) + sum_strips(p)
                    return p, m_new, l, alpha

                def with_acc(o_acc):
                    m = plgpu.layout_cast(jnp.full((64,), EMPTY_MAX, jnp.float32), WGMMA_ROW)
                    l = plgpu.layout_cast(jnp.full((64, 8), 0.0, jnp.float32), plgpu.Layout.WGMMA)
                    plgpu.barrier_wait(q_full)

                    slot = lax.rem(step0, ST)
                    plgpu.barrier_wait(k_full.at[slot])
                    my_turn()

                    def first(s_acc):
                        plgpu.wgmma(s_acc, my_q, k_smem.at[slot].transpose((1, 0)))
                        next_turn()
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        return softmax(s, hi - 1, m, l, causal or S % BN != 0)
                    p, m, l, _ = pl.run_scoped(first, plgpu.ACC((64, BN), jnp.float32))
                    p = p.astype(dtype)

                    def step(i, carry, masked):
                        p, m, l, *ov = carry
                        o_acc_ = ov or o_acc
                        j = hi - 1 - i
                        slot = lax.rem(step0 + i, ST)
                        vslot = lax.rem(step0 + i - 1, ST)

                        plgpu.barrier_wait(k_full.at[slot])
                        my_turn()

                        def scores(s_acc):
                            plgpu.wgmma(s_acc, my_q, k_smem.at[slot].transpose((1, 0)))
                            plgpu.barrier_wait(v_full.at[vslot])
                            o_new = pv(o_acc_, p, vslot)
                            next_turn()
                            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                            plgpu.barrier_arrive(k_empty.at[slot])
                            p32, m_, l_, alpha = softmax(s, j, m, l, masked)
                            if config.overlap:
                                pin_smem[wg] = l_
                            # Pins the softmax before the wait for PV, under which it runs.
                            return *lax.optimization_barrier((p32, m_, l_, alpha)), *(o_new if stage_p else ())
                        p, m, l, alpha, *o_new = pl.run_scoped(scores, plgpu.ACC((64, BN), jnp.float32))
                        o = o_new[0] if stage_p else plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                        plgpu.barrier_arrive(v_empty.at[vslot])
                        if stage_p:
                            return p.astype(dtype), m, l, o * lax.broadcast_in_dim(alpha, o.shape, [0])
                        o, alpha = lax.optimization_barrier((o, alpha))
                        if config.lazy_rescale:
                            o_acc[...] = scale_rows_if_needed(o, alpha)
                        else:
                            o_acc[...] = o * lax.broadcast_in_dim(alpha, o.shape, [0])
                        return p.astype(dtype), m, l

                    carry = (p, m, l, o_acc[0]) if stage_p else (p, m, l)
                    n_masked = jnp.maximum(hi - full_hi, 1)
                    if causal:
                        carry = lax.fori_loop(1, n_masked, functools.partial(step, masked=True), carry)
                        carry = lax.fori_loop(n_masked, hi, functools.partial(step, masked=False), carry)
                    else:
                        carry = lax.fori_loop(1, hi, functools.partial(step, masked=False), carry)
                    p, m, l, *ov = carry
                    vslot = lax.rem(step0 + hi - 1, ST)
                    plgpu.barrier_wait(v_full.at[vslot])
                    o_new = pv(ov or o_acc, p, vslot)
                    o = o_new[0] if stage_p else plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                    plgpu.barrier_arrive(v_empty.at[vslot])
                    return o, m, l

                o, m, l = with_acc([plgpu.broadcasted_iota(jnp.int32, (64, Hv), 0, layout=plgpu.Layout.WGMMA).astype(jnp.float32) * 0.0]) if stage_p else pl.run_scoped(with_acc, plgpu.ACC((64, Hv), jnp.float32))
                l = l.sum(axis=1)
                inv = jnp.where(l == 0.0, 0.0, 1.0 / l)
                my_q[...] = (o * lax.broadcast_in_dim(inv, o.shape, [0])).astype(dtype)
                my_lse[...] = jnp.where(l == 0.0, -jnp.inf, (m + jnp.log2(l)) * (1 / LOG2E))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(my_q, out_gmem.at[b, pl.ds(q0, 64), n])
                plgpu.copy_smem_to_gmem(my_lse, lse_gmem.at[b, n, pl.ds(q0, 64)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_empty)
                return step0 + hi

            loop_tiles(tile_body, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            if config.ping_pong:
                @pl.when(wg == 0)
                def _():
                    plgpu.barrier_wait(turn.at[0])

        @pl.when(wg == W)
        def _load():
            plgpu.set_max_registers(24 if W == 2 else 32, action="decrease")

            def tile_body(tile, step0):
                b, n, qt = coords(tile)
                kh = lax.div(n, group)
                lo, _, hi = kv_range(qt)
                plgpu.barrier_wait(q_empty)
                for w in range(W):
                    plgpu.copy_gmem_to_smem(q_gmem.at[b, pl.ds(qt * BM + w * 64, 64), n], q_smem.at[w], q_full)

                def load(i, _):
                    j = hi - 1 - i
                    slot = lax.rem(step0 + i, ST)
                    plgpu.barrier_wait(k_empty.at[slot])
                    plgpu.copy_gmem_to_smem(k_gmem.at[b, pl.ds(j * BN, BN), kh], k_smem.at[slot], k_full.at[slot])
                    plgpu.barrier_wait(v_empty.at[slot])
                    plgpu.copy_gmem_to_smem(v_gmem.at[b, pl.ds(j * BN, BN), kh], v_smem.at[slot], v_full.at[slot])
                lax.fori_loop(0, hi, load, None)
                return step0 + hi
            loop_tiles(tile_body, jnp.int32(0))
            plgpu.barrier_wait(q_empty)
            for i in range(ST):
                plgpu.barrier_wait(k_empty.at[i])
                plgpu.barrier_wait(v_empty.at[i])

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    t_pad = num_q_tiles * BM
    out, lse = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((B, T, N, Hv), dtype), jax.ShapeDtypeStruct((B, N, t_pad), jnp.float32)),
        scratch_types=[
            plgpu.SMEM((W, 64, H), dtype, transforms=tiled),
            plgpu.SMEM((ST, BN, H), dtype, transforms=tiled),
            plgpu.SMEM((ST, BN, Hv), dtype, transforms=tiled),
            plgpu.SMEM((W, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=W),
            plgpu.Barrier(num_barriers=ST),
            plgpu.Barrier(num_barriers=ST),
            plgpu.Barrier(num_arrivals=W),
            plgpu.Barrier(num_arrivals=W, num_barriers=ST),
            plgpu.Barrier(num_arrivals=W, num_barriers=ST),
            plgpu.Barrier(num_barriers=W),
            plgpu.SMEM((W, 64, 8), jnp.float32),
            *([plgpu.SMEM((W, 64, BN), dtype, transforms=tiled)] if stage_p else []),
        ],
        grid=(num_sms if config.persistent else num_tiles,),
        grid_names=("sm",),
        num_threads=W + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(q, k, v)
    return out, lse[:, :, :T].swapaxes(1, 2)
