"""What "auto" takes is said once for each case, by every op that chooses."""

import logging

import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.common import chosen

X = np.ones((2, 64), np.float32)
POOL, TABLES = np.ones((2, 2, 1, 8), np.float32), np.array([[1]], np.int32)
CALLS = {
    "flash_attention": lambda: pallas_kernels.flash_attention(POOL, POOL, POOL),
    "rms_norm": lambda: pallas_kernels.rms_norm(X, np.ones(64, np.float32), epsilon=1e-6),
    "softmax": lambda: pallas_kernels.softmax(X),
    "few_rows_matmul": lambda: pallas_kernels.few_rows_matmul(X, X.T),
    "append_heads": lambda: pallas_kernels.append_heads(
        np.ones((1, 1, 4, 8), np.float32), POOL, POOL, TABLES, np.array([[1]], np.int32),
        (np.ones((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.float32)),
    ),
    "paged_attention": lambda: pallas_kernels.paged_attention(
        np.ones((1, 1, 8), np.float32), POOL, POOL, TABLES, np.array([2], np.int32)
    ),
}  # fmt: skip


@pytest.mark.slow_cases("flash_attention", "paged_attention")
@pytest.mark.parametrize("op", CALLS)
def test_auto_logs_each_case_once(op, caplog):
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    chosen._announce.cache_clear()
    for _ in range(2):
        CALLS[op]()
    said = [record.getMessage() for record in caplog.records]
    # Of rows both directions are chosen.
    assert len(said) == len(set(said)) == (2 if op in ("rms_norm", "softmax") else 1)
    assert all(line.startswith(f"{op} on cpu uses xla for ") for line in said)
    assert all("Hopper" in line for line in said), "why not the kernel"
