"""Newton-Schulz orthogonalization, batched over every leading axis.

A step maps every singular value s of a matrix to a s + b s^3 + c s^5 and leaves the singular vectors. A table has a row
(a, b, c) a step; `SETS` are the tables in use. Together the steps bring the singular values near 1.

A segment of steps works on R = X X^T alone, on the short side of X: a step's P = a I + b R + c R^2 makes X into P X and so R
into P R P. The product of the P is applied to X at the end of the segment. The standard form is segments of one step. The Gram
form has longer ones and so touches a long X less often; `form` counts which is cheaper.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k2jax.kernels import symmetric, symmetric_tpu, symmetric_triton
from k2jax.kernels.newton_schulz_on_chip import fits, on_chip_tpu, on_chip_triton
from k2jax.kernels.newton_schulz_tiled import Row, Work, tiled
from k2jax.kernels.symmetric import symmetric_product
from k2jax.kernels.tiles import nvidia_is_capable

Table = Sequence[Sequence[float]]  # rows

JORDAN: Row = (3.4445, -4.7750, 2.0315)  # steep at 0, and it does not converge: values end spread around 1
_POLAR_EXPRESS: Table = (  # the steepest quintics that a spectrum in [1e-3, 1] allows, computed for exact arithmetic
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# What a set makes of singular values from 0.01 of the Frobenius norm up, after so many steps:
SETS: dict[str, tuple[Row, ...]] = {
    # Keller Jordan's, in Moonlight and Kimi K2. 5 steps: [0.682, 1.134].
    "jordan": (JORDAN,),
    # You Jiacheng's schedule. 5 steps: [0.978, 1.032].
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932) in the paper's variant: every row but the last is taken at s / 1.01, so that rounding
    # may push a value 1% above what the row was made for. 5 steps: [0.870, 1.124]; 8 steps converge.
    "polar_express": (
        *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
    # Eight steep steps, then two that converge. 10 steps: [1.000, 1.0005].
    "eight_two": (*[JORDAN] * 8, *[(2.0, -1.5, 0.5)] * 2),
}
WHOLE = ("you", "eight_two")  # sets that are tuned as a whole: fewer steps than they have rows are refused

EPS = 1e-7  # added to the Frobenius norm: zero in, zero out
FIRST, LATER = 2, 3  # steps of the Gram form's first segment, and the most of a later one; longer ones drift
CHUNK_BYTES = 2**17  # of matrices worked on at a time on a CPU, so that they and their products stay in its cache

Form = Literal["standard", "gram"]


def coefficients(name: str, steps: int) -> tuple[Row, ...]:
    """Returns the first `steps` rows of a set; beyond its end the last one repeats.

    Fewer than one step, an unknown set, and fewer steps than a set that is tuned as a whole has raise ValueError.
    """
    if name not in SETS:
        raise ValueError(f"no Newton-Schulz coefficients are called {name!r}; there are {', '.join(SETS)}")
    rows = SETS[name]
    if steps < 1:
        raise ValueError(f"Newton-Schulz needs at least 1 step; got {steps}")
    if name in WHOLE and steps < len(rows):
        raise ValueError(f"Newton-Schulz coefficients {name!r} need at least {len(rows)} steps; got {steps}")
    return rows[:steps] + rows[-1:] * (steps - len(rows))


def flops(n: int, m: int, steps: int, form: Form) -> int:
    """Counts the matrix-product FLOPs of one n x m matrix, a multiply-add being 2; work of order n*m is left out.

    Products known to be symmetric count half where they are computed as such (`symmetric.MIN_SIDE`).
    """
    n, m = min(n, m), max(n, m)
    square = 1 if n >= symmetric.MIN_SIDE else 2
    # A segment forms X X^T and applies its polynomial to X once. Its first step squares the Gram matrix; every later one
    # also moves it (two products) and extends the polynomial (one).
    return sum((square + 2) * n * n * m + square * n**3 * (4 * length - 3) for length in segments(steps, form))


def form(n: int, m: int, steps: int) -> Form:
    """Returns the form with fewer counted FLOPs: "gram" for every long side above the short one where symmetric products
    count half, and from 1.5 times the short side on where they do not (at five steps)."""
    return "gram" if flops(n, m, steps, "gram") < flops(n, m, steps, "standard") else "standard"


def segments(steps: int, form: Form, longest: int | None = None) -> tuple[int, ...]:
    """Returns how many steps each segment has; `longest` is the most that a later one may have, LATER by default."""
    if form == "standard":
        return (1,) * steps
    rest = max(steps - FIRST, 0)
    later = -(-rest // (longest or LATER))
    return (min(steps, FIRST), *(rest // later + (i < rest % later) for i in range(later)))


def newton_schulz(x: Float[Array, "... n m"], table: Table, dtype: str) -> Float[Array, "... n m"]:
    """Orthogonalizes each matrix of `x` approximately: singular vectors kept, singular values near 1; float32.

    `table` has a row (a, b, c) a step. Products with X take operands in `dtype`, float32, bfloat16 or float16; norm, sums and
    what is added to products are float32. A zero matrix stays zero. A table that is not rows of three finite numbers and a
    matrix without rows or columns raise ValueError. Source: Moonlight report 2.1, Kimi K2 report algorithm 1.

    Against float64 on the matrix that `dtype` makes of x, five steps of Jordan's set are off, relative to the result's norm,
    by 2e-6 in float32, 4e-3 in float16 and 3e-2 in bfloat16 for Gaussian matrices, and by up to 3e-4, 4e-2 and 3e-1 where
    singular values fall to the dtype's rounding error of the largest. None of them exceeds the set's range by more than 0.1.

    On NVIDIA GPUs and TPUs it is Pallas kernels in half precision, for matrices that fit on a chip and for short sides from
    `symmetric.MIN_SIDE` on. GSPMD does not partition them: on a mesh call this inside shard_map.
    """
    _check(table)
    n, m = x.shape[-2:]
    if not n * m:
        raise ValueError(f"Newton-Schulz needs matrices with rows and columns; got shape {tuple(x.shape)}")
    chosen = {"standard": standard, "gram": gram}[form(n, m, len(table))]

    def reference(x):
        return map_chunks(lambda x: (chosen(x, table, dtype),), x)[0]

    x_bnm, kernels = x.reshape(-1, n, m), _kernels(n, m, table, dtype)
    y_bnm = lax.platform_dependent(x_bnm, default=reference, **kernels) if kernels else reference(x_bnm)
    return y_bnm.reshape(x.shape)


def _kernels(n: int, m: int, table: Table, dtype: str) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """By platform, the Pallas kernels that do it in half precision; the jnp form does what is not here.

    Their products of [n, n] matrices take float16 on NVIDIA, which rounds as TF32 does. A TPU has no float16, and its bfloat16
    bears segments of two steps.
    """
    platforms = {}
    if dtype in ("bfloat16", "float16") and nvidia_is_capable():
        platforms["cuda"] = on_chip_triton, symmetric_triton.symmetric, "float16", LATER
    if dtype == "bfloat16":
        platforms["tpu"] = on_chip_tpu, symmetric_tpu.symmetric, "bfloat16", 2

    def work(form: Form, square: str, longest: int) -> Work:
        rows = (tuple(row) for row in table)
        lengths = segments(len(table), form, longest)
        return Work(tuple(tuple(itertools.islice(rows, length)) for length in lengths), dtype, square, EPS)

    kernels: dict[str, Callable] = {}
    for platform, (on_chip, product, square, longest) in platforms.items():
        if fits(n, m):
            kernels[platform] = functools.partial(on_chip, work=work("gram", square, longest))
        elif min(n, m) >= symmetric.MIN_SIDE:
            plan = work(form(n, m, len(table)), square, longest)
            kernels[platform] = functools.partial(tiled, work=plan, symmetric=product)
    return kernels


def standard(x: Float[Array, "b n m"], table: Table, dtype: str) -> Float[Array, "b n m"]:
    """Every step on the matrices themselves: X <- (a I + b A + c A^2) X with A = X X^T."""
    return _iterate(x, table, dtype, segments(len(table), "standard"))


def gram(x: Float[Array, "b n m"], table: Table, dtype: str) -> Float[Array, "b n m"]:
    """The same map on the Gram matrix, formed anew from X after every segment."""
    return _iterate(x, table, dtype, segments(len(table), "gram"))


def _iterate(x: Float[Array, "b n m"], table: Table, dtype: str, lengths: Sequence[int]) -> Float[Array, "b n m"]:
    tall = x.shape[-2] > x.shape[-1]
    wide = symmetric.sums(dtype)
    rows = iter(table)
    scale = None
    if dtype == "float16":  # its range is too small for what has not been divided by its norm
        x = x.astype(wide)
        x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + EPS)
    for number, length in enumerate(lengths):
        r = symmetric_product("bki,bkj->bij" if tall else "bik,bjk->bij", x, x, dtype)
        if number == 0 and dtype != "float16":
            # The trace of X X^T is the squared Frobenius norm: no pass over X is needed for it.
            scale = 1 / (jnp.sqrt(jnp.trace(r, axis1=-2, axis2=-1))[:, None, None] + EPS)
            r = r * scale * scale
        # A segment of more than one step feeds rounding errors of R back into R, 12-fold a step, so its [n, n] products keep
        # float32 operands: the result is then half as far off as with bfloat16 throughout. The standard form bears those.
        square = dtype if length == 1 else wide.name
        q = None
        for step in range(length):
            p = _polynomial(r, next(rows), square)
            q = p if q is None else _square(p, q, square)
            if step < length - 1:
                r = _square(p, _square(r, p, square), square)
        x = _apply(q if number or scale is None else q * scale, x, dtype, tall)
    return x


def _polynomial(r: Float[Array, "b n n"], row: Row, dtype: str) -> Float[Array, "b n n"]:
    """a I + b R + c R^2."""
    a, b, c = row
    return a * jnp.eye(r.shape[-1], dtype=r.dtype)[None] + b * r + c * _square(r, r, dtype)


def _square(x: Float[Array, "b n n"], y: Float[Array, "b n n"], dtype: str) -> Float[Array, "b n n"]:
    """The product of two polynomials in one symmetric matrix.

    X Y, not X Y^T: rounding leaves them a little asymmetric, and transposed that would grow with every product.
    """
    return symmetric_product("bik,bkj->bij", x, y, dtype)


def _apply(p: Float[Array, "b k k"], x: Float[Array, "b n m"], dtype: str, tall: bool) -> Float[Array, "b n m"]:
    """The symmetric [k, k] polynomial times X, from the right where the short side is the last."""
    pair = (x, p) if tall else (p, x)
    product = functools.partial(jnp.matmul, precision=symmetric.PRECISION, preferred_element_type=symmetric.sums(dtype))
    return symmetric.with_operands(product, dtype, *pair)


def _check(table: Table) -> None:
    rows = [tuple(row) for row in table]
    if not rows or not all(len(row) == 3 and all(map(math.isfinite, row)) for row in rows):
        raise ValueError(f"Newton-Schulz takes rows of three finite numbers a, b, c, one a step; got {table!r}")


def map_chunks(f: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Applies `f` to arrays [b, ...] that share the axis b: in cache-sized chunks on a CPU, whole elsewhere.

    `f` must treat the entries of b independently, take zeros, and return arrays with the same leading axis.
    """
    count, row_bytes = arrays[0].shape[0], 4 * math.prod(arrays[0].shape[1:])
    most = CHUNK_BYTES // row_bytes
    if most < 2 or count <= most:  # XLA runs a loop on one core, and without one products of several leaves at once
        return f(*arrays)
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: _map_chunks(f, arrays, -(-count // most)),
        default=f,
    )


def _map_chunks(f, arrays, turns: int):
    """In so many equal chunks, the last filled up with zeros: what would be left over needed a second copy of f's program."""
    count = arrays[0].shape[0]
    chunk = -(-count // turns)

    def cut(a):
        a = jnp.pad(a, ((0, turns * chunk - count), *((0, 0),) * (a.ndim - 1)))
        return a.reshape(turns, chunk, *a.shape[1:])

    out = lax.map(lambda a: f(*a), tuple(map(cut, arrays)))
    return tuple(o.reshape(turns * chunk, *o.shape[2:])[:count] for o in out)
