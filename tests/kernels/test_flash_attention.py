import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels.flash_attention import attention


def dense_attention(q, k, v, segments, scale):
    """The obvious implementation: all [T, T] logits of every head at once."""
    heads_a_group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, heads_a_group, axis=2) for x in (k, v))
    s = jnp.einsum("bthx,bshx->bhts", q, k, precision="highest") * scale
    T = q.shape[1]
    allowed = (
        (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0) & jnp.tril(jnp.ones((T, T), bool))[None]
    )
    s = jnp.where(allowed[:, None], s, -jnp.inf)
    p = jnp.where(allowed[:, None], jax.nn.softmax(s, axis=-1), 0)
    return jnp.einsum("bhts,bshv->bthv", p, v, precision="highest"), s.max((0, 2, 3))


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
    ("T", "block", "H", "G", "packed"), [(13, 4, 4, 2, True), (16, 4, 2, 2, False), (16, 64, 4, 4, True), (7, 7, 2, 1, False)]
)
def test_equals_dense_attention(T, block, H, G, packed):
    q, k, v, segments = inputs(T, H, G, packed)
    out, max_logit = attention(q, k, v, segments, scale=0.3, block=block)
    expected, expected_max = dense_attention(q, k, v, segments, 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(max_logit, expected_max, rtol=1e-6)

    weights = jnp.cos(jnp.arange(out.size).reshape(out.shape))
    grads = jax.grad(lambda *x: (attention(*x, segments, scale=0.3, block=block)[0] * weights).sum(), (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *x: (dense_attention(*x, segments, 0.3)[0] * weights).sum(), (0, 1, 2))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected)


def test_padding_returns_zero_and_enters_no_maximum():
    q, k, v, segments = inputs(8, 2, 2, packed=False)
    segments = segments.at[:, 5:].set(0)
    huge = q.at[:, 5:].set(1e3), k.at[:, 5:].set(1e3)
    out, max_logit = attention(*huge, v, segments, scale=1.0, block=4)
    _, expected = attention(q[:, :5], k[:, :5], v[:, :5], segments[:, :5], scale=1.0, block=4)
    assert (out[:, 5:] == 0).all()
    np.testing.assert_allclose(max_logit, expected, rtol=1e-6)


def test_all_logits_negative_gives_a_negative_maximum():
    x = jnp.ones((1, 4, 1, 2))
    _, max_logit = attention(x, -x, x, jnp.ones((1, 4), jnp.int32), scale=1.0, block=2)
    assert max_logit[0] == -2.0


def test_maximum_carries_no_gradient():
    q, k, v, segments = inputs(8, 2, 2, packed=False)
    grad = jax.grad(lambda q: attention(q, k, v, segments, scale=1.0, block=4)[1].sum())(q)
    assert (grad == 0).all()


def test_nothing_of_size_T_by_T_is_formed_above_a_block():
    T, block = 512, 32
    q, k, v, segments = inputs(T, 1, 1, packed=False)
    step = jax.grad(lambda q, k, v: attention(q, k, v, segments, scale=1.0, block=block)[0].sum(), (0, 1, 2))
    compiled = jax.jit(step).lower(q, k, v).compile()
    assert f"{T},{T}" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * T * 4  # a batch of 2 dense logit arrays alone


def test_bfloat16_inputs_agree_with_float32():
    q, k, v, segments = inputs(16, 2, 2, packed=True)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out, max_logit = attention(*low, segments, scale=0.3, block=4)
    expected, expected_max = dense_attention(*(x.astype(jnp.float32) for x in low), segments, 0.3)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)
    np.testing.assert_allclose(max_logit, expected_max, rtol=1e-6)  # logits accumulate in float32
