"""A whole run from a config: data, compilation, steps, validation, checkpoints, result."""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k2jax.allocator import keep_freed_memory
from k2jax.config import MeshConfig, RunConfig, to_dict
from k2jax.data.corpora import Corpus, prepare
from k2jax.data.pipeline import Batch, Batches, heldout_batches, timed, train_batches
from k2jax.model import store
from k2jax.optim.probes import probe
from k2jax.parallel import mesh
from k2jax.train import diagnostics, folder, hosts, metrics
from k2jax.train.checkpoint import Checkpoints, intact
from k2jax.train.display import Display
from k2jax.train.folder import DiskFull, Refused, Result, is_full
from k2jax.train.step import TrainState, abstract_state, init_state, make_eval, make_step, to_natural

PARTS = ("start", "data", "compile", "step", "evaluate", "checkpoint")  # of the time a run takes; probes count as evaluation


class Stopped(SystemExit):
    """A signal ended the run in good order; the exit code is the shell's for that signal."""


class Diverged(RuntimeError):
    """Too many steps in a row had a gradient that was not finite."""


def train(config: RunConfig, *, show_progress: bool = True) -> Result:
    """Trains, or goes on training, the run that `config` describes, in the folder `config.out`.

    The folder gets `config.json`, the tokenizer, `metrics.jsonl`, `probes.jsonl` if any are asked for, TensorBoard events,
    checkpoints and at the end `result.json`. A run that has ended is read and not run again. One that was killed goes on from
    its last checkpoint and ends with the same bits; on another mesh it goes on too, and its numbers agree to rounding. All
    processes of a run call this; process 0 writes.

    Raises:
      Refused: the folder holds something else or another run; the corpus, the checkpoint, the data, the devices or the weights
        of `config.init` do not fit the config; processes differ in it.
      DiskFull: the last checkpoint is whole.
      Diverged: `optim.max_skips` gradients in a row were not finite.
      Stopped: SIGTERM or SIGINT arrived; a checkpoint was saved (in the main thread alone).
    """
    clock = Clock()
    mesh.take_cores(config)
    hosts.agree_on_run(config)
    if hosts.leads():
        folder.check(config)
    display = Display(config, show=show_progress and hosts.leads())
    if hosts.share(hosts.leads() and folder.read_result(config) is not None):
        result = folder.read_result(config)
        display.say(f"this run has ended: {config.out / 'result.json'} is read, not run again")
        display.table(result)
        return result
    keep_freed_memory()
    _keep_programs(config)
    try:
        with _claim(config), _signals() as stop:
            result = _train(config, stop, display, clock)
    except Exception as error:
        if isinstance(error, DiskFull) or not is_full(error):
            raise
        left = intact(config.out / "checkpoints")
        raise DiskFull(f"no space is left to write in {config.out}; {left}; free some and run the same command") from error
    display.table(result)
    return result


@contextlib.contextmanager
def _claim(config: RunConfig) -> Iterator[None]:
    """The folder is this run's alone, by the lock of process 0, and all processes see it."""
    with folder.claim(config) if hosts.leads() else contextlib.nullcontext():
        hosts.check_shared(config.out)
        yield


def _train(config: RunConfig, stop: "_Stop", display: Display, clock: "Clock") -> Result:
    with _refusing():
        sizes = mesh.sizes(config, jax.device_count())
        grid = mesh.make(config) if mesh.count(sizes) > 1 or hosts.count() > 1 else None
    with Checkpoints(config.out / "checkpoints", grid) as saved:
        try:
            session = _set_up(config, sizes, grid, saved, display, clock)
        except Stopped:
            display.say(f"stopped by {stop.received.name} before the first step")
            raise
        with display, contextlib.closing(session.log), contextlib.closing(session.batches):
            stop.graceful = True
            _run(session, stop)
            return _finish(session)


class Clock:
    """Wall time by what it went into."""

    def __init__(self):
        self.seconds, self._last = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    def lap(self, part: str) -> float:
        """Counts the time since the last lap as `part`'s; returns it."""
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        self.seconds[part] += spent
        return spent

    def move(self, seconds: float, source: str, to: str) -> None:
        """Counts time that one part was given as another's."""
        self.seconds[source] -= seconds
        self.seconds[to] += seconds


class _Pending(NamedTuple):
    """A step under way, whose metrics are fetched once the next one is dispatched, so that the device never waits."""

    number: int
    metrics: dict
    data_wait: float


@dataclass
class _Session:
    """One process's share of a run."""

    config: RunConfig
    sizes: MeshConfig
    grid: Mesh | None  # None on one device
    rows: np.ndarray  # of the batch, those that this process feeds
    corpus: Corpus
    state: TrainState
    batches: Batches
    heldout: dict[str, list[dict]]
    step: jax.stages.Compiled
    log: metrics.Log
    saved: Checkpoints
    display: Display
    clock: Clock
    first: int  # steps of earlier sessions

    @functools.cached_property
    def evaluate(self) -> jax.stages.Compiled:
        """The evaluation, traced and compiled when it is first asked for: the first steps need not wait for it."""
        state, batch, _ = _inputs(self.config, self.grid)
        return make_eval(self.config, self.grid).lower(state, batch).compile(compiler_options())

    @property
    def spread(self) -> dict[str, int]:
        """How the work is divided, which decides how sums are rounded."""
        names = ("pipeline", "chunks", "expert", "data")
        divided = {name: value for name, value in asdict(self.sizes).items() if name in names}
        return divided | {"microbatches": mesh.microbatches(self.config, self.sizes), "processes": hosts.count()}

    def place(self, batch: Batch) -> dict[str, np.ndarray | jax.Array]:
        """A batch as the programs take it: this process's rows become its part of global arrays."""
        return batch if self.grid is None else mesh.place(self.grid, batch, self.rows, self.config.batch)


def _set_up(
    config: RunConfig, sizes: MeshConfig, grid: Mesh | None, saved: Checkpoints, display: Display, clock: Clock
) -> _Session:
    display.plan(sizes)
    clock.lap("start")
    rows = np.arange(config.batch) if grid is None else mesh.local_rows(grid, config.batch)
    with _refusing():
        if config.init and not saved.latest:
            store.check(Path(config.init), config.model)
        corpus, batches, heldout = _data(config, rows.tolist(), display)
    if hosts.leads():
        corpus.tokenizer.save(config.out)
    clock.lap("data")
    first = saved.latest or 0
    with ThreadPoolExecutor(1) as beside:  # the first state takes seconds too, most of them to compile small programs
        compiled = beside.submit(_compile, config, grid)
        restored = saved.restore(config) if first else None
        state = restored.state if restored else init_state(config, grid)
        clock.lap("start")
        step = compiled.result()
    clock.lap("compile")
    log = metrics.Log(config.out, first) if hosts.leads() else metrics.NoLog()
    session = _Session(config, sizes, grid, rows, corpus, state, batches, heldout, step, log, saved, display, clock, first)
    if restored:
        with _refusing():
            batches.set_state(restored.position)
        for part, spent in restored.seconds.items():
            clock.seconds[part] += spent
        display.say(f"going on after step {first:,} of {config.steps:,}{_changed(restored.spread, session.spread)}")
    clock.lap("start")
    return session


def _changed(before: dict[str, int] | None, now: dict[str, int]) -> str:
    """What is said of a run whose work is divided in another way than before."""
    apart = [f"{name} {before[name]} -> {now[name]}" for name in now if before and before.get(name) != now[name]]
    return f" with {', '.join(apart)}: numbers agree to rounding, not bit for bit" if apart else ""


def _data(config: RunConfig, rows: list[int], display: Display) -> tuple[Corpus, Batches, dict[str, list[Batch]]]:
    """The corpus, its training batches and the held-out batches of each domain of the mixture, these rows of each."""
    with hosts.first():
        corpus = prepare(config.data, console=display.console)
    if corpus.tokenizer.n_words > config.model.n_words:
        raise Refused(
            f"the tokenizer's vocabulary must fit the model's n_words={config.model.n_words}; "
            f"{config.data.tokenizer!r} has {corpus.tokenizer.n_words} words"
        )
    shape = {"batch": config.batch, "seq_len": config.seq_len}
    batches = train_batches(corpus, config.data, **shape, seed=config.data_seed, wanted=rows)
    hosts.agree({"order of the data": batches.get_state()["order"]}, "every process must read the same corpus")
    domains = [domain for domain, weight in config.data.mixture.items() if weight > 0]
    return corpus, batches, {d: heldout_batches(corpus, d, **shape, count=config.eval_batches, wanted=rows) for d in domains}


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Names what the user's input is at fault for; errors elsewhere are ours and keep their traceback."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise Refused(str(error)) from error


def _compile(config: RunConfig, grid: Mesh | None) -> jax.stages.Compiled:
    """The step."""
    return make_step(config, grid).lower(*_inputs(config, grid)).compile(compiler_options())


def _inputs(config: RunConfig, grid: Mesh | None) -> tuple[TrainState, dict, jax.ShapeDtypeStruct]:
    """What the step takes: shapes, dtypes, and on a mesh shardings."""
    split, everywhere = (NamedSharding(grid, spec) if grid else None for spec in (mesh.BATCH, PartitionSpec()))
    ids = jax.ShapeDtypeStruct((config.batch, config.seq_len + 1), np.int32, sharding=split)
    batch = {"tokens_BT": ids, "segments_BT": ids, "positions_BT": ids}
    return abstract_state(config, grid), batch, jax.ShapeDtypeStruct((), np.float32, sharding=everywhere)


def compiler_options() -> dict[str, int]:
    """Options for the programs of a run, where the user's XLA_FLAGS do not say.

    On a CPU the products are library calls and all else moves memory: LLVM's higher levels of optimization take a quarter more
    time to compile and make no step faster.
    """
    told = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    return {} if told or jax.default_backend() != "cpu" else {"xla_backend_optimization_level": 1}


def _keep_programs(config: RunConfig) -> None:
    """Compiled programs outlive the process, beside the prepared data, unless the user has chosen a place for them."""
    if jax.config.jax_compilation_cache_dir is None:
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", str(config.data.cache.expanduser() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # what has compiled before in this process settled that there is none


def _run(session: _Session, stop: "_Stop") -> None:
    """Steps until the end or a signal; afterwards every row is written and the last state saved."""
    config, pending, total_tokens = session.config, None, np.float32(session.config.tokens)
    if session.grid is not None:
        total_tokens = jax.device_put(total_tokens, NamedSharding(session.grid, PartitionSpec()))
    stream, stops = timed(session.batches), hosts.Ballot(session.grid) if hosts.count() > 1 else None
    for number in range(session.first + 1, config.steps + 1):
        batch, wait = next(stream)
        probing = _due(config.probe_every, number)
        before = _weights(session) if probing else None
        session.state, out = session.step(session.state, session.place(batch), total_tokens)
        if pending is not None:
            _record(session, pending)
        pending = _Pending(number, out, wait)
        received, last = stop.received, number == config.steps  # read once: a signal may arrive at any line
        stopped = received if stops is None else stops.next(received)
        save = last or stopped or _due(config.checkpoint_every, number)
        evaluate = last or _due(config.eval_every, number)
        if save or evaluate or probing:
            # Evaluated, logged, saved, in this order: no checkpoint is ahead of its log.
            _record(session, pending, evaluate=evaluate)
            pending = None
        if probing:
            _probe(session, number, before)
        if save:
            _save(session)
        if stopped and not last:
            session.saved.wait()
            hosts.wait()
            session.display.say(f"stopped by {stopped.name} after step {number:,}; the same command goes on from there")
            raise Stopped(128 + stopped)


def _due(every: int, number: int) -> bool:
    return every > 0 and number % every == 0


def _record(session: _Session, pending: _Pending, evaluate: bool = False) -> None:
    """Fetches a step's metrics, logs them, and stops a run that has diverged."""
    config, clock = session.config, session.clock
    values = jax.device_get(pending.metrics)
    seconds = clock.lap("step")
    clock.move(pending.data_wait, "step", "data")
    row = metrics.row(config, pending.number, values, seconds, pending.data_wait)
    if evaluate:
        row["val_loss_by_domain"] = _validate(session)
        row["val_loss"] = _mean(config, row["val_loss_by_domain"])
        clock.lap("evaluate")
    session.log.write(row, values["max_logit_LH"] if evaluate else None)
    session.display.step(row)
    if int(values["skips"]) >= config.optim.max_skips:
        raise Diverged(
            f"the gradient was not finite in {int(values['skips'])} steps in a row (optim.max_skips), the last at step "
            f"{pending.number}; the weights are those of step {pending.number - int(values['skips'])}. "
            f"A lower optim.learning_rate may help; {config.out / 'metrics.jsonl'} has every step"
        )


def _validate(session: _Session) -> dict[str, float]:
    """Next-token loss of each domain's held-out batches, nats. Reads the state and nothing else."""
    state, evaluate, losses = session.state, session.evaluate, {}
    session.clock.lap("compile")
    for domain, batches in session.heldout.items():
        sums = jax.device_get([evaluate(state, session.place(batch)) for batch in batches])
        losses[domain] = sum(float(nll) for nll, _ in sums) / max(sum(int(count) for _, count in sums), 1)
    return losses


def _mean(config: RunConfig, by_domain: dict[str, float]) -> float:
    """Mean over domains, weighted as the mixture is."""
    mixture = config.data.mixture
    return sum(mixture[d] * loss for d, loss in by_domain.items()) / sum(mixture[d] for d in by_domain)


def _weights(session: _Session) -> dict:
    """The weights in their natural form; a copy, since the next step consumes the state."""
    if session.grid is None:
        return _copied(session.state.params)
    # Waited for: programs that exchange data must not run beside each other.
    return jax.block_until_ready(to_natural(session.config, session.grid, session.state).params)


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _gathered(grid: Mesh) -> Callable[[jax.Array], jax.Array]:
    """What makes an array that is spread over a mesh one of a single device, the same on every process."""
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(grid, PartitionSpec()))
    return lambda x: jax.block_until_ready(gather(x)).addressable_data(0)


def _probe(session: _Session, number: int, before: dict) -> None:
    """Probes the weights after step `number`, given those before it. Reads the state and nothing else."""
    if session.grid is None:
        probes = probe(before, session.state.params)
    else:
        probes = probe(before, _weights(session), _gathered(session.grid))
    session.log.probe(metrics.probe_rows(number, probes))
    session.clock.lap("evaluate")


def _save(session: _Session) -> None:
    session.log.sync()
    session.saved.save(session.config, session.state, session.batches.get_state(), session.clock.seconds, session.spread)
    session.clock.lap("checkpoint")


def _finish(session: _Session) -> Result:
    session.saved.wait()
    session.clock.lap("checkpoint")
    if hosts.leads():
        folder.finish(session.config, _result(session))
    hosts.wait()
    return folder.read_result(session.config)


def _result(session: _Session) -> Result:
    config, corpus = session.config, session.corpus
    rows = metrics.read(config.out / "metrics.jsonl")
    last, recent = rows[-1], [r["loss"] for r in rows[-20:] if r["loss"] is not None]
    return Result(
        steps=config.steps,
        tokens=config.tokens,
        train_loss=sum(recent) / max(len(recent), 1),
        val_loss=last["val_loss"],
        val_loss_by_domain=last["val_loss_by_domain"],
        tokens_per_second=config.tokens / max(session.clock.seconds["step"], 1e-9),
        seconds=session.clock.seconds,
        skipped_steps=last["skips_total"],
        spikes=[spike._asdict() for spike in diagnostics.find_spikes([r["loss"] for r in rows])],
        warnings=diagnostics.diagnose(config, rows),
        heads={"total": last["heads"], "clipped": last["heads_ever_clipped"], "last_step": last["last_clip_step"]},
        corpus={"tier": corpus.tier, "sha256": corpus.sha256, "tokens": corpus.tokens},
        config=to_dict(config),
    )


@dataclass
class _Stop:
    """Whether a signal has asked the run to end; before the first step there is nothing to save and it ends at once."""

    received: signal.Signals | None = None
    graceful: bool = False


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    """Turns the first SIGTERM or SIGINT into a request; the second has its usual effect."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return

    def handle(number, _frame):
        stop.received = signal.Signals(number)
        for n, handler in before.items():
            signal.signal(n, handler)
        if not stop.graceful:
            raise Stopped(128 + number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
