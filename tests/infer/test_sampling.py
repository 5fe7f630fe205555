import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from k2jax.infer.sampling import Sampling, kept, sample, settings

W = 7
draw, keep = jax.jit(sample), jax.jit(kept)


def many(row, logits, n=4000):
    """Tokens drawn at n places from the same logits."""
    rows = settings([Sampling(**row)] * n)
    return np.asarray(draw(jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1)), rows, jnp.arange(n)))


LOGITS = np.log([0.05, 0.4, 0.1, 0.3, 0.02, 0.03, 0.1])


def test_draws_follow_the_softmax_at_the_temperature():
    for temperature in (0.5, 1.0, 2.0):
        share = np.bincount(many({"temperature": temperature}, LOGITS), minlength=W) / 4000
        p = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
        assert np.abs(share - p).max() < 4 * np.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ({"temperature": 0.0}, {1}),
        ({"temperature": 1e-3}, {1}),
        ({"top_k": 1, "temperature": 5.0}, {1}),
        ({"top_k": 3}, {1, 3, 2}),  # 2 and 6 are equally likely: the lower
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 2}),
        ({"min_p": 0.25}, {1, 3, 2, 6}),
        ({"min_p": 0.2, "top_p": 0.69}, {1, 3}),
        ({"top_k": 2, "top_p": 0.57}, {1}),  # of the two that are left, the first has 0.571
        ({"min_p": 1.0}, {1}),
    ],
)
def test_only_what_the_limits_leave_is_drawn(row, left):
    assert set(many({"temperature": 1.0} | row, LOGITS)) == left


@examples(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-5, 5, width=16), min_size=W, max_size=W),
    st.integers(0, W + 2),
    st.floats(0.0625, 1, width=32),
    st.floats(0, 1, width=32),
)
def test_limits_leave_the_fewest_likely_tokens(logits, k, top_p, min_p):
    """Against the definition, in float64: a set closed upwards, the least one with its mass."""
    left = np.asarray(keep(jnp.asarray([logits]), settings([Sampling(top_k=k, top_p=top_p, min_p=min_p)])))[0]
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum()
    assert (left.any() and (~left).sum() == 0) or p[left].min() >= p[~left].max() - 1e-6
    assert left.sum() <= (k or W)
    assert (p[left] >= min_p * p.max() - 1e-6).all()
    top = np.sort(p)[::-1][: k or W]
    if left.sum() > 1:  # without the least likely one the mass is not enough
        assert p[left].sum() - p[left].min() < top_p * top.sum() + 1e-5


def test_a_draw_depends_on_seed_and_place_and_not_on_the_rest_of_the_batch():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((6, 50)), jnp.float32)
    rows = [Sampling(temperature=1.0, seed=s) for s in (1, 1, 2, 3, 4, 5)]
    rows[5] = Sampling(temperature=1.0, top_p=0.9, seed=5)
    places = jnp.array([8, 8, 8, 9, 9, 9])
    together = np.asarray(draw(logits, settings(rows), places))
    alone = [int(draw(logits[i : i + 1], settings(rows[i : i + 1]), places[i : i + 1])[0]) for i in range(6)]
    np.testing.assert_array_equal(together, alone)
    flat = jnp.zeros((40, 1000))

    def drawn(seeds, places):
        return np.asarray(draw(flat, settings([Sampling(temperature=1.0, seed=s) for s in seeds]), jnp.asarray(places)))

    assert len(set(drawn([0] * 40, range(40)))) > 35 and len(set(drawn(range(40), [0] * 40))) > 35
    assert len(set(drawn([3] * 40, [5] * 40))) == 1


@pytest.mark.parametrize(
    "field", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"seed": -1}]
)
def test_wrong_settings_are_refused(field):
    (name, value), *_ = field.items()
    with pytest.raises(ValueError, match=rf"Sampling.{name} must .*; got {value}"):
        Sampling(**field)
