"""The calls that flash attention is measured on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import dispatch
from pallas_kernels.flash_attention.spec import AttentionCall, AttentionMasks, AttentionSpec

SHAPES = ((8, 2048), (4, 4096), (1, 16384))
HEADS = {64: 32, 128: 32, 256: 16}
GROUP = 4
DOCUMENT_LENGTH = 300  # mean length in packed cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and mask of one call; query and key equally long."""

    B: int
    T: int
    N: int
    K: int
    H: int
    Hv: int
    causal: bool
    window: int | None = None
    packed: bool = False  # documents of random lengths

    @property
    def name(self) -> str:
        """Name of the case in the table."""
        mask = "causal" if self.causal else "full"
        window = f" window{self.window}" if self.window else ""
        width = f"d{self.H}/{self.Hv}"
        packed = " packed" if self.packed else ""
        return f"b{self.B} s{self.T} h{self.N}/{self.K} {width} {mask}{window}{packed}"

    @property
    def spec(self) -> AttentionSpec:
        """The static part of the call."""
        left = None if self.window is None else self.window - 1
        return AttentionSpec(scale=self.H**-0.5, left=left, right=0 if self.causal else None)

    @property
    def flop(self) -> float:
        """FLOPs of the forward pass. Windows and packed rows count as the full causal call they
        replace."""
        return 2 * self.B * self.N * self.T**2 * (self.H + self.Hv) / (2 if self.causal else 1)

    def arrays(self, seed: int = 0) -> list[jax.Array]:
        """q, k, v and the output's cotangent."""
        keys = jax.random.split(jax.random.key(seed), 4)
        heads, widths = (self.N, self.K, self.K, self.N), (self.H, self.H, self.Hv, self.Hv)
        return [
            jax.random.normal(key, (self.B, self.T, n, w), jnp.bfloat16)
            for key, n, w in zip(keys, heads, widths, strict=True)
        ]

    def segment_ids(self) -> jax.Array | None:
        """Document of each token [B, T]; None unless packed."""
        if not self.packed:
            return None
        starts = np.random.default_rng(0).random((self.B, self.T)) < 1 / DOCUMENT_LENGTH
        return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)

    def fields(self, direction: str) -> dict:
        """The case of a direction as the dispatch table names it."""
        q, k, v, _ = jax.eval_shape(self.arrays)
        ids: Any = jax.ShapeDtypeStruct((self.B, self.T), jnp.int32) if self.packed else None
        masks = AttentionMasks(q_segment_ids=ids, kv_segment_ids=ids)
        call = AttentionCall(spec=self.spec, masks=masks, q=q, k=k, v=v)
        return dispatch.case_of(call, gradient=direction == "fwd+bwd")


def grid(dims: list[int]) -> list[Case]:
    """The cases that the bars are about."""
    return [
        Case(B=B, T=T, N=HEADS[H], K=HEADS[H] // group, H=H, Hv=H, causal=causal)
        for H in dims
        for causal in (False, True)
        for B, T in SHAPES
        for group in (1, GROUP)
    ]


EXTRA = (
    Case(B=1, T=16384, N=32, K=8, H=128, Hv=128, causal=True, window=1024),
    Case(B=2, T=8192, N=32, K=32, H=192, Hv=128, causal=True),
    *(
        Case(B=4, T=4096, N=N, K=N, H=H, Hv=H, causal=True)
        for H, N in ((80, 32), (96, 32), (192, 16))
    ),
)
"""Cases beyond those with targets: a window, latent attention, other widths."""

PACKED = tuple(
    Case(B=B, T=T, N=N, K=K, H=H, Hv=H, causal=True, packed=True)
    for B, T, N, K, H in (
        (32, 1024, 12, 12, 64), (4, 4096, 32, 8, 64), (2, 8192, 32, 8, 128), (2, 8192, 16, 8, 256)
    )
)  # fmt: skip
