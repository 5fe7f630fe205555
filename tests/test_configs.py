import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs import deepseek_v3, k2, ladder
from k2jax.config import RunConfig, differences, from_dict, to_dict
from k2jax.scaling.flops import count_params, training_flops

PRESETS = sorted(p.stem for p in Path(ladder.__file__).parent.glob("*.py") if p.stem != "__init__")
LADDER = [
    (s, preset, rung) for preset in ladder.RUNGS for rung in range(len(ladder.RUNGS[preset])) for s in ladder.SPARSITIES[preset]
]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_survives_json(name):
    config = importlib.import_module(f"configs.{name}").config()
    assert isinstance(config, RunConfig)
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert differences(again, replace(config, steps=config.steps + 1)) == [f"steps: {config.steps} != {config.steps + 1}"]


def test_k2_has_every_published_dimension():
    model = k2.config().model
    a, m = model.attention, model.moe
    assert (model.n_layers, model.n_dense, model.d_model, model.d_dense) == (61, 1, 7168, 18_432)
    assert (m.n_experts, m.n_active, m.n_shared, m.d_expert, m.n_groups, m.n_active_groups) == (384, 8, 1, 2048, 1, 1)
    assert (a.kind, a.n_heads, a.n_kv_heads, a.q_rank, a.kv_rank) == ("mla", 64, 64, 1536, 512)
    assert (a.d_nope, a.d_rope, a.d_value) == (128, 64, 128)
    assert (model.n_words, model.context, model.norm_eps, model.n_mtp) == (163_840, 131_072, 1e-6, 0)
    assert (a.rope.theta, a.rope.layout, m.routed_scale) == (50_000, "interleaved", 2.827)
    assert model.d_dense == (m.n_active + m.n_shared) * m.d_expert


def test_yarn_is_off_in_pretraining_and_on_as_released():
    assert k2.config().model.attention.rope.yarn_factor == 1
    rope = k2.released().attention.rope
    assert (rope.yarn_factor, rope.original_context, rope.beta_fast, rope.beta_slow) == (32, 4096, 1, 1)
    assert (rope.mscale, rope.mscale_all_dim) == (1, 1)
    assert count_params(k2.released()) == count_params(k2.config())


def test_k2_trains_on_its_schedules_tokens_at_67_million_a_step():
    config = k2.config()
    schedule = config.optim.schedule
    assert config.batch * config.seq_len == 2**26
    assert config.tokens == pytest.approx(schedule.warmup + schedule.stable + schedule.decay + schedule.anneal, rel=1e-4)
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.qk_tau) == (2e-4, 0.1, 100)


def test_deepseek_v3_differs_from_k2_where_the_report_says():
    model = deepseek_v3.config().model
    m = model.moe
    assert (m.n_experts, m.n_active, m.n_shared, m.n_groups, m.n_active_groups, m.routed_scale) == (256, 8, 1, 8, 4, 2.5)
    assert (model.n_dense, model.attention.n_heads, model.n_words, model.attention.rope.theta) == (3, 128, 129_280, 10_000)
    same = {"d_model", "n_layers", "d_dense"}
    assert all(getattr(model, name) == getattr(k2.config().model, name) for name in same)


@pytest.mark.parametrize("preset", ladder.RUNGS)
def test_a_rung_varies_the_experts_and_nothing_else(preset):
    for rung in range(len(ladder.RUNGS[preset])):
        base, *others = [ladder.config(s, preset, rung) for s in ladder.SPARSITIES[preset]]
        for sparsity, other in zip(ladder.SPARSITIES[preset][1:], others, strict=True):
            apart = {d.split(":")[0] for d in differences(base, other)}
            assert apart == {"name", "out", "model.moe.n_experts"}
            assert other.model.moe.n_experts == 8 * sparsity
            a, b = (training_flops(c, c.seq_len).without_router for c in (base, other))
            assert a == b


def test_rungs_rise_in_budget():
    for preset, rungs in ladder.RUNGS.items():
        budgets = [
            c.tokens * training_flops(c, c.seq_len).total for c in (ladder.config(8, preset, r) for r in range(len(rungs)))
        ]
        assert len(rungs) >= 3  # a curve needs three
        assert budgets == sorted(set(budgets))


def test_ladder_has_k2s_architecture_in_small():
    for sparsity, preset, rung in LADDER:
        model = ladder.config(sparsity, preset, rung).model
        assert model.attention.kind == "mla"
        assert (model.moe.n_active, model.moe.n_shared) == (8, 1)
        assert model.n_moe >= 2
        assert model.d_dense == 9 * model.moe.d_expert
        assert model.moe.routed_scale == 0  # 2.827 belongs to 8 of 384 alone


def test_validation_is_large_enough():
    for preset in ladder.RUNGS:
        config = ladder.config(8, preset, 0)
        assert 4 * config.eval_batches * config.batch * config.seq_len == pytest.approx(65_536, rel=0.5)


def test_unknown_rungs_are_refused():
    with pytest.raises(ValueError, match="preset must be one of smoke, default, full; got 'tiny'"):
        ladder.config(8, "tiny")
    with pytest.raises(ValueError, match=r"sparsity must be one of .*; got 7"):
        ladder.config(7)
    with pytest.raises(IndexError):
        ladder.config(8, "default", 9)
