import json
import random
from dataclasses import replace

import pytest

from experiments import _runner, _study
from experiments._study import Trained
from k2jax.train.folder import Result
from k2jax.train.loop import train


@pytest.fixture
def texts(tmp_path):
    """A folder of text in all four domains, so that no time goes into the builtin corpus."""
    folder, rng = tmp_path / "texts", random.Random(0)
    words = [a + b for a in ("ba", "ko", "ri", "tu") for b in ("la", "min", "so", "x")]
    for domain in ("web", "code", "math", "knowledge"):
        (folder / domain).mkdir(parents=True)
        for i in range(60):
            (folder / domain / f"{i}.txt").write_text(" ".join(rng.choice(words) for _ in range(100)))
    return folder


@pytest.fixture
def in_process(monkeypatch):
    """Trains the runs of a study here, one after the other: a process each would take longer to start than to train."""

    def run_all(jobs, home, **_):
        for config, _cost in jobs:
            seconds = 0.0
            yield _runner.Outcome(config, train(config, show_progress=False), "", seconds, seconds)

    monkeypatch.setattr(_study._runner, "run_all", run_all)
    monkeypatch.setattr(_study._runner, "training_rate", lambda: 1e9)


@pytest.fixture
def trained():
    """A run that was never trained: `trained(config, logits [steps][layers], ...)` has the rows and the result of one."""

    def make(config, logits, val_loss=3.0, ever=(), clipped=None, spikes=(), skipped=0):
        rows, heads = [], config.model.n_layers * config.model.attention.n_heads
        for i, layers in enumerate(logits):
            above = clipped[i] if clipped else 0
            rows.append(
                {
                    "step": i + 1,
                    "loss": val_loss + 1 / (i + 1),
                    "max_logit": {"dense": list(layers)},
                    "heads": heads,
                    "heads_clipped": above,
                    "heads_ever_clipped": round((ever[i] if ever else 0.0) * heads),
                    "heads_ever_clipped_share": ever[i] if ever else 0.0,
                    "last_clip_step": max((j + 1 for j in range(i + 1) if clipped and clipped[j]), default=None),
                }
            )
        rows[-1]["val_loss"] = val_loss
        result = Result(
            steps=len(rows),
            tokens=config.tokens,
            train_loss=val_loss,
            val_loss=val_loss,
            val_loss_by_domain={"code": val_loss},
            tokens_per_second=1000.0,
            seconds={"step": 1.0},
            skipped_steps=skipped,
            spikes=list(spikes),
            warnings=[],
            heads={"total": heads, "clipped": 0, "last_step": None},
            corpus={},
            config={},
        )
        return Trained(replace(config, steps=len(rows)), result, json.loads(json.dumps(rows)))

    return make
