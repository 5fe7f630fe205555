import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels.flash_attention import attention


def dense_attention(q, k, v, segments, scale, soft_cap=0.0):
    """The obvious implementation: all [T, T] logits of every head at once."""
    heads_a_group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, heads_a_group, axis=2) for x in (k, v))
    s = jnp.einsum("bthx,bshx->bhts", q, k, precision="highest") * scale
    T = q.shape[1]
    allowed = (
        (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0) & jnp.tril(jnp.ones((T, T), bool))[None]
    )
    max_logit = jnp.where(allowed[:, None], s, -jnp.inf).max((0, 2, 3))
    s = jnp.where(allowed[:, None], soft_cap * jnp.tanh(s / soft_cap) if soft_cap else s, -jnp.inf)
    p = jnp.where(allowed[:, None], jax.nn.softmax(s, axis=-1), 0)
    return jnp.einsum("bhts,bshv->bthv", p, v, precision="highest"), max_logit


def inputs(T, H, G, packed, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k = jax.random.normal(keys[0], (2, T, H, 6)), jax.random.normal(keys[1], (2, T, G, 6))
    v = jax.random.normal(keys[2], (2, T, G, 5))
    segments = np.ones((2, T), np.int32)
    if packed:
        segments[0, T // 3 :] = 2
        segments[1, T // 2 :] = 2
        segments[1, T - 3 :] = 0
    return q, k, v, jnp.asarray(segments)


@pytest.mark.parametrize(
    ("T", "block", "H", "G", "packed"),
    [
        *((13, 4, 4, 2, True), (16, 4, 2, 2, False), (20, 3, 4, 4, True)),  # loops over blocks
        *((13, 7, 4, 2, True), (16, 64, 4, 4, True), (7, 7, 2, 1, False)),  # one or two, written out
    ],
)
def test_equals_dense_attention(T, block, H, G, packed):
    q, k, v, segments = inputs(T, H, G, packed)
    out, max_logit = attention(q, k, v, segments, scale=0.3, block=block, soft_cap=0.0)
    expected, expected_max = dense_attention(q, k, v, segments, 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(max_logit, expected_max, rtol=1e-6)

    weights = jnp.cos(jnp.arange(out.size).reshape(out.shape))
    grads = jax.grad(lambda *x: (attention(*x, segments, scale=0.3, block=block, soft_cap=0.0)[0] * weights).sum(), (0, 1, 2))(
        q, k, v
    )
    expected = jax.grad(lambda *x: (dense_attention(*x, segments, 0.3)[0] * weights).sum(), (0, 1, 2))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected)


@pytest.mark.parametrize(("T", "block", "H", "G"), [(13, 4, 4, 2), (9, 64, 2, 2), (13, 7, 4, 2)])
def test_soft_cap_equals_dense_attention_with_tanh(T, block, H, G):
    q, k, v, segments = inputs(T, H, G, packed=True)

    def both(f):
        def weighed(*x):
            out, max_logit = f(*x)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), (out, max_logit)

        return jax.jit(jax.value_and_grad(weighed, (0, 1, 2), has_aux=True))(q, k, v)

    (_, (out, max_logit)), grads = both(lambda *x: attention(*x, segments, scale=1.0, block=block, soft_cap=1.5))
    (_, (expected, expected_max)), expected_grads = both(lambda *x: dense_attention(*x, segments, 1.0, 1.5))
    assert (max_logit > 3).all()  # well into the cap, and of the logits before it
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(max_logit, expected_max, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)


def test_soft_cap_bounds_the_weights_while_the_largest_logit_grows():
    q, k, _, segments = inputs(8, 2, 2, packed=False)
    v = jnp.broadcast_to(jnp.eye(8)[None, :, None], (2, 8, 2, 8))  # the output is the weights
    capped, plain = (jax.jit(lambda q, c=c: attention(q, k, v, segments, scale=1.0, block=4, soft_cap=c)) for c in (2.0, 0.0))
    last = np.exp(4.0) / (np.exp(4.0) + 7)  # one logit at the cap, seven at its negative
    for size in (1.0, 1e3, 1e6):
        weights, max_logit = capped(size * q)
        assert weights[:, -1].max() <= last * (1 + 1e-6)
        np.testing.assert_allclose(max_logit, plain(size * q)[1], rtol=1e-6)
    assert max_logit.min() > 1e5
    assert plain(size * q)[0][:, -1].max() > 0.999


def test_without_a_soft_cap_the_program_has_none():
    q, k, v, segments = inputs(8, 2, 2, packed=False)

    def program(soft_cap):
        f = jax.grad(lambda q: attention(q, k, v, segments, scale=1.0, block=4, soft_cap=soft_cap)[0].sum())
        return str(jax.make_jaxpr(f)(q))

    assert "tanh" in program(1.0) and "tanh" not in program(0.0)


def test_padding_returns_zero_and_enters_no_maximum():
    q, k, v, segments = inputs(8, 2, 2, packed=False)
    segments = segments.at[:, 5:].set(0)
    huge = q.at[:, 5:].set(1e3), k.at[:, 5:].set(1e3)
    out, max_logit = attention(*huge, v, segments, scale=1.0, block=4, soft_cap=0.0)
    _, expected = attention(q[:, :5], k[:, :5], v[:, :5], segments[:, :5], scale=1.0, block=4, soft_cap=0.0)
    assert (out[:, 5:] == 0).all()
    np.testing.assert_allclose(max_logit, expected, rtol=1e-6)


def test_all_logits_negative_gives_a_negative_maximum():
    x = jnp.ones((1, 4, 1, 2))
    _, max_logit = attention(x, -x, x, jnp.ones((1, 4), jnp.int32), scale=1.0, block=2, soft_cap=0.0)
    assert max_logit[0] == -2.0


def test_maximum_carries_no_gradient():
    q, k, v, segments = inputs(8, 2, 2, packed=False)
    grad = jax.grad(lambda q: attention(q, k, v, segments, scale=1.0, block=4, soft_cap=0.0)[1].sum())(q)
    assert (grad == 0).all()


def test_nothing_of_size_T_by_T_is_formed_above_a_block():
    T, block = 512, 32
    q, k, v, segments = inputs(T, 1, 1, packed=False)
    step = jax.grad(lambda q, k, v: attention(q, k, v, segments, scale=1.0, block=block, soft_cap=0.0)[0].sum(), (0, 1, 2))
    compiled = jax.jit(step).lower(q, k, v).compile()
    assert f"{T},{T}" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * T * 4  # a batch of 2 dense logit arrays alone


def test_bfloat16_inputs_agree_with_float32():
    q, k, v, segments = inputs(16, 2, 2, packed=True)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out, max_logit = attention(*low, segments, scale=0.3, block=4, soft_cap=0.0)
    expected, expected_max = dense_attention(*(x.astype(jnp.float32) for x in low), segments, 0.3)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)
    np.testing.assert_allclose(max_logit, expected_max, rtol=1e-6)  # logits accumulate in float32
