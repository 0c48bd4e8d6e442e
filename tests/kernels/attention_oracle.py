"""Attention and its gradients in NumPy, written from the definition, loops over heads and all.

Independent of the package: no code of it is used, so a wrong mask there is not repeated here.
"""

import numpy as np


def visible(B, T, S, *, left, right, q_ids, kv_ids, q_lengths, kv_lengths):
    """bool [B, T, S] from the words of the contract."""
    seen = np.ones((B, T, S), dtype=bool)
    for t in range(T):
        diagonal = t + S - T
        for s in range(S):
            if left is not None and s < diagonal - left:
                seen[:, t, s] = False
            if right is not None and s > diagonal + right:
                seen[:, t, s] = False
    for b in range(B):
        if q_ids is not None:
            seen[b] &= (q_ids[b][:, None] == kv_ids[b][None, :]) & (q_ids[b][:, None] >= 0)
        if q_lengths is not None:
            seen[b, q_lengths[b] :] = False
        if kv_lengths is not None:
            seen[b, :, kv_lengths[b] :] = False
    return seen


def attention(
    q,
    k,
    v,
    d_out,
    d_lse,
    seen,
    *,
    scale,
    cap=None,
    sinks=None,
    bias=None,
    dtype,
    rounded=lambda x: x,
):
    """Results and gradients in ``dtype``, float64 for the oracle.

    ``rounded`` is applied to probabilities before their product with the values and to out, which
    the gradients read, as in a pass that keeps both in 16 bits.

    Returns a dict: out, lse, dq, dk, dv and, where given, d_sinks, d_bias. A row without keys has
    out 0, lse -inf (or the sink) and no gradient.
    """
    q, k, v, d_out, d_lse = (np.asarray(x, dtype) for x in (q, k, v, d_out, d_lse))
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    result = {
        "out": np.zeros((B, T, N, v.shape[-1]), dtype),
        "lse": np.full((B, T, N), -np.inf, dtype),
        "dq": np.zeros_like(q),
        "dk": np.zeros_like(k),
        "dv": np.zeros_like(v),
    }
    if sinks is not None:
        sinks = np.asarray(sinks, dtype)
        result["d_sinks"] = np.zeros_like(sinks)
    if bias is not None:
        bias = np.asarray(bias, dtype)
        result["d_bias"] = np.zeros_like(bias)
        full_bias = np.broadcast_to(bias, (B, N, T, S))
        d_full_bias = np.zeros((B, N, T, S), dtype)
    for b in range(B):
        for n in range(N):
            kv = n // (N // K)
            raw = (q[b, :, n] @ k[b, :, kv].T) * dtype(scale)
            slope = np.ones_like(raw)
            scores = raw
            if cap is not None:
                tanh = np.tanh(raw / dtype(cap))
                scores, slope = dtype(cap) * tanh, 1 - tanh * tanh
            if bias is not None:
                scores = scores + full_bias[b, n]
            scores = np.where(seen[b], scores, -np.inf)
            logits = scores
            if sinks is not None:
                logits = np.concatenate([scores, np.full((T, 1), sinks[n], dtype)], axis=1)
            m = np.max(logits, axis=1, keepdims=True, initial=-np.inf)
            m = np.where(np.isneginf(m), 0, m)
            total = np.exp(logits - m).sum(axis=1, keepdims=True)
            some = total > 0
            lse = np.where(some, m + np.log(np.where(some, total, 1)), -np.inf)
            p = np.where(some, np.exp(scores - np.where(some, lse, 0)), 0)
            out = rounded(rounded(p) @ v[b, :, kv])
            delta = (out * d_out[b, :, n]).sum(axis=1, keepdims=True)
            delta = np.where(some, delta - d_lse[b, :, n, None], 0)
            ds = p * (d_out[b, :, n] @ v[b, :, kv].T - delta)
            result["out"][b, :, n] = out
            result["lse"][b, :, n] = lse[:, 0]
            if bias is not None:
                d_full_bias[b, n] = ds
            ds = ds * slope * dtype(scale)
            result["dq"][b, :, n] = ds @ k[b, :, kv]
            result["dk"][b, :, kv] += ds.T @ q[b, :, n]
            result["dv"][b, :, kv] += p.T @ d_out[b, :, n]
            if sinks is not None:
                p_sink = np.where(some, np.exp(sinks[n] - np.where(some, lse, 0)), 0)
                result["d_sinks"][n] -= (p_sink * delta).sum()
    if bias is not None:
        broadcast = tuple(d for d in range(4) if bias.shape[d] < d_full_bias.shape[d])
        result["d_bias"] = d_full_bias.sum(axis=broadcast, keepdims=True)
    return result
