"""The queue, with workers that train nothing: each test's worker is a few lines of Python."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from configs import ladder
from experiments import _runner
from experiments._runner import Job, Outcome, Slot, run_all
from k2jax.config import to_dict

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from experiments._runner import _die_with

_die_with(int(sys.argv[2]))
job = json.loads(Path(sys.argv[1]).read_text())
config = job["config"]
out = Path(config["out"])
out.mkdir(parents=True, exist_ok=True)

def save(*_):
    time.sleep(0.5)
    (out / "saved").write_text("")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
(out / "config.json").write_text(json.dumps(config))
(out / "started.json").write_text(json.dumps({"time": time.time(), "core": job["core"], "pid": os.getpid(),
    "flags": os.environ.get("XLA_FLAGS"), "mark": os.environ.get("MARK")}))
if config["name"] == "bad":
    print("the reason, in words")
    sys.exit(3)
with (out / "metrics.jsonl").open("a") as metrics:
    for step in range(1, config["steps"] + 1):
        time.sleep(0.02)
        print(json.dumps({"step": step}), file=metrics, flush=True)
fields = {"val_loss": 3.0, "config": config, "val_loss_by_domain": {}, "seconds": {}, "heads": {}, "corpus": {}, "spikes": []}
numbers = {"steps": 1, "tokens": 1, "train_loss": 3.1, "tokens_per_second": 1.0, "skipped_steps": 0}
(out / "result.json").write_text(json.dumps(fields | numbers | {"warnings": []}))
"""


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER))
    return (sys.executable, str(path))


def job(tmp_path, name, steps=2, cost=1.0, sparsity=8):
    config = ladder.config(sparsity, "smoke", 0)
    return Job(replace(config, name=name, out=tmp_path / "runs" / name, steps=steps), cost)


def run(jobs, tmp_path, worker, n_slots=2) -> list[Outcome]:
    slots = [Slot(None, {"MARK": str(i)}) for i in range(n_slots)]
    return list(run_all(jobs, tmp_path, console=Console(file=StringIO()), slots=slots, worker=worker))


def started(config) -> dict:
    return json.loads((config.out / "started.json").read_text())


def wait_for(path: Path, seconds=20.0):
    limit = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.05)


def test_runs_everything_longest_first_in_its_own_slot(tmp_path, worker):
    jobs = [job(tmp_path, f"run{i}", steps=3 + 5 * i, cost=float(i)) for i in range(3)]
    outcomes = run(jobs, tmp_path, worker)
    assert sorted(o.config.name for o in outcomes) == ["run0", "run1", "run2"]
    assert all(o.result.val_loss == 3.0 and o.wall_seconds > 0 and o.cpu_seconds > 0 for o in outcomes)
    at = {j.config.name: started(j.config) for j in jobs}
    assert at["run2"]["time"] < at["run0"]["time"] and at["run1"]["time"] < at["run0"]["time"]
    assert at["run2"]["mark"] != at["run1"]["mark"]
    assert re.findall(r"device_count=(\d+)", at["run0"]["flags"]) == ["1"]  # the tests' fake devices are not the runs'


def test_a_finished_run_is_read_and_not_run(tmp_path, worker):
    jobs = [job(tmp_path, "run0")]
    run(jobs, tmp_path, worker)
    first = started(jobs[0].config)
    (again,) = run(jobs, tmp_path, worker)
    assert again.result.val_loss == 3.0
    assert (again.wall_seconds, started(jobs[0].config)) == (0.0, first)


def test_a_folder_with_another_config_is_refused_by_the_fields_name(tmp_path, worker):
    first = job(tmp_path, "run0")
    run([first], tmp_path, worker)
    other = Job(replace(first.config, batch=first.config.batch * 2), 1.0)
    with pytest.raises(ValueError, match=r"run0 holds a run of another config .*batch: \d+ != \d+"):
        run([other], tmp_path, worker)
    # Where data are cached or the folder now lies does not make another run of it.
    moved = replace(first.config, data=replace(first.config.data, cache=Path("elsewhere"), workers=1))
    assert _runner.finished(moved).val_loss == 3.0


def test_a_failed_run_is_told_with_its_log_and_the_others_go_on(tmp_path, worker):
    outcomes = run([job(tmp_path, "bad", cost=9.0), job(tmp_path, "good")], tmp_path, worker, n_slots=1)
    bad, good = outcomes
    assert good.result is not None
    assert bad.result is None
    assert "bad ended with exit code 3" in bad.error
    assert "the reason, in words" in bad.error
    assert "the reason, in words" in (tmp_path / "logs" / "bad.log").read_text()


def test_closing_the_queue_stops_its_runs_in_order(tmp_path, worker):
    jobs = [job(tmp_path, "quick", cost=9.0), job(tmp_path, "slow", steps=2000)]
    slots = [Slot(None, {}), Slot(None, {})]
    outcomes = run_all(jobs, tmp_path, console=Console(file=StringIO()), slots=slots, worker=worker)
    assert next(outcomes).config.name == "quick"
    wait_for(jobs[1].config.out / "metrics.jsonl")
    outcomes.close()
    assert (jobs[1].config.out / "saved").exists()  # waited for, not killed
    with pytest.raises(ProcessLookupError):
        os.kill(started(jobs[1].config)["pid"], 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_runs_save_and_end_with_their_queue_however_it_ends(tmp_path, worker, number):
    slow = job(tmp_path, "slow", steps=2000)
    (tmp_path / "slow.json").write_text(json.dumps(to_dict(slow.config)))
    queue = f"""
        import json
        from pathlib import Path
        from rich.console import Console
        from experiments._runner import Job, Slot, run_all
        from k2jax.config import RunConfig, from_dict
        folder = Path({str(tmp_path)!r})
        config = from_dict(RunConfig, json.loads((folder / "slow.json").read_text()))
        list(run_all([Job(config, 1.0)], folder, console=Console(), slots=[Slot(None, {{}})], worker={worker!r}))
    """

    def heed_interrupts():  # a shell's background job, as a test run may be, has its children ignore them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-c", textwrap.dedent(queue)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heed_interrupts)
    wait_for(slow.config.out / "metrics.jsonl")
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: -2}[number]
    wait_for(slow.config.out / "saved")


def test_a_second_queue_waits_for_the_runs_of_a_killed_one(tmp_path, worker):
    """The lock is the runs' too: else a run that still saves and its successor would write one folder."""
    (tmp_path / "logs").mkdir()
    with _runner._lock(tmp_path, Console(file=StringIO())) as lock:
        holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"], pass_fds=(lock,))
    start = time.monotonic()
    run([job(tmp_path, "run0")], tmp_path, worker)
    assert holder.wait() == 0
    assert time.monotonic() - start > 1.0


def test_a_program_is_compiled_by_one_run_at_a_time(tmp_path):
    a0, a1, b0 = job(tmp_path, "a0", sparsity=8), job(tmp_path, "a1", sparsity=8), job(tmp_path, "b0", sparsity=16)
    queue = _runner._Queue([a0, a1, b0])

    class Running:
        job = a0

    assert queue.take([]) is a0
    assert queue.take([Running]) is b0  # a1 would compile what a0 compiles
    queue.waiting.append(b0)
    queue.programs.add(_runner.program_of(a0.config))
    assert queue.take([Running]) is a1
    queue.waiting[:] = [a1]
    queue.programs.clear()
    assert queue.take([Running]) is a1  # better than an idle core


def test_programs_are_equal_where_only_names_seeds_and_lengths_differ():
    config = ladder.config(8, "default", 0)
    same = replace(config, name="x", out=Path("y"), seed=3, data_seed=4, steps=7, checkpoint_every=1)
    assert _runner.program_of(same) == _runner.program_of(config) == _runner.program_of(ladder.config(8, "default", 2))
    assert _runner.program_of(ladder.config(16, "default", 0)) != _runner.program_of(config)
    assert _runner.program_of(replace(config, batch=config.batch * 2)) != _runner.program_of(config)


def test_last_step_reads_past_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert _runner.last_step(path) == 0
    path.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "lo')
    assert _runner.last_step(path) == 2


def test_one_slot_a_core(monkeypatch):
    monkeypatch.setattr(_runner, "_count_gpus", lambda: 0)
    monkeypatch.setattr(_runner.importlib.util, "find_spec", lambda _: None)
    assert [s.core for s in _runner.find_slots()] == sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(_runner, "_count_gpus", lambda: 3)
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in _runner.find_slots()] == ["0", "1", "2"]


def test_longer_and_sparser_runs_are_expected_to_take_longer():
    short, long, sparse = (ladder.config(s, "default", r) for s, r in ((8, 0), (8, -1), (64, 0)))
    seconds = [_runner.estimate_seconds(c, 1e10) for c in (short, sparse, long)]
    assert seconds == sorted(set(seconds))
    assert 1e9 < _runner.training_rate() < 1e12
