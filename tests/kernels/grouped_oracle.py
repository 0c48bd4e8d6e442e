"""Grouped products and their gradients in NumPy float64, group by group.

Dims: M row, T token, J visit of a token, G group, K width in, N width out.
"""

import numpy as np

from tests.rounding import Rounded, rounded, stored


def by_groups(sizes, num_rows, columns, compute):
    """Rows of ``compute(group, its rows)``, and 0 beyond the groups."""
    out = Rounded(np.zeros((num_rows, columns)))
    for g, rows in enumerate(spans(sizes)):
        if rows.stop > rows.start:
            out[rows] = compute(g, rows)
    return out


def spans(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def product(x_MK, w_GKN, sizes):
    x_MK = rounded(x_MK)
    return by_groups(
        sizes, len(x_MK), w_GKN.shape[2], lambda g, rows: x_MK[rows] @ rounded(w_GKN[g])
    )


def input_gradient(d_MN, w_GKN, sizes):
    return product(d_MN, np.swapaxes(w_GKN, 1, 2), sizes)


def weight_gradient(x_MK, d_MN, sizes):
    x_MK, d_MN = rounded(x_MK), rounded(d_MN)
    parts = [x_MK[rows].T @ d_MN[rows] for rows in spans(sizes)]
    return Rounded(np.stack([p.value for p in parts]), np.stack([p.spread for p in parts]))


def scattered(d_MK, rows_M, sizes, num_tokens):
    """The sum of the gradients of each token's rows."""
    named_TM = np.arange(num_tokens)[:, None] == rows_M
    named_TM = named_TM & (np.arange(len(rows_M)) < np.sum(sizes))
    return Rounded(named_TM.astype(np.float64)) @ d_MK


def swiglu(gate_MN, up_MN):
    sigmoid = 1.0 / (1.0 + np.exp(-gate_MN))
    return gate_MN * sigmoid * up_MN


def swiglu_gradient(gate_MN, up_MN, d_MN, dtype):
    """Cotangents of gate and up, which were kept and are handed on in ``dtype``."""
    gate_MN, up_MN = stored(gate_MN, dtype), stored(up_MN, dtype)
    sigmoid = 1.0 / (1.0 + np.exp(-gate_MN))
    d_gate = d_MN * up_MN * (sigmoid * (1.0 + gate_MN * (1.0 - sigmoid)))
    return stored(d_gate, dtype), stored(d_MN * (gate_MN * sigmoid), dtype)
