"""Every test runs on 8 virtual CPU devices, under strict promotion, with warnings as errors."""

import os

# A GPU suite sets JAX_PLATFORMS itself; everything else must not touch an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
