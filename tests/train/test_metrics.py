import json

import numpy as np

from k2jax.optim.probes import Probe
from k2jax.train import metrics


def fetched(fired=(), last=None, loss=3.0):
    """What a step of two stacks of one layer and two heads returns."""
    now = np.zeros((2, 2), bool)
    for head in fired:
        now[head] = True
    last = np.zeros((2, 2), np.int32) if last is None else last
    values = dict.fromkeys(("loss", "mtp_loss", "balance_loss", "total_loss", "learning_rate", "grad_norm", "update_rms"), loss)
    return values | {
        "max_logit_LH": {"dense": np.array([[5.0, 9.0]]), "moe": np.array([[-1.0, 3.0]])},
        "load_LE": {"moe": np.array([[6, 2, 0, 0]], np.int32)},
        "fired_LH": {"dense": now[:1], "moe": now[1:]},
        "last_fired_LH": {"dense": last[:1], "moe": last[1:]},
        "skips": 0,
        "skips_total": 0,
        "exchange_rounds": np.int32(1),
    }


def test_a_row_holds_plain_numbers(small):
    row = metrics.row(small, 7, fetched(), seconds=0.5, data_wait=0.1)
    json.dumps(row, allow_nan=False)
    assert row["step"] == 7 and row["tokens"] == 7 * 4 * 32
    assert row["max_logit"] == {"dense": [9.0], "moe": [3.0]}
    assert row["load_imbalance"] == {"moe": [3.0]} and row["idle_experts"] == {"moe": [2]}
    assert row["tokens_per_second"] == 4 * 32 / 0.5 and row["data_wait"] == 0.1
    # By hand: projections, the causal core and the head of the small config, six FLOPs a weight.
    attention = 16 * 8 + 8 * 2 * 16 + 16 * 16 + 8 * 2 * 16 + 2 * 8 * 16
    weights = attention + 3 * 3 * 16 * 8 + 16 * 4 + 260 * 16
    per_token = 6 * weights + 3 * 2 * (8 + 8 + 8) * 33
    np.testing.assert_allclose(row["flops_per_second"], 256 * per_token)


def test_a_number_that_is_not_finite_is_null(small):
    row = metrics.row(small, 1, fetched(loss=np.nan), 1.0, 0.0)
    assert row["loss"] is None and row["grad_norm"] is None
    json.dumps(row, allow_nan=False)


def test_clip_telemetry_of_a_synthetic_trace(small):
    """Heads fire at steps 2 and 3 and never again: the counts say how many do, how many ever did, and when last."""
    names = ("heads_clipped", "heads_clipped_share", "heads_ever_clipped", "heads_ever_clipped_share", "last_clip_step")
    last, seen = np.zeros((2, 2), np.int32), []
    for step, fired in enumerate([[], [(0, 1)], [(0, 1), (1, 0)], [], []], start=1):
        for head in fired:
            last[head] = step
        row = metrics.row(small, step, fetched(fired, last.copy()), 1.0, 0.0)
        seen.append([row[name] for name in names])
    assert seen == [
        [0, 0.0, 0, 0.0, None],
        [1, 0.25, 1, 0.25, 2],
        [2, 0.5, 2, 0.5, 3],
        [0, 0.0, 2, 0.5, 3],
        [0, 0.0, 2, 0.5, 3],
    ]


def test_a_run_that_goes_on_has_every_step_once(small, tmp_path):
    def write(steps, first, loss):
        log = metrics.Log(tmp_path, first)
        for step in steps:
            log.write(metrics.row(small, step, fetched(loss=loss), 1.0, 0.0), fetched()["max_logit_LH"])
        log.close()

    write(range(1, 9), 0, 1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # a kill in the middle of a line
    write(range(6, 11), 5, 2.0)
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 11))
    assert [r["loss"] for r in rows] == [1.0] * 5 + [2.0] * 5
    assert list((tmp_path / "tensorboard").iterdir())


def test_probes_have_a_row_a_leaf_and_layer_and_once_only_after_a_kill(tmp_path):
    def probes(entropy):
        return {
            "moe/ffn/router_DE": Probe(*(np.array(x) for x in ([9.0, 8.0], [entropy, np.nan], [3.0, 2.0], [0.1, 0.2], [0, 0])))
        }

    for first, entropy in ((0, 0.5), (3, 0.25)):
        log = metrics.Log(tmp_path, first)
        for step in (2, 4) if not first else (4,):
            log.probe(metrics.probe_rows(step, probes(entropy)))
        log.sync()
        log.close()
    rows = metrics.read(tmp_path / "probes.jsonl")
    assert [(row["step"], row["layer"], row["entropy"]) for row in rows] == [
        (2, 0, 0.5),
        (2, 1, None),
        (4, 0, 0.25),
        (4, 1, None),
    ]
    names = ["step", "leaf", "layer", "spectral_norm", "entropy", "effective_rank", "weight_rms", "update_rms"]
    assert list(rows[0]) == names and rows[1]["spectral_norm"] == 8.0 and rows[0]["leaf"] == "moe/ffn/router_DE"


def test_names_of_scalars():
    value = {"loss": 1.5, "max_logit": {"moe": [1.0, 2.0]}, "none": None, "skipped": False}
    assert dict(metrics.scalars(value)) == {"loss": 1.5, "max_logit/moe/0": 1.0, "max_logit/moe/1": 2.0, "skipped": 0.0}
