"""Lazy access to Mosaic GPU and the MLIR dialects: imported when a kernel first uses a name.

Importing them takes two thirds as long as importing JAX. Every process imports the kernel modules,
which also check whether a kernel supports a call, but few processes trace a kernel.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import launch_context as copies
    from jax.experimental.mosaic.gpu import mma_utils as mma_utils
    from jax.experimental.mosaic.gpu import utils as mgpu_utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector
else:

    class _Deferred:
        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    mgpu = _Deferred("jax.experimental.mosaic.gpu")
    copies = _Deferred("jax.experimental.mosaic.gpu.launch_context")
    mma_utils = _Deferred("jax.experimental.mosaic.gpu.mma_utils")
    mgpu_utils = _Deferred("jax.experimental.mosaic.gpu.utils")
    plgpu = _Deferred("jax.experimental.pallas.mosaic_gpu")
    arith, llvm, nvvm, scf, vector = (
        _Deferred(f"jaxlib.mlir.dialects.{name}")
        for name in ("arith", "llvm", "nvvm", "scf", "vector")
    )
