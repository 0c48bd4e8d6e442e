"""Every test runs on 8 virtual CPU devices, under strict promotion, with warnings as errors and the
shapes that the product's annotations name checked.
"""

import os

# A GPU suite sets JAX_PLATFORMS itself; everything else must not touch an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] != "cpu":
    # Several workers share a GPU, and plain references need no fast matmuls: compiling is what a
    # GPU suite waits for.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()

import jax
import shape_checks

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
shape_checks.install()
