"""What XLA computes at the memory's rate by itself, so that no kernel is written for it.

Shapes of a 1.2B model's step: 16,384 tokens, width 2048, 32 and 8 heads of 64, 8192 hidden columns,
128,256 token ids. Bytes are the fewest: each input read once, each result written once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

TOKENS, WIDTH, HIDDEN, VOCAB, PARAMETERS = 16384, 2048, 8192, 128256, 2**28


def _random(*shapes: tuple[int, ...], dtype=jnp.bfloat16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _rotary(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array):
    """Halves rotated, in fp32; q and k [B, T, N, H], angles [T, H / 2]."""

    def rotate(x):
        low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate((low * c - high * s, high * c + low * s), axis=-1).astype(x.dtype)

    return rotate(q), rotate(k)


def _gated(activation: Callable) -> Callable:
    def product(gate, up):
        return (activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    return product


def _gradient(f: Callable) -> Callable:
    return lambda d, *args: jax.vjp(f, *args)[1](d)


def _embedding_gradient(d: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.zeros((VOCAB, WIDTH), jnp.float32).at[ids].add(d.astype(jnp.float32))


def _adamw(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 1e-4 * (m / 0.5 / (jnp.sqrt(v / 0.3) + 1e-8) + 0.1 * p), m, v


def _rotary_arguments() -> list[jax.Array]:
    angles = jnp.arange(4096.0)[:, None] * 5e5 ** (-jnp.arange(32.0) / 32)
    return [*_random((4, 4096, 32, 64), (4, 4096, 8, 64)), jnp.cos(angles), jnp.sin(angles)]


def _embedding_arguments() -> list[jax.Array]:
    ids = jax.random.randint(jax.random.key(1), (TOKENS,), 0, VOCAB)
    return [*_random((TOKENS, WIDTH)), ids]


def _hidden(count: int) -> Callable[[], list[jax.Array]]:
    return lambda: _random(*[(TOKENS, HIDDEN)] * count)


_silu, _gelu = _gated(jax.nn.silu), _gated(jax.nn.gelu)

PLAIN: dict[str, tuple[Callable[[], list[jax.Array]], Callable, int]] = {
    "copy": (
        lambda: [jnp.zeros(PARAMETERS, jnp.int32)], lambda x: x + 1, 8 * PARAMETERS,
    ),
    "rotary": (_rotary_arguments, _rotary, 4 * TOKENS * 40 * 64),
    "swiglu": (_hidden(2), _silu, 6 * TOKENS * HIDDEN),
    "swiglu_gradient": (_hidden(3), _gradient(_silu), 10 * TOKENS * HIDDEN),
    "geglu": (_hidden(2), _gelu, 6 * TOKENS * HIDDEN),
    "geglu_gradient": (_hidden(3), _gradient(_gelu), 10 * TOKENS * HIDDEN),
    "embedding_gradient": (
        _embedding_arguments, _embedding_gradient, 2 * TOKENS * WIDTH + 4 * VOCAB * WIDTH,
    ),
    "adamw": (
        lambda: [abs(x) for x in _random(*[(PARAMETERS,)] * 4, dtype=jnp.float32)], _adamw,
        28 * PARAMETERS,
    ),
}  # fmt: skip
"""Name: arguments, function, fewest bytes."""
