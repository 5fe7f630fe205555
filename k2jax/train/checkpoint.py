"""Checkpoints: the whole training state, the position in the data and the config, written aside and kept two deep (orbax)."""

import logging
import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from k2jax.config import RunConfig, from_dict, to_dict
from k2jax.train.folder import DiskFull, Refused, differing, is_full
from k2jax.train.step import TrainState, abstract_state

KEEP = 2  # the one before the last outlives a fault while the last is written


class Checkpoints:
    """The checkpoints of one run. Writing goes on in the background; a checkpoint counts only once all its files are there."""

    def __init__(self, folder: Path):
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file it writes
        self._folder = folder.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return self._manager.latest_step()

    @property
    def intact(self) -> str:
        """What is left when writing fails, as half a sentence."""
        return "there is no checkpoint yet" if self.latest is None else f"the checkpoint of step {self.latest} is whole"

    def save(self, config: RunConfig, state: TrainState, position: dict, seconds: dict[str, float]) -> None:
        """Starts writing a checkpoint; the caller may give the state away at once.

        Args:
          position: of the data iterator, its `get_state()`.
          seconds: what the run has spent so far.

        Raises DiskFull for this checkpoint or the one under way.
        """
        self.wait()
        step = int(state.step)
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._full(step, f"it needs about {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free")
        record = {"config": to_dict(config), "data": position, "seconds": seconds}
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

    def restore(self, config: RunConfig) -> tuple[TrainState, dict, dict[str, float]]:
        """The last checkpoint: state, position of the data, seconds spent.

        Raises Refused, naming the fields, if it is of another config.
        """
        step = self.latest
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if apart := differing(from_dict(RunConfig, record["config"]), config):
            raise Refused(f"the checkpoint in {self._folder} is of another config: {'; '.join(apart)}")
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract_state(config))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args).state, record["data"], record["seconds"]

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
            f"{which} could not be written to {self._folder}: {why}; {self.intact}; free some and run the same command"
        )
