"""Layers of a decode step, and what they mean in float64 with the rounding of programs.

Dims: as in ``pallas_kernels.decode_layer.reference``.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import LayerWeights
from tests.rounding import Rounded, stored

EPSILON = 1e-3
BF16 = jnp.dtype(jnp.bfloat16)


class Drawn:
    """Random arrays."""

    def __init__(self, seed: int = 7):
        self.rng = np.random.default_rng(seed)

    def array(self, *shape: int, size: float = 1.0, dtype: Any = BF16) -> np.ndarray:
        """Normally distributed."""
        return (size * self.rng.normal(size=shape)).astype(dtype)

    def weight(self, *shape: int) -> np.ndarray:
        """Whose products have the size of what they are multiplied with."""
        return self.array(*shape, size=shape[0] ** -0.5)

    def norm(self, D: int, dtype: Any = BF16) -> RmsNorm:
        """A norm."""
        return RmsNorm(scale=jnp.asarray(self.array(D, dtype=dtype)), epsilon=EPSILON)


def tail_operands(M: int, D: int, A: int, F: int, *, scale_dtype: Any = BF16) -> tuple[Any, ...]:
    """What ``layer_tail`` takes before its counter."""
    drawn = Drawn()
    x, attended, out = drawn.array(M, D), drawn.array(M, A), drawn.weight(A, D)
    return (
        x, attended, out, drawn.norm(D, scale_dtype), drawn.weight(D, 2 * F), drawn.weight(F, D)
    )  # fmt: skip


def exact_tail(given: tuple[Any, ...], *, is_apart: bool = False) -> Rounded:
    """The formula.

    Args:
        is_apart: what goes from product to product is rounded to x's dtype.
    """
    x, attended, out, norm, gate_up, down = given
    x, attended = (each if isinstance(each, Rounded) else _wide(each) for each in (x, attended))

    def between(rows: Rounded) -> Rounded:
        return stored(rows, BF16) if is_apart else rows

    x = between(between(attended @ _wide(out)) + x)
    both = between(between(_normed(x, norm)) @ _wide(gate_up))
    half = both.shape[1] // 2
    gate, up = both[:, :half], both[:, half:]
    hidden = between(gate / (1 + np.exp(-gate)) * up)
    return between(hidden @ _wide(down)) + x


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One row of so many tokens, the last one new; nobody's slots hold NaN."""

    length: int
    D: int = 2048
    N: int = 16
    K: int = 4
    H: int = 64
    F: int = 1024
    size: int = 64

    def arguments(self) -> tuple[Any, ...]:
        """What ``decode_layer`` takes before its counter."""
        drawn, A = Drawn(), self.N * self.H
        weights = LayerWeights(
            attention_norm=drawn.norm(self.D),
            qkv=drawn.weight(self.D, A + 2 * self.K * self.H),
            out=drawn.weight(A, self.D),
            mlp_norm=drawn.norm(self.D),
            gate_up=drawn.weight(self.D, 2 * self.F),
            down=drawn.weight(self.F, self.D),
        )
        per_row = -(-self.length // self.size)
        shape = per_row + 3, self.size, self.K, self.H
        pools = [drawn.array(*shape) for _ in range(2)]
        table = drawn.rng.permutation(per_row + 2)[:per_row].astype(np.int32)
        for pool in pools:
            kept = {(table[p // self.size], p % self.size): None for p in range(self.length - 1)}
            empty = np.ones(shape[:2], bool)
            empty[tuple(np.array(list(kept), int).reshape(-1, 2).T)] = False
            pool[empty] = np.nan
        table = np.append(table, -1)[None].astype(np.int32)
        angles = drawn.rng.uniform(0, 6, (1, self.H // 2)).astype(np.float32)
        positions = np.array([self.length - 1], np.int32)
        return drawn.array(1, self.D), weights, *pools, table, positions, _rope(angles)

    def exact(self, given: tuple[Any, ...], *, is_apart: bool = False) -> tuple[Any, ...]:
        """The stream after the layer, and both pools."""
        x, w, k, v, (table,), _, rope = given

        def between(rows: Rounded) -> Rounded:
            return stored(rows, BF16) if is_apart else rows

        heads = between(between(_normed(_wide(x), w.attention_norm)) @ _wide(w.qkv))
        heads = np.reshape(heads, (-1, self.H))
        half, (cos, sin) = self.H // 2, (_wide(each) for each in rope)
        first, second = heads[:, :half], heads[:, half:]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        queries = np.reshape(between(turned[: self.N]), (self.K, self.N // self.K, self.H))
        new = [stored(turned[self.N : self.N + self.K], BF16), stored(heads[-self.K :], BF16)]
        places = [(table[p // self.size], p % self.size) for p in range(self.length - 1)]
        index = tuple(np.array(places, int).reshape(-1, 2).T)
        old = [_wide(pool[index].reshape(-1, self.K, self.H)) for pool in (k, v)]
        keys, values = (np.concatenate([o, n[None]], axis=0) for o, n in zip(old, new, strict=True))
        scores = np.einsum("kgh,lkh->kgl", queries, keys) * self.H**-0.5
        powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        powers = between(powers / np.sum(powers, axis=-1, keepdims=True))
        attended = np.einsum("kgl,lkh->kgh", powers, values)
        tail = x, between(np.reshape(attended, (1, -1))), w.out, w.mlp_norm, w.gate_up, w.down
        pools = []
        at = table[(self.length - 1) // self.size], (self.length - 1) % self.size
        for pool, n in zip((k, v), new, strict=True):
            pool = _wide(pool)
            pool[at] = n
            pools.append(pool)
        return exact_tail(tail, is_apart=is_apart), *pools


def _rope(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.cos(angles), np.sin(angles)


def _wide(x: Any) -> Rounded:
    return Rounded(np.asarray(x, np.float64))


def _normed(x: Rounded, norm: RmsNorm) -> Rounded:
    root = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + norm.epsilon)
    return x / root * _wide(norm.scale)
