"""Which kernels Newton-Schulz becomes on which platform, and that they compile for H100, without any of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k2jax.kernels import newton_schulz as ns
from k2jax.kernels import symmetric, tiles
from k2jax.kernels.symmetric_triton import symmetric as symmetric_triton
from k2jax.parallel import aot

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "tpu_custom_call"
TABLE = ns.coefficients("jordan", 5)
ON_CHIP, BETWEEN, TILED = (2, 40, 24), (2, 150, 140), (2, 200, 260)  # TILED: from MIN_SIDE on, as the fixture sets it


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(symmetric, "MIN_SIDE", 200)


def lower(platform, shape, dtype):
    """The program for a platform; newer versions of jax want to be told the GPU."""
    gpu = contextlib.nullcontext()
    if platform == "cuda" and hasattr(jax.sharding, "AbstractDevice"):
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
        auto = (jax.sharding.AxisType.Auto,)
        gpu = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device))
    with gpu:
        traced = jax.jit(lambda x: ns.newton_schulz(x, TABLE, dtype)).trace(jax.ShapeDtypeStruct(shape, jnp.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "shape", "dtype", "expected"),
    [
        ("cuda", ON_CHIP, "bfloat16", (TRITON, "newton_schulz_on_chip")),
        ("cuda", TILED, "float16", (TRITON, "symmetric_product")),
        ("tpu", ON_CHIP, "bfloat16", (MOSAIC, "newton_schulz_on_chip")),
        ("tpu", TILED, "bfloat16", (MOSAIC, "symmetric_product")),
    ],
)
def test_the_kernels_of_a_platform(platform, shape, dtype, expected):
    program = lower(platform, shape, dtype)
    assert all(name in program for name in expected)
    assert {TRITON, MOSAIC} - set(expected) == {name for name in (TRITON, MOSAIC) if name not in program}


@pytest.mark.parametrize(
    ("platform", "shape", "dtype"),
    [
        ("cpu", ON_CHIP, "bfloat16"),
        ("rocm", ON_CHIP, "bfloat16"),
        ("cuda", ON_CHIP, "float32"),
        ("tpu", ON_CHIP, "float16"),  # a TPU has none
        ("cuda", BETWEEN, "bfloat16"),  # too large to stay on chip, too small for halves of products to pay
    ],
)
def test_elsewhere_it_is_the_jnp_form(platform, shape, dtype):
    program = lower(platform, shape, dtype)
    assert TRITON not in program and MOSAIC not in program and "dot_general" in program


def test_a_gpu_with_little_shared_memory_takes_the_jnp_form(monkeypatch):
    class Device:
        compute_capability = "8.9"

    monkeypatch.setattr(tiles.jax, "local_devices", lambda backend: [Device()])
    assert not tiles.nvidia_is_capable()
    Device.compute_capability = "9.0"
    assert tiles.nvidia_is_capable()


@pytest.fixture(scope="module")
def compile_h100():
    """Compiles for one H100, in a shard_map as the kernels want it: `compile_h100(f, (shape, dtype))`."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    mesh = Mesh(np.array(aot.h100(1)), ("data",))

    def run(f, shape, dtype, **options):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        return jax.jit(mapped).lower(x).compile(compiler_options=options).as_text()

    return run


NO_SPILLS = {"xla_backend_optimization_level": 3, "xla_gpu_fail_ptx_compilation_on_register_spilling": True}
ROW = (3.4, -4.7, 2.0)


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((4, 2048, 7168), "bfloat16", {"out": "float16"}),  # experts
        ((4, 7168, 2048), "bfloat16", {"tall": True}),
        ((4, 2048, 2048), "float16", {"row": ROW, "out": "float16"}),
        ((1, 8192, 7168), "bfloat16", {"tall": True, "out": "float16"}),  # the output projection
        ((1, 7168, 576), "bfloat16", {"tall": True, "out": "float16"}),  # keys and values down, joint: tiles cut off at 576
    ],
    ids=["experts", "experts-tall", "polynomial", "output", "ragged"],
)
def test_symmetric_product_compiles_for_h100_at_k2s_shapes_without_spilling_registers(compile_h100, shape, dtype, options):
    program = compile_h100(lambda x: symmetric_triton(x, x, **options), shape, dtype, **NO_SPILLS)
    assert program.count(TRITON) == 1


@pytest.mark.parametrize("shape", [(64, 1536, 128), (64, 128, 512)])
def test_newton_schulz_on_chip_compiles_for_h100_at_mlas_heads_as_one_kernel(compile_h100, shape):
    program = compile_h100(lambda x: ns.newton_schulz(x, TABLE, "bfloat16"), shape, jnp.float32, **NO_SPILLS)
    assert program.count(TRITON) == 1 and "dot(" not in program and "copy(" not in program


def test_newton_schulz_compiles_for_h100_without_copies_or_transpositions(compile_h100):
    program = compile_h100(lambda x: ns.newton_schulz(x, TABLE[:2], "bfloat16"), (2, 640, 384), jnp.float32)
    assert program.count(TRITON) == 6  # the Gram form's X X^T, two P, the next R in two products, their Q
    assert "copy(" not in program and "transpose(" not in program
