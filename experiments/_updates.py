"""Sizes of Muon's updates and of the weights they move, from random matrices, checkpoints and probes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._study import Trained
from k2jax.config import OptimConfig, RunConfig
from k2jax.model import transformer
from k2jax.optim import probes
from k2jax.optim.muon import MuonState, blocks_of, by_path, nested, scale_by_muon
from k2jax.train import metrics
from k2jax.train.checkpoint import Checkpoints

SHAPES = ((32, 32), (32, 128), (128, 32), (64, 512), (256, 256), (48, 1024))


class Update(NamedTuple):
    """The update of a matrix."""

    name: str
    n: int
    m: int
    rms: float  # after scaling


def random_updates(config: OptimConfig) -> list[Update]:
    """Updates of normal matrices of several shapes."""
    rng = np.random.default_rng(0)
    momentum = {f"random{i}": {"w_DF": jnp.asarray(rng.standard_normal(s), jnp.float32)} for i, s in enumerate(SHAPES)}
    return updates_of(config, 0, momentum)


def trained_updates(run: RunConfig) -> list[Update]:
    """Updates from the momenta at a run's end, as a step without a gradient would have them."""
    with Checkpoints(run.out / "checkpoints") as saved:
        states = jax.tree.leaves(saved.restore(run).state.opt_state, is_leaf=lambda x: isinstance(x, MuonState))
    momentum = next(state.momentum for state in states if isinstance(state, MuonState))
    return updates_of(run.optim, run.model.d_model, nested(by_path(momentum)))


def updates_of(config: OptimConfig, d_model: int, momentum: dict) -> list[Update]:
    """Every matrix's update, from a tree of momenta."""
    out, _ = jax.jit(scale_by_muon(config, d_model).update)(jax.tree.map(jnp.zeros_like, momentum), MuonState(momentum))
    leaves, found = by_path(out), []
    for block in blocks_of(out, "split"):
        x_bnm = np.asarray(leaves[block.paths[0]]).reshape(block.count, block.n, block.m)
        name = block.paths[0][-1]
        found += [Update(name, block.n, block.m, float(np.sqrt(np.mean(np.square(x))))) for x in x_bnm]
    return found


def weight_rms(runs: Sequence[Trained]) -> list[tuple[int, float]]:
    """RMS of all that Muon moves on the way of some runs, their mean: (step, RMS)."""
    squares: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        sizes = {"/".join(path): n * m for path, (n, m) in probes.matrices(transformer.abstract(run.config.model)[0]).items()}
        for r in metrics.read(run.config.out / "probes.jsonl"):
            squares.setdefault(r["step"], []).append((sizes[r["leaf"]], r["weight_rms"] ** 2))
    found = []
    for step, parts in sorted(squares.items()):
        weight, square = np.array(parts).T
        found.append((step, float(np.sqrt(np.average(square, weights=weight)))))
    return found
