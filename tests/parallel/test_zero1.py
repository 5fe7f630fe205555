"""Owned updates against the plain chain of optimizer transforms on the whole tree of one device.

Gradients are whole numbers times a power of two, so that their sum over ranks is the same in any order; what is left is the
order of sums inside Newton-Schulz and in norms.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from configs import k2
from k2jax.config import AttentionConfig, MeshConfig
from k2jax.model import transformer
from k2jax.optim.muon import by_path
from k2jax.optim.muonclip import muonclip
from k2jax.parallel import hlo, owned_update, ownership, zero1
from k2jax.parallel import mesh as meshes
from k2jax.parallel.layout import DENSE, IDENTITY, MTP
from tests.parallel.stages import cut, join, tree_map

SIZES = (2.0**-8, 1.0, 2.0)  # of the gradients of each step: a norm under the limit, and two over it
LAST_STAGE = ("hidden_norm_D", "embed_norm_D", "project_JD")
SMALL = {"n_layers": 1, "n_dense": 0, "n_mtp": 0}
GQA = AttentionConfig(kind="gqa", n_heads=4, n_kv_heads=2, d_nope=0, d_rope=8, d_value=8, block=32)
FEW = SMALL | {"attention": GQA, "moe": {"n_shared": 0}}  # four units
CASES = {
    "every part": (MeshConfig(pipeline=2, chunks=2, expert=2, data=2), {"split": "split"}, {"n_layers": 6}),
    "a place over": (MeshConfig(data=3), {"split": "joint"}, SMALL),  # 8 experts over 3 replicas
    "expert ranks": (MeshConfig(expert=4, data=1), {"rule": "muon", "split": "per_head"}, FEW),
    "idle ranks": (MeshConfig(expert=2, data=4), {}, FEW),
    "adamw": (MeshConfig(pipeline=2, data=3), {"rule": "adamw"}, SMALL | {"n_mtp": 1}),
}
ONE_BY_ONE = ("every part", "idle ranks", "adamw")  # cases in which each matrix is updated by itself too, as large ones are


def config_of(run_of, sizes, optim, changes):
    attention = changes.get("attention")
    optim = {"qk_tau": 1.0, "ns_steps": 1, "clip_norm": 40.0} | optim
    config = run_of(sizes, batch=96, optim=optim, **{key: value for key, value in changes.items() if key != "attention"})
    return replace(config, model=replace(config.model, attention=attention)) if attention else config


def stages_of(plan, natural):
    """Stage trees [P, EP, DP, ...]; what of MTP the last stage alone uses is zero on the others."""
    stages = cut(natural, plan.layout, plan.sizes.expert)
    for name in LAST_STAGE if "mtp" in stages else ():
        stages["mtp"][name][:-1] = 0
    return tree_map(lambda x: np.repeat(x[:, :, None], plan.sizes.data, axis=2), stages)


def draw(config, plan, natural, step):
    """Gradients of every rank, their sum, and largest logits, of which a third is over tau = 1."""
    rng, ranks = np.random.default_rng(step), {}
    for e in range(plan.sizes.expert):
        for d in range(plan.sizes.data):
            tree = tree_map(lambda x: (SIZES[step] * rng.integers(-8, 9, x.shape)).astype(np.float32), natural)
            for path, x in by_path(tree).items():  # a rank has gradients of its own experts alone
                if path[-1].endswith(("EDF", "EFD")):
                    x[:, np.arange(x.shape[1]) // (x.shape[1] // plan.sizes.expert) != e] = 0
            ranks[e, d] = tree
    gradients = tree_map(np.zeros_like, stages_of(plan, natural))
    for (e, d), tree in ranks.items():
        tree_map(lambda x, one, e=e, d=d: x.__setitem__(np.s_[:, e, d], one[:, e, d]), gradients, stages_of(plan, tree))
    stacks = {"dense": natural.get("dense"), "moe": natural.get("moe"), "mtp": natural.get("mtp", {}).get("block")}
    shapes = {k: (len(tree["ffn_norm_D"]), config.model.attention.n_heads) for k, tree in stacks.items() if tree}
    logit_LH = {stack: rng.uniform(-1.0, 2.0, shape).astype(np.float32) for stack, shape in shapes.items()}
    total = tree_map(lambda *x: sum(x), *ranks.values())
    return SimpleNamespace(gradients=gradients, total=total, logit_LH=logit_LH, logit_ZLH=by_slot(plan, logit_LH))


def by_slot(plan, logit_LH):
    """The statistic of every stage's slots; what a slot without a layer has is never read."""
    kind, layer = plan.layout.kind_ZL, plan.layout.layer_ZL
    out = np.full((*kind.shape, next(iter(logit_LH.values())).shape[-1]), 1e9, np.float32)
    for p, s in np.argwhere(kind != IDENTITY):
        out[p, s] = logit_LH[{DENSE: "dense", MTP: "mtp"}.get(kind[p, s], "moe")][layer[p, s]]
    return out


def compile_steps(config, plan, given):
    """(stages, gradients [K, ...], logits, rates, finite) -> stage trees of weights and moments, owned state, metrics."""
    mesh = meshes.make(config, jax.devices()[: meshes.count(config.mesh)])

    def body(stages, gradients, logit_ZLH, rates, finite):
        owned = zero1.own(plan, zero1.local(stages), plan.sections["params"])
        zeros = {name: {k: jax.tree.map(jnp.zeros_like, owned[k]) for k in plan.sections[name]} for name in plan.moments}

        def step(state, given):
            gradients, logit_LH, rate, finite = given
            *state, metrics = owned_update.update(plan, config, *state, gradients, rate, logit_LH, finite)
            return tuple(state), metrics

        gradients = jax.tree.map(lambda x: x.reshape(x.shape[0], *x.shape[4:]), gradients)
        given = gradients, logit_ZLH[:, 0], rates, finite
        state, metrics = jax.lax.scan(step, (owned, zeros | {"count": jnp.int32(0)}), given)
        owned = {"params": state[0]} | state[1]
        trees = {name: zero1.working(plan, owned[name], "float32") for name in plan.sections}
        return zero1.whole(trees), zero1.whole({k: x for k, x in owned.items() if k != "count"}), owned["count"], metrics

    rank, everywhere = PartitionSpec(*meshes.AXES), PartitionSpec()
    in_specs = rank, PartitionSpec(None, *meshes.AXES), PartitionSpec(None, "pipeline"), everywhere, everywhere
    out_specs = rank, rank, everywhere, everywhere
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    return f.lower(*given).compile()


def on_one_device(config, natural, given, rates):
    """Weights, moments and metrics of the plain chain."""
    optimizer = muonclip(config.optim, config.model)

    @jax.jit
    def step(params, state, gradients, rate, logit_LH):
        updates, state = optimizer.update(gradients, state, params, learning_rate=rate, max_logit_LH=logit_LH)
        return optax.apply_updates(params, updates), state, optax.tree.norm(gradients), optax.tree.norm(updates)

    params, state, metrics = natural, optimizer.init(natural), []
    for g, rate in zip(given, rates, strict=True):
        params, state, *norms = step(params, state, g.total, rate, g.logit_LH)
        metrics.append(norms)
    return params, state, np.array(metrics)


@pytest.fixture(scope="module", params=[*CASES, *(f"{name}, one by one" for name in ONE_BY_ONE)])
def run(request, run_of):
    """Three steps from the same weights on a mesh and on one device."""
    name, *one_by_one = request.param.split(", ")
    config = config_of(run_of, *CASES[name])
    plan = zero1.plan(config, config.mesh)
    natural = jax.tree.map(np.asarray, transformer.init(config.model, 1)[0])
    given = [draw(config, plan, natural, step) for step in range(len(SIZES))]
    gradients = tree_map(lambda *x: np.stack(x), *(g.gradients for g in given))
    inputs = stages_of(plan, natural), gradients, np.stack([g.logit_ZLH for g in given]), np.float32([0.02, 0.01, 0.03])
    finite = np.ones(len(SIZES), bool)
    with pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr(owned_update, "AT_ONCE", 0)
        program = compile_steps(config, plan, (*inputs, finite))
    trees, owned, count, metrics = jax.tree.map(np.asarray, program(*inputs, finite))
    one = jax.tree.map(np.asarray, on_one_device(config, natural, given, inputs[-1]))
    found = {"one_by_one": bool(one_by_one), "trees": trees, "owned": owned, "count": count, "metrics": metrics, "one": one}
    return SimpleNamespace(config=config, plan=plan, natural=natural, inputs=inputs, program=program, **found)


def joined(run, name):
    """The natural tree out of the stage trees of the weights or of a moment; leaves without that moment are zero."""
    held = by_path(run.trees[name])
    full = jax.tree.map_with_path(lambda path, x: held.get(tuple(k.key for k in path), np.zeros_like(x)), run.inputs[0])
    first = tree_map(lambda x: x[:, :, 0], full)
    for path, x in held.items():  # whole on every replica
        np.testing.assert_array_equal(x, np.repeat(x[:, :, :1], run.plan.sizes.data, axis=2), err_msg=str(path))
    return by_path(join(first, run.natural, run.plan.layout, run.plan.sizes.expert))


def close(a, b, name, share=2e-5):
    np.testing.assert_allclose(a, b, rtol=0, atol=share * np.abs(b).max() + 1e-12, err_msg=str(name))


def test_three_steps_equal_the_plain_chain(run):
    params, state, norms = run.one
    for path, x in by_path(params).items():
        close(joined(run, "params")[path], x, path)
    for name in run.plan.moments:
        moment = joined(run, name)
        reference = by_path(optax.tree.get(state, name))
        for path, x in moment.items():
            close(x, reference.get(path, np.zeros_like(x)), (name, path))
    assert run.count == optax.tree.get(state, "count") == len(SIZES)
    assert run.metrics["finite"].all()
    np.testing.assert_allclose(run.metrics["grad_norm"], norms[:, 0], rtol=1e-6)
    assert norms[0, 0] < run.config.optim.clip_norm < norms[1, 0]
    np.testing.assert_allclose(run.metrics["update_rms"], norms[:, 1] / run.plan.n_params**0.5, rtol=1e-5)


def test_a_step_that_is_not_finite_leaves_all_bits(run):
    stages, gradients, logit_ZLH, rates = run.inputs
    gradients = tree_map(np.copy, gradients)
    gradients["slots"]["attention"]["o_HVD"][1, 0, -1, -1].flat[0] = np.nan  # one number on one rank
    finite = np.array([False, True, True])
    trees, owned, count, metrics = jax.tree.map(np.asarray, run.program(stages, gradients, logit_ZLH, rates, finite))
    np.testing.assert_array_equal(metrics["finite"], [False, False, True])
    assert np.isnan(metrics["update_rms"][:2]).all() and np.isfinite(metrics["update_rms"][2])
    assert count == 1
    # The third step is as if there were no others: it may come first, and what it made stays.
    order = np.array([2, 0, 1])
    first = tree_map(lambda x: x[order], gradients), logit_ZLH[order], rates[order], finite[order]
    jax.tree.map(np.testing.assert_array_equal, (trees, owned), run.program(stages, *first)[:2])
    nothing = run.program(stages, gradients, logit_ZLH, rates, np.zeros(3, bool))
    for path, x in by_path(nothing[0]["params"]).items():
        np.testing.assert_array_equal(x, by_path(stages)[path], err_msg=str(path))
    assert not any(np.any(x) for name in run.plan.moments for x in jax.tree.leaves(nothing[1][name]))


def test_a_hot_head_is_scaled_in_its_layer_and_nowhere_else(run):
    stages, gradients, logit_ZLH, rates = run.inputs
    cold = np.zeros_like(logit_ZLH)
    hot, (p, s) = cold.copy(), np.argwhere(run.plan.layout.kind_ZL != IDENTITY)[-1]
    hot[0, p, s, 1] = 4.0
    once = np.array([True, False, False])
    trees = [run.program(stages, gradients, logits, rates, once)[0]["params"] for logits in (cold, hot)]
    trees = [by_path(jax.tree.map(np.asarray, tree)) for tree in trees]
    gqa, fires = run.config.model.attention.kind == "gqa", run.config.optim.rule == "muonclip"
    powers = {"q_DHR": 0.5, "k_DGR": 0.5} if gqa else {"q_nope_QHN": 0.5, "k_nope_CHN": 0.5, "q_rope_QHR": 1.0}
    for path, x in trees[0].items():
        expected = np.array(x)
        if fires and path[-1] in powers:
            # Query heads 0 and 1 of the GQA model read key head 0 and share its clip.
            heads = np.s_[:1] if path[-1] == "k_DGR" else np.s_[:2] if gqa else np.s_[1:2]
            expected[p, :, :, s, :, heads] *= 0.25 ** powers[path[-1]]
        np.testing.assert_allclose(trees[1][path], expected, rtol=2e-6, atol=1e-8, err_msg=str(path))
        assert not np.any((trees[1][path] != x) & (expected == x)), path


def test_a_rank_holds_its_share_and_what_lies_empty_is_zero(run):
    plan, R = run.plan, run.plan.ranks
    for name, sections in plan.sections.items():
        assert set(run.owned[name]) == set(sections)
    params = run.owned["params"]
    shapes = {path: x.shape[3:] for path, x in by_path(run.inputs[0]).items()}
    adamw = sum(math.prod(shapes[leaf.path]) for leaf in plan.adamw)
    assert adamw <= R * params["adamw"].shape[-1] < adamw + R * len(plan.adamw)
    pairs = plan.layout.slots * run.config.model.moe.n_experts // plan.sizes.expert
    for x in params["experts"].values():
        assert x.shape[3] == -(-pairs // plan.sizes.data)
    if "muon" in params:
        units = [sum(leaf.size for leaf in unit.leaves) for unit in plan.units]
        assert params["muon"].shape[-2:] == (R, plan.width)
        assert R * plan.width <= sum(units) / R + 2 * max(units) + R * len(units)
    for name, sections in plan.sections.items():
        owned = sum(np.count_nonzero(x) for x in jax.tree.leaves(run.owned[name]))
        copies = {path: np.s_[:, :, 0] if path[-1].endswith(("EDF", "EFD")) else np.s_[:, 0, 0] for path in shapes}
        assert owned == sum(np.count_nonzero(x[copies[path]]) for path, x in by_path(run.trees[name]).items()), sections


def test_collectives_of_the_compiled_step(run):
    program = hlo.parse(run.program.as_text())
    (step,) = program.bodies(lambda exchanges: "reduce-scatter" in [e.kind for e in exchanges])
    kinds = [e.kind for e in program.all_exchanges(step)]
    experts = 3 if run.plan.sizes.data > 1 else 0
    muon = "muon" in run.plan.sections["params"]
    assert sorted(kinds) == sorted(["reduce-scatter"] * (1 + experts) + ["all-to-all"] * muon + ["all-reduce"] * 2)
    sums = [e for e in program.exchanges(step) if e.kind == "all-reduce"]
    assert all(e.bytes == 4 for e in sums)  # the norm of the gradient, and that of the update
    loops = [i for i in program.walk(step) if i.opcode == "while"]
    assert len(loops) >= (len(run.plan.kinds) + 1) * run.one_by_one
    assert not any(program.all_exchanges(name) for loop in loops for name in loop.calls)


# Of FLOPs with symmetric products at half: an expert of 3.5 to 1 gains more by them than the nearly square output projection.
@pytest.mark.parametrize(("nodes", "bound"), [(32, 1.07), (64, 1.15), (256, 1.67)])
def test_newton_schulz_of_k2_is_balanced_as_far_as_whole_matrices_allow(nodes, bound):
    config = k2.config()
    plan = zero1.plan(config, MeshConfig(pipeline=16, expert=16, data=nodes // 32, chunks=4))
    assert plan.balance <= bound
    # No other owners would be better: one rank has an output matrix beside an equal share of the experts.
    largest = max(unit.cost for unit in plan.units if unit.used_Z.all())
    assert plan.load_ZR.max() <= 1.005 * (plan.experts.owned * plan.expert_cost + largest)
    text = ownership.render(plan)
    assert f"ratio {plan.balance:.3f}" in text and "o_HVD" in text


def test_state_on_the_host_is_updated_to_the_same_bits_and_stays_there(run_of):
    rng, results = np.random.default_rng(0), {}
    for offload in (False, True):
        config = config_of(run_of, MeshConfig(expert=2, data=2, offload=offload), {}, FEW)
        mesh, plan = meshes.make(config, jax.devices()[:4]), zero1.plan(config, config.mesh)
        if not results:
            owned = jax.tree.map(lambda x: np.asarray(rng.uniform(0, 1, x.shape), x.dtype), zero1.abstract_owned(plan))
            logit_LH = rng.uniform(0, 2, (plan.layout.slots, 4)).astype(np.float32)

        def body(params, opt_state, logit_LH, plan=plan, config=config):
            params, opt_state = zero1.local((params, opt_state))
            gradients = zero1.working(plan, params, "float32")  # any will do
            given = plan, config, params, opt_state, gradients, jnp.float32(0.1), logit_LH, jnp.bool_(True)
            return zero1.whole(owned_update.update(*given)[:2])

        specs = zero1.specs(plan)
        f = jax.shard_map(body, mesh=mesh, in_specs=(*specs, PartitionSpec()), out_specs=specs, check_vma=False)
        new = jax.jit(f, donate_argnums=(0, 1))(*jax.device_put(owned, zero1.shardings(plan, mesh)), logit_LH)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(new) if x.ndim}
        assert kinds == {"pinned_host" if offload else "device"}
        results[offload] = jax.tree.map(np.asarray, new)
    jax.tree.map(np.testing.assert_array_equal, *results.values())
    assert not np.array_equal(results[True][0]["muon"], owned[0]["muon"])
