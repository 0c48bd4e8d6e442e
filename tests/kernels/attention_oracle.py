"""Attention and its gradients in NumPy, written from the definition, loops over heads and all.

Independent of the package: no code of it is used, so a wrong mask there is not repeated here.
"""

import numpy as np

from tests.rounding import Rounded, stored


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


def attention(q, k, v, d_out, d_lse, seen, *, scale, cap=None, sinks=None, bias=None, kept=None):
    """Results and gradients in float64.

    With ``kept``, the dtype of operands and results, they are ``Rounded``: the spread of programs
    that keep probabilities, ``out`` and the scores' gradients in that dtype, and all else in fp32.

    Returns a dict: out, lse, dq, dk, dv and, where given, d_sinks, d_bias. A row without keys has
    out 0, lse -inf (or the sink) and no gradient.
    """
    make = (lambda x: np.asarray(x, np.float64)) if kept is None else Rounded
    q, k, v, d_out, d_lse = map(make, (q, k, v, d_out, d_lse))
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    result = {
        "out": np.zeros((B, T, N, v.shape[-1])),
        "lse": np.full((B, T, N), -np.inf),
        "dq": np.zeros(q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
    }
    if sinks is not None:
        result["d_sinks"] = np.zeros(sinks.shape)
    result = {name: make(zeros) for name, zeros in result.items()}
    if bias is not None:
        full_bias = np.broadcast_to(np.asarray(bias, np.float64), (B, N, T, S))
        d_full_bias = make(np.zeros((B, N, T, S)))
    for b in range(B):
        for n in range(N):
            kv = n // (N // K)
            raw = (q[b, :, n] @ k[b, :, kv].T) * scale
            slope = np.ones((T, S))
            scores = raw
            if cap is not None:
                tanh = np.tanh(raw / cap)
                scores, slope = cap * tanh, 1 - tanh * tanh
            if bias is not None:
                scores = scores + full_bias[b, n]
            scores = np.where(seen[b], scores, -np.inf)
            logits = scores
            if sinks is not None:
                logits = np.concatenate([scores, np.full((T, 1), sinks[n], np.float64)], axis=1)
            m = np.max(np.concatenate([logits, np.full((T, 1), -np.inf)], axis=1), axis=1)[:, None]
            m = np.where(m == -np.inf, 0, m)
            total = np.exp(logits - m).sum(axis=1, keepdims=True)
            some = total > 0
            lse = np.where(some, m + np.log(np.where(some, total, 1)), -np.inf)
            p = np.where(some, np.exp(scores - np.where(some, lse, 0)), 0)
            out = stored(stored(p, kept) @ v[b, :, kv], kept)
            delta = (out * d_out[b, :, n]).sum(axis=1, keepdims=True)
            delta = np.where(some, delta - d_lse[b, :, n, None], 0)
            dp = stored(d_out[b, :, n] @ v[b, :, kv].T, kept)
            ds = p * (dp - delta)
            result["out"][b, :, n] = out
            result["lse"][b, :, n] = lse[:, 0]
            if bias is not None:
                d_full_bias[b, n] = ds
            ds = stored(ds * slope * scale, kept)
            result["dq"][b, :, n] = ds @ k[b, :, kv]
            d_k, d_v = ds.T @ q[b, :, n], stored(p, kept).T @ d_out[b, :, n]
            result["dk"][b, :, kv] = result["dk"][b, :, kv] + d_k
            result["dv"][b, :, kv] = result["dv"][b, :, kv] + d_v
            if sinks is not None:
                p_sink = np.where(some, np.exp(sinks[n] - np.where(some, lse, 0)), 0)
                result["d_sinks"][n] = result["d_sinks"][n] - (p_sink * delta).sum()
    if bias is not None:
        broadcast = tuple(d for d in range(4) if bias.shape[d] < d_full_bias.shape[d])
        result["d_bias"] = d_full_bias.sum(axis=broadcast, keepdims=True)
    return result
