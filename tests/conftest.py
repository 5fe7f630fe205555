import os

# Before jax starts: eight devices on the CPU, nothing but the CPU, and programs compiled fast rather than fast programs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
