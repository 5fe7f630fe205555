import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from k2jax.config import MeshConfig, to_dict
from k2jax.model import store, transformer
from k2jax.parallel.mesh import make as make_mesh
from k2jax.train import loop, metrics
from k2jax.train.checkpoint import Checkpoints
from k2jax.train.folder import DiskFull, Refused
from k2jax.train.loop import Diverged, Stopped, train
from k2jax.train.step import init_state, to_natural

NOT_OF_THE_CLOCK = ("loss", "grad_norm", "update_rms", "max_logit", "load_imbalance", "learning_rate", "val_loss_by_domain")


def last_state(config):
    saved = Checkpoints(config.out / "checkpoints")
    state, position, *_ = saved.restore(config)
    saved.close()
    return jax.tree.map(np.array, state), position


def assert_same_run(a, b):
    (state_a, position_a), (state_b, position_b) = last_state(a), last_state(b)
    jax.tree.map(np.testing.assert_array_equal, state_a, state_b)
    assert position_a == position_b
    assert logged(a) == logged(b)


def logged(config, names=NOT_OF_THE_CLOCK[:-1]):
    return [[row["step"], *(row[name] for name in names)] for row in metrics.read(config.out / "metrics.jsonl")]


def test_a_run_leaves_what_it_promises_and_is_not_run_twice(small, capsys):
    result = train(small)
    shown = capsys.readouterr().out
    assert (result.steps, result.tokens, result.skipped_steps, result.spikes) == (12, 12 * 4 * 32, 0, [])
    rows = metrics.read(small.out / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert [r["step"] for r in rows if "val_loss" in r] == [5, 10, 12]
    np.testing.assert_allclose(result.train_loss, np.mean([r["loss"] for r in rows]))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05
    assert result.heads["clipped"] == rows[-1]["heads_ever_clipped"] > 0
    by_domain = result.val_loss_by_domain
    assert set(by_domain) == {"web", "math"}
    np.testing.assert_allclose(result.val_loss, 0.7 * by_domain["web"] + 0.3 * by_domain["math"])
    assert set(result.seconds) == set(loop.PARTS) and all(s >= 0 for s in result.seconds.values())
    assert result.corpus["tier"] == "folder" and len(result.corpus["sha256"]) == 64 and result.corpus["tokens"] > 0
    assert json.loads((small.out / "result.json").read_text())["val_loss"] == result.val_loss
    assert json.loads((small.out / "config.json").read_text()) == to_dict(small) == result.config
    assert last_state(small)[0].step == 12 and list((small.out / "tensorboard").iterdir())
    for words in ("step 5 ", "validation", "loss spikes", "none", "of 2 heads"):
        assert words in shown

    touched = (small.out / "metrics.jsonl").stat().st_mtime_ns
    assert train(replace(small, eval_every=3), show_progress=False) == result
    assert (small.out / "metrics.jsonl").stat().st_mtime_ns == touched


def test_evaluations_checkpoints_and_probes_between_steps_leave_no_trace(small, tmp_path):
    often = replace(small, out=tmp_path / "often", eval_every=1, checkpoint_every=1, probe_every=5)
    never = replace(small, out=tmp_path / "never", eval_every=0, checkpoint_every=0)
    train(often, show_progress=False)
    train(never, show_progress=False)
    assert_same_run(often, never)
    rows = metrics.read(often.out / "probes.jsonl")
    assert {(row["step"], row["layer"]) for row in rows} == {(5, 0), (10, 0)} and not (never.out / "probes.jsonl").exists()
    assert {"moe/attention/q_nope_QHN", "moe/ffn/gate_EDF", "moe/ffn/router_DE"} <= {row["leaf"] for row in rows}
    rates = {row["step"]: row["learning_rate"] for row in metrics.read(often.out / "metrics.jsonl")}
    for row in rows:
        assert 0 < row["entropy"] <= 1 and row["weight_rms"] > 0 and row["spectral_norm"] > row["weight_rms"]
        # Muon moves a matrix by 0.2 of the rate; with decay, the clip, and Newton-Schulz's own spread, about so.
        assert 0.05 < row["update_rms"] / rates[row["step"]] < 0.5, row


def test_a_run_begins_with_the_weights_of_another(small, tmp_path):
    """They are read at step 0 and never again."""
    train(small, show_progress=False)
    before = last_state(small)[0]
    second = replace(small, steps=1, seed=5, data_seed=5, init=str(small.out), out=tmp_path / "second")
    state, drawn = init_state(second), init_state(replace(second, init=""))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.router_bias), (before.params, before.router_bias))
    jax.tree.map(np.testing.assert_array_equal, (state.opt_state, state[4:]), (drawn.opt_state, drawn[4:]))
    assert state.step == 0 and np.abs(state.router_bias["moe"]).max() > 0

    spread = replace(second, batch=8, mesh=MeshConfig(pipeline=2, expert=2))
    on_mesh = to_natural(spread, make_mesh(spread), init_state(spread, make_mesh(spread)))
    jax.tree.map(np.testing.assert_array_equal, (on_mesh.params, on_mesh.router_bias), (before.params, before.router_bias))

    train(second, show_progress=False)
    small.out.rename(tmp_path / "elsewhere")
    (second.out / "result.json").unlink()
    result = train(second, show_progress=False)  # goes on after its last step
    assert result.steps == last_state(second)[0].step == 1


def test_weights_come_to_a_mesh_and_from_a_folder_of_weights(small, tmp_path):
    params, router_bias = transformer.init(small.model, 3)
    router_bias = {"moe": router_bias["moe"] + np.arange(4.0, dtype=np.float32)[None]}
    store.save(tmp_path / "weights", store.Weights(small.model, params, router_bias))
    spread = replace(small, batch=8, mesh=MeshConfig(pipeline=2, expert=2), init=str(tmp_path / "weights"))
    grid = make_mesh(spread)
    state = to_natural(spread, grid, init_state(spread, grid))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.router_bias), (params, router_bias))
    assert state.step == 0 and all(np.abs(x).max(initial=0) == 0 for x in jax.tree.leaves(state.opt_state))


def test_weights_of_another_model_are_refused_before_anything_is_read(small, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_data", lambda *_: pytest.fail("the corpus was read"))
    store.save(tmp_path / "weights", store.Weights(small.model, *transformer.init(small.model, 3)))
    model, given = small.model, str(tmp_path / "weights")
    rope = model.attention.rope

    def turned(**changes):
        return replace(model, attention=replace(model.attention, rope=replace(rope, **changes)))

    store.check(tmp_path / "weights", replace(turned(yarn_factor=8.0, theta=1e4), context=64, norm_eps=1e-5))
    for i, (other, said) in enumerate(
        [
            (replace(model, d_model=24), r"shapes are not the config's: .*embed_WD is \(260, 16\), not \(260, 24\)"),
            (replace(model, n_layers=2), "tensors are missing: moe.1.attention"),
            (turned(layout="half"), "has 'interleaved', not 'half'"),
        ]
    ):
        with pytest.raises(Refused, match=said):
            train(replace(small, model=other, init=given, out=tmp_path / str(i)), show_progress=False)
    (tmp_path / "weights" / "moe.0.safetensors").unlink()
    with pytest.raises(Refused, match=r"is not whole: moe\.0\.safetensors is missing"):
        train(replace(small, init=given, out=tmp_path / "half"), show_progress=False)
    with pytest.raises(Refused, match=f"{tmp_path / 'none'} is neither"):
        train(replace(small, init=str(tmp_path / "none")), show_progress=False)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_and_agrees_to_rounding(small, tmp_path, monkeypatch, capsys):
    one = replace(small, batch=8, eval_every=0, checkpoint_every=0, probe_every=12)
    whole, moved = replace(one, out=tmp_path / "whole"), replace(one, out=tmp_path / "moved")
    expected = train(whole, show_progress=False)
    record = loop._record

    def record_and_stop(session, pending, evaluate=False):
        record(session, pending, evaluate)
        if pending.number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(loop, "_record", record_and_stop)
        train(moved)
    capsys.readouterr()
    result = train(replace(moved, microbatches=2, mesh=MeshConfig(pipeline=2, expert=2)))
    shown = capsys.readouterr().out
    assert "on 8 devices, pipeline 2 x expert 2 x data 2: 2 microbatches, 1 chunks a stage, 5 ticks, bubble 33.3%, " in shown
    assert "1 of 2 slots without a layer, a token's way to the experts of a layer and back 0.11 kB" in shown
    assert "going on after step 5 of 12 with pipeline 1 -> 2, expert 1 -> 2, data 1 -> 2: numbers agree to rounding" in shown
    assert json.loads((moved.out / "config.json").read_text())["mesh"]["pipeline"] == 2
    rows, others = (metrics.read(c.out / "metrics.jsonl") for c in (whole, moved))
    assert [row["step"] for row in others] == list(range(1, 13))
    for name in ("loss", "grad_norm", "update_rms"):
        np.testing.assert_allclose([row[name] for row in others], [row[name] for row in rows], rtol=1e-4)
    np.testing.assert_allclose(result.val_loss, expected.val_loss, rtol=1e-5)
    probes, others = (metrics.read(c.out / "probes.jsonl") for c in (whole, moved))
    for a, b in zip(probes, others, strict=True):
        assert (a["step"], a["leaf"], a["layer"]) == (b["step"], b["leaf"], b["layer"])
        for name in ("spectral_norm", "entropy", "weight_rms", "update_rms"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, err_msg=str((a["leaf"], name)))


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(small):
    config = replace(small, mesh=MeshConfig(expert=3), data=replace(small.data, corpus="nowhere"))
    with pytest.raises(Refused, match=r"must be a multiple of .* = 3; got 8; next to it are 6 and 9"):
        train(config, show_progress=False)


PRESET = """
from pathlib import Path
from k2jax.config import *

def config():
    return {config}
"""


def start(config, folder, programs, log):
    """The command line in a process of its own."""
    (folder / "preset.py").write_text(PRESET.format(config=repr(config).replace("PosixPath", "Path")))
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with log.open("a") as out:
        command = [sys.executable, "-m", "k2jax.train", "preset"]
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)


def wait_for_step(config, process, step):
    path, limit = config.out / "metrics.jsonl", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < limit:
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.002)
    pytest.fail(f"step {step} was not reached")


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(small, tmp_path, programs):
    small = replace(small, steps=80, checkpoint_every=9, eval_every=17, probe_every=13, mesh=MeshConfig(data=2))
    whole, broken = replace(small, out=tmp_path / "whole"), replace(small, out=tmp_path / "broken")
    log = tmp_path / "log.txt"
    assert start(whole, tmp_path, programs, log).wait(300) == 0, log.read_text()

    rng = random.Random(time.time_ns())
    targets = sorted(rng.sample(range(3, 70), 3))
    for target, number in zip(targets, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=True):
        process = start(broken, tmp_path, programs, log)
        wait_for_step(broken, process, target)
        process.send_signal(number)
        code = process.wait(300)
        if number == signal.SIGTERM:
            assert code == 128 + signal.SIGTERM, log.read_text()
            at = int(re.search(r"stopped by SIGTERM after step (\d+)", log.read_text()).group(1))
            assert last_state(broken)[0].step == at == metrics.read(broken.out / "metrics.jsonl")[-1]["step"]
        else:
            assert code == -signal.SIGKILL
        assert not (broken.out / "result.json").exists()
    assert start(broken, tmp_path, programs, log).wait(300) == 0, log.read_text()

    assert log.read_text().count("going on after step") >= 2
    assert [r["step"] for r in metrics.read(broken.out / "metrics.jsonl")] == list(range(1, 81)), targets
    assert_same_run(whole, broken)
    assert (whole.out / "probes.jsonl").read_text() == (broken.out / "probes.jsonl").read_text()
    results = [json.loads((c.out / "result.json").read_text()) for c in (whole, broken)]
    for name in ("train_loss", "val_loss", "val_loss_by_domain", "spikes", "heads"):
        assert results[0][name] == results[1][name]


def test_gradients_that_stay_non_finite_end_the_run(small, fresh_state, monkeypatch):
    config, state = replace(small, optim=replace(small.optim, max_skips=3)), fresh_state()
    broken = state._replace(params=state.params | {"embed_WD": state.params["embed_WD"] * np.nan})
    monkeypatch.setattr(loop, "init_state", lambda *_: broken)
    with pytest.raises(Diverged, match=r"in 3 steps in a row \(optim\.max_skips\), the last at step 3; .* those of step 0"):
        train(config, show_progress=False)
    rows = metrics.read(config.out / "metrics.jsonl")
    assert [(r["skipped"], r["loss"], r["grad_norm"]) for r in rows] == [(True, None, None)] * 3
    assert not (config.out / "result.json").exists()


def test_a_vocabulary_larger_than_the_models_is_refused_before_training(small):
    config = replace(small, model=replace(small.model, n_words=128))
    with pytest.raises(Refused, match=r"n_words=128; 'byte' has 260 words"):
        train(config, show_progress=False)
    assert not (config.out / "metrics.jsonl").exists()


def test_a_signal_before_the_first_step_ends_the_run_at_once(small, monkeypatch, capsys):
    monkeypatch.setattr(loop, "prepare", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        train(small)
    assert stopped.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    assert "stopped by SIGTERM before the first step" in capsys.readouterr().out


def test_a_corpus_that_is_not_there_is_refused(small):
    with pytest.raises(Refused, match="nowhere"):
        train(replace(small, data=replace(small.data, corpus="nowhere")), show_progress=False)


def test_a_full_disk_is_said_and_the_last_checkpoint_stands(small, monkeypatch):
    write = metrics.Log.write

    def fail_at_step_8(log, row, *rest):
        if row["step"] == 8:
            raise OSError(28, "No space left on device")
        write(log, row, *rest)

    monkeypatch.setattr(metrics.Log, "write", fail_at_step_8)
    with pytest.raises(DiskFull, match=r"no space is left to write in .*; the checkpoint of step 5 is whole"):
        train(small, show_progress=False)
    monkeypatch.undo()
    train(small, show_progress=False)
    assert [r["step"] for r in metrics.read(small.out / "metrics.jsonl")] == list(range(1, 13))
