import json
import random
import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import long_context
from experiments._study import Options, Study
from experiments.long_context import DEPTHS, KEY, SIZES, WAYS, Measured, claims, draw, passkey, plan, share_found
from k2jax.config import differences
from k2jax.model import transformer
from k2jax.model.store import Weights

SIZE = SIZES["smoke"]


@pytest.mark.parametrize("statements", [1, 3])
def test_a_passkey_document_states_its_key_and_ends_with_it(statements):
    rng = random.Random(0)
    for _ in range(20):
        text = passkey(rng, 63, statements)
        keys = re.findall(r"key=([A-J]+)", text)
        assert len(text) == 63 and len(keys) == statements + 1 and set(keys) == {text[-KEY:]} and len(set(text[-KEY:])) == KEY


def test_the_depth_is_where_the_key_is_stated():
    starts = [passkey(random.Random(1), 255, 1, depth).index("key=") for depth in (0.0, 0.5, 1.0)]
    assert starts == [0, 118, 237]  # of 255 characters, 10 are the statement and 8 the question


def test_the_ways_differ_as_they_say(tmp_path):
    opened = Study("long_context", Options(preset="smoke", seeds=2), tmp_path, None)
    runs = plan(opened, SIZE, tmp_path / "corpus")
    assert len(runs) == 6
    for seed in range(2):
        short, plain, yarn = (runs[phase, seed] for phase in ("short", "long_plain", "long_yarn"))
        assert [d.split(":")[0] for d in differences(plain, yarn)] == [
            *("name", "out"),
            "model.attention.rope.yarn_factor",
        ]
        assert plain.seq_len == 8 * short.seq_len and yarn.model.attention.rope.original_context == short.seq_len
        assert plain.init == yarn.init == str(short.out) and short.init == ""
        assert (short.data.math, plain.data.knowledge) == (0, 0) and short.data.web == plain.data.web == 0.25
        assert replace(plain.model, attention=short.model.attention) == short.model


def test_a_key_counts_when_all_its_letters_are_the_likeliest(monkeypatch):
    """Of a model that writes each token again, in place of a trained one: letters that are all one are found."""
    config = long_context._model(SIZE)
    params, bias = transformer.init(config, 0)
    output = jnp.eye(260)

    class Again:
        @staticmethod
        def apply(config, params, router_bias, tokens_BT, segments_BT, positions_BT):
            return transformer.Output(output[tokens_BT[:, :-1]], None, None)

    monkeypatch.setattr(long_context, "transformer", Again)
    rows = np.array([[256, 65, 65, 65, 65, 65, 257], [256, 65, 65, 65, 66, 66, 257]], np.int32)
    assert share_found(Weights(config, params | {"head_WD": output}, bias), rows) == 0.5


def measured(share, loss):
    return [Measured({SIZE.short * 2**i: [share] * DEPTHS for i in range(4)}, loss)]


def verdicts(**of):
    return [c.verdict for c in claims(SIZE, {way: measured(*of.get(way, (0.1, 2.0))) for way in WAYS})]


def test_each_verdict_is_reached():
    assert verdicts(long_yarn=(1.0, 2.09), yarn=(0.7, 2.5)) == ["pass", "pass", "pass", "pass"]
    assert verdicts(long_yarn=(1.0, 2.11), yarn=(0.5, 2.0)) == ["pass", "fail", "pass", "fail"]
    assert verdicts(long_yarn=(1.0, 2.0), long_plain=(1.0, 2.0)) == ["pass", "fail", "fail", "pass"]
    assert verdicts(long_yarn=(0.9, 2.0)) == ["fail", "fail", "untested", "pass"]


def test_the_figure_draws_every_way():
    axes = draw(SIZE, {way: measured(0.5, 2.0) for way in WAYS}, "a test").axes
    assert [len(ax.lines) for ax in axes] == [4, 5]  # with the training length


@pytest.mark.slow
def test_both_phases_are_trained_measured_and_drawn(tmp_path, texts, in_process, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "smoke", SIZE._replace(d_model=16, n_layers=1, batch=8, steps=3, long_steps=2, tests=4))
    everything = plan

    def small(*given):
        return {key: replace(c, eval_batches=1, mesh=replace(c.mesh, data=1)) for key, c in everything(*given).items()}

    monkeypatch.setattr(long_context, "plan", small)
    options = Options(preset="smoke", out=tmp_path / "out", corpus=str(texts), cache=tmp_path / "cache")
    assert long_context.main(options) == 0
    summary = json.loads((options.out / "summary.json").read_text())
    assert [c["verdict"] for c in summary["claims"]][:3] == ["fail", "fail", "untested"]
    ways = summary["ways"]
    assert set(ways) == set(WAYS) and set(ways["yarn"][0]["found"]) == {"64", "128", "256", "512"}
    losses = [ways[way][0]["text_loss"] for way in WAYS]
    assert len(set(losses)) == 4 and max(losses) < 6
    assert (options.out / "figure.png").stat().st_size > 10_000
    (options.out / "figure.png").unlink()
    assert long_context.main(options) == 0  # reads
    assert json.loads((options.out / "summary.json").read_text())["ways"] == ways
