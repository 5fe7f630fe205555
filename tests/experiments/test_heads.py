from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from configs import stress
from experiments import _heads
from k2jax.model import transformer


def test_rows_tell_the_largest_logit_and_what_the_clip_scales():
    layers = [(5.0, 120.0, 5.0, 130.0), (5.0, 120.0, 5.0, 5.0), (1.0, -2.0, 1.0, 1.0), (1.0, None, 1.0, 200.0)]
    rows = [
        {"max_logit": {"dense": list(a[:1]), "moe": list(a[1:])}, "heads": 32, "heads_clipped": n}
        for a, n in zip(layers, (3, 2, 0, 1), strict=True)
    ]
    largest = _heads.largest(rows)
    assert largest[:3].tolist() == [130.0, 120.0, 1.0] and np.isnan(largest[3])
    assert _heads.scaled(rows, 100.0, "head").tolist() == [3, 2, 0, 1]
    assert _heads.scaled(rows, 100.0, "layer").tolist() == [16, 8, 0, 8]
    assert _heads.first_above(largest, 125.0) == 1
    assert _heads.first_above(largest[1:], 125.0) is None
    assert _heads.settled(np.array([*[0.0] * 27, 1.0, 5.0, 3.0])) == 3.0


def test_a_clip_that_misses_tau_is_seen(trained, monkeypatch):
    """`clip_by_hand` measures: with a clip that scales too little or touches other heads its numbers say so."""
    config = replace(stress.config("smoke"), model=replace(stress.config("smoke").model, init_std=0.5))
    batch = {name: np.ones((2, 9), np.int32) for name in ("tokens_BT", "segments_BT")}
    batch["tokens_BT"][:] = np.arange(18).reshape(2, 9)
    batch["positions_BT"] = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    params, router_bias = transformer.init(config.model, 0)
    logits = transformer.apply(config.model, params, router_bias, *map(jnp.asarray, batch.values())).aux.max_logit_LH["dense"]
    config = replace(config, optim=replace(config.optim, qk_tau=float(np.median(logits))))
    monkeypatch.setattr(_heads, "last_state", lambda _: SimpleNamespace(params=params, router_bias=router_bias))
    monkeypatch.setattr(_heads, "_first_batch", lambda _: batch)
    good = _heads.clip_by_hand(config)
    assert (good.heads, good.above, good.untouched) == (8, 4, 4)
    assert good.error < 1e-5
    honest = _heads._clip

    def lax(config, params, max_logit_LH):
        return honest(config, params, {stack: 0.9 * x for stack, x in max_logit_LH.items()})

    def greedy(config, params, max_logit_LH):
        return honest(config, params, {stack: 1.5 * jnp.maximum(x, 0.0) + 1.0 for stack, x in max_logit_LH.items()})

    monkeypatch.setattr(_heads, "_clip", lax)
    assert _heads.clip_by_hand(config).error > 0.05
    monkeypatch.setattr(_heads, "_clip", greedy)
    assert _heads.clip_by_hand(config).untouched < 4
