"""Runs a list of training runs over the cores, or the accelerators, of this machine.

One single-threaded process a core: at these sizes a second thread buys a run nothing, and a second run everything. The longest
run starts first. Two runs of one shape never compile the same program at once: while the first compiles, another shape goes
ahead, and the later ones find the program in the persistent cache. A run that has finished is read; one that was killed goes on
from its checkpoint; one that fails is reported with the end of its log and the others go on.

As a script this file is the worker: `python -m experiments._runner JOB.json PARENT_PID`.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from k2jax.allocator import fault_in_huge_pages
from k2jax.config import RunConfig, from_dict, to_dict
from k2jax.scaling.flops import count_params, training_flops
from k2jax.train import folder
from k2jax.train.folder import Result

WORKER = (sys.executable, "-m", "experiments._runner")
POLL = 0.3  # seconds
GRACE = 60.0  # seconds a stopped run gets to save its checkpoint


class Job(NamedTuple):
    """A run and the seconds it is expected to take on one core; only the proportions matter once runs are going."""

    config: RunConfig
    cost: float


class Outcome(NamedTuple):
    """What became of a run: its result, or the reason there is none."""

    config: RunConfig
    result: Result | None
    error: str
    wall_seconds: float  # of this session's process; 0 where the result was read
    cpu_seconds: float


class Slot(NamedTuple):
    """A place where one run at a time fits."""

    core: int | None  # the worker is pinned to it
    environment: dict[str, str]


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen
    log: Path
    started: float
    first_step: int  # what a resumed run had behind it
    task: TaskID
    compiled: bool = False


@dataclass
class _Queue:
    waiting: list[Job]
    programs: set[str] = field(default_factory=set)  # shapes that some run has compiled

    def take(self, running: Sequence[_Running]) -> Job:
        """The longest run whose program nobody is compiling just now; failing that, the longest."""
        compiling = {program_of(r.job.config) for r in running} - self.programs
        free = (job for job in self.waiting if program_of(job.config) not in compiling)
        job = next(free, self.waiting[0])
        self.waiting.remove(job)
        return job


def run_all(
    jobs: Sequence[Job], home: Path, *, console: Console, slots: Sequence[Slot] | None = None, worker=WORKER
) -> Iterator[Outcome]:
    """Yields the outcome of every run as it is known, the finished ones first.

    Interrupted (SIGINT, SIGTERM, or by closing the iterator) it asks the runs under way to save and stop. Should this process
    die outright, the system asks them.

    Args:
      home: gets `jobs/NAME.json` and `logs/NAME.log`.
      slots: where runs go; found by `find_slots` if not given.
      worker: the command that is given a job file and this process's id.

    Raises ValueError, before anything starts, if a run's folder holds a run of another config.
    """
    done = [(job, finished(job.config)) for job in jobs]
    yield from (Outcome(job.config, result, "", 0.0, 0.0) for job, result in done if result)
    waiting = sorted((job for job, result in done if not result), key=lambda job: -job.cost)
    if not waiting:
        return
    for name in ("jobs", "logs"):
        (home / name).mkdir(parents=True, exist_ok=True)
    slots = list(slots or find_slots())
    with _lock(home, console) as lock, _progress(console) as progress, _stop_on_signal():
        running: list[_Running] = []
        overall = _Overall(progress, jobs, [job for job, result in done if result], len(slots))
        queue = _Queue(waiting)
        try:
            while queue.waiting or running:
                for slot in slots:
                    if queue.waiting and not any(r.slot is slot for r in running):
                        running.append(_start(queue.take(running), slot, home, worker, lock, progress))
                time.sleep(POLL)
                for r in list(running):
                    _watch(r, queue, progress)
                    if outcome := _outcome(r):
                        running.remove(r)
                        progress.remove_task(r.task)
                        overall.finish(r.job)
                        yield outcome
                overall.update(running, queue.waiting)
        finally:
            _stop(running)


def finished(config: RunConfig) -> Result | None:
    """The result in the run's folder, None while it is to do; ValueError, naming the field, if it is another run's folder."""
    folder.check(config)
    return folder.read_result(config)


def estimate_seconds(config: RunConfig, rate: float) -> float:
    """About how long a run takes on one core; accelerators take less in much the same proportions.

    Newton-Schulz costs some 20 * d_expert FLOPs a weight and step, whatever the tokens.

    Args:
      rate: FLOPs a second in training.
    """
    per_token = training_flops(config, config.seq_len).total
    newton_schulz = 20 * config.model.moe.d_expert * count_params(config).total
    validation = 4 * config.eval_batches * config.batch * config.seq_len * per_token / 3
    return 15 + (config.tokens * per_token + config.steps * newton_schulz + validation) / rate


def training_rate() -> float:
    """FLOPs a second of training on one core here: about 0.55 of what products of small matrices reach."""
    a = np.ones((256, 64, 64), np.float32)  # small enough that numpy keeps to one thread
    seconds = []
    for _ in range(5):
        start = time.process_time()
        a @ a
        seconds.append(time.process_time() - start)
    return 0.55 * 256 * 2 * 64**3 / max(min(seconds), 1e-4)


def program_of(config: RunConfig) -> str:
    """A key that is equal for runs whose compiled programs are: names, seeds, data and lengths are not compiled in."""
    plain = to_dict(config)
    for name in ("name", "out", "init", "seed", "data_seed", "steps", "eval_every", "eval_batches", "checkpoint_every", "data"):
        del plain[name]
    return json.dumps(plain, sort_keys=True)


def find_slots() -> list[Slot]:
    """One slot an accelerator if jax sees any, else one a core that this process may use."""
    if n := _count_gpus():
        return [Slot(None, {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(n)]
    if importlib.util.find_spec("libtpu"):
        return [Slot(None, {})]  # a TPU's devices cannot be shared out by an environment variable alone
    if hasattr(os, "sched_getaffinity"):
        return [Slot(core, {"JAX_PLATFORMS": "cpu"}) for core in sorted(os.sched_getaffinity(0))]
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return [Slot(None, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": single}) for _ in range(os.cpu_count() or 1)]


def _count_gpus() -> int:
    has_plugin = any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))
    if not has_plugin or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    # In a process of its own: a parent that opened the devices would keep the workers from them.
    probe = "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()))"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    return int(out.stdout.split()[-1]) if out.returncode == 0 and out.stdout.split() else 0


def _start(job: Job, slot: Slot, home: Path, worker: Sequence[str], lock: int, progress: Progress) -> _Running:
    name = job.config.name
    path, log = home / "jobs" / f"{name}.json", home / "logs" / f"{name}.log"
    path.write_text(json.dumps({"config": to_dict(job.config), "core": slot.core}, indent=1))
    environment = os.environ | slot.environment
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # A slot is one device: neither a test's fake ones nor the machine's cores are for one run.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", environment.get("XLA_FLAGS", ""))
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=1".strip()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*worker, str(path), str(os.getpid())],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the runs in order
        )
    step = last_step(job.config.out / "metrics.jsonl")
    task = progress.add_task(f"  {name}", total=job.config.steps, completed=step, text="starting")
    return _Running(job, slot, process, log, time.monotonic(), step, task)


def _watch(r: _Running, queue: _Queue, progress: Progress) -> None:
    step = last_step(r.job.config.out / "metrics.jsonl")
    if step > r.first_step and not r.compiled:
        r.compiled = True
        queue.programs.add(program_of(r.job.config))
    text = f"step {step}/{r.job.config.steps}" if r.compiled else "starting"
    progress.update(r.task, completed=step, text=text)


def _outcome(r: _Running) -> Outcome | None:
    """None while the run goes on."""
    pid, status, usage = os.wait4(r.process.pid, os.WNOHANG)
    if not pid:
        return None
    code = r.process.returncode = os.waitstatus_to_exitcode(status)
    seconds, cpu = time.monotonic() - r.started, usage.ru_utime + usage.ru_stime
    if code == 0 and (result := finished(r.job.config)):
        return Outcome(r.job.config, result, "", seconds, cpu)
    reason = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    reason = "ended without a result" if code == 0 else reason
    return Outcome(r.job.config, None, f"{r.job.config.name} {reason}; the end of {r.log}:\n{_tail(r.log)}", seconds, cpu)


def last_step(path: Path) -> int:
    """The step of the last whole line of a run's metrics; 0 before there is one."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def _tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def _lock(home: Path, console: Console) -> Iterator[int]:
    """Keeps a second queue out of the folder. The runs inherit the lock: it outlives a killed queue until they have saved."""
    with (home / "lock").open("w") as file:
        limit, waited = time.monotonic() + GRACE, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise ValueError(f"another process works in {home}; one queue at a time") from None
                if not waited:
                    console.print(f"waiting for runs in {home} that still save")
                waited = True
                time.sleep(POLL)
        yield file.fileno()


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[None]:
    """Makes SIGTERM an exception, as SIGINT is, so that the runs are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(running: Sequence[_Running]) -> None:
    """Asks the runs to save and stop; kills what has not stopped in time, or at once at a second signal."""
    for r in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(r.process.pid, signal.SIGTERM)
    limit = time.monotonic() + GRACE
    try:
        for r in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                r.process.wait(max(0.0, limit - time.monotonic()))
    finally:
        for r in running:
            if r.process.poll() is None:
                r.process.kill()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


class _Overall:
    """The first line of the progress: runs done, and the time left by cost."""

    def __init__(self, progress: Progress, jobs: Sequence[Job], done: Sequence[Job], n_slots: int):
        self.progress, self.n_slots, self.n_jobs = progress, n_slots, len(jobs)
        self.done, self.n_done = sum(j.cost for j in done), len(done)
        self.started, self.at_start = time.monotonic(), None
        self.task = progress.add_task("all runs", total=sum(j.cost for j in jobs), completed=self.done, text="")

    def finish(self, job: Job) -> None:
        self.done, self.n_done = self.done + job.cost, self.n_done + 1

    def update(self, running: Sequence[_Running], waiting: Sequence[Job]) -> None:
        partial = [r.job.cost * last_step(r.job.config.out / "metrics.jsonl") / r.job.config.steps for r in running]
        now = self.done + sum(partial)
        left = sum(r.job.cost for r in running) + sum(j.cost for j in waiting) - sum(partial)
        self.at_start = now if self.at_start is None else self.at_start
        elapsed, left = (
            time.monotonic() - self.started,
            sum(r.job.cost for r in running) + sum(j.cost for j in waiting) - sum(partial),
        )
        # The rate is the estimate's until there is something to measure it by.
        rate = (now - self.at_start) / elapsed if now - self.at_start > 0.02 * (left + now) else self.n_slots
        minutes = left / max(rate, 1e-9) / 60
        self.progress.update(self.task, completed=now, text=f"{self.n_done}/{self.n_jobs} runs, about {minutes:.0f} min left")


def _die_with(parent: int) -> None:
    """Has the system send this process SIGTERM when its parent ends, however it ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            sys.exit("the process that started this run is gone")


def work(job: Path, parent: int) -> None:
    """The worker: trains one run, on one core if the job names one."""
    _die_with(parent)
    plain = json.loads(job.read_text())
    if plain["core"] is not None:
        os.sched_setaffinity(0, {plain["core"]})
    fault_in_huge_pages()
    from k2jax.train.loop import Diverged, train  # after pinning: XLA makes as many threads as there are cores to run on

    try:
        train(from_dict(RunConfig, plain["config"]), show_progress=False)
    except (ValueError, OSError, Diverged) as error:
        sys.exit(f"error: {error}")  # a sentence, for the end of the log


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
