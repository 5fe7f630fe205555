import jax
import jax.numpy as jnp

from k2jax.parallel.pairing import Done, alone, paired


def coroutine(log, name, x, exchanges):
    for i in range(exchanges):
        log.append(f"{name} computes {i}")
        x = (yield x + 1) * 2
    log.append(f"{name} computes {exchanges}")
    return Done(x, name)


def recorded(log):
    def travel(words):
        log.append("travel")
        return words * 3

    return travel


def test_each_exchange_has_the_other_units_computation_beside_it():
    log = []
    travel = recorded(log)
    first, second = paired(travel, coroutine(log, "b", jnp.float32(1), 4), lambda x: coroutine(log, "f", x, 4), jnp.float32(5))
    names = [line.split()[0] for line in log]
    assert names == ["b"] + ["travel", "f", "travel", "b"] * 4 + ["f"]
    assert (first.rest, second.rest) == ("b", "f")
    assert float(first.tied) == float(alone(recorded([]), coroutine([], "b", jnp.float32(1), 4)).tied)
    assert float(second.tied) == float(alone(recorded([]), coroutine([], "f", jnp.float32(5), 4)).tied)


def test_the_order_is_fixed_by_barriers():
    def both(x, y):
        log = []
        done = paired(recorded(log), coroutine(log, "b", x, 2), lambda y: coroutine(log, "f", y, 2), y)
        return done[0].tied, done[1].tied

    text = jax.jit(both).lower(1.0, 2.0).as_text()
    assert text.count("optimization_barrier") == 5  # at the start, and after each of the four exchanges
