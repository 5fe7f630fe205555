import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k2jax.config import AttentionConfig
from k2jax.model import transformer
from k2jax.optim.muonclip import rules
from k2jax.optim.qk_clip import qk_clip
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


FROZEN = np.float32(1e30)  # tokens of a run so long that its first steps have no learning rate: a step is then its clip alone


def heated(params, stack, factor_LH):
    """The weights with the queries of a stack's heads scaled."""
    block = params[stack]["block"] if stack == "mtp" else params[stack]
    factor = np.array(factor_LH, np.float32)[:, None, :, None]
    queries = {name: factor * block["attention"][name] for name in ("q_nope_QHN", "q_rope_QHR")}
    block = block | {"attention": block["attention"] | queries}
    return params | {stack: params[stack] | {"block": block} if stack == "mtp" else block}


CLIP = {"q_nope_QHN": 0.5, "k_nope_CHN": 0.5, "q_rope_QHR": 1.0}  # leaf -> power of gamma


def assert_clipped(before, after, gamma_LH):
    """Heads are scaled by their gamma; where that is 1, and in every other leaf, no bit has changed.

    The clip is an update, added to the weights, so what is left is rounded at their old size: 6e-8 / gamma, of gammas to 0.05.
    """
    for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True):
        keys, new, old = [key.key for key in path], np.array(new), np.array(old)
        if keys[-1] in CLIP and keys[0] in gamma_LH:
            gamma = np.asarray(gamma_LH[keys[0]])[:, None, :, None]
            np.testing.assert_allclose(new, gamma ** CLIP[keys[-1]] * old, rtol=2e-6, atol=1e-8, err_msg=str(keys))
            new, old = (np.where(gamma == 1, w, 0) for w in (new, old))
        np.testing.assert_array_equal(new, old, err_msg=str(keys))


def test_the_clip_of_a_step_takes_a_hot_head_to_tau_and_leaves_all_else(stepped, make_batch):
    config, step, state = stepped
    params, tau = heated(state.params, "moe", [[1e-3, 2.0]]), config.optim.qk_tau
    before = jax.tree.map(np.array, params)
    state, first = step(state._replace(params=params), make_batch(0, 4, 33), FROZEN)
    first, after = jax.tree.map(np.array, (first, state.params))
    logits = first["max_logit_LH"]["moe"]
    assert logits[0, 0] < tau < 10 * tau < logits[0, 1]
    assert_clipped(before, after, {"moe": tau / np.maximum(tau, logits)})
    _, second = step(state, make_batch(0, 4, 33), FROZEN)
    again = np.asarray(second["max_logit_LH"]["moe"])
    np.testing.assert_allclose(again[0, 1], tau, rtol=1e-5)
    np.testing.assert_array_equal(again[0, 0], logits[0, 0])


def test_mtps_layer_is_clipped_by_what_it_saw_itself(every_part, make_batch):
    """Only its head is hot: the trunk keeps every bit, hence MTP its inputs, and run again the head is at tau."""
    config, batch = replace(every_part, optim=replace(every_part.optim, qk_tau=1.0)), make_batch(0, 4, 33)
    params, router_bias = transformer.init(config.model, 0)
    params = jax.tree.map(np.array, heated(params, "mtp", [[1.0, 50.0]]))
    given = [jnp.asarray(x) for x in batch.values()]
    forward = jax.jit(lambda params: transformer.apply(config.model, params, router_bias, *given).aux.max_logit_LH)
    clip = qk_clip(config.optim, config.model.attention)
    before = forward(params)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(lambda params, s: clip.update(zeros, optax.EmptyState(), params, max_logit_LH=s))(params, before)
    new = optax.apply_updates(params, updates)
    gamma = 1 / np.maximum(1, before["mtp"])
    assert gamma[0, 1] < 0.3
    assert_clipped(params, new, {"mtp": gamma})
    after = forward(new)
    np.testing.assert_allclose(after["mtp"][0, 1], 1, rtol=1e-5)
    after["mtp"], before["mtp"] = after["mtp"][0, 0], before["mtp"][0, 0]
    assert_same_bits(after, before)


def test_bfloat16_steps_clip_the_float32_weights_of_one_layer_whatever_the_microbatches(small, make_batch):
    """The clip goes to the master weights, in float32 and in the layer that is hot alone; the copy that the next forward pass
    works with is made of them. The largest logits lie in different microbatches."""
    config = replace(small, microbatches=4, model=replace(small.model, dtype="bfloat16", n_layers=2))
    step, state, tau, batch = make_step(config), init_state(config), config.optim.qk_tau, make_batch(0, 4, 33)
    params = heated(state.params, "moe", [[1e-3, 2.0], [1e-3, 1e-3]])
    before = jax.tree.map(np.array, params)
    alone = []
    for b in range(4):
        row = {name: np.where(np.arange(4)[:, None] == b, x, 0) for name, x in batch.items()}
        _, metrics = step(jax.tree.map(jnp.array, state._replace(params=before)), row, FROZEN)
        alone.append(np.asarray(metrics["max_logit_LH"]["moe"]))
    state, first = step(state._replace(params=params), batch, FROZEN)
    logits, after = jax.tree.map(np.array, (first["max_logit_LH"]["moe"], state.params))
    np.testing.assert_array_equal(logits, np.max(alone, axis=0))
    assert len(set(np.argmax(alone, axis=0).flat)) > 1
    np.testing.assert_array_equal(first["fired_LH"]["moe"], [[0, 1], [0, 0]])
    np.testing.assert_array_equal(state.last_fired_LH["moe"], [[0, 1], [0, 0]])
    assert {x.dtype for x in jax.tree.leaves(after)} == {np.dtype("float32")} and logits[0, 1] > 10 * tau
    assert_clipped(before, after, {"moe": tau / np.maximum(tau, logits)})
    _, second = step(state, batch, FROZEN)
    again = np.asarray(second["max_logit_LH"]["moe"])
    np.testing.assert_allclose(again[0, 1], tau, rtol=2**-7)
    np.testing.assert_array_equal(again[0, 0], logits[0, 0])


def test_a_pair_that_is_masked_does_not_fire(stepped):
    """Word 1 asks for what word 2 has: their logit is huge, all others are zero. Only where 1 sees 2 does the head fire."""
    config, step, state = stepped
    params = jax.tree.map(np.array, state.params)
    params["embed_WD"] = np.eye(260, 16, dtype=np.float32)
    params["embed_WD"][3:] = params["embed_WD"][0]
    layer = {name: np.zeros_like(w) for name, w in params["moe"]["attention"].items()}
    layer |= {name: params["moe"]["attention"][name] for name in ("q_norm_Q", "kv_norm_C", "v_CHV", "o_HVD")}
    for word, name in ((1, "q_down_DQ"), (2, "kv_down_DC")):
        layer[name][0, :, 1] = 1  # all words to the second channel of the low rank, but this one to the first
        layer[name][0, word] = np.eye(8)[0]
    layer["q_nope_QHN"][0, 0, 0, 0] = layer["k_nope_CHN"][0, 0, 0, 0] = 100
    params["moe"] = params["moe"] | {"attention": layer}

    def fires(*documents):
        batch = {name: np.zeros((4, 33), np.int32) for name in ("tokens_BT", "segments_BT", "positions_BT")}
        tokens, segments = ([x for pair in documents for x in f(*pair)] for f in (lambda n, w: w, lambda n, w: [n] * len(w)))
        batch["tokens_BT"][2, : len(tokens)], batch["segments_BT"][2, : len(tokens)] = tokens, segments
        _, metrics = step(jax.tree.map(jnp.array, state._replace(params=params)), batch, FROZEN)
        logits = np.asarray(metrics["max_logit_LH"]["moe"][0])
        assert logits[1] == 0 and (logits[0] > 1e4 or logits[0] == 0)
        np.testing.assert_array_equal(metrics["fired_LH"]["moe"][0], logits > config.optim.qk_tau)
        return logits[0] > 0

    assert fires((1, [2, 5, 1, 5]))
    assert not fires((1, [1, 5, 2, 5]))  # a later key
    assert not fires((1, [5, 2, 5]), (2, [1, 5, 5]))  # of another document
    assert not fires((1, [5, 2, 5]), (0, [1, 5, 5]))  # asked by padding
    assert not fires((1, [5, 5]), (0, [2]), (1, [1, 5]))  # padding that is asked


def test_a_skipped_step_clips_nothing_however_hot_the_heads(stepped, make_batch):
    config, step, state = stepped
    state, _ = step(state, make_batch(0, 4, 33), np.float32(1e4))
    params = heated(state.params, "moe", [[1.0, 30.0]])
    params = params | {"head_WD": params["head_WD"].at[7].set(jnp.nan)}  # after attention: the logits are sound
    before = jax.tree.map(np.array, state._replace(params=params))
    state, metrics = step(state._replace(params=params), make_batch(1, 4, 33), FROZEN)
    assert metrics["max_logit_LH"]["moe"][0, 1] > 10 * config.optim.qk_tau and state.skips == 1
    for name in ("params", "opt_state", "router_bias", "last_fired_LH"):
        assert_same_bits(getattr(before, name), getattr(state, name))
    assert not metrics["fired_LH"]["moe"].any()


def test_with_qk_norm_a_step_has_logits_that_the_gains_bound(small, make_batch):
    """Multi-head attention; weights a thousand times too large, and the logits stay where the gains have them."""
    mha = AttentionConfig(kind="gqa", n_heads=2, n_kv_heads=2, d_nope=0, d_rope=8, d_value=8, block=32, qk_norm=True)
    model = replace(small.model, n_dense=1, attention=mha)
    config = replace(small, microbatches=1, model=model, optim=replace(small.optim, rule="adamw"))
    step, state = make_step(config), init_state(config)
    layer = state.params["dense"]["attention"]
    layer = layer | {name: 1e3 * layer[name] for name in ("q_DHR", "k_DGR")}
    state = state._replace(params=state.params | {"dense": state.params["dense"] | {"attention": layer}})
    before = jax.tree.map(np.array, state.params["dense"]["attention"])
    for number in (0, 1):
        gains = [np.abs(np.array(state.params["dense"]["attention"][name])).max() for name in ("q_norm_R", "k_norm_R")]
        state, metrics = step(state, make_batch(number, 4, 33), np.float32(1e4))
        assert 0.5 < np.asarray(metrics["max_logit_LH"]["dense"]).max() <= np.sqrt(8) * np.prod(gains) * (1 + 1e-5)
    assert metrics["skips_total"] == 0 and np.isfinite(metrics["loss"])
    moved = {name: (w != before[name]).any() for name, w in state.params["dense"]["attention"].items()}
    assert set(moved) >= {"q_norm_R", "k_norm_R"} and all(moved.values())
    rule = rules(replace(small.optim, rule="muon"), transformer.abstract(model)[0])["dense"]["attention"]
    assert {name for name in rule if rule[name] == "adamw"} == {"q_norm_R", "k_norm_R"}
    with pytest.raises(ValueError, match=r"qk_norm needs optim\.rule muon or adamw, got muonclip"):
        replace(config, optim=small.optim)


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
