"""Muon: momentum, orthogonalized matrix by matrix, scaled to AdamW's update size.

M <- mu M + G;  O = NewtonSchulz(mu M + G), or of M without Nesterov;  update = update_rms * sqrt(max(n, m)) * O

Which matrices a leaf holds is read off the axis letters of its name. Axes before the letters (layers) and E (experts) are
batch; the last two letters are a matrix; a head letter, H or G, belongs to the axis beside it that carries the head's width.
`split` chooses between our stored parts, the released fused matrices, and one matrix a head.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from k2jax.axes import axes_of
from k2jax.config import OptimConfig
from k2jax.kernels.newton_schulz import coefficients, map_chunks, newton_schulz

Path = tuple[str, ...]  # keys from the root of a tree of dicts to a leaf

# The released matrices and the leaves they hold side by side, along the last axis and so within each head.
FUSED = (("q_nope_QHN", "q_rope_QHR"), ("kv_down_DC", "k_rope_DR"), ("k_nope_CHN", "v_CHV"))
HEADS = "HG"
BATCH_BYTES = 2**20  # of a block, up to which it is put into one batch with others of its shape


class Block(NamedTuple):
    """Leaves orthogonalized together as matrices [count, n, m]: one leaf, or the parts of a fused matrix."""

    paths: tuple[Path, ...]
    width: int  # of the first leaf's last axis; a second leaf lies beside it
    axes: tuple[int, ...]  # shape of the leaves put together
    batch_head: bool  # the second axis from the end is a head that must become batch: [.., Q, H, N] -> [.., H, Q, N]
    count: int
    n: int
    m: int


class MuonState(NamedTuple):
    """Momentum M in float32, a tree like the parameters."""

    momentum: optax.Updates


def scale_by_muon(config: OptimConfig, d_model: int) -> optax.GradientTransformation:
    """Returns the transform G -> scale * NewtonSchulz(M), with M = momentum * M + G.

    With `config.nesterov` momentum * M + G is orthogonalized instead of M; `update_scale` has the scale. The result has no
    sign, decay or learning rate yet and is float32. A leaf whose name is not that of a matrix raises ValueError. Source: K2
    report, algorithm 1.
    """

    def init_fn(params):
        blocks_of(params, config.split)  # a wrong name is found before anything runs
        return MuonState(jax.tree.map(lambda w: jnp.zeros_like(w, dtype=jnp.float32), params))

    def update_fn(updates, state, params=None):
        del params
        grads, momentum = by_path(updates), by_path(state.momentum)
        directions, moved = {}, {}
        for blocks in _batches(blocks_of(updates, config.split)):
            edges = [0, *itertools.accumulate(block.count for block in blocks)]
            arrays = (jnp.concatenate([_matrices(block, tree) for block in blocks]) for tree in (grads, momentum))
            out_bnm, moved_bnm = _step(config, d_model, *arrays)
            for block, (first, end) in zip(blocks, itertools.pairwise(edges), strict=True):
                directions |= _leaves(block, out_bnm[first:end])
                moved |= _leaves(block, moved_bnm[first:end])
        return _like(updates, directions), MuonState(_like(updates, moved))

    return optax.GradientTransformation(init_fn, update_fn)


def _batches(blocks: Sequence[Block]) -> list[list[Block]]:
    """Small blocks of one shape together, the others alone: a program of fewer operations is traced and compiled sooner, and
    for small matrices the copies cost no more than the calls they save."""
    found: dict = {}
    for place, block in enumerate(blocks):
        small = 4 * block.count * block.n * block.m <= BATCH_BYTES
        found.setdefault((block.n, block.m) if small else place, []).append(block)
    return list(found.values())


def _step(
    config: OptimConfig, d_model: int, grad_bnm: Float[Array, "b n m"], momentum_bnm: Float[Array, "b n m"]
) -> tuple[Float[Array, "b n m"], Float[Array, "b n m"]]:
    """Moves the momentum and orthogonalizes it, a chunk at a time so that both are done while the chunk is in cache."""
    table = coefficients(config.ns_coefficients, config.ns_steps)
    scale = update_scale(config, d_model, *grad_bnm.shape[-2:])

    def chunk(g, m):
        m = config.momentum * m + g.astype(jnp.float32)
        x = config.momentum * m + g.astype(jnp.float32) if config.nesterov else m
        o = newton_schulz(x, table, config.ns_dtype)
        return (_to_rms(o, config.update_rms) if scale is None else scale * o), m

    return map_chunks(chunk, grad_bnm, momentum_bnm)


def update_scale(config: OptimConfig, d_model: int, n: int, m: int) -> float | None:
    """The factor on an orthogonalized n x m matrix; None for "update_norm", which measures each matrix (Moonlight report 2.2).

    "adjusted" gives an orthogonal matrix the RMS `config.update_rms` whatever its shape; "baseline" does so for square
    matrices of the model's width alone, and a wider one moves less.
    """
    if config.scale == "update_norm":
        return None
    return config.update_rms * math.sqrt(max(n, m) if config.scale == "adjusted" else d_model)


def _to_rms(o_bnm: Float[Array, "b n m"], rms: float) -> Float[Array, "b n m"]:
    """Each matrix brought to the RMS; a zero matrix stays."""
    found = jnp.sqrt(jnp.mean(jnp.square(o_bnm), axis=(-2, -1), keepdims=True))
    return o_bnm * (rms / jnp.where(found > 0, found, 1.0))


def is_matrix(name: str) -> bool:
    """Whether the letters of a leaf's name make it a matrix or a batch of them: DQ, EDF, QHN, HVD."""
    letters = axes_of(name).removeprefix("E")
    heads = [i for i, letter in enumerate(letters) if letter in HEADS]
    return (len(letters) == 2 and not heads) or (len(letters) == 3 and heads in ([0], [1]))


def blocks_of(tree: optax.Params, split: str) -> list[Block]:
    """Lists the blocks of a tree of matrices (arrays or ShapeDtypeStructs), each leaf in exactly one."""
    leaves = by_path(tree)
    partner = _partners(leaves) if split == "joint" else {}
    taken = set(partner.values())
    paths = [(path, partner[path]) if path in partner else (path,) for path in leaves if path not in taken]
    return [_block(group, [leaves[path].shape for path in group], split == "per_head") for group in paths]


def _partners(leaves: Mapping[Path, object]) -> dict[Path, Path]:
    """First leaf -> second leaf of every fused matrix."""
    found = {}
    for names in FUSED:
        for path in leaves:
            if path[-1] in names:
                first, second = ((*path[:-1], name) for name in names)
                missing = [p for p in (first, second) if p not in leaves]
                if missing:
                    raise ValueError(f"split 'joint' fuses {' and '.join(names)}; {'/'.join(missing[0])} is missing")
                found[first] = second
    return found


def _block(paths: tuple[Path, ...], shapes: Sequence[tuple[int, ...]], per_head: bool) -> Block:
    name, letters = paths[0][-1], axes_of(paths[0][-1])
    if not is_matrix(name):
        raise ValueError(f"Muon takes matrices, and the letters of {'/'.join(paths[0])} do not make one")
    if len(shapes[0]) < len(letters):
        raise ValueError(f"{'/'.join(paths[0])} must have the axes {letters}; got shape {shapes[0]}")
    for path, shape in zip(paths, shapes, strict=True):
        if 0 in shape:
            raise ValueError(f"Muon takes matrices with rows and columns; {'/'.join(path)} has shape {shape}")
    axes = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    if len(letters) == 2 or letters[0] == "E":
        n, m = axes[-2:]
    elif letters[0] in HEADS:  # o_HVD: rows are (head, width)
        n, m = (axes[-2] if per_head else axes[-3] * axes[-2]), axes[-1]
    else:  # q_nope_QHN: columns are (head, width)
        n, m = axes[-3], (axes[-1] if per_head else axes[-2] * axes[-1])
    batch_head = per_head and len(letters) == 3 and letters[1] in HEADS
    return Block(paths, shapes[0][-1], axes, batch_head, math.prod(axes) // (n * m), n, m)


def _matrices(block: Block, arrays: Mapping[Path, Array]) -> Float[Array, "b n m"]:
    parts = [arrays[path] for path in block.paths]
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    x = jnp.swapaxes(x, -2, -3) if block.batch_head else x
    return x.reshape(block.count, block.n, block.m)


def _leaves(block: Block, x_bnm: Float[Array, "b n m"]) -> dict[Path, Array]:
    """The inverse of `_matrices`."""
    if block.batch_head:
        *lead, rows, heads, width = block.axes
        x = jnp.swapaxes(x_bnm.reshape(*lead, heads, rows, width), -2, -3)
    else:
        x = x_bnm.reshape(block.axes)
    if len(block.paths) == 1:
        return {block.paths[0]: x}
    first, second = block.paths
    return {first: x[..., : block.width], second: x[..., block.width :]}


def by_path(tree: optax.Params) -> dict[Path, Any]:
    """Returns {path: leaf} of a tree of dicts, in the tree's order; masked-out nodes have no leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def nested(leaves: Mapping[Path, Any]) -> dict:
    """The inverse of `by_path`: a tree of dicts."""
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _like(tree: optax.Params, leaves: Mapping[Path, Array]) -> optax.Updates:
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in by_path(tree)])
