import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from k2jax.kernels import newton_schulz as ns

KERNELS = {
    "standard": jax.jit(ns.standard, static_argnums=(1, 2)),
    "gram": jax.jit(ns.gram, static_argnums=(1, 2)),
}


def spectrum(n, m, s, seed=0):
    """U diag(s) V^T with random U, V."""
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((n, len(s))))[0]
    v = np.linalg.qr(rng.standard_normal((m, len(s))))[0]
    return u, v, (u * s) @ v.T


def quintic(x, steps):
    a, b, c = ns.JORDAN
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


def matmuls(f, *args):
    """The dot_general equations of f's program, those of inner programs included."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(eqn)
            for inner in jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return found


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_singular_values_land_in_the_band_and_vectors_stay(kernel, shape):
    s = np.geomspace(1, 0.012, min(shape))
    s = s / np.linalg.norm(s)
    s[-1] = max(s[-1], 0.01)
    u, v, x = spectrum(*shape, s)
    y = np.asarray(kernel(jnp.asarray(x, jnp.float32)[None], 5, ns.JORDAN)[0], np.float64)
    values = np.linalg.svd(y, compute_uv=False)
    assert values.min() > 0.68 and values.max() < 1.14
    # y = U f(s) V^T: column i of y V is u_i times f(s_i).
    aligned = np.sum(u * (y @ v), axis=0) / np.linalg.norm(y @ v, axis=0)
    assert aligned.min() > 0.999


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (12, 12)])
def test_both_forms_equal_the_float64_quintic(kernel, steps, shape):
    x = np.random.default_rng(1).standard_normal((3, *shape)).astype(np.float32)
    y = kernel(jnp.asarray(x), steps, ns.JORDAN)
    for got, one in zip(y, x, strict=True):
        assert relative(got, quintic(one, steps)) < 1e-5


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_equals_optax(shape):
    g = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32)
    oracle = optax.contrib.muon(1.0, beta=0.0, nesterov=False, consistent_rms=1 / max(shape) ** 0.5)
    updates, _ = jax.jit(oracle.update)({"w": g}, oracle.init({"w": g}), {"w": g})
    assert relative(ns.newton_schulz(g, 5), -np.asarray(updates["w"], np.float64)) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_zero_gives_zero_and_leaves_the_rest_of_the_batch(kernel):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 4, 6)), jnp.float32)
    y = kernel(x.at[0].set(0), 5, ns.JORDAN)
    assert (y[0] == 0).all() and jnp.isfinite(y).all()
    np.testing.assert_array_equal(y[1], kernel(x, 5, ns.JORDAN)[1])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_tall_is_the_transpose_of_wide_for_the_same_flops(kernel):
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 6, 20)), jnp.float32)
    wide, tall = kernel(x, 5, ns.JORDAN), kernel(x.mT, 5, ns.JORDAN)
    np.testing.assert_allclose(tall.mT, wide, atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 5, 6, 16), (3, 5, 16, 6), (15, 8, 8)])
def test_stacks_in_chunks_equal_a_loop(shape, monkeypatch):
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    one_by_one = jax.jit(lambda x: ns.newton_schulz(x, 5))
    loop = np.stack([one_by_one(jnp.asarray(one)) for one in x.reshape(-1, *shape[-2:])]).reshape(shape)
    monkeypatch.setattr(ns, "CHUNK_BYTES", 4 * 4 * shape[-2] * shape[-1])  # 4 matrices a chunk, 3 left over
    y = jax.jit(lambda x: ns.newton_schulz(x, 5))(x)
    np.testing.assert_allclose(y, loop, atol=2e-6)
    traced = jax.jit(lambda x: ns.newton_schulz(x, 5)).trace(x)
    assert "while" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "while" not in traced.lower(lowering_platforms=("cuda",)).as_text()  # chunks are for a CPU's cache


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_counted_flops_are_those_of_the_program(form, steps, shape):
    total = 0
    for eqn in matmuls(lambda x: KERNELS[form](x, steps, ns.JORDAN), jnp.zeros((2, *shape))):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs, rhs = (v.aval.shape for v in eqn.invars)
        total += 2 * lhs[1] * lhs[2] * rhs[1] * rhs[2] // lhs[contracted[0]]
    assert total == ns.flops(*shape, steps, form)


def test_form_by_shape():
    n = 2048
    assert ns.flops(n, 7168, 5, "standard") == 20 * n * n * 7168 + 10 * n**3
    assert ns.flops(n, 7168, 5, "gram") == 8 * n * n * 7168 + 28 * n**3
    assert ns.form(7168, 2048, 5) == "gram"  # K2's experts
    assert ns.form(8192, 7168, 5) == "standard"  # K2's output projection
    assert ns.form(64, 96, 5) == "standard" and ns.form(64, 97, 5) == "gram"  # they break even at 3 : 2


def test_inner_product_with_the_sign_is_the_nuclear_norm():
    """The steepest descent direction in spectral norm: tr(G^T msign(G)) is the sum of the singular values."""
    g = np.random.default_rng(6).standard_normal((16, 18)).astype(np.float32)
    converging = (15 / 8, -10 / 8, 3 / 8)  # this quintic's limit is msign; Jordan's only comes near it
    sign = ns.newton_schulz(jnp.asarray(g), 25, converging)
    nuclear = np.linalg.svd(g.astype(np.float64), compute_uv=False).sum()
    np.testing.assert_allclose(np.sum(np.asarray(sign, np.float64) * g), nuclear, rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_bfloat16_accumulates_in_float32(kernel):
    x = jnp.asarray(np.random.default_rng(7).standard_normal((1, 32, 96)), jnp.bfloat16)
    y = kernel(x, 5, ns.JORDAN)
    assert y.dtype == jnp.bfloat16
    dots = matmuls(lambda x: kernel(x, 5, ns.JORDAN), x)
    assert dots and all(v.aval.dtype == jnp.bfloat16 for d in dots for v in d.invars)
    assert all(d.outvars[0].aval.dtype == jnp.float32 for d in dots)
    assert relative(y[0].astype(jnp.float32), quintic(x[0].astype(jnp.float32), 5)) < 4e-2


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="at least 1 step; got 0"):
        ns.newton_schulz(jnp.zeros((3, 3)), 0)
