"""Newton-Schulz of many small matrices, each on one core from its first step to its last, as Pallas kernels.

Where the short side is small, steps in products of their own move more bytes than they compute: X is read and written in each.
The Gram form needs X only at the ends of its segments. What it works on in between, R and the polynomials, is [n, n] and stays
in registers (NVIDIA, through Triton) or in VMEM (TPU). On a GPU X is streamed in chunks, once for each segment's X X^T and once
for the result: at five steps, 2 + 3, three reads and a write; float16 takes one read more, for the norm. What L2 keeps of X
between the reads does not come from memory. On a TPU a whole X is in VMEM: one read, one write.

For MLA's matrices of one head (1536 x 128, 512 x 128, 1536 x 64) and small experts. GSPMD does not partition the kernels: on a
mesh they are called inside shard_map. They have been compiled for H100 and TPU and compared with float64 in Pallas's
interpreter, and never run on either.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from k2jax.kernels.newton_schulz_tiled import Row, Work
from k2jax.kernels.tiles import matrix, power_of_two, product, read, write

SHORT = 128  # the longest short side: R and two polynomials of 128 x 128 are what a GPU's registers hold
LONG = 2048  # the longest long side: one core works through a longer one while the others wait; on a TPU 4 MB of VMEM
CHUNK = 64  # of X's long side at a time, on a GPU


def fits(n: int, m: int) -> bool:
    """Whether an n x m matrix may be kept on chip."""
    return min(n, m) <= SHORT and max(n, m) <= LONG


@functools.partial(jax.jit, static_argnames=("work", "interpret"))  # traced once a shape
def on_chip_triton(x: Float[Array, "b n m"], work: Work, interpret: bool = False) -> Float[Array, "b n m"]:
    """The Gram form of `newton_schulz` on an NVIDIA GPU, one matrix a thread block; float32.

    A matrix that does not fit raises ValueError.
    """
    b, n, m = x.shape
    _check(n, m)
    side, chunk = power_of_two(min(n, m)), min(CHUNK, power_of_two(max(n, m)))
    block = matrix(n, m, (chunk, side) if n > m else (side, chunk), lambda b: (b, 0, 0))
    return pl.pallas_call(
        functools.partial(_streamed, work=work, sides=(n, m), side=side, chunk=chunk),
        grid=(b,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((b, n, m), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=8 if side > 64 else 4, num_stages=2),
        interpret=interpret,
        name="newton_schulz_on_chip",
    )(x)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))  # traced once a shape
def on_chip_tpu(x: Float[Array, "b n m"], work: Work, interpret: bool = False) -> Float[Array, "b n m"]:
    """The Gram form of `newton_schulz` on a TPU, one matrix a step of the grid; float32.

    A matrix that does not fit raises ValueError.
    """
    b, n, m = x.shape
    _check(n, m)
    block = pl.BlockSpec((None, n, m), lambda b: (b, 0, 0))
    return pl.pallas_call(
        functools.partial(_resident, work=work),
        grid=(b,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((b, n, m), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="newton_schulz_on_chip",
    )(x)


def _check(n: int, m: int) -> None:
    if not fits(n, m):
        raise ValueError(f"a matrix kept on chip has sides of at most {SHORT} and {LONG}; got shape {(n, m)}")


def _streamed(x_ref, out_ref, *, work, sides, side, chunk):
    tall = sides[0] > sides[1]
    chunks = pl.cdiv(max(sides), chunk)

    def at(c):
        return (c * chunk, 0) if tall else (0, c * chunk)

    def load(c):
        return read(x_ref, at(c), (chunk, side) if tall else (side, chunk), sides).astype(jnp.float32)

    def total(f, zero):
        return lax.fori_loop(0, chunks, lambda c, total: total + f(load(c)), zero)

    def gram(f):
        return total(lambda x: _gram(f(x), work.dtype, tall), jnp.zeros((side, side), jnp.float32))

    result = _iterated(gram, lambda: total(lambda x: jnp.sum(jnp.square(x)), jnp.float32(0)), work, tall)

    def store(c, carry):
        write(out_ref, at(c), result(load(c)), sides)
        return carry

    lax.fori_loop(0, chunks, store, 0)


def _resident(x_ref, out_ref, *, work):
    x = x_ref[...].astype(jnp.float32)
    tall = x.shape[0] > x.shape[1]
    result = _iterated(lambda f: _gram(f(x), work.dtype, tall), lambda: jnp.sum(jnp.square(x)), work, tall)
    out_ref[...] = result(x)


def _iterated(gram: Callable, squares: Callable, work: Work, tall: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns what maps X, or a chunk of its long side, to the result in float32.

    `gram(f)` is f(X) f(X)^T for such a map f, and `squares()` the sum of X's squares.
    """
    # The trace of X X^T is the squared Frobenius norm, so no pass over X is needed for it, and X is scaled after its first
    # product; but float16's range is too small for what has not been divided by its norm.
    before = 1 / (jnp.sqrt(squares()) + work.eps) if work.dtype == "float16" else None
    after = None
    polynomials: list[jax.Array] = []

    def applied(x):
        x = x if before is None else before * x
        for number, q in enumerate(polynomials):
            x = x.astype(work.dtype)
            x = product(x, q, (1, 0)) if tall else product(q, x, (1, 0))
            x = after * x if number == 0 and before is None else x
        return x

    for rows in work.segments:
        r = gram(applied)
        eye = lax.broadcasted_iota(jnp.int32, r.shape, 0) == lax.broadcasted_iota(jnp.int32, r.shape, 1)
        if before is None and after is None:
            after = 1 / (jnp.sqrt(jnp.sum(jnp.where(eye, r, 0.0))) + work.eps)
            r = r * after * after
        polynomials.append(_polynomial(r, rows, eye, work.square).astype(work.dtype))
    return applied


def _polynomial(r: jax.Array, rows: Sequence[Row], eye: jax.Array, dtype: str) -> jax.Array:
    """A segment on the Gram matrix: the product of its steps' P = a I + b R + c R^2, where a step makes R into P R P."""

    def times(x, y):
        return product(x, y, (1, 0)).astype(dtype)

    r, q = r.astype(dtype), None
    for step, (a, b, c) in enumerate(rows):
        p = b * r.astype(jnp.float32) + c * product(r, r, (1, 0))
        p = jnp.where(eye, p + a, p).astype(dtype)
        q = p if q is None else times(p, q)
        if step < len(rows) - 1:
            r = times(p, times(r, p))
    return q


def _gram(y: jax.Array, dtype: str, tall: bool) -> jax.Array:
    y = y.astype(dtype)
    return product(y, y, (0, 0) if tall else (1, 1))
