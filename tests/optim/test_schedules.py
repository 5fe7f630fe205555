import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import OptimConfig, ScheduleConfig
from k2jax.optim.schedules import learning_rate

K2 = OptimConfig()
WARMUP, TOTAL = 500 * 2**26, 10e12 + 5.5e12 + 460e9


def test_k2_at_twelve_token_points():
    def cosine(u):
        return 2e-5 + 0.5 * (2e-4 - 2e-5) * (1 + math.cos(math.pi * u))

    want = {
        0: 0.0,
        2**26: 2e-4 / 500,  # after one step of 67M tokens
        250 * 2**26: 1e-4,
        500 * 2**26: 2e-4,
        5e12: 2e-4,
        10e12: 2e-4,
        10e12 + 5.5e12 / 4: cosine(1 / 4),
        10e12 + 5.5e12 / 2: 1.1e-4,
        10e12 + 5.5e12 * 0.9: cosine(0.9),
        15.5e12: 2e-5,
        15.5e12 + 230e9: 1.35e-5,
        TOTAL: 7e-6,
    }
    got = [float(learning_rate(K2, tokens, TOTAL)) for tokens in want]
    np.testing.assert_allclose(got, list(want.values()), rtol=1e-5)


@pytest.mark.parametrize("join", [WARMUP, 10e12, 15.5e12])
def test_continuous_at_the_joins(join):
    before, at, after = (float(learning_rate(K2, join + delta, TOTAL)) for delta in (-4e6, 0, 4e6))
    assert abs(before - at) < 2e-7 and abs(after - at) < 2e-7


def test_rises_then_never_rises_again():
    tokens = jnp.linspace(0, TOTAL, 20_001)
    rates = np.asarray(jax.vmap(lambda t: learning_rate(K2, t, TOTAL))(tokens))
    peak = int(np.argmax(rates))
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak:]) <= 0).all()
    decay = np.asarray(tokens) > 10.01e12
    assert (np.diff(rates[decay]) < 0).all()


def test_phases_stretch_to_any_run_in_one_program():
    program = jax.jit(lambda tokens, total: learning_rate(K2, tokens, total))
    for total in (1e6, 3e9, TOTAL):
        for share in (0.001, 0.3, 0.8, 0.99, 1.0):
            want = learning_rate(K2, share * TOTAL, TOTAL)
            np.testing.assert_allclose(program(share * total, total), want, rtol=1e-5)
    assert program._cache_size() == 1


def test_beyond_the_end_keeps_the_last_rate():
    assert float(learning_rate(K2, 2 * TOTAL, TOTAL)) == float(learning_rate(K2, TOTAL, TOTAL))


def test_shapes_and_phases_of_no_length():
    linear = ScheduleConfig(warmup=0.0, stable=1.0, decay=1.0, anneal=0.0, decay_shape="linear", decay_to=0.2)
    config = OptimConfig(learning_rate=1.0, schedule=linear)
    got = [float(learning_rate(config, tokens, 8)) for tokens in (0, 4, 5, 6, 8)]
    np.testing.assert_allclose(got, [1, 1, 0.8, 0.6, 0.2], rtol=1e-6)
    constant = OptimConfig(learning_rate=1.0, schedule=ScheduleConfig(warmup=0.0, stable=1.0, decay=0.0, anneal=0.0))
    assert [float(learning_rate(constant, tokens, 8)) for tokens in (0, 8)] == [1, 1]
