import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from k2jax.kernels import newton_schulz as ns
from k2jax.kernels import symmetric

KERNELS = {"standard": ns.standard, "gram": ns.gram}  # without jit: all tests share the programs of single operations
FORMS = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
JORDAN = ns.coefficients("jordan", 5)

# Rounding errors, relative to the result's norm, on the spectra of `stress` and on a Gaussian matrix; all sets and both forms.
ERRORS = {"float32": (1e-2, 6e-6), "float16": (0.8, 8e-3), "bfloat16": (0.8, 4e-2)}
EXCESS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}  # and how far above the set's range they take a singular value

# What a set makes of values from 0.01 of the Frobenius norm up, and the least that it makes of values from 0.001 up.
RANGES = {
    ("jordan", 5): (0.6818, 1.1344, 0.4705),
    ("you", 5): (0.9777, 1.0318, 0.4749),
    ("polar_express", 5): (0.8702, 1.1236, 0.8461),
    ("polar_express", 8): (1 - 1e-12, 1 + 1e-12, 1 - 1e-12),
    ("eight_two", 10): (1 - 1e-12, 1.00054, 1 - 1e-12),
}
SETS = pytest.mark.parametrize(("name", "steps"), RANGES, ids=[f"{name}-{steps}" for name, steps in RANGES])


def mapped(s, table):
    """What the table's polynomials make of a singular value."""
    for a, b, c in table:
        s = a * s + b * s**3 + c * s**5
    return s


def spectrum(n, m, s, seed=0):
    """U diag(s) V^T with random U, V."""
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((n, len(s))))[0]
    v = np.linalg.qr(rng.standard_normal((m, len(s))))[0]
    return u, v, (u * s) @ v.T


def quintic(x, table):
    """The same map in float64 by a singular value decomposition."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return (u * mapped(s / (np.linalg.norm(s) + 1e-7), table)) @ vt


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


@SETS
def test_ranges_of_the_sets_by_a_scan(name, steps):
    low, high, low_at_a_thousandth = RANGES[name, steps]
    table = ns.coefficients(name, steps)
    values = mapped(np.geomspace(0.01, 1, 200_001), table)
    assert low <= values.min() < low + 2e-4 and high - 2e-4 < values.max() <= high
    values = mapped(np.geomspace(0.001, 1, 200_001), table)
    assert low_at_a_thousandth <= values.min() < low_at_a_thousandth + 2e-4
    assert 0 <= mapped(np.linspace(0, 1, 20_001), table).max() < 1.21  # whatever the spectrum


@FORMS
@SETS
def test_ranges_of_the_sets_by_matrices(kernel, name, steps):
    low, high, _ = RANGES[name, steps]
    s = np.geomspace(1, 0.011, 24)
    s = np.append(s[:-1], 0.01 * np.linalg.norm(s))
    u, v, x = spectrum(24, 40, s)
    y = np.asarray(kernel(jnp.asarray(x, jnp.float32)[None], ns.coefficients(name, steps), "float32")[0], np.float64)
    values = np.linalg.svd(y, compute_uv=False)
    assert low - 1e-4 < values.min() and values.max() < high + 1e-4
    # y = U f(s) V^T: column i of y V is u_i times f(s_i).
    aligned = np.sum(u * (y @ v), axis=0) / np.linalg.norm(y @ v, axis=0)
    assert aligned.min() > 0.999


@pytest.fixture(scope="module")
def stress():
    """Matrices of norm 1 with the spectra that Newton-Schulz bears least, and as the last a Gaussian one: [6, 64, 160]."""
    n, m = 64, 160
    spectra = [
        np.ones(n),
        np.geomspace(1, 1e-9, n),
        np.ones(n // 4),  # rank-deficient
        np.array([1.0, 1.0] + [1e-3] * (n - 2)),  # two spikes
        np.ones(1),  # rank 1
    ]
    matrices = [spectrum(n, m, s, seed)[2] for seed, s in enumerate(spectra)]
    matrices.append(np.random.default_rng(9).standard_normal((n, m)))
    return np.stack([x / np.linalg.norm(x) for x in matrices])


@FORMS
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("name", "steps"), [("jordan", 5), ("you", 5), ("polar_express", 5), ("eight_two", 10)])
def test_every_dtype_is_finite_and_in_range_on_hard_spectra(stress, kernel, dtype, name, steps):
    table = ns.coefficients(name, steps)
    x = jnp.asarray(stress, dtype).astype(jnp.float32)  # the errors of interest are those behind the operands' own rounding
    y = kernel(x, table, dtype)
    assert y.dtype == jnp.float32 and jnp.isfinite(y).all()
    bound = mapped(np.linspace(0, 1, 20_001), table).max() + EXCESS[dtype]
    assert np.linalg.svd(np.asarray(y, np.float64), compute_uv=False).max() < bound
    errors = [relative(got, quintic(one, table)) for got, one in zip(y, x, strict=True)]
    assert max(errors[:-1]) < ERRORS[dtype][0] and errors[-1] < ERRORS[dtype][1]


def test_the_gram_form_drifts_without_restarts(stress, monkeypatch):
    table = ns.coefficients("eight_two", 10)
    x = jnp.asarray(stress[1:2], jnp.float32)
    restarted = relative(ns.gram(x, table, "float32")[0], quintic(stress[1], table))
    monkeypatch.setattr(ns, "LATER", 8)
    drifted = relative(ns.gram(x, table, "float32")[0], quintic(stress[1], table))
    assert restarted < 2e-3 and drifted > 0.1


@pytest.mark.parametrize(("name", "steps"), [("you", 5), ("eight_two", 10)])
@pytest.mark.parametrize("shape", [(48, 160), (40, 12), (12, 12)])
def test_both_forms_are_the_same_map(name, steps, shape):
    table = ns.coefficients(name, steps)
    x = np.random.default_rng(1).standard_normal(shape)
    with jax.enable_x64(True):
        standard, gram = (np.asarray(kernel(jnp.asarray(x)[None], table, "float64")[0]) for kernel in KERNELS.values())
    assert standard.dtype == np.float64
    assert relative(gram, standard) < 3e-13 and relative(standard, quintic(x, table)) < 3e-13


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_equals_optax(shape):
    g = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32)
    oracle = optax.contrib.muon(1.0, beta=0.0, nesterov=False, consistent_rms=1 / max(shape) ** 0.5)
    updates, _ = jax.jit(oracle.update)({"w": g}, oracle.init({"w": g}), {"w": g})
    assert relative(ns.newton_schulz(g, JORDAN, "float32"), -np.asarray(updates["w"], np.float64)) < 1e-5


@FORMS
@pytest.mark.parametrize("dtype", ERRORS)
def test_zero_gives_zero_and_leaves_the_rest_of_the_batch(kernel, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 4, 6)), jnp.float32)
    y = kernel(x.at[0].set(0), JORDAN, dtype)
    assert (y[0] == 0).all() and jnp.isfinite(y).all()
    np.testing.assert_array_equal(y[1], kernel(x, JORDAN, dtype)[1])


@FORMS
def test_tall_is_the_transpose_of_wide(kernel):
    x = np.random.default_rng(4).standard_normal((2, 6, 20))
    with jax.enable_x64(True):
        wide, tall = kernel(jnp.asarray(x), JORDAN, "float64"), kernel(jnp.asarray(x.swapaxes(1, 2)), JORDAN, "float64")
        np.testing.assert_allclose(np.asarray(tall).swapaxes(1, 2), wide, atol=1e-12)


@FORMS
@pytest.mark.parametrize("power", [-24, 30])
def test_float16_takes_matrices_beyond_its_range(kernel, power):
    x = np.random.default_rng(8).standard_normal((6, 20)) * 2.0**power
    assert relative(kernel(jnp.asarray(x, jnp.float32)[None], JORDAN, "float16")[0], quintic(x, JORDAN)) < 8e-3


@pytest.mark.parametrize("shape", [(3, 5, 6, 16), (3, 5, 16, 6), (15, 8, 8)])
def test_stacks_in_chunks_equal_a_loop(shape, monkeypatch):
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    run = jax.jit(lambda x: ns.newton_schulz(x, JORDAN, "float32"))
    loop = np.stack([run(jnp.asarray(one)) for one in x.reshape(-1, *shape[-2:])]).reshape(shape)
    monkeypatch.setattr(ns, "CHUNK_BYTES", 4 * 4 * shape[-2] * shape[-1])  # 4 matrices a chunk, 3 left over
    np.testing.assert_allclose(run(x), loop, atol=2e-6)
    traced = run.trace(x)
    assert "while" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "while" not in traced.lower(lowering_platforms=("cuda",)).as_text()  # chunks are for a CPU's cache


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_counted_flops_are_those_of_the_program(form, steps, shape):
    total = 0
    for eqn in matmuls(lambda x: KERNELS[form](x, ns.coefficients("jordan", steps), "float32"), jnp.zeros((2, *shape))):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs, rhs = (v.aval.shape for v in eqn.invars)
        total += 2 * lhs[1] * lhs[2] * rhs[1] * rhs[2] // lhs[contracted[0]]
    assert total == ns.flops(*shape, steps, form)


def test_form_by_shape(monkeypatch):
    n = 2048
    assert ns.flops(n, 7168, 5, "standard") == 15 * n * n * 7168 + 5 * n**3
    assert ns.flops(n, 7168, 5, "gram") == 6 * n * n * 7168 + 14 * n**3
    assert ns.form(7168, 2048, 5) == "gram"  # K2's experts
    assert ns.form(7168, 8192, 5) == "gram"  # K2's output projection
    assert ns.form(512, 513, 5) == "gram" and ns.form(512, 512, 5) == "standard"  # they break even at squares
    assert ns.form(64, 96, 5) == "standard" and ns.form(64, 97, 5) == "gram"  # and at 3 : 2 by whole products
    monkeypatch.setattr(symmetric, "MIN_SIDE", 10_000)
    assert ns.flops(n, 7168, 5, "standard") == 20 * n * n * 7168 + 10 * n**3
    assert ns.flops(n, 7168, 5, "gram") == 8 * n * n * 7168 + 28 * n**3


def test_segments_restart_once_in_five_steps_and_stay_short():
    assert ns.segments(5, "gram") == (2, 3) and ns.segments(5, "standard") == (1,) * 5
    for steps in range(1, 20):
        lengths = ns.segments(steps, "gram")
        assert sum(lengths) == steps and lengths[0] == min(steps, 2) and max(lengths) <= 3


def test_inner_product_with_the_sign_is_the_nuclear_norm():
    """The steepest descent direction in spectral norm: tr(G^T msign(G)) is the sum of the singular values."""
    g = np.random.default_rng(6).standard_normal((16, 18)).astype(np.float32)
    sign = ns.newton_schulz(jnp.asarray(g), ns.coefficients("polar_express", 10), "float32")
    nuclear = np.linalg.svd(g.astype(np.float64), compute_uv=False).sum()
    np.testing.assert_allclose(np.sum(np.asarray(sign, np.float64) * g), nuclear, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16")])
@FORMS
def test_operands_are_in_half_precision_and_sums_in_float32(kernel, dtype, name):
    traced = jax.jit(lambda x: kernel(x, JORDAN, dtype)).trace(jnp.zeros((1, 32, 96)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()  # a CPU rounds operands and multiplies them in float32
    dots = re.findall(r"stablehlo.dot_general .*: \(tensor<(.*)>, tensor<(.*)>\) -> tensor<(.*)>", text)
    assert all(result.endswith("xf32") for *_, result in dots)
    with_x = [operands for *operands, _ in dots if any("x96x" in shape for shape in operands)]
    squares = [operands for *operands, _ in dots if operands not in with_x]
    assert with_x and all(shape.endswith(f"x{name}") for operands in with_x for shape in operands)
    r = name if kernel is ns.standard else "f32"
    assert squares and all(shape.endswith(f"x{r}") for operands in squares for shape in operands)


def test_coefficients_end_with_their_last_row_repeated():
    assert ns.coefficients("jordan", 7) == (ns.JORDAN,) * 7
    you, express = ns.SETS["you"], ns.SETS["polar_express"]
    assert len(you) == 5 and ns.coefficients("you", 7) == you + you[-1:] * 2
    assert ns.coefficients("polar_express", 3) == express[:3]
    assert ns.coefficients("polar_express", 9) == (*express, (1.875, -1.25, 0.375))
    assert ns.coefficients("eight_two", 10) == (ns.JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2


@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("you", 4, "'you' need at least 5 steps; got 4"),
        ("eight_two", 9, "'eight_two' need at least 10 steps; got 9"),
        ("jordan", 0, "at least 1 step; got 0"),
        ("cubic", 5, "'cubic'; there are jordan, you, polar_express, eight_two"),
    ],
)
def test_sets_cut_short_and_unknown_ones_are_refused(name, steps, message):
    with pytest.raises(ValueError, match=message):
        ns.coefficients(name, steps)


@pytest.mark.parametrize("table", [(), ((1.0, 2.0),), (ns.JORDAN, (1.0, float("nan"), 1.0))], ids=["empty", "short", "nan"])
def test_wrong_tables_are_refused(table):
    with pytest.raises(ValueError, match="rows of three finite numbers"):
        ns.newton_schulz(jnp.zeros((3, 3)), table, "float32")


@pytest.mark.parametrize("shape", [(4, 0), (2, 0, 3)])
def test_matrices_without_rows_or_columns_are_refused(shape):
    with pytest.raises(ValueError, match=f"rows and columns; got shape \\({', '.join(map(str, shape))}\\)"):
        ns.newton_schulz(jnp.zeros(shape), JORDAN, "float32")
