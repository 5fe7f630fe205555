import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from k2jax.config import HostsConfig, MeshConfig
from k2jax.train import hosts, metrics
from k2jax.train.folder import Refused
from k2jax.train.hosts import Ballot, find
from k2jax.train.loop import train

SLURM = {
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_NTASKS": "32",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
AT = HostsConfig(coordinator="node001:1234", count=4, index=3)


@pytest.mark.parametrize(
    ("config", "environment", "place"),
    [
        (HostsConfig(), {}, None),
        (AT, {}, ("node001:1234", 4, 3, "deactivate", None)),
        (HostsConfig(), SLURM, (None, 32, 13, "slurm", [5])),
        (HostsConfig(coordinator="n:1"), SLURM, ("n:1", 32, 13, "deactivate", [5])),
        (HostsConfig(), SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, (None, 32, 13, "slurm", None)),  # bound by SLURM
        (HostsConfig(), SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (None, 32, 13, "slurm", [5])),
        (HostsConfig(), SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, (None, 4, 13, "slurm", None)),
        (HostsConfig(), SLURM | {"SLURM_NTASKS": "1"}, None),
        (HostsConfig(), {"SLURM_NTASKS": "32", "SLURM_PROCID": "0"}, None),  # the batch script, not a step
        (HostsConfig(), OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "x"}, (None, 2, 1, "ompi", None)),
        (HostsConfig(coordinator="n:1"), OPEN_MPI, ("n:1", 2, 1, "deactivate", None)),
        (HostsConfig(), SLURM | OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "x"}, (None, 2, 1, "ompi", None)),  # mpirun in a job
        (replace(AT, count=1, index=0), {}, None),
    ],
)
def test_a_process_finds_its_place_by_flags_or_by_what_started_it(config, environment, place):
    assert find(config, environment) == place


@pytest.mark.parametrize(
    ("config", "environment", "said"),
    [
        (HostsConfig(count=2), {}, "needs --hosts.coordinator, --hosts.count and --hosts.index; got coordinator='', count=2"),
        (HostsConfig(coordinator="n:1", count=2), {}, "--hosts.index; got coordinator='n:1', count=2, index=-1"),
        (replace(AT, index=4), {}, "index must be less than hosts.count=4; got 4"),
        (replace(AT, coordinator="node001"), {}, "must be HOST:PORT; got 'node001'"),
        (HostsConfig(), OPEN_MPI, "does not tell where process 0 is; give --hosts.coordinator"),
    ],
)
def test_a_place_that_is_not_whole_is_refused(config, environment, said):
    with pytest.raises(Refused, match=said):
        find(config, environment)


def test_a_process_alone_agrees_with_itself(base, tmp_path):
    with hosts.joined(HostsConfig()) as others:
        assert hosts.leads() and hosts.share({"a": 1}) == {"a": 1}
        hosts.agree({"a": 1}, "rule")
        hosts.agree_on_run(base)
        hosts.check_shared(tmp_path)
        with hosts.first():
            hosts.wait()
        assert others.fail(2, "x") == 2


def test_a_vote_is_known_one_step_later():
    ballot = Ballot(Mesh(np.array(jax.devices()), ("data",)))
    votes = [None, signal.SIGINT, signal.SIGTERM, None, None]
    assert [ballot.next(vote) for vote in votes] == [None, None, signal.SIGINT, signal.SIGTERM, None]


@pytest.fixture
def start(tmp_path, programs):
    """Starts process `index` of two with two devices: `start(index, "-m", "k2jax.train", ...)`; all are gone at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count={}")
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    started = []

    def start(index, *arguments, devices=2, folder=tmp_path):
        place = ["--hosts.coordinator", f"127.0.0.1:{port}", "--hosts.count", "2", "--hosts.index", str(index)]
        process = subprocess.Popen(
            [sys.executable, *arguments, *place, "--hosts.patience", "3"],
            cwd=folder,
            env=environment | {"XLA_FLAGS": flags.format(devices), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    """Exit code and error of a process, without what jax and gloo tell of themselves."""
    _, error = process.communicate(timeout=120)
    return process.returncode, [line for line in error.splitlines() if line.startswith("error: ")]


PAIR = """
import os, signal, sys, time
import jax, numpy as np, tyro
from k2jax.config import HostsConfig
from k2jax.train import hosts
from jax.sharding import Mesh

def exchange(ballot, n):
    for i in range(n):
        received = signal.SIGTERM if hosts.index() == 1 and i == 5 else None
        if ballot.next(received):
            return i


act = sys.argv.pop(1)
place = tyro.cli(HostsConfig, args=[a.replace("--hosts.", "--") for a in sys.argv[1:]])
with hosts.joined(place) as others:
    ballot = hosts.Ballot(Mesh(np.array(jax.devices()), ("data",)))
    assert hosts.share(hosts.index() + 5) == 5
    with hosts.first():
        print("in", time.monotonic())
    hosts.agree({"a": {"b": 1}}, "rule")
    assert exchange(ballot, 10) == 6
    print("ready", flush=True)
    if act == "hang":
        while True:
            ballot.next(None)
            time.sleep(0.01)
    if hosts.index() == 1 and act == "fail":
        others.fail(2, "the cat is out")
    if hosts.index() == 1 and act == "raise":
        raise KeyError("cat")
    if act in ("fail", "raise"):
        hosts.wait()
print("done")
"""


@pytest.fixture
def pair(tmp_path, start):
    (tmp_path / "pair.py").write_text(PAIR)
    return lambda act: [start(index, "pair.py", act) for index in (0, 1)]


@pytest.mark.slow
def test_two_processes_agree_and_part(pair):
    processes = pair("part")
    told = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    first, second = (out.split() for out, _ in told)
    assert first[-2:] == second[-2:] == ["ready", "done"]
    assert float(first[1]) < float(second[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("fail", 2, "process 1 of 2 ({host}) ended the run: the cat is out"),
        ("raise", 1, "process 1 of 2 ({host}) ended the run: KeyError: 'cat'"),
    ],
)
def test_the_error_of_one_process_is_told_to_the_other_and_ends_it(pair, act, code, said):
    first, second = pair(act)
    assert ended(first) == (code, [f"error: {said.format(host=socket.gethostname())}"])
    assert ended(second)[0] == code


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_so(tmp_path, start):
    (tmp_path / "late.py").write_text(PAIR.replace("place = tyro", "hosts.JOIN = 3\nplace = tyro"))
    code, (said,) = ended(start(0, "late.py", "part"))
    assert code == 1 and "process 0 of 2 could not join the others at 127.0.0.1:" in said and "in 3 seconds" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL), (0, signal.SIGSTOP)]
)
def test_a_lost_process_ends_the_other_which_names_it(pair, lost, number):
    processes = pair("hang")
    for process in processes:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
    processes[lost].send_signal(number)
    code, (said,) = ended(processes[1 - lost])
    assert code == 1 and said.startswith(f"error: process {lost} of 2") and "is lost" in said
    assert "the same command goes on from the last checkpoint" in said


PRESET = """
from pathlib import Path
from k2jax.config import *

def config():
    return {config}
"""
COMMAND = ("-m", "k2jax.train", "preset")


def write_preset(config, folder):
    folder.mkdir(exist_ok=True)
    (folder / "preset.py").write_text(PRESET.format(config=repr(config).replace("PosixPath", "Path")))


@pytest.mark.slow
def test_processes_that_differ_in_the_config_refuse_and_name_the_fields(small, tmp_path, start):
    write_preset(small, tmp_path)
    first, second = start(0, *COMMAND), start(1, *COMMAND, "--steps", "13", "--optim.qk-tau", "9")
    (code, (said,)), (code_of_second, (said_of_second,)) = ended(first), ended(second)
    apart = (
        "every process must have the same config and the same packages; process 1 differs from process 0 in "
        "optim.qk_tau: 0.03 != 9.0; steps: 12 != 13"
    )
    assert (code, code_of_second, said_of_second) == (2, 2, f"error: {apart}")
    assert said == f"error: process 1 of 2 ({socket.gethostname()}) ended the run: {apart}"
    assert not small.out.exists()


@pytest.mark.slow
def test_a_folder_that_one_process_does_not_see_is_refused(small, tmp_path, start):
    config = replace(small, out=type(small.out)("run"), batch=8, mesh=MeshConfig())
    for name in ("a", "b"):
        write_preset(config, tmp_path / name)
    first, second = start(0, *COMMAND, folder=tmp_path / "a"), start(1, *COMMAND, folder=tmp_path / "b")
    for process in (first, second):
        code, (said,) = ended(process)
        assert code == 2 and "out must be a folder that every process sees; process 1 on" in said


def wait_for_step(config, processes, step):
    path = config.out / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert all(process.poll() is None for process in processes), [ended(process) for process in processes]
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_after_one_is_killed_and_ends_as_on_one_device(small, tmp_path, start):
    every = {"eval_every": 10, "checkpoint_every": 4, "probe_every": 10}
    one = replace(small, steps=20, batch=8, microbatches=1, **every, out=tmp_path / "one")
    alone = train(one, show_progress=False)
    config = replace(one, mesh=MeshConfig(expert=2), out=tmp_path / "many")
    write_preset(config, tmp_path)

    first, second = (start(index, *COMMAND, devices=4) for index in (0, 1))
    wait_for_step(config, [first, second], 9)
    second.kill()
    code, said = ended(first)
    assert code == 1 and "process 1 of 2" in said[-1]

    processes = [start(index, *COMMAND, devices=4) for index in (0, 1)]
    out, _ = processes[0].communicate(timeout=300)
    assert [process.wait(60) for process in processes] == [0, 0]
    assert "going on after step" in out and "on 8 devices, pipeline 1 x expert 2 x data 4" in out
    rows, expected = (metrics.read(folder / "metrics.jsonl") for folder in (config.out, one.out))
    assert [row["step"] for row in rows] == list(range(1, 21))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[name] for row in rows], [row[name] for row in expected], rtol=1e-4)
    probes, alike = (metrics.read(folder / "probes.jsonl") for folder in (config.out, one.out))
    assert {row["step"] for row in probes} == {10, 20} and len(probes) >= len(alike) > 0
    many = train(replace(config, mesh=MeshConfig(data=1)), show_progress=False)  # has ended, and is read
    np.testing.assert_allclose(many.val_loss, alone.val_loss, rtol=1e-5)
