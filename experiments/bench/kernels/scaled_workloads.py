"""Scaled matmuls of real models, shared by tests and benchmark. Dims as in ``api``."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.scales import Scaling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledWorkload:
    """One product."""

    M: int
    N: int
    K: int

    @property
    def name(self) -> str:
        """Name of the shape in results, such as ``4096x24576x1536``."""
        return f"{self.M}x{self.N}x{self.K}"

    @property
    def flop(self) -> int:
        """Multiplications and additions."""
        return 2 * self.M * self.N * self.K

    def arrays(
        self,
        a: Scaling,
        b: Scaling,
        dtypes: tuple[DTypeLike, DTypeLike] = (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """a, b, a_scale, b_scale."""
        return (
            jax.ShapeDtypeStruct((self.M, self.K), dtypes[0]),
            jax.ShapeDtypeStruct((self.N, self.K), dtypes[1]),
            jax.ShapeDtypeStruct(a.shape(self.M, self.K), jnp.float32),
            jax.ShapeDtypeStruct(b.shape(self.N, self.K), jnp.float32),
        )


LARGE = (
    ScaledWorkload(M=8192, N=8192, K=8192),
    ScaledWorkload(M=4096, N=4096, K=7168),
    ScaledWorkload(M=4096, N=24576, K=1536),
    ScaledWorkload(M=4096, N=7168, K=18432),
    ScaledWorkload(M=16384, N=8192, K=2048),
    ScaledWorkload(M=16384, N=2048, K=8192),
)
"""Shapes of training and prefill: DeepSeek-V3's (hidden 7168) and Llama's."""

SMALL = (
    ScaledWorkload(M=64, N=4096, K=7168),
    ScaledWorkload(M=128, N=7168, K=18432),
)
"""Shapes of decoding."""

WORKLOADS = (*LARGE, *SMALL)
