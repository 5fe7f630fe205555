import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.optim.schedules import learning_rate
from k2jax.train.loss import count_targets
from k2jax.train.step import abstract_state, gradients, init_state, make_eval, make_step


def assert_same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_four_microbatches_equal_one(small, make_batch):
    small = replace(small, model=replace(small.model, n_mtp=1))
    batch = make_batch(3, 4, 33)
    rows = (batch["segments_BT"] > 0).sum(1)
    assert len(set(rows.tolist())) > 1  # unequal counts: the mean of means would differ
    state = init_state(small)

    def run(n):
        config = replace(small, microbatches=n)
        return jax.jit(lambda p, r, b: gradients(config, p, r, b))(state.params, state.router_bias, batch)

    (one, parts, total), (four, parts4, total4) = run(1), run(4)
    np.testing.assert_allclose(total, total4, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(a).max()) + 1e-9)
    np.testing.assert_allclose([parts.mtp, parts.balance], [parts4.mtp, parts4.balance], rtol=1e-6)
    for stack in parts.max_logit_LH:
        np.testing.assert_allclose(parts.max_logit_LH[stack], parts4.max_logit_LH[stack], rtol=1e-6)
    for stack in parts.load_LE:
        np.testing.assert_array_equal(parts.load_LE[stack], parts4.load_LE[stack])


def test_recomputed_layers_give_the_same_gradients(every_part, make_batch):
    batch, state = make_batch(4, 4, 33), init_state(every_part)

    def run(*around):
        f = jax.jit(lambda p, r, b: gradients(every_part, p, r, b, *around))
        given = state.params, state.router_bias, batch
        return f(*given), len(re.findall(r"(?:remat2?|checkpoint)\[", str(f.trace(*given).jaxpr)))

    (kept, none), (recomputed, layers) = run(), run(jax.checkpoint)
    assert (none, layers) == (0, 3)  # one for each stack: dense, moe, mtp
    for a, b in zip(jax.tree.leaves(recomputed), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(np.abs(b).max()))


def test_eight_devices_and_four_microbatches_observe_what_one_device_does(small, make_batch):
    """The largest logit of each head and the loads are over the whole batch, exactly, however it is split (report 2.1)."""
    batch, state = make_batch(5, 32, 33), init_state(small)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def parts(config, params, router_bias, batch):
        return jax.jit(lambda p, r, b: gradients(config, p, r, b)[1])(params, router_bias, batch)

    one = parts(replace(small, batch=32, microbatches=1), state.params, state.router_bias, batch)
    placed = jax.device_put((state.params, state.router_bias), everywhere)
    eight = parts(replace(small, batch=32, microbatches=4), *placed, jax.device_put(batch, rows))
    jax.tree.map(np.testing.assert_array_equal, one.load_LE, eight.load_LE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), one.max_logit_LH, eight.max_logit_LH)
    np.testing.assert_allclose(one.next_token, eight.next_token, rtol=1e-6)


@pytest.fixture(scope="module")
def program(base):
    return make_step(base)


@pytest.fixture
def stepped(base, program, fresh_state):
    """A config, its step and its first state."""
    return base, program, fresh_state()


def without(batch, token):
    return batch | {"tokens_BT": np.where(batch["tokens_BT"] == token, token + 1, batch["tokens_BT"])}


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_counters(stepped, make_batch):
    _, step, state = stepped
    total, good = np.float32(1e4), without(make_batch(0, 4, 33), 7)
    bad = good | {"tokens_BT": good["tokens_BT"].copy()}
    bad["tokens_BT"][0, 0] = 7
    state, _ = step(state, good, total)
    poisoned = state.params | {"embed_WD": state.params["embed_WD"].at[7].set(jnp.nan)}
    state = state._replace(params=poisoned)

    before = jax.tree.map(np.array, state)
    state, metrics = step(state, bad, total)
    after = jax.tree.map(np.array, state)
    for name in ("params", "router_bias", "opt_state", "last_fired_LH"):
        assert_same_bits(getattr(before, name), getattr(after, name))
    assert not np.isfinite(metrics["grad_norm"])
    assert (after.step, after.skips, after.skips_total) == (2, 1, 1)
    assert not any(np.asarray(fired).any() for fired in metrics["fired_LH"].values())

    state, _ = step(state, bad, total)
    assert (int(state.skips), int(state.skips_total)) == (2, 2)
    state, metrics = step(state, good, total)  # word 7 is not looked up: all is well again
    assert (int(state.step), int(state.skips), int(state.skips_total)) == (4, 0, 2)
    assert np.isfinite(metrics["grad_norm"])
    moved = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), before.params["moe"], state.params["moe"])
    assert not any(jax.tree.leaves(moved))


def test_the_step_remembers_which_heads_it_clipped(stepped, make_batch):
    config, step, state = stepped
    last = np.zeros((1, 2), int)
    for number in range(1, 5):
        state, metrics = step(state, make_batch(number, 4, 33), np.float32(1e4))
        over = np.asarray(metrics["max_logit_LH"]["moe"]) > config.optim.qk_tau
        np.testing.assert_array_equal(metrics["fired_LH"]["moe"], over)
        last = np.where(over, number, last)
        np.testing.assert_array_equal(state.last_fired_LH["moe"], last)
    assert last.any()


def test_the_router_bias_moves_once_by_the_load_of_all_microbatches(stepped, make_batch):
    config, step, state = stepped
    batch = make_batch(0, 4, 33)
    state, metrics = step(state, batch, np.float32(1e4))
    load = np.asarray(metrics["load_LE"]["moe"], float)
    assert load.sum() == 2 * (batch["segments_BT"][:, :-1] > 0).sum()
    sign = np.sign(load.mean(-1, keepdims=True) - load)
    expected = config.model.moe.bias_speed * (sign - sign.mean(-1, keepdims=True))
    np.testing.assert_allclose(state.router_bias["moe"], expected, atol=1e-9)
    assert np.abs(expected).max() > 0


def test_one_program_serves_every_budget(stepped, make_batch):
    config, step, state = stepped
    batch, tokens, rates = make_batch(0, 4, 33), config.batch * config.seq_len, []
    for total in (4 * tokens, 400 * tokens):
        state, metrics = step(state, batch, np.float32(total))
        n = int(state.step)
        np.testing.assert_allclose(metrics["learning_rate"], learning_rate(config.optim, n * tokens, total), rtol=1e-6)
        rates.append(float(metrics["learning_rate"]))
    assert rates[0] != rates[1] and step._cache_size() == 1


def test_evaluation_sums_over_targets(small, fresh_state, make_batch):
    state, evaluate, batch = fresh_state(), make_eval(small), make_batch(5, 4, 33)
    nll, count = evaluate(state, batch)
    assert int(count) == int(count_targets(jnp.asarray(batch["segments_BT"])).next_token)
    # Padding adds nothing: a batch with one row emptied has the sum of the others.
    parts = []
    for b in range(4):
        alone = {name: np.where(np.arange(4)[:, None] == b, a, 0) for name, a in batch.items()}
        parts.append(evaluate(state, alone))
    np.testing.assert_allclose(nll, sum(float(n) for n, _ in parts), rtol=1e-6)
    assert int(count) == sum(int(c) for _, c in parts)


def test_the_abstract_state_has_the_shapes_of_the_real_one(small, fresh_state):
    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes(abstract_state(small)) == shapes(fresh_state())
