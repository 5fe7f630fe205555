"""Many processes in one run: how they find each other, agree before anything is written, and end together.

jax.distributed joins the processes through a service in process 0. What is said here goes through that service's key-value
store and not over devices, so it also works when a device program hangs because one process is gone.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the only way to the client of jax.distributed; orbax takes it too
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k2jax.config import HostsConfig, RunConfig, to_dict
from k2jax.train.folder import Refused

PACKAGES = ("k2jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")  # that decide what is computed
JOIN = 300  # seconds that processes wait for each other at the start
BEATS = 15  # signs of life in the time after which a process without one counts as lost
GRACE = 2.0  # seconds that a process has to end by itself once another has said that the run is over
FOREVER = 7 * 24 * 3600 * 1000  # milliseconds; who waits for a lost process is ended by its watch
END = "k2jax/end"
BEAT = "k2jax/beat"
# How errors of exchanges begin; their type changes with jax.
BROKEN = re.compile("(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS): ")
AGAIN = "the same command goes on from the last checkpoint"


class _Place(NamedTuple):
    """What a process is told about itself and the others."""

    coordinator: str | None  # None: jax finds it
    count: int
    index: int
    method: str  # of jax's detection
    devices: list[int] | None  # accelerators of this node that are this process's; None: all


def find(config: HostsConfig, environment: Mapping[str, str]) -> _Place | None:
    """This process's place among others, by the flags or what started it; None for a process alone. Raises Refused."""
    told = _of_launcher(environment)
    if not (config.coordinator or config.count or config.index >= 0):
        if told and told.method == "ompi" and "OMPI_MCA_orte_hnp_uri" not in environment:  # Open MPI 5
            raise Refused("this Open MPI does not tell where process 0 is; give --hosts.coordinator HOST:PORT")
        return told
    count = config.count or (told.count if told else 0)
    index = config.index if config.index >= 0 else (told.index if told else -1)
    given = f"got coordinator={config.coordinator!r}, count={config.count}, index={config.index}"
    if count <= 0 or index < 0 or (count > 1 and not config.coordinator):
        raise Refused(f"a run of many processes needs --hosts.coordinator, --hosts.count and --hosts.index; {given}")
    if index >= count:
        raise Refused(f"hosts.index must be less than hosts.count={count}; got {index}")
    if count == 1:
        return None
    if not re.fullmatch(r".+:\d+", config.coordinator):
        raise Refused(f"hosts.coordinator must be HOST:PORT; got {config.coordinator!r}")
    return _Place(config.coordinator, count, index, "deactivate", told.devices if told else None)


def _of_launcher(environment: Mapping[str, str]) -> _Place | None:
    """What mpirun or srun say, if they started more than one process."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        method, names = "ompi", [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    elif "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        method, names = "slurm", ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    else:
        return None
    # SLURM lists the tasks of its nodes as 8(x4) or 8,7.
    count, index, local, on_node = (int(re.match(r"\d+", environment.get(name, "1"))[0]) for name in names)
    # One process a node, or one that is shown no other accelerator, has all that it sees.
    alone = on_node == 1 or re.fullmatch(r"[^,]+", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None
    return _Place(None, count, index, method, None if alone else [local]) if count > 1 else None


class Alone:
    """The only process of a run."""

    def fail(self, code: int, error: Exception | str) -> int:
        """Says what is wrong and returns the exit code; nobody else has to know."""
        print(f"error: {error}", file=sys.stderr)
        return code


@contextlib.contextmanager
def joined(config: HostsConfig) -> Iterator["Alone | Crew"]:
    """Joins the other processes of the run, if there are any; call it before anything that asks jax for devices.

    While the context lasts, the loss or failure of one process ends the others with a sentence that names it: within `patience`
    and ten seconds, or, if it is process 0 that is there but does not answer, twice that. An error in the context ends all of
    them and does not leave it.

    Raises Refused for flags that do not fit or processes that do not come.
    """
    place = find(config, os.environ)
    if place is None:
        yield Alone()
        return
    _connect(place, config.patience)
    crew = Crew(place, config.patience)
    try:
        yield crew
        wait()  # all have come to the end before one stops listening
    except BaseException as error:
        crew.break_off(error)
    crew.leave()


def _connect(place: _Place, patience: float) -> None:
    where = place.coordinator or "the place that the launcher names"
    failed = f"process {place.index} of {place.count} could not join the others at {where}"
    _explain_abort(lambda: f"{failed} in {JOIN} seconds: not all came, two have one index, or the port is taken")
    # jax would answer SIGTERM itself; the training loop does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            local_device_ids=place.devices,
            cluster_detection_method=place.method,
            initialization_timeout=JOIN,
            heartbeat_timeout_seconds=round(2 * patience + 15),  # for when process 0 itself does not answer
        )
        if place.devices is None and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
            for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
                jax.config.update(name, "all")  # what jax finds by itself is one a process
    except (RuntimeError, ValueError, OSError) as error:
        raise Refused(f"{failed}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Crew:
    """This process among the others: a thread that gives signs of life and listens whether the run is over."""

    def __init__(self, place: _Place, patience: float):
        self._place, self._patience, self._client = place, patience, distributed.global_state.client
        self._name = f"process {place.index} of {place.count} ({socket.gethostname()})"
        self._over, self._answered = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        _explain_abort(self._why_aborted)

    def leave(self) -> None:
        """Parts from the others, in good order."""
        self._over.set()
        self._thread.join()
        jax.distributed.shutdown()

    def fail(self, code: int, error: Exception | str) -> NoReturn:
        """Says what is wrong, here and to the others, and ends this process with an exit code."""
        self._wait_for_blame(error)
        print(f"error: {error}", file=sys.stderr)
        self._part(code, str(error))

    def break_off(self, error: BaseException) -> NoReturn:
        """Ends the run for an error that nobody has explained."""
        if isinstance(error, SystemExit):
            self._part(error.code if isinstance(error.code, int) else 1, "it was stopped")
        self._wait_for_blame(error)
        traceback.print_exception(error)
        self._part(130 if isinstance(error, KeyboardInterrupt) else 1, f"{type(error).__name__}: {_first_line(error)}")

    def _wait_for_blame(self, error: BaseException | str) -> None:
        """Waits, if an exchange broke: most likely another process is gone, and the watch will know which and end this one."""
        if BROKEN.match(str(error)):
            time.sleep(self._patience + 3 * GRACE + 6 * self._patience / BEATS)

    def _part(self, code: int, sentence: str) -> NoReturn:
        with contextlib.suppress(Exception):  # without the service they are told by its silence
            self._say_end(code, f"{self._name} ended the run: {sentence}")
        self._over.set()
        if self._place.index == 0:
            time.sleep(GRACE + 2 * self._patience / BEATS)  # the service goes with this process
        _exit(code)

    def _say_end(self, code: int, sentence: str) -> None:
        self._client.key_value_set(f"{END}/{self._place.index}", json.dumps([code, sentence]), allow_overwrite=True)

    def _watch(self) -> None:
        n, start = self._place.count, time.monotonic()
        last_seen = {f"{BEAT}/{i}": (json.dumps([f"process {i} of {n}", -1]), start) for i in range(n)}
        for beat in itertools.count():
            if self._over.wait(self._patience / BEATS):
                return
            try:
                sign = json.dumps([self._name, beat])
                self._client.key_value_set(f"{BEAT}/{self._place.index}", sign, allow_overwrite=True)
                said = self._client.key_value_dir_get(f"{END}/")
                signs = dict(self._client.key_value_dir_get(f"{BEAT}/")) if self._place.index == 0 else {}
            except Exception:  # of a type that changes with jax
                continue  # process 0 is gone or slow; jax aborts this process when it is sure
            self._answered = now = time.monotonic()
            if said:
                self._end(*json.loads(said[0][1]))
            for key, (before, since) in last_seen.items() if signs else ():
                if (sign := signs.get(key, before)) != before:
                    last_seen[key] = sign, now
                elif now - since > self._patience:
                    self._lost(json.loads(sign)[0])

    def _lost(self, name: str) -> None:
        sentence = f"{name} is lost: it gave no sign of life for {self._patience:g} seconds; {AGAIN}"
        self._say_end(1, sentence)
        time.sleep(GRACE + 2 * self._patience / BEATS)  # until the others have heard it
        self._end(1, sentence)

    def _end(self, code: int, sentence: str) -> None:
        if not self._over.wait(GRACE):
            print(f"error: {sentence}", file=sys.stderr, flush=True)
            _exit(code)

    def _why_aborted(self) -> str | None:
        if self._place.index and not self._over.is_set() and self._is_service_gone():
            return f"process 0 of {self._place.count}, which joins the others, is lost; {AGAIN}"
        return None

    def _is_service_gone(self) -> bool:
        if time.monotonic() - self._answered > self._patience:
            return True
        host, port = distributed.global_state.coordinator_address.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError:
            return True
        return False


_kept = []  # the handler below: C does not keep it alive


def _explain_abort(why: Callable[[], str | None]) -> None:
    """Says why when jax aborts this process, which it does at once and with a stack trace alone; None leaves it at that."""

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_number: int) -> None:
        if sentence := why():
            print(f"error: {sentence}", file=sys.stderr)
            _exit(1)

    # A handler of Python's would never run: abort() ends the process as soon as the handler in C returns.
    ctypes.CDLL(None).signal(signal.SIGABRT, handle)
    _kept[:] = [handle]


def _exit(code: int) -> None:
    """Ends this process without waiting for others, as jax would do at exit."""
    if sys.stdout.isatty():
        print("\033[?25h", end="")  # a progress bar hides the cursor
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- what processes say to each other; all of them make the same calls in the same order

_CALLS = itertools.count()


def count() -> int:
    """Processes of the run."""
    return distributed.global_state.num_processes


def index() -> int:
    """Which of them this one is."""
    return distributed.global_state.process_id


def leads() -> bool:
    """Whether this is process 0, which alone writes what is not a checkpoint."""
    return index() == 0


def share(value: Any = None) -> Any:
    """Process 0's value, which must survive JSON, in every process."""
    client = distributed.global_state.client
    if client is None:
        return value
    key = f"k2jax/share/{next(_CALLS)}"
    if leads():
        client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(client.blocking_key_value_get(key, FOREVER))


def wait() -> None:
    """Returns when all processes are here."""
    if distributed.global_state.client is not None:
        distributed.global_state.client.wait_at_barrier(f"k2jax/wait/{next(_CALLS)}", FOREVER)


def agree(mine: dict, rule: str) -> None:
    """Raises Refused if this process's values are not those of process 0, naming those that differ; returns when all agree."""
    theirs = share(mine)
    if theirs != json.loads(json.dumps(mine)):
        here, there = _flat(mine), _flat(theirs)
        names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
        apart = "; ".join(f"{name}: {there.get(name)} != {here.get(name)}" for name in names)
        raise Refused(f"{rule}; process {index()} differs from process 0 in {apart}")
    wait()


def agree_on_run(config: RunConfig) -> None:
    """Raises Refused unless every process has the same config and the same versions of Python and packages."""
    if count() == 1:
        return
    versions = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    agree(to_dict(config) | versions, "every process must have the same config and the same packages")


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


@contextlib.contextmanager
def first() -> Iterator[None]:
    """Process 0 runs the block before the others do: what it leaves on a disk that they share they need not make again."""
    if not leads():
        wait()
    yield
    if leads():
        wait()


def check_shared(folder: Path) -> None:
    """Raises Refused if a process does not see what process 0 writes in this folder."""
    if count() == 1:
        return
    mark = folder / f".{share(uuid.uuid4().hex)}"
    if leads():
        mark.touch()
    wait()
    for _ in range(20):  # a network file system may show it late
        if seen := mark.exists():
            break
        time.sleep(0.5)
    if not seen:
        here = f"process {index()} on {socket.gethostname()}"
        raise Refused(f"out must be a folder that every process sees; {here} does not see what process 0 writes in {folder}")
    wait()
    if leads():
        mark.unlink()


class Ballot:
    """Whether any process has received a signal: a small collective a step, so that all learn it at the same step."""

    def __init__(self, mesh: Mesh):
        self._shape, self._split = (mesh.size,), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._cast = None

    def next(self, received: signal.Signals | None) -> signal.Signals | None:
        """Casts this process's vote of a step, and counts those of the step before, for which no device has to wait."""
        before, vote = self._cast, np.full(1, received or 0, np.int32)
        self._cast = self._largest(jax.make_array_from_callback(self._shape, self._split, lambda _: vote))
        number = 0 if before is None else int(before)
        return signal.Signals(number) if number else None
