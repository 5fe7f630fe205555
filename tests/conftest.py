import os

# Before jax starts: eight devices on the CPU, and nothing but the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
