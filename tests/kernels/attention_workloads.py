"""Attention calls of real models, that are chosen for and checked.

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWorkload:
    """Shapes and masks of one call of ``flash_attention``."""

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int
    causal: bool = True
    window: int | None = None  # keys that a query sees before its own position
    documents: int = 1  # of equal length, packed in one row
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"

    def options(self) -> dict[str, Any]:
        """The static arguments of ``flash_attention``."""
        return {
            "is_causal": self.causal,
            "local_window_size": None if self.window is None else (self.window, 0),
            "logit_soft_cap": self.soft_cap,
        }

    def arrays(self, key: jax.Array) -> dict[str, jax.Array]:
        """Its array arguments: random ones, because a GPU's clock depends on the data."""
        keys = jax.random.split(key, 4)
        dtype = jnp.dtype(self.dtype)
        arrays = {
            "query": jax.random.normal(keys[0], (self.B, self.T, self.N, self.H), dtype),
            "key": jax.random.normal(keys[1], (self.B, self.S, self.K, self.H), dtype),
            "value": jax.random.normal(keys[2], (self.B, self.S, self.K, self.V), dtype),
        }
        if self.sinks:
            arrays["sinks"] = jax.random.normal(keys[3], (self.N,), jnp.float32)
        if self.documents > 1:
            ids = jnp.arange(self.S, dtype=jnp.int32) // (self.S // self.documents)
            arrays["q_segment_ids"] = jnp.tile(ids[self.S - self.T :], (self.B, 1))
            arrays["kv_segment_ids"] = jnp.tile(ids, (self.B, 1))
        return arrays


def _bars() -> tuple[AttentionWorkload, ...]:
    widths = ((64, 32), (128, 32), (256, 16))
    lengths = ((8, 2048), (4, 4096), (1, 16384))
    grid = itertools.product(widths, (True, False), lengths, (1, 4))
    return tuple(
        AttentionWorkload(
            name=f"d{H} {'causal' if causal else 'full'} b{B} s{length} h{N}/{N // group}",
            B=B,
            T=length,
            S=length,
            N=N,
            K=N // group,
            H=H,
            V=H,
            causal=causal,
        )
        for (H, N), causal, (B, length), group in grid
    )


BARS = _bars()
"""The grid on which the kernels are held against cuDNN."""

SPECIAL = (
    AttentionWorkload(name="mla causal b4 s4096", B=4, T=4096, S=4096, N=16, K=16, H=192, V=128),
    AttentionWorkload(name="mla causal b1 s16384", B=1, T=16384, S=16384, N=16, K=16, H=192, V=128),
    AttentionWorkload(
        name="window 1024 b1 s16384", B=1, T=16384, S=16384, N=32, K=8, H=128, V=128, window=1023
    ),
    AttentionWorkload(
        name="packed 8 x 1024 b4", B=4, T=8192, S=8192, N=32, K=8, H=128, V=128, documents=8
    ),
    AttentionWorkload(
        name="chunked prefill t2048 s16384", B=1, T=2048, S=16384, N=32, K=8, H=128, V=128
    ),
)
"""What cuDNN through JAX lacks or does slowly."""

MODELS = (
    AttentionWorkload(name="llama-3.2-1b", B=4, T=4096, S=4096, N=32, K=8, H=64, V=64),
    AttentionWorkload(name="llama-3-8b", B=1, T=8192, S=8192, N=32, K=8, H=128, V=128),
    AttentionWorkload(name="llama-3-70b, 8-way heads", B=1, T=8192, S=8192, N=8, K=1, H=128, V=128),
    AttentionWorkload(name="phi-3-mini", B=2, T=4096, S=4096, N=32, K=32, H=96, V=96),
    AttentionWorkload(name="phi-2", B=4, T=2048, S=2048, N=32, K=32, H=80, V=80),
    AttentionWorkload(
        name="gemma-2-9b, local", B=1, T=8192, S=8192, N=16, K=8, H=256, V=256, window=4095,
        soft_cap=50.0,
    ),
    AttentionWorkload(
        name="gpt-oss-20b, local", B=1, T=8192, S=8192, N=64, K=8, H=64, V=64, window=127,
        sinks=True,
    ),
)  # fmt: skip
"""One layer's call in training, as the models' papers and configurations give it."""

WORKLOADS = (*BARS, *SPECIAL, *MODELS)
