"""Which kernels a computation becomes on which platform, and that they compile for H100, without any of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k2jax.kernels import flash_attention_triton, grouped_matmul_rows, symmetric, tiles
from k2jax.kernels import newton_schulz as ns
from k2jax.kernels.expert_rows import Experts, block_rows, sort_pairs
from k2jax.kernels.flash_attention import attention
from k2jax.kernels.grouped_matmul import routed_swiglu
from k2jax.kernels.symmetric_triton import symmetric as symmetric_triton
from k2jax.parallel import aot

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "tpu_custom_call"
TABLE = ns.coefficients("jordan", 5)
ON_CHIP, BETWEEN, TILED = (2, 40, 24), (2, 150, 140), (2, 200, 260)  # TILED: from MIN_SIDE on, as the fixture sets it


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(symmetric, "MIN_SIDE", 200)


def orthogonalized(dtype):
    return lambda x: ns.newton_schulz(x, TABLE, dtype)


def lower(platform, f, *arrays):
    """The program for a platform; newer versions of jax want to be told the GPU. An array is (shape, dtype)."""
    gpu = contextlib.nullcontext()
    if platform == "cuda" and hasattr(jax.sharding, "AbstractDevice"):
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
        auto = (jax.sharding.AxisType.Auto,)
        gpu = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device))
    with gpu:
        traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(*array) for array in arrays))
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
    program = lower(platform, orthogonalized(dtype), (shape, jnp.float32))
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
    program = lower(platform, orthogonalized(dtype), (shape, jnp.float32))
    assert TRITON not in program and MOSAIC not in program and "dot_general" in program


def heads(B, T, H, G, Y, V, dtype):
    return ((B, T, H, Y), dtype), ((B, T, G, Y), dtype), ((B, T, G, V), dtype), ((B, T), jnp.int32)


def experts(X, K, E, D, F, dtype):
    return (
        ((X, D), dtype),
        ((X, K), jnp.int32),
        ((X, K), jnp.float32),
        ((E, D, F), dtype),
        ((E, D, F), dtype),
        ((E, F, D), dtype),
    )


def attention_gradients(q, k, v, segments):
    def total(q, k, v):
        o, max_logit = attention(q, k, v, segments, scale=0.1, block=512, soft_cap=0.0)
        return o.astype(jnp.float32).sum(), max_logit

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)


def experts_gradients(x, expert, weight, *matrices):
    def total(x, weight, *matrices):
        return routed_swiglu(x, expert, weight, *matrices).astype(jnp.float32).sum()

    return jax.value_and_grad(total, (0, 1, 2, 3, 4))(x, weight, *matrices)


ATTENTION = "flash_attention", "flash_attention_d_queries", "flash_attention_d_keys"
GROUPED = "grouped_matmul", "grouped_matmul_weight_gradient"


@pytest.mark.parametrize(
    ("f", "arrays", "names"),
    [
        (attention_gradients, (1, 40, 4, 2, 24, 16), ATTENTION),
        (experts_gradients, (40, 2, 4, 24, 16), GROUPED),
    ],
    ids=["attention", "experts"],
)
def test_attention_and_experts_are_kernels_on_nvidia_in_half_precision_alone(f, arrays, names):
    shapes = heads if f is attention_gradients else experts
    program = lower("cuda", f, *shapes(*arrays, jnp.bfloat16))
    assert all(f'"{name}"' in program for name in names)
    for platform, dtype in (("cpu", jnp.bfloat16), ("cuda", jnp.float32), ("tpu", jnp.bfloat16)):
        program = lower(platform, f, *shapes(*arrays, dtype))
        assert TRITON not in program
        assert ("ragged_dot" in program) == (platform == "tpu" and f is experts_gradients)  # which expands elsewhere


def test_heads_too_wide_for_registers_are_no_kernel():
    assert TRITON not in lower("cuda", attention_gradients, *heads(1, 40, 2, 2, 256, 256, jnp.bfloat16))


def test_a_gpu_with_little_shared_memory_takes_the_jnp_form(monkeypatch):
    class Device:
        compute_capability = "8.9"

    monkeypatch.setattr(tiles.jax, "local_devices", lambda backend: [Device()])
    assert not tiles.nvidia_is_capable()
    Device.compute_capability = "9.0"
    assert tiles.nvidia_is_capable()


@pytest.fixture(scope="module")
def compile_h100():
    """Compiles for one H100, in a shard_map as the kernels want it: `compile_h100(f, (shape, dtype), ...)`."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    mesh = Mesh(np.array(aot.h100(1)), ("data",))

    def run(f, *arrays, donate=(), **options):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        given = [jax.ShapeDtypeStruct(*array, sharding=NamedSharding(mesh, PartitionSpec())) for array in arrays]
        return jax.jit(mapped, donate_argnums=donate).lower(*given).compile(compiler_options=options)

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
    program = compile_h100(lambda x: symmetric_triton(x, x, **options), (shape, dtype), **NO_SPILLS).as_text()
    assert program.count(TRITON) == 1


@pytest.mark.parametrize("shape", [(64, 1536, 128), (64, 128, 512)])
def test_newton_schulz_on_chip_compiles_for_h100_at_mlas_heads_as_one_kernel(compile_h100, shape):
    program = compile_h100(orthogonalized("bfloat16"), (shape, jnp.float32), **NO_SPILLS).as_text()
    assert program.count(TRITON) == 1 and "dot(" not in program and "copy(" not in program


def test_newton_schulz_compiles_for_h100_without_copies_or_transpositions(compile_h100):
    program = compile_h100(lambda x: ns.newton_schulz(x, TABLE[:2], "bfloat16"), ((2, 640, 384), jnp.float32)).as_text()
    assert program.count(TRITON) == 6  # the Gram form's X X^T, two P, the next R in two products, their Q
    assert "copy(" not in program and "transpose(" not in program


def test_attention_compiles_for_h100_at_k2s_shape_without_spilling_registers_in_memory_of_order_t(compile_h100):
    T, H, Y, V = 4096, 64, 192, 128
    compiled = compile_h100(attention_gradients, *heads(1, T, H, H, Y, V, jnp.bfloat16), **NO_SPILLS)
    assert compiled.as_text().count(TRITON) == 3
    rows = T * H * (2 * V * 2 + 3 * 4)  # output and its gradient, and three numbers a row
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * rows < H * T * T / 4


def test_what_does_not_fit_into_shared_memory_does_not_compile(compile_h100):
    tile = flash_attention_triton.Tile(queries=128, keys=128, warps=8, stages=4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded"):
        compile_h100(
            lambda *x: flash_attention_triton.forward(*x, 0.1, 0.0, tile=tile), *heads(1, 512, 2, 2, 192, 128, jnp.bfloat16)
        )


def test_experts_compile_for_h100_at_k2s_shapes_without_spilling_registers(compile_h100):
    X, K, E, D, F = 4096, 8, 24, 7168, 2048
    compiled = compile_h100(routed_swiglu, *experts(X, K, E, D, F, jnp.bfloat16), **NO_SPILLS)
    assert compiled.as_text().count(TRITON) == 3
    places = X * K + 64 * E
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * places * (D + 3 * F) * 2  # and nothing of [E, X, D]


def test_gradients_of_arrived_rows_compile_for_h100_in_place_without_spilling_registers(compile_h100):
    L, E, D, F, X, K = 2, 24, 7168, 2048, 16 * 2079, 8  # what a rank of 16 receives, in buffers of 1.25 times the mean
    block = block_rows(4096 * K, E)
    part = -(-int(1.25 * 4096 * K) // block) + E

    def f(x, d_y, expert, weight, gate, up, down, *gradients):
        given = x, d_y, sort_pairs(expert, E, block), weight, Experts(gate, up, down), jnp.int32(1)
        out, _, total = grouped_matmul_rows.backward_rows(*given, block, Experts(*gradients), 0, part)
        return out, total

    row, weights = ((X, D), jnp.bfloat16), ((L, E, D, F), (L, E, D, F), (L, E, F, D))
    stacks = [(w, dtype) for dtype in (jnp.bfloat16, jnp.float32) for w in weights]
    rest = ((X, K), jnp.int32), ((X, K), jnp.float32), *stacks
    compiled = compile_h100(f, row, row, *rest, donate=(7, 8, 9), **NO_SPILLS)
    assert compiled.as_text().count(TRITON) == 4 + 3
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 3 * L * E * D * F * 4  # the stacks of gradients, of which there is no copy:
    assert memory.temp_size_in_bytes < L * E * D * F * 4
