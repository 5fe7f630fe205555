"""The optimizers' bench on a tree of a few matrices: that it compares the same work, and what it prints."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from configs import tiny
from experiments import bench_optimizer as bench
from k2jax.optim.muon import by_path


@pytest.fixture
def small(monkeypatch):
    """The tiny model in place of every tree's."""
    model = tiny.config().model
    model = replace(model, n_layers=2, n_dense=1, moe=replace(model.moe, n_experts=8))
    monkeypatch.setattr(bench, "model_of", lambda name: model)
    return model


def test_trees_have_the_weights_they_are_named_after():
    sizes = {name: sum(x.size for x in jax.tree.leaves(bench.tree_of(name))) for name in ("sweep", "100m", "k2_experts")}
    assert 95e6 < sizes["100m"] < 105e6 and sizes["k2_experts"] == 2 * 7168 * 2048
    assert by_path(bench.tree_of("sweep"))["moe", "ffn", "gate_EDF"].shape[1] == 512


@pytest.mark.parametrize(
    ("leaf", "ndim", "rows", "columns"),
    [
        ("down_EFD", 4, 2, 3),
        ("q_down_DQ", 3, 1, 2),
        ("q_nope_QHN", 4, 1, (2, 3)),
        ("o_HVD", 4, (1, 2), 3),
    ],
)
def test_optax_is_told_our_matrices(leaf, ndim, rows, columns):
    assert bench.dimensions(("moe", "ffn", leaf), ndim) == optax.contrib.MuonDimensionNumbers(rows, columns)
    assert bench.dimensions(("embed_WD",), 2) is None


def test_one_tree_end_to_end(small):
    row = bench.time_tree("k2_experts", rounds=2)
    assert row["first_update_apart"] < 1e-4
    assert row["parameters"] == sum(x.size for x in jax.tree.leaves(bench.tree_of("k2_experts")))
    assert {"ours_ms", "optax_muon_ms", "adamw_ms", "ratio_to_optax", "ratio_equal_precision"} < set(row)
    low, high = row["spread_ms"]["ours"]
    assert 0 < low <= row["ours_ms"] <= high
    bench.show({"trees": {"sweep": row}, "forms": {}, "clip": dict.fromkeys(CLIP, 0.0)})
    json.dumps(row)


CLIP = ("step_ms", "clip_ms", "statistic_ms", "share_of_step")


def test_other_work_is_refused():
    shapes = {"moe": {"ffn": {"gate_EDF": jax.ShapeDtypeStruct((1, 2, 8, 4), jnp.float32)}}}
    before, ours = bench.drawn(shapes, 0), bench.drawn(shapes, 1)
    assert bench.same_work(ours, ours, before) == 0
    with pytest.raises(ValueError, match="moe/ffn/gate_EDF: not the same work"):
        bench.same_work(ours, jax.tree.map(lambda x: 1.1 * x, ours), before)


def test_forms_are_timed_with_and_without_symmetric_products(monkeypatch):
    asked = []

    def compiled(kernel, x, table, dtype):
        asked.append((kernel.__name__, x.shape, len(table), dtype, bench.symmetric.MIN_SIDE < 10_000))
        return lambda: None

    monkeypatch.setattr(bench, "_compiled", compiled)
    found = bench.time_forms("k2_experts", rounds=1)
    shape = (1, 1024, 3584)
    for form in ("standard", "gram"):
        for known in (True, False):
            assert (form, shape, 5, "float32", known) in asked
    assert ("newton_schulz", shape, 10, "float32", True) in asked and ("newton_schulz", shape, 5, "bfloat16", True) in asked
    assert len(found) == len(asked) == 9 and {row["matrices"] for row in found.values()} == {"1 of 1024 x 3584"}
    asked.clear()
    bench.time_forms("100m", rounds=1)  # too small for blocks
    assert len(asked) == 7 and {shape for _, shape, *_ in asked} == {(32, 128, 512)}


def test_rounds_must_be_positive():
    with pytest.raises(ValueError, match="--rounds must be at least 1; got 0"):
        bench.Bench(rounds=0)
