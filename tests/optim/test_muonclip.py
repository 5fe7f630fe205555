import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k2jax.config import AttentionConfig, ModelConfig, OptimConfig
from k2jax.optim.muonclip import muonclip, render, rule_of, rules, table

MLA = ModelConfig(d_model=8, attention=AttentionConfig(n_heads=3, n_kv_heads=3))
COLD = {"dense": np.zeros((1, 3), np.float32), "moe": np.zeros((2, 3), np.float32), "mtp": np.zeros((1, 3), np.float32)}


MOE_COLD = {"moe": COLD["moe"]}


K2 = ModelConfig()


def leaves(tree):
    return {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def matrices(name, x, split):
    """(index, function that puts a matrix back into the leaf's layout) -> matrix, for the split and per_head modes."""
    letters = name.rsplit("/", 1)[-1].rsplit("_", 1)[-1]
    lead = x.ndim - len(letters) + (letters[0] == "E")
    for index in np.ndindex(*x.shape[:lead]):
        one = x[index]
        if one.ndim == 2:
            yield index, one
        elif split == "per_head" and letters[0] == "H":
            for h in range(3):
                yield (*index, h), one[h]
        elif split == "per_head":
            for h in range(3):
                yield (*index, slice(None), h), one[:, h]
        else:
            yield index, one.reshape(-1, one.shape[-1]) if letters[0] == "H" else one.reshape(one.shape[0], -1)


def reference(config, params, grads, logits, rates, quintic):
    """Algorithm 1 in float64 over len(grads) steps: clip the norm, Muon or AdamW, decay, and the clip of hot heads."""
    w = {name: np.asarray(x, np.float64) for name, x in leaves(params).items()}
    first, second = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    for step, (grad, logit, rate) in enumerate(zip(grads, logits, rates, strict=True), 1):
        g = {name: np.asarray(x, np.float64) for name, x in leaves(grad).items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        for name in w:
            gn = g[name] * min(1, config.clip_norm / norm)
            if "norm" in name or name in ("embed_WD", "head_WD"):
                first[name] = config.adam_b1 * first[name] + (1 - config.adam_b1) * gn
                second[name] = config.adam_b2 * second[name] + (1 - config.adam_b2) * gn**2
                corrected = first[name] / (1 - config.adam_b1**step), second[name] / (1 - config.adam_b2**step)
                move = corrected[0] / (np.sqrt(corrected[1]) + config.adam_eps)
            else:
                first[name] = config.momentum * first[name] + gn
                fed = config.momentum * first[name] + gn if config.nesterov else first[name]
                move = np.zeros_like(fed)
                for index, matrix in matrices(name, fed, config.split):
                    o = 0.2 * np.sqrt(max(matrix.shape)) * quintic(matrix)
                    move[index] = o.reshape(move[index].shape)
            w[name] = w[name] - rate * (move + config.weight_decay * w[name])
        for stack in logit:
            block = "mtp/block" if stack == "mtp" else stack
            for layer, head in zip(*np.nonzero(logit[stack] > config.qk_tau), strict=True):
                gamma = config.qk_tau / logit[stack][layer, head]
                w[f"{block}/attention/q_nope_QHN"][layer, :, head] *= np.sqrt(gamma)
                w[f"{block}/attention/k_nope_CHN"][layer, :, head] *= np.sqrt(gamma)
                w[f"{block}/attention/q_rope_QHR"][layer, :, head] *= gamma
    return w


@pytest.mark.parametrize(("split", "nesterov", "tree"), [("split", True, "shapes"), ("per_head", False, "few")])
def test_twenty_jitted_steps_equal_algorithm_1(split, nesterov, tree, request, normal, quintic):
    shapes = request.getfixturevalue(tree)
    stacks = {stack: COLD[stack].shape for stack in shapes if stack in COLD}
    config = OptimConfig(split=split, nesterov=nesterov, clip_norm=20.0, ns_dtype="float32")
    params = jax.tree.map(lambda x: 0.1 * x, normal(shapes, 0))
    sizes = [0.1 if i % 3 == 0 else 2.0 for i in range(20)]  # norms on both sides of clip_norm
    grads = [jax.tree.map(lambda x, size=size: size * x, normal(shapes, 1 + i)) for i, size in enumerate(sizes)]
    rng = np.random.default_rng(0)
    logits = [{k: rng.uniform(-20, 130, x).astype(np.float32) for k, x in stacks.items()} for _ in range(20)]
    rates = [1e-2 * (1 + i) / 20 for i in range(20)]
    assert any(optax.tree.norm(g) > config.clip_norm for g in grads)
    assert any(optax.tree.norm(g) < config.clip_norm for g in grads)

    tx = muonclip(config, MLA)

    @jax.jit
    def step(params, state, grads, rate, logits):
        updates, state = tx.update(grads, state, params, learning_rate=rate, max_logit_LH=logits)
        return optax.apply_updates(params, updates), state

    got, state = params, tx.init(params)
    for grad, rate, logit in zip(grads, rates, logits, strict=True):
        got, state = step(got, state, grad, rate, logit)
    assert step._cache_size() <= 2  # numpy in, then jax arrays; never one program a rate
    want = reference(config, params, grads, logits, rates, quintic)
    for name, x in leaves(got).items():
        error = np.linalg.norm(np.asarray(x, np.float64) - want[name]) / np.linalg.norm(want[name])
        assert error < 2e-5, (name, error)


def test_zero_gradient_decays_every_weight_by_the_base_rate(few, normal):
    params = normal(few, 0)
    config = OptimConfig(rule="muon", weight_decay=0.125)
    tx = muonclip(config, MLA)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params, learning_rate=0.0625, max_logit_LH=MOE_COLD)
    after = optax.apply_updates(params, updates)
    # Rate and decay are powers of two, so that one rounding is all there is: equality is exact.
    jax.tree.map(lambda w, x: np.testing.assert_array_equal(x, w * np.float32(1 - 2**-7)), params, after)


def test_every_leaf_has_one_rule(shapes, normal):
    labels = leaves(rules(OptimConfig(), normal(shapes, 0)))
    adamw = {name for name, label in labels.items() if label == "adamw"}
    norms = {f"{b}/{n}" for b in ("dense", "moe", "mtp/block") for n in ("attention_norm_D", "ffn_norm_D")}
    norms |= {"norm_D", "mtp/hidden_norm_D", "moe/attention/q_norm_Q", "moe/attention/kv_norm_C"}
    assert adamw == norms | {"embed_WD", "head_WD"}
    muon = {name for name, label in labels.items() if label == "muon"}
    assert muon | adamw == set(labels)
    assert {"moe/ffn/router_DE", "moe/ffn/gate_EDF", "mtp/project_JD", "moe/attention/o_HVD"} <= muon
    assert set(leaves(rules(OptimConfig(rule="adamw"), normal(shapes, 0))).values()) == {"adamw"}


@pytest.mark.parametrize("name", ["bias_E", "router_bias", "table_WD", "gate", "x_QH", "conv_DFR"])
def test_a_leaf_without_a_rule_is_named(name, few, normal):
    params = normal(few, 0)
    params["moe"]["ffn"][name] = np.ones((2, 3, 3, 3), np.float32)
    with pytest.raises(ValueError, match=f"no update rule for moe/ffn/{name}"):
        muonclip(OptimConfig(), MLA).init(params)
    with pytest.raises(ValueError, match=f"no update rule for moe/ffn/{name}"):
        table(OptimConfig(), K2, params)


PAIR = {"embed_WD": (11, 8), "moe": {"gate_EDF": (2, 4, 8, 5)}}  # a leaf of each rule


def test_one_rate_and_one_decay_drive_both_rules(normal):
    params, grads = normal(PAIR, 0), normal(PAIR, 1)

    def updates(decay, *rates):
        tx = muonclip(OptimConfig(rule="muon", weight_decay=decay), MLA)
        update = jax.jit(tx.update)
        return [update(grads, tx.init(params), params, learning_rate=rate, max_logit_LH={})[0] for rate in rates]

    once, twice = updates(0.25, 0.01, 0.02)
    (bare,) = updates(0.0, 0.01)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * a, b), once, twice)
    jax.tree.map(lambda a, b, w: np.testing.assert_allclose(a - b, -0.0025 * w, atol=1e-7), once, bare, params)


def test_adamw_may_have_a_rate_and_a_decay_of_its_own(normal):
    """Both as multiples; what Muon updates does not move."""
    params, grads = normal(PAIR, 0), normal(PAIR, 1)

    def update(**fields):
        tx = muonclip(OptimConfig(rule="muon", **fields), MLA)
        return jax.jit(tx.update)(grads, tx.init(params), params, learning_rate=0.01, max_logit_LH={})[0]

    bare, same, own = (
        update(weight_decay=0.0),
        update(weight_decay=0.1),
        update(weight_decay=0.1, adamw_rate=3.0, adamw_decay=0.5),
    )
    np.testing.assert_array_equal(own["moe"]["gate_EDF"], same["moe"]["gate_EDF"])
    embed = 3 * (bare["embed_WD"] - 0.01 * 0.05 * params["embed_WD"])
    np.testing.assert_allclose(own["embed_WD"], embed, rtol=1e-6, atol=1e-9)


def test_rules_of_the_whole(few, normal):
    del few["moe"]["ffn"]
    params, grads = normal(few, 0), normal(few, 1)
    hot = {"moe": MOE_COLD["moe"] + 200}

    def updates(rule, *logits):
        tx = muonclip(OptimConfig(rule=rule, weight_decay=0.0, clip_norm=0.0), MLA)
        update = jax.jit(tx.update)
        return [update(grads, tx.init(params), params, learning_rate=0.01, max_logit_LH=each)[0] for each in logits]

    (plain,), (cold, clipped), (adamw,) = updates("muon", hot), updates("muonclip", MOE_COLD, hot), updates("adamw", hot)
    jax.tree.map(np.testing.assert_array_equal, plain, cold)
    same = jax.tree.map(np.array_equal, plain, clipped)
    moved = {name.rsplit("/", 1)[-1] for name, equal in leaves(same).items() if not equal}
    assert moved == {"q_nope_QHN", "q_rope_QHR", "k_nope_CHN"}
    # AdamW's first step is the sign of the gradient.
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -0.01 * np.sign(g), rtol=1e-3), adamw, grads)


def test_clip_norm_scales_the_whole_gradient(normal):
    grads = normal(PAIR, 1)
    norm = float(optax.tree.norm(grads))
    for clip_norm, share in ((0.0, 1), (norm / 4, 0.25), (norm * 4, 1)):
        tx = muonclip(OptimConfig(rule="muon", clip_norm=clip_norm), MLA)
        _, state = jax.jit(tx.update)(grads, tx.init(grads), grads, learning_rate=0.01, max_logit_LH={})
        inner = state[1].inner_states
        np.testing.assert_allclose(
            inner["muon"].inner_state[0].momentum["moe"]["gate_EDF"], share * grads["moe"]["gate_EDF"], rtol=1e-6
        )
        np.testing.assert_allclose(inner["adamw"].inner_state[0].mu["embed_WD"], 0.1 * share * grads["embed_WD"], rtol=1e-6)


def test_table_describes_k2_without_allocating():
    def stack(lead, **shapes):
        return {name: jax.ShapeDtypeStruct((lead, *shape), jnp.float32) for name, shape in shapes.items()}

    params = {
        "embed_WD": jax.ShapeDtypeStruct((163_840, 7168), jnp.float32),
        "moe": {
            "attention": stack(60, o_HVD=(64, 128, 7168), q_nope_QHN=(1536, 64, 128), q_rope_QHR=(1536, 64, 64)),
            "ffn": stack(60, gate_EDF=(384, 7168, 2048), router_DE=(7168, 384)),
        },
    }
    rows = {row.path: row for row in table(OptimConfig(), K2, params)}
    assert list(rows) == list(leaves(params))
    assert rows["embed_WD"].rule == "adamw" and rows["embed_WD"].matrices == 0
    gate = rows["moe/ffn/gate_EDF"]
    assert gate[1:5] == ("muon", 60 * 384, 7168, 2048) and gate.form == "gram"
    assert gate.flops == 60 * 384 * (6 * 2048**2 * 7168 + 14 * 2048**3)  # symmetric products at half
    scales = {"q_nope_QHN": 18.10, "q_rope_QHR": 12.80, "o_HVD": 18.10}  # Moonlight's rule on K2's shapes
    for name, scale in scales.items():
        assert rows[f"moe/attention/{name}"].scale == pytest.approx(scale, abs=5e-3)
    assert rows["moe/ffn/router_DE"].form == "gram" and rows["moe/ffn/router_DE"].flops == 60 * (
        6 * 384**2 * 7168 + 14 * 384**3
    )

    joint = {row.path: row for row in table(OptimConfig(split="joint"), K2, params)}
    assert joint["moe/attention/q_nope_QHN"][2:5] == (60, 1536, 12_288)
    assert joint["moe/attention/q_nope_QHN"].scale == pytest.approx(22.17, abs=5e-3)
    assert joint["moe/attention/q_rope_QHR"].matrices == joint["moe/attention/q_rope_QHR"].flops == 0
    text = render(list(rows.values())).splitlines()
    assert len(text) == 2 + len(rows)
    assert any(line.split()[:5] == ["moe/ffn/gate_EDF", "muon", "23040", "7168", "x"] for line in text)


def test_rule_of_reads_the_name_alone():
    assert rule_of(OptimConfig(), ("anywhere", "router_DE")) == "muon"
    assert rule_of(OptimConfig(), ("anywhere", "kv_norm_C")) == "adamw"
