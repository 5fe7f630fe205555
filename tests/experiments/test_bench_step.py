import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _step_parts, bench_step
from experiments.bench_step import Bench, Timing
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig
from k2jax.scaling.flops import count_params, training_flops

TINY = replace(
    bench_step.peer_shape("muonclip"),
    batch=2,
    seq_len=8,
    model=ModelConfig(
        **{"n_words": 32, "d_model": 8, "n_layers": 3, "n_dense": 1, "d_dense": 16, "context": 16, "dtype": "float32"},
        attention=AttentionConfig(
            **{"n_heads": 2, "n_kv_heads": 2, "q_rank": 4, "kv_rank": 4, "d_nope": 4, "d_rope": 4, "d_value": 4}, block=8
        ),
        moe=MoEConfig(n_experts=4, n_active=2, d_expert=4, routed_scale=0.0),
    ),
    data=replace(bench_step.peer_shape("adamw").data, tokenizer="byte"),
)


def test_the_peers_shape_is_the_peers():
    """Weights of a layer by hand: MLA of 4 heads, ranks 32 and 16, and the feed-forwards of width 64."""
    config = bench_step.peer_shape("adamw")
    attention = 64 * 32 + 32 + 32 * 4 * (128 + 64) + 64 * (16 + 64) + 16 + 16 * 4 * (128 + 128) + 4 * 128 * 64
    swiglu, norms = 3 * 64 * 64, 2 * 64
    expert_layer = attention + norms + 17 * swiglu + 64 * 16 + 16
    assert count_params(config).total == 2 * 1024 * 64 + 64 + (attention + norms + swiglu) + 3 * expert_layer
    assert (config.batch, config.seq_len, config.model.moe.n_active) == (4, 128, 8)


def test_every_part_of_a_step_runs_and_gives_gradients_that_are_finite():
    parts = _step_parts.parts(TINY)
    assert parts.keys() == {"attention", "dense", "router", "experts", "head", "optimizer"}
    for name, run in parts.items():
        leaves = jax.tree.leaves(run())
        assert all(bool(jnp.isfinite(x).all()) for x in leaves), name
        assert any(float(jnp.abs(x).max()) > 0 for x in leaves), name
    # One program a layer that has the part.
    assert [len(parts[name]()) for name in ("attention", "dense", "router", "experts")] == [3, 1, 2, 2]


def test_the_whole_step_goes_on_from_its_own_result():
    again = _step_parts.step(TINY)
    first, second = again(), again()
    assert np.isfinite(first["loss"]) and first["loss"] != second["loss"]


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """An interpreter that answers as one with MaxText does, and keeps what it was asked."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "if sys.argv[1] == '-c':\n"
        "    print('/somewhere/maxtext')\n"
        "else:\n"
        f"    open({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv))\n"
        "    steps = next(int(a[6:]) for a in sys.argv if a.startswith('steps='))\n"
        "    for n in range(steps):\n"
        "        print(f'I1 metric_logger.py:1] completed step: {n}, seconds: {9 if n < 10 else 0.25 + n / 1000:.3f}')\n"
    )
    path.chmod(0o755)
    return path


def test_the_peers_times_are_read_without_its_first_steps(peer, tmp_path):
    found = bench_step.time_peer(Bench(peer=peer, steps=13), "muonclip", tmp_path)
    assert found.step_s == [0.260, 0.261, 0.262] and 0 < found.start_s < 60
    asked = (tmp_path / "asked").read_text().split()
    assert {"opt_type=muon", "use_qk_clip=True", "base_num_decoder_layers=4", "steps=13"} <= set(asked)
    assert asked[3] == os.path.join("/somewhere/maxtext", "configs", "base.yml")


def test_a_peer_that_is_none_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="has no MaxText"):
        bench_step.time_peer(Bench(peer=Path(sys.executable)), "adamw", tmp_path)


def test_figures_are_medians_over_all_runs_and_ratios_to_the_peer():
    bench = Bench(peer=Path("python"))
    runs = {rule: Timing([s, 3 * s, s], 10.0) for rule, s in (("adamw", 0.1), ("muonclip", 0.2))}
    timings = {("peer", rule, kind): [run] for rule, run in runs.items() for kind in ("cold", "warm")}
    timings |= {("maxtext", rule, "cold"): [Timing([0.4, 0.4], 40.0)] for rule in runs}
    row = bench_step._shape_row(bench, "peer", timings, rate=1e9)
    assert (row["adamw_s"], row["muonclip_s"]) == (0.1, 0.2)
    assert row["over_maxtext"] == {"adamw": 0.25, "muonclip": 0.5}
    assert row["start_over_maxtext"] == {"adamw": 0.25, "muonclip": 0.25}
    assert row["tokens_per_s"] == 512 / 0.2
    active = training_flops(bench_step.peer_shape("adamw").model, 128).total
    np.testing.assert_allclose(row["active_flops_fraction"], 512 * active / 0.2 / 1e9)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match=r"shapes are peer, sweep8, .*; got K2"):
        bench_step.main(Bench(shapes=("peer", "K2")))
