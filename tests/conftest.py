import os

# Before jax starts: eight devices on the CPU, nothing but the CPU, and programs compiled fast rather than fast programs. At
# LLVM's lowest level the older code generator, in one piece, takes a third less time than the default.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def make_batch():
    """Random packed rows with padding at the end: `make_batch(seed, rows, width)`, int32 [rows, width]."""

    def make(seed, rows, width, n_words=260):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, n_words, (rows, width)).astype(np.int32)
        segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
        for b in range(rows):
            start, document = 0, 1
            end = width - int(rng.integers(0, width // 2)) * (b % 2)  # every second row is padded, each by its own length
            while start < end:
                length = min(int(rng.integers(1, width // 2)), end - start)
                segments[b, start : start + length] = document
                positions[b, start : start + length] = np.arange(length)
                start, document = start + length, document + 1
        return {"tokens_BT": tokens, "segments_BT": segments, "positions_BT": positions}

    return make
