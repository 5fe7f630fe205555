"""Probes of the weights: how large their matrices are, and over how many directions their singular values spread.

Why Muon needs QK-Clip is put down to this (report, appendix E): its updates have many directions of equal size, AdamW's few,
so that it meets the directions a weight already has more often and drives its spectral norm, and the attention logits, up.

The matrices are those of Moonlight's report in its section 3.4: MLA's parts apart, heads joint, embedding and head left out.
One of short side n and long side m costs 2 n^2 m FLOPs for its Gram matrix, which all that is said of its spectrum is read
from, 200 n^2 for the power method and a few n^3 for the eigenvalues: half a second of a core for 2048 experts of 32 x 128, one
second for a matrix of 1408 x 2048.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from k2jax.axes import axes_of
from k2jax.optim.muon import Path, blocks_of, by_path, is_matrix, nested

# Of the power method. Of dense spectra such as training leaves it is at worst 0.6% low, to n = 4096; a single value that stands
# a few percent above thousands of equal ones may be missed.
ITERATIONS = 100


class Probe(NamedTuple):
    """What is seen of a leaf, float32 [layers] each; of a layer's experts as told."""

    spectral_norm: np.ndarray  # largest singular value; of the experts the largest
    entropy: np.ndarray  # of the singular values; of the experts the mean
    effective_rank: np.ndarray  # directions that this entropy stands for; of the experts the mean
    weight_rms: np.ndarray  # of all numbers of the layer
    update_rms: np.ndarray  # of their change in the step, decay and clip included; zero if before is after


def probe(before: dict, after: dict, whole: Callable[[Array], Array] = lambda w: w) -> dict[str, Probe]:
    """Probes every matrix of a tree of parameters after a step, and what the step changed; {path with slashes: Probe}.

    One leaf after another, so that beside the trees only a leaf's Gram matrices take room. `whole` makes a leaf that is spread
    over a mesh an array of one device.
    """
    old, new, found = by_path(before), by_path(after), {}
    for path, (n, m) in matrices(after).items():
        stacked = new[path].ndim > len(axes_of(path[-1]))
        program = _program(new[path].shape[0] if stacked else 1, n, m)
        found["/".join(path)] = jax.device_get(program(whole(old[path]), whole(new[path])))
    return found


def matrices(params: dict) -> dict[Path, tuple[int, int]]:
    """Path -> rows and columns of every leaf that Muon would take, arrays or ShapeDtypeStructs."""
    taken = {path: w for path, w in by_path(params).items() if is_matrix(path[-1]) and "W" not in axes_of(path[-1])}
    return {block.paths[0]: (block.n, block.m) for block in blocks_of(nested(taken), "split")}


@functools.lru_cache
def _program(layers: int, n: int, m: int) -> Callable[[Array, Array], Probe]:
    """The jitted probe of leaves of these matrices, one layer after another."""

    def one_layer(given: tuple[Array, Array]) -> Probe:
        old, new = (w.astype(jnp.float32) for w in given)
        gram_bkk = _gram(new)
        entropy = _entropy(gram_bkk)
        return Probe(
            spectral_norm=_top(gram_bkk).max(),
            entropy=entropy.mean(),
            effective_rank=_effective_rank(gram_bkk, entropy).mean(),
            weight_rms=_rms(new),
            update_rms=_rms(new - old),
        )

    def of_leaf(old: Array, new: Array) -> Probe:
        return lax.map(one_layer, tuple(w.reshape(layers, -1, n, m) for w in (old, new)))

    return jax.jit(of_leaf)


def spectral_norm(x: Float[ArrayLike, "*batch n m"]) -> Float[Array, "*batch"]:
    """The largest singular value of each matrix, by `ITERATIONS` of the power method on the short side; never above it.

    The start is the same for every matrix, and each iteration multiplies by X X^T, so that equal values at the top do no harm.
    """
    return _top(_gram(jnp.asarray(x, jnp.float32)))


def svd_entropy(x: Float[ArrayLike, "*batch n m"]) -> Float[Array, "*batch"]:
    """`-sum p ln p / ln k` of the k singular values s of each matrix, with `p = s^2 / sum s^2` (Moonlight report 3.4).

    1 where all are equal; 0 at rank one, and for a matrix that is zero or has a single row or column.
    """
    return _entropy(_gram(jnp.asarray(x, jnp.float32)))


def effective_rank(x: Float[ArrayLike, "*batch n m"]) -> Float[Array, "*batch"]:
    """How many equal singular values would have the same entropy, `k^entropy`: from 1 to k, and 0 for a zero matrix."""
    gram = _gram(jnp.asarray(x, jnp.float32))
    return _effective_rank(gram, _entropy(gram))


class Comparison(NamedTuple):
    """The entropies of the matrices of one tree against those of another."""

    matrices: int  # layers and experts counted apart
    higher: float  # share of them with the higher entropy in the first tree
    gap: float  # mean of the first's entropy less the second's


def compare_entropy(a: dict, b: dict) -> dict[str, Comparison]:
    """Compares two trees of one model, as Moonlight's report does those of Muon and AdamW: by leaf, and "all" together."""
    a_of, b_of, gaps = by_path(a), by_path(b), {}
    for path, (n, m) in matrices(a).items():
        first, second = (np.asarray(_entropies(jnp.asarray(w[path]).reshape(-1, n, m))) for w in (a_of, b_of))
        gaps["/".join(path)] = first - second
    gaps["all"] = np.concatenate(list(gaps.values()))
    return {name: Comparison(gap.size, float((gap > 0).mean()), float(gap.mean())) for name, gap in gaps.items()}


_entropies = jax.jit(svd_entropy)


def _gram(x: Float[Array, "*batch n m"]) -> Float[Array, "*batch k k"]:
    """X X^T on the short side."""
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    return jnp.matmul(x, x.mT, precision="highest")


def _top(gram: Float[Array, "*batch k k"]) -> Float[Array, "*batch"]:
    """The root of the largest eigenvalue."""
    start = np.random.default_rng(0).standard_normal((gram.shape[-1], 1), np.float32)
    v = jnp.broadcast_to(start / np.linalg.norm(start), (*gram.shape[:-1], 1))

    def step(_, carry):
        v, _ = carry
        w = jnp.matmul(gram, v, precision="highest")
        length = jnp.sqrt(jnp.sum(jnp.square(w), axis=-2, keepdims=True))  # of a unit vector's image: at most the largest
        return w / jnp.where(length > 0, length, 1), length

    _, length = lax.fori_loop(0, ITERATIONS, step, (v, jnp.zeros((*gram.shape[:-2], 1, 1))))
    return jnp.sqrt(length[..., 0, 0])


def _entropy(gram: Float[Array, "*batch k k"]) -> Float[Array, "*batch"]:
    # Float32 leaves eigenvalues a few 1e-7 of the largest off, some below 0: of no account to the entropy.
    s2 = jnp.maximum(jnp.linalg.eigvalsh(gram), 0)
    total = s2.sum(-1, keepdims=True)
    p = s2 / jnp.where(total > 0, total, 1)
    k = gram.shape[-1]
    return jax.scipy.special.entr(p).sum(-1) / (np.log(k) if k > 1 else 1)


def _effective_rank(gram: Float[Array, "*batch k k"], entropy: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.where(jnp.trace(gram, axis1=-2, axis2=-1) > 0, gram.shape[-1] ** entropy, 0)


def _rms(x: Array) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(jnp.square(x)))
