"""Grouped products by the definition, with nan at every place that a kernel leaves unwritten: it would show in every sum."""

import jax.numpy as jnp

from k2jax.kernels.grouped_matmul import Products
from k2jax.kernels.grouped_matmul_triton import Taken


def formed(rows):
    return rows.x_XD[rows.row_P] if isinstance(rows, Taken) else rows


def places_of(groups, P):
    """[E, P]: which places are each expert's."""
    place = jnp.arange(P)[None]
    return ((groups.first_E[:, None] <= place) & (place < groups.end_E[:, None])).astype(jnp.float32)


def dense_multiply(rows, matrices, groups, transposed=False):
    pattern = "ep,pj,eij->pi" if transposed else "ep,pi,eij->pj"
    here_EP = places_of(groups, formed(rows[0]).shape[0])
    clean = (jnp.where(here_EP.any(0)[:, None], formed(x), 0) for x in rows)
    y = sum(jnp.einsum(pattern, here_EP, x, w[groups.matrix_E]) for x, w in zip(clean, matrices, strict=True))
    return jnp.where(here_EP.any(0)[:, None], y, jnp.nan)


def dense_weight_gradient(x, y, groups, total=None):
    here_EP = places_of(groups, formed(x).shape[0])
    x, y = (jnp.where(here_EP.any(0)[:, None], formed(a), 0) for a in (x, y))
    sums = jnp.einsum("ep,pi,pj->eij", here_EP, x, y)
    return sums if total is None else total.at[groups.matrix_E].add(sums)


DENSE = Products(dense_multiply, dense_weight_gradient)
