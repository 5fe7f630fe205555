"""Checkpoints: the whole training state, the position in the data and the config, written aside and kept two deep (orbax).

What is written is the state of one device, whatever the mesh: any mesh and any number of processes goes on from any checkpoint.
"""

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from k2jax.config import RunConfig, from_dict, to_dict
from k2jax.train.folder import DiskFull, Refused, differing, is_full
from k2jax.train.step import TrainState, abstract_natural, abstract_state, from_natural, to_natural

KEEP = 2  # the one before the last outlives a fault while the last is written
SHARED = 2**22  # bytes a replica, from which the replicas of an array share its writing: each cut is a program to compile


class Restored(NamedTuple):
    """What a checkpoint holds."""

    state: TrainState
    position: dict  # of the data iterator
    seconds: dict[str, float]  # what the run had spent
    spread: dict[str, int] | None  # how its work was divided; None if it does not tell


def intact(folder: Path) -> str:
    """What a folder of checkpoints still holds when writing fails, as half a sentence."""
    # A checkpoint gets its number for a name last. Orbax is not asked: among many processes it would wait for all.
    steps = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return f"the checkpoint of step {max(steps)} is whole" if steps else "there is no checkpoint yet"


class Checkpoints:
    """The checkpoints of one run, on a mesh or on one device (None). All processes make the same calls.

    Writing goes on in the background; a checkpoint counts only once all its files are there.
    """

    def __init__(self, folder: Path, mesh: Mesh | None = None):
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file it writes
        self._folder, self._mesh = folder.resolve(), mesh
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED)
        ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return self._manager.latest_step()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # Closing waits for the other processes, which after an error may never come.
        if kind is None or jax.process_count() == 1:
            self.close()

    def save(
        self, config: RunConfig, state: TrainState, position: dict, seconds: dict[str, float], spread: dict[str, int]
    ) -> None:
        """Starts writing a checkpoint; the caller may give the state away at once.

        Args:
          position: of the data iterator, its `get_state()`.
          seconds: what the run has spent so far.
          spread: how its work is divided.

        Raises DiskFull for this checkpoint or the one under way.
        """
        self.wait()
        if self._mesh is not None:
            state = to_natural(config, self._mesh, state)
        step = int(state.step)
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._full(step, f"it needs about {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free")
        record = {"config": to_dict(config), "data": position, "seconds": seconds, "spread": spread}
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
            )
        except Exception as error:
            self._explain(step, error)

    def wait(self) -> None:
        """Waits until the checkpoint under way is whole. Raises like `save`."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._explain(None, error)

    def restore(self, config: RunConfig) -> Restored:
        """The last checkpoint.

        Raises Refused, naming the fields, if it is of another config.
        """
        step = self.latest
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if apart := differing(from_dict(RunConfig, record["config"]), config):
            raise Refused(f"the checkpoint in {self._folder} is of another config: {'; '.join(apart)}")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(self._abstract(config)))
        state = self._manager.restore(step, args=args).state
        if self._mesh is not None:
            state = from_natural(config, self._mesh, state)
        return Restored(state, record["data"], record["seconds"], record.get("spread"))

    def _abstract(self, config: RunConfig) -> TrainState:
        """What to restore, and onto which devices."""
        if self._mesh is not None:
            return abstract_natural(config, self._mesh)
        device = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract_state(config))

    def close(self) -> None:
        """Ends the background work without waiting for an answer from a full disk."""
        try:
            self._manager.close()
        except Exception as error:
            self._explain(None, error)

    def _explain(self, step: int | None, error: Exception) -> None:
        raise (self._full(step, "no space is left") if is_full(error) else error) from error

    def _full(self, step: int | None, why: str) -> DiskFull:
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        return DiskFull(
            f"{which} could not be written to {self._folder}: {why}; {intact(self._folder)}; free some and run the same command"
        )
