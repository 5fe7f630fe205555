import jax
import numpy as np
import pytest

from experiments import roofline
from experiments.roofline import CHIPS, Chip, Options, Pass
from k2jax.scaling.flops import training_flops

TINY = Options(divide=64, seq_len=32, expert=64, rounds=2)


def test_the_parts_add_up_to_the_layers_flops_as_they_are_counted_elsewhere():
    for options in (Options(), TINY):
        parts = [part for part in roofline.parts(options, "bfloat16") if part.name not in roofline.OUTSIDE]
        # The core's backward pass has five products where the convention counts four.
        found = training_flops(roofline.model_of(options), options.seq_len)
        assert sum(part.flops for part in parts) == options.seq_len * (found.total - found.head) // 3
        assert all(part.flops_back == 2 * part.flops for part in parts if part.name != "attention core")


def test_flops_are_those_of_the_compiled_programs():
    """XLA counts the products it compiled, and a little for the rest. It counts loops once: parts with loops are left out."""
    for part in roofline.parts(TINY, "float32"):
        if part.name in ("query down", "query up", "key-value down", "key-value up", "output", "router", "shared expert"):
            compiled = jax.jit(part.function).lower(part.inputs, part.weights, *part.fixed).compile()
            counted = compiled.cost_analysis()["flops"]
            other = 60 * part.inputs[0].size + 30 * 32 * 384 if part.name == "router" else 8 * 32 * 64
            assert part.flops <= counted <= part.flops + other, part.name


def test_bytes_by_hand():
    """K2's query down-projection: x and its gradient, the weight, the output, and the weight's gradient read and written."""
    part = next(part for part in roofline.parts(Options(), "bfloat16") if part.name == "query down")
    x, w, y = 4096 * 7168, 7168 * 1536, 4096 * 1536
    assert roofline.passes(part) == {
        "forward": Pass(2 * 4096 * w, 2 * (x + w + y)),
        "backward": Pass(4 * 4096 * w, 2 * (x + w + y) + 2 * x + 8 * w),
    }


def test_the_floor_is_the_longer_of_compute_and_memory():
    assert Pass(989 * 10**9, 1).floor(CHIPS["H800"]) == pytest.approx(1e-3)
    assert Pass(1, 4_800_000_000).floor(CHIPS["H200"]) == pytest.approx(1e-3)
    assert roofline._bound(Pass(10, 1), Chip(1.0, 1.0)) == "compute"
    assert roofline._bound(Pass(1, 10), Chip(1.0, 1.0)) == "memory"


def test_every_part_runs_in_both_directions_and_its_share_is_of_this_machines_rates(monkeypatch, tmp_path):
    monkeypatch.setattr(roofline, "here", lambda rounds, dtype: Chip(1e9, 1e9))
    result = roofline.main(Options(divide=64, seq_len=32, expert=64, rounds=2, measure=True))
    assert len(result["parts"]) == 2 * 13 - 2  # Newton-Schulz has no backward pass, the head's is in its forward pass
    for row in result["parts"]:
        assert row["share_of_floor"] == row["floor_ms"]["here"] / row["ms"] > 0
    inside = [row["ms"] for row in result["parts"] if row["part"] not in roofline.OUTSIDE]
    np.testing.assert_allclose(result["layer"]["ms"], sum(inside))
    assert "Newton-Schulz" in roofline.render(result)
    roofline.draw(result, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="--expert must divide the 384 experts; got 7"):
        Options(expert=7)
    with pytest.raises(ValueError, match="--seq-len must be at least 1; got 0"):
        Options(seq_len=0)
