"""Queries, keys and values as e4m3 with fp32 scales: the format of FP8 attention.

    scale = max(largest |x| of the block, 2**-40) / 448,   x = scale * e4m3

A block is one query of one head, [1, H]; 64 keys of one head, [64, H]; 64 values of one head,
[64, Hv]. A query's scale multiplies a row of scores and a key block's 64 columns of them, both of
which the softmax does anyway; finer blocks of keys would cost a multiplication a score. e4m3 has 3
bits of mantissa: relative rounding error up to 2**-4, 2**-6 of a block's largest element and below
down to 2**-15 of it.

Values are stored as an 8-bit matmul wants them, [B, K, Hv, keys], and of every 16 keys in the order
in which a thread holds their probabilities (``hopper.fp8_registers``).

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width, J
blocks of 64 keys, P keys padded to whole blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.e4m3 import E4M3, LARGEST, LEAST
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.rounding import keep_rounded

from .validate import check_qkv

KEYS_PER_SCALE = 64
GROUP = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Operands:
    """What ``quantize_fp8`` returns; ``dequantized`` undoes it up to rounding.

    Raises:
        InputError: from ``check``, for arrays that do not fit each other.
    """

    q: jax.Array  # e4m3 [B, T, N, H]
    q_scale: jax.Array  # float32 [B, T, N]
    k: jax.Array  # e4m3 [B, S, K, H]
    k_scale: jax.Array  # float32 [B, J, K]
    v_t: jax.Array  # e4m3 [B, K, V, P]: transposed, ``ordered``
    v_scale: jax.Array  # float32 [B, J, K]

    def check(self) -> None:
        """Refuses arrays that do not belong together."""
        for name in ("q", "k", "v_t"):
            x = getattr(self, name)
            if x.ndim != 4 or x.dtype != E4M3:
                raise InputError(
                    f"{name} is {x.dtype} {x.shape}; FP8 operands are float8_e4m3fn of four dims: "
                    "make them by quantize_fp8"
                )
        (B, T, N, H), (_, S, K, _) = self.q.shape, self.k.shape
        J = -(-S // KEYS_PER_SCALE)
        wanted = {
            "q_scale": (B, T, N),
            "k": (B, S, K, H),
            "k_scale": (B, J, K),
            "v_t": (B, K, self.v_t.shape[2], J * KEYS_PER_SCALE),
            "v_scale": (B, J, K),
        }
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise InputError(
                    f"{name} is {getattr(self, name).shape} and must be {shape}, after q "
                    f"{self.q.shape} and k {self.k.shape}: make them by quantize_fp8"
                )
        if N % K:
            raise InputError(f"num_query_heads={N} is not a multiple of num_kv_heads={K}")


def quantize_fp8(query: jax.Array, key: jax.Array, value: jax.Array) -> Fp8Operands:
    """Rounds attention's operands to e4m3, each block by its own largest element.

    Args:
        query: bfloat16, float16 or float32 [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, V].

    Returns:
        Operands with ``q``, ``k``, ``v_t`` in e4m3 and their float32 scales, for
        ``flash_attention_fp8``; ``dequantized`` gives float32 back.

    Raises:
        InputError: shapes or dtypes that disagree.

    Examples:
        >>> q = k = v = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
        >>> pallas_kernels.quantize_fp8(q, k, v).q.dtype
        dtype(float8_e4m3fn)
    """
    check_qkv(query, key, value)
    q, q_scale = _scaled(query.astype(jnp.float32)[:, :, None])
    k, k_scale = _scaled(_blocks(key))
    v, v_scale = _scaled(_blocks(value))
    B, S, K, V = value.shape
    J = v.shape[1]
    v_t = v.reshape(B, J * KEYS_PER_SCALE, K, V).transpose(0, 2, 3, 1)
    return Fp8Operands(
        q=q[:, :, 0],
        q_scale=q_scale,
        k=k.reshape(B, J * KEYS_PER_SCALE, K, key.shape[3])[:, :S],
        k_scale=k_scale,
        v_t=ordered(v_t),
        v_scale=v_scale,
    )


def dequantized(operands: Fp8Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """query, key and value in float32, as FP8 attention sees them."""
    S = operands.k.shape[1]
    q = operands.q.astype(jnp.float32) * operands.q_scale[..., None]
    k = operands.k.astype(jnp.float32) * _of_each_key(operands.k_scale, S)
    v = natural(operands.v_t).transpose(0, 3, 1, 2)[:, :S].astype(jnp.float32)
    return q, k, v * _of_each_key(operands.v_scale, S)


def ordered(x: jax.Array) -> jax.Array:
    """Renumbers the last dim, a multiple of 16: position 4t + 2h + l holds key 8h + 2t + l."""
    split = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, 2, 4, 2)
    return split.swapaxes(-3, -2).reshape(x.shape)


def natural(x: jax.Array) -> jax.Array:
    """Undoes ``ordered``."""
    split = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, 4, 2, 2)
    return split.swapaxes(-3, -2).reshape(x.shape)


def _blocks(x: jax.Array) -> jax.Array:
    """[B, S, K, H] as float32 [B, J, 64, K, H], zeros after the end."""
    B, S, K, H = x.shape
    x = jnp.pad(x, ((0, 0), (0, -S % KEYS_PER_SCALE), (0, 0), (0, 0)))
    return x.reshape(B, -1, KEYS_PER_SCALE, K, H).astype(jnp.float32)


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e4m3 and scales of [B, J, rows, K, H] with one scale for rows and H."""
    largest = jnp.max(jnp.abs(x), axis=(2, 4), keepdims=True)
    scale = jnp.maximum(largest, LEAST) / LARGEST
    return keep_rounded((x / scale).astype(E4M3)), scale[:, :, 0, :, 0]


def _of_each_key(scale: jax.Array, length: int) -> jax.Array:
    """Scales [B, J, K] as [B, length, K, 1]."""
    return jnp.repeat(scale, KEYS_PER_SCALE, axis=1)[:, :length, :, None]
