"""Decoding of real models, that paged attention is measured on.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedWorkload:
    """Rows of one step, each with ``length`` positions or random ones of the same sum."""

    name: str
    B: int
    length: int
    N: int
    K: int
    H: int = 128
    V: int = 128
    size: int = 64
    T: int = 1
    latent: bool = False
    window: int | None = None

    @property
    def title(self) -> str:
        """Name and size of pages."""
        return f"{self.name}, pages of {self.size}"

    def lengths(self, *, equal: bool = True) -> np.ndarray:
        """int32 [B]."""
        if equal:
            return np.full(self.B, self.length, np.int32)
        share = np.random.default_rng(0).dirichlet(np.full(self.B, 2.0))
        lengths = np.maximum(self.T, (share * self.B * self.length).astype(np.int32))
        lengths[np.argmax(lengths)] += self.B * self.length - lengths.sum()
        return lengths

    def cache_bytes(self, itemsize: int = 2) -> int:
        """What each step reads at least, of keys and values."""
        seen = min(self.length, (self.window or self.length) + self.T - 1)
        width = self.H if self.latent else self.H + self.V
        return self.B * seen * self.K * width * itemsize

    def options(self) -> dict[str, Any]:
        """The static arguments of ``paged_attention``."""
        return {"window": self.window} | ({"value_width": self.V} if self.latent else {})

    def pools(self, key: jax.Array, dtype: jnp.dtype, num_pages: int) -> list[jax.Array | None]:
        """Queries and pools."""
        keys = jax.random.split(key, 3)
        pages = (num_pages, self.size, self.K)
        q = jax.random.normal(keys[0], (self.B, self.T, self.N, self.H), dtype)
        k = jax.random.normal(keys[1], (*pages, self.H), dtype)
        return [q, k, None if self.latent else jax.random.normal(keys[2], (*pages, self.V), dtype)]

    def tables(self, lengths: np.ndarray, *, in_order: bool = False) -> tuple[np.ndarray, int]:
        """int32 [B, M] of pages, in random order by default, and how many there are."""
        counts = -(-lengths // self.size)
        tables = np.full((self.B, counts.max()), -1, np.int32)
        order = np.arange(counts.sum())
        if not in_order:
            order = np.random.default_rng(1).permutation(order)
        for row, pages in zip(tables, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            row[: len(pages)] = pages
        return tables, int(counts.sum())


WORKLOADS = (
    PagedWorkload(name="b64 x 8192 x 32/8", B=64, length=8192, N=32, K=8),
    PagedWorkload(name="b16 x 32768 x 64/8", B=16, length=32768, N=64, K=8),
    PagedWorkload(name="b128 x 2048 x 32/32", B=128, length=2048, N=32, K=32),
    PagedWorkload(name="b1 x 32768 x 32/8", B=1, length=32768, N=32, K=8),
    PagedWorkload(name="b256 x 2048 x 32/8", B=256, length=2048, N=32, K=8),
    PagedWorkload(name="b128 x 1024 x 32/8", B=128, length=1024, N=32, K=8),
    PagedWorkload(name="b64 x 2048 x 32/8 of 64", B=64, length=2048, N=32, K=8, H=64, V=64),
    PagedWorkload(
        name="latent b64 x 8192 x 16", B=64, length=8192, N=16, K=1, H=576, V=512, latent=True
    ),
    PagedWorkload(
        name="latent b64 x 8192 x 128", B=64, length=8192, N=128, K=1, H=576, V=512, latent=True
    ),
)
