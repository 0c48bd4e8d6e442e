"""Fused flash attention backward for Hopper: one loop over queries per key tile, five matmuls.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.hopper_tile import mask_tile

LOG2E = math.log2(math.e)
WGMMA_COL = plgpu.Layout.WGMMA.reduce(0)


def backward(q, k, v, out, lse, d_out, d_lse, *, spec, config):
    B, T, N, H = q.shape
    _, S, K, Hv = v.shape
    W = 2
    BN, BM, ST = 64 * W, config.block_q, config.num_stages
    dtype = q.dtype
    group = N // K
    nq, nk = -(-T // BM), -(-S // BN)
    diag = S - T
    scale2 = spec.scale * LOG2E
    t_pad = nq * BM
    tail = S % BN != 0
    # Per WG part of dQ: half the columns of 64 rows, or all columns of its 64 rows.
    q_rows, q_cols = (64, H // W) if BM == 64 else (64, H)

    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse.swapaxes(1, 2)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, t_pad - T)))
    # exp2(s - inf) = 0 for rows without keys and rows past the end.
    lse2 = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E).swapaxes(1, 2)
    lse2 = jnp.pad(lse2, ((0, 0), (0, 0), (0, t_pad - T)), constant_values=jnp.inf)

    def q_range(kt):
        lo, full_lo = jnp.int32(0), jnp.int32(0)
        if spec.right is not None:
            first = kt * BN - diag - spec.right
            lo = jnp.clip(lax.div(jnp.maximum(first, 0), BM), 0, nq)
            full_lo = jnp.clip(lax.div(jnp.maximum(first + BN - 1, 0) + BM - 1, BM), lo, nq)
        return lo, full_lo, jnp.int32(nq)

    def kernel(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, dq_gmem, dk_gmem, dv_gmem):
        def scoped(q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, dq_smem,
                   kv_full, q_full, do_full, q_empty, do_empty, ds_ready):
            wg = lax.axis_index("wg")
            tile = lax.axis_index("tile")
            bk = lax.rem(tile, B * K)
            kt = lax.div(tile, B * K)  # key tile 0 has the most queries: first
            b, kh = lax.div(bk, K), lax.rem(bk, K)
            k0 = kt * BN
            lo, full_lo, hi = q_range(kt)
            if tail:
                full_lo = jnp.where(k0 + BN > S, hi, full_lo)
            per_head = hi - lo
            mine = pl.ds(pl.multiple_of(wg * 64, 64), 64)

            @pl.when(wg < W)
            def _compute():
                plgpu.set_max_registers(240, action="increase")
                my_k, my_v = k_smem.at[mine], v_smem.at[mine]
                plgpu.barrier_wait(kv_full)
                for i in range(ST):
                    plgpu.barrier_arrive(q_empty.at[i])
                    plgpu.barrier_arrive(do_empty.at[i])

                def accumulate(dk_acc, dv_acc):
                    def first_scores(s_acc):
                        plgpu.wgmma(s_acc, my_k, q_smem.at[0].transpose((1, 0)))
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                    plgpu.barrier_wait(q_full.at[0])
                    s = pl.run_scoped(first_scores, plgpu.ACC((64, BM), jnp.float32))

                    def step(i, s, g, masked):
                        n = kh * group + g
                        it = g * per_head + i - lo
                        slot = lax.rem(it, ST)
                        ds_tile = ds_smem.at[lax.rem(it, 2)]
                        plgpu.barrier_wait(do_full.at[slot])

                        def probabilities(dp_acc):
                            plgpu.wgmma(dp_acc, my_v, do_smem.at[slot].transpose((1, 0)))
                            lse_row = plgpu.load(lse_smem.at[slot], layout=WGMMA_COL)
                            p = jnp.exp2(s * scale2 - lax.broadcast_in_dim(lse_row, s.shape, [1]))
                            if masked:
                                key0 = k0 + wg * 64
                                p = mask_tile(
                                    p,
                                    fill=0.0,
                                    diag_min=None if spec.right is None else key0 - i * BM - diag - spec.right,
                                    num_rows=S - key0 if tail else None,
                                )
                            return p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)

                        p, dp = pl.run_scoped(probabilities, plgpu.ACC((64, BM), jnp.float32))
                        plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])
                        delta_row = plgpu.load(delta_smem.at[slot], layout=WGMMA_COL)
                        ds = p * (dp - lax.broadcast_in_dim(delta_row, p.shape, [1]))
                        ds_tile[mine, :] = ds.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(ds_ready)
                        plgpu.wgmma(dk_acc, ds_tile.at[mine], q_smem.at[slot])
                        plgpu.barrier_wait(ds_ready)

                        next_slot = lax.rem(it + 1, ST)
                        plgpu.barrier_wait(q_full.at[next_slot])

                        def query_grad(dq_acc):
                            if BM == 64:
                                cols = pl.ds(pl.multiple_of(wg * q_cols, q_cols), q_cols)
                                plgpu.wgmma(dq_acc, ds_tile.transpose((1, 0)), k_smem.at[:, cols])
                            else:
                                plgpu.wgmma(dq_acc, ds_tile.at[:, mine].transpose((1, 0)), k_smem)
                            return pl.run_scoped(
                                functools.partial(next_scores, dq_acc),
                                plgpu.ACC((64, BM), jnp.float32),
                            )

                        def next_scores(dq_acc, s_acc):
                            # The next tile's scores run while this tile's dQ leaves.
                            plgpu.wgmma(s_acc, my_k, q_smem.at[next_slot].transpose((1, 0)))
                            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
                            plgpu.barrier_arrive(q_empty.at[slot])
                            plgpu.barrier_arrive(do_empty.at[slot])
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            dq_smem[wg] = dq
                            plgpu.commit_smem()
                            if BM == 64:
                                to = dq_gmem.at[b, pl.ds(i * BM, 64), n, pl.ds(wg * q_cols, q_cols)]
                            else:
                                to = dq_gmem.at[b, pl.ds(i * BM + wg * 64, 64), n]
                            plgpu.copy_smem_to_gmem(dq_smem.at[wg], to, reduction_op="add")
                            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                        return pl.run_scoped(query_grad, plgpu.ACC((q_rows, q_cols), jnp.float32))

                    def head(g, s):
                        if spec.right is not None or tail:
                            s = lax.fori_loop(lo, full_lo, functools.partial(step, g=g, masked=True), s)
                        return lax.fori_loop(full_lo, hi, functools.partial(step, g=g, masked=False), s)

                    if group == 1:
                        head(jnp.int32(0), s)
                    else:
                        lax.fori_loop(0, group, head, s)
                    return (
                        plgpu.wgmma_accumulator_load(dk_acc, wait_n=0),
                        plgpu.wgmma_accumulator_load(dv_acc, wait_n=0),
                    )

                dk, dv = pl.run_scoped(
                    accumulate,
                    plgpu.ACC((64, H), jnp.float32),
                    plgpu.ACC((64, Hv), jnp.float32),
                )
                # Both warpgroups have read all of K for their part of dQ: its tile is free.
                plgpu.barrier_arrive(ds_ready)
                plgpu.barrier_wait(ds_ready)
                my_k[...] = (dk * spec.scale).astype(dtype)
                my_v[...] = dv.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(my_k, dk_gmem.at[b, pl.ds(k0 + wg * 64, 64), kh])
                plgpu.copy_smem_to_gmem(my_v, dv_gmem.at[b, pl.ds(k0 + wg * 64, 64), kh])
                plgpu.wait_smem_to_gmem(0)

            @pl.when(wg == W)
            def _load():
                plgpu.set_max_registers(24, action="decrease")
                plgpu.copy_gmem_to_smem(k_gmem.at[b, pl.ds(k0, BN), kh], k_smem, kv_full)
                plgpu.copy_gmem_to_smem(v_gmem.at[b, pl.ds(k0, BN), kh], v_smem, kv_full)

                def load(it, _):
                    g = lax.div(it, jnp.maximum(per_head, 1))
                    # One query tile more than there are: its scores are issued and dropped.
                    g = jnp.minimum(g, group - 1)
                    i = lo + lax.rem(it, jnp.maximum(per_head, 1))
                    n = kh * group + g
                    slot = lax.rem(it, ST)
                    rows = pl.ds(i * BM, BM)
                    plgpu.barrier_wait(q_empty.at[slot])
                    plgpu.copy_gmem_to_smem(q_gmem.at[b, rows, n], q_smem.at[slot], q_full.at[slot])
                    plgpu.copy_gmem_to_smem(lse_gmem.at[b, n, rows], lse_smem.at[slot], q_full.at[slot])

                    @pl.when(it < per_head * group)
                    def _():
                        plgpu.barrier_wait(do_empty.at[slot])
                        plgpu.copy_gmem_to_smem(do_gmem.at[b, rows, n], do_smem.at[slot], do_full.at[slot])
                        plgpu.copy_gmem_to_smem(delta_gmem.at[b, n, rows], delta_smem.at[slot], do_full.at[slot])

                lax.fori_loop(0, per_head * group + 1, load, None)

        # A warpgroup's columns of dQ must be whole swizzle atoms of K.
        swizzle = min(128, 2 * q_cols)
        tiled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
        pl.run_scoped(
            scoped,
            plgpu.SMEM((ST, BM, H), dtype, transforms=tiled),
            plgpu.SMEM((ST, BM, Hv), dtype, transforms=tiled),
            plgpu.SMEM((ST, BM), jnp.float32),
            plgpu.SMEM((ST, BM), jnp.float32),
            plgpu.SMEM((BN, H), dtype, transforms=tiled),
            plgpu.SMEM((BN, Hv), dtype, transforms=tiled),
            plgpu.SMEM((2, BN, BM), dtype, transforms=tiled),
            plgpu.SMEM((W, q_rows, q_cols), jnp.float32,
                       transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=ST),
            plgpu.Barrier(num_arrivals=2, num_barriers=ST),
            plgpu.Barrier(num_arrivals=W, num_barriers=ST),
            plgpu.Barrier(num_arrivals=W, num_barriers=ST),
            plgpu.Barrier(num_arrivals=W),
            collective_axes="wg",
        )

    dq_ref = jax.new_ref(jnp.zeros((B, T, N, H), jnp.float32))
    mesh = plgpu.Mesh(grid=(nk * B * K,), grid_names=("tile",), num_threads=W + 1, thread_name="wg")

    def body(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, dq_gmem, dk_gmem, dv_gmem):
        kernel(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, dq_gmem, dk_gmem, dv_gmem)

    dk, dv = pl.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(q, k, v, d_out, lse2, delta, dq_ref)
    dq = (jax.freeze(dq_ref) * spec.scale).astype(dtype)
    return dq, dk, dv
