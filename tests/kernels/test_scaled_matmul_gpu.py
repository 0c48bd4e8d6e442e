"""Scaled matmuls and quantization on a Hopper GPU: every form, against what tensor cores can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize, scaled_matmul
from pallas_kernels.common.scales import Scaling, spread
from tests.kernels.test_scaled_matmul import E4M3, E5M2, operands
from tests.tolerance import assert_no_worse

pytestmark = pytest.mark.gpu
BITS = 13  # that 8-bit tensor cores keep below the largest addend's leading one
TERMS = 32  # of one instruction

CASES = {
    "blocks": ((392, 832, 384), ("1x128", "128x128"), {}),
    "few rows, split": ((64, 128, 2048), ("1x128", "128x128"), {}),
    "weight gradient": ((256, 320, 384), ("1x128", "1x128"), {}),
    "input gradient": ((264, 512, 256), ("1x128", "128x128"), {"dtypes": (E5M2, E4M3)}),
    "blocks by rows of blocks": ((256, 320, 256), ("128x128", "1x128"), {}),
}


def as_tensor_cores_add(a_MK, b_NK):
    """The sum of 128 products, and as Hopper's tensor cores truncate it, in float64."""
    acc = np.zeros((a_MK.shape[0], b_NK.shape[0]))
    exact = np.zeros_like(acc)
    for k in range(0, a_MK.shape[1], TERMS):
        terms = a_MK[:, None, k : k + TERMS] * b_NK[None, :, k : k + TERMS]
        largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(acc))
        unit = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-300))) - BITS)
        kept = np.trunc(terms / unit[..., None]).sum(axis=-1)
        acc = (np.trunc(acc / unit) + kept) * unit
        exact += terms.sum(axis=-1)
    return exact, acc


def exact_and_truncated(a, b, a_scale, b_scale):
    values = [np.asarray(x.astype(jnp.float32), np.float64) for x in (a, b)]
    factors = []
    for x, scale in ((a, a_scale), (b, b_scale)):
        form = next(f for f in Scaling if f.shape(*x.shape) == scale.shape)
        each = np.broadcast_to(np.asarray(spread(form, scale, *x.shape), np.float64), x.shape)
        factors.append(each[:, ::128])
    sums = [0.0, 0.0]
    for j in range(a.shape[1] // 128):
        parts = as_tensor_cores_add(*(v[:, 128 * j : 128 * j + 128] for v in values))
        factor = np.outer(factors[0][:, j], factors[1][:, j])
        sums = [total + part * factor for total, part in zip(sums, parts, strict=True)]
    return sums


@pytest.mark.parametrize("case", list(CASES))
def test_kernels_add_as_tensor_cores_do(case):
    shape, forms, options = CASES[case]
    arrays = operands(*shape, forms, options.get("dtypes", (E4M3, E4M3)))
    f = jax.jit(functools.partial(scaled_matmul, out_dtype=jnp.float32, implementation="hopper"))
    got = f(*arrays)
    exact, truncated = exact_and_truncated(*arrays)
    assert_no_worse(got, plain=truncated.astype(np.float32), oracle=exact, what=case)
    np.testing.assert_array_equal(got, f(*arrays), err_msg="a second run differs")


@pytest.mark.parametrize("form", ["1x128", "128x128"])
def test_quantization_has_the_same_bits_as_xla(form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 640)) * 10.0 ** rng.uniform(-20, 20, (256, 1))
    x = jnp.asarray(x, jnp.bfloat16).at[3, 5].set(jnp.inf).at[9].set(0.0)
    mine, plain = (
        jax.jit(functools.partial(quantize, scaling=form, implementation=name))(x)
        for name in ("hopper", "xla")
    )
    for got, want in zip(mine, plain, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
