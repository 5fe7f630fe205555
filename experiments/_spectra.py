"""Pictures of single updates, for the notebook: singular values before and after Newton-Schulz, and RMS by shape."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from k2jax.config import OptimConfig
from k2jax.kernels.newton_schulz import SETS, coefficients, newton_schulz
from k2jax.optim.muon import update_scale
from k2jax.optim.probes import svd_entropy

K2 = OptimConfig()
N, M = 64, 96  # the matrix of `draw_spectrum`
GRADIENTS = 20  # given to both optimizers before their updates are looked at
COLUMNS = (16, 32, 64, 128, 256)  # of the matrices of `draw_rms`
D_MODEL = 64  # the model's width there, which "baseline" scales by


def gradients(condition: float) -> Float[Array, "t N M"]:
    """Draws gradients whose singular values fall from 1 to 1 / `condition`, evenly in the logarithm, with noise of that shape.

    G_t = U S^(1/2) (I + Z_t / sqrt(N)) S^(1/2) V^T with U, V and S fixed and Z_t normal.
    """
    if not 1 <= condition < np.inf:
        raise ValueError(f"the condition of a spectrum is at least 1; got {condition}")
    rng = np.random.default_rng(0)
    u_NN, _ = np.linalg.qr(rng.normal(size=(N, N)))
    v_MN, _ = np.linalg.qr(rng.normal(size=(M, N)))
    root_N = np.geomspace(1, 1 / condition, N) ** 0.5
    middle_tNN = np.eye(N) + rng.normal(size=(GRADIENTS, N, N)) / np.sqrt(N)
    return jnp.asarray((u_NN * root_N) @ middle_tNN @ (root_N[:, None] * v_MN.T), jnp.float32)


def momentum(grads_tNM: Float[Array, "t N M"]) -> Float[Array, "N M"]:
    """Returns Muon's M after these gradients."""
    return _last_update(optax.trace(K2.momentum), grads_tNM)


def adamw(grads_tNM: Float[Array, "t N M"]) -> Float[Array, "N M"]:
    """Returns AdamW's direction after these gradients, without decay and learning rate."""
    return _last_update(optax.scale_by_adam(K2.adam_b1, K2.adam_b2, K2.adam_eps), grads_tNM)


def _last_update(transform: optax.GradientTransformation, grads_tNM: Float[Array, "t N M"]) -> Float[Array, "N M"]:
    def step(state, grad_NM):
        update_NM, state = transform.update(grad_NM, state)
        return state, update_NM

    return jax.lax.scan(step, transform.init(grads_tNM[0]), grads_tNM)[1][-1]


def draw_spectrum(name: str, steps: int, condition: float) -> Figure:
    """Returns the picture of one update: the spectra of a momentum, of what Newton-Schulz with the coefficients `name` makes of
    it, and of AdamW's update; beside them, value by value, what each set makes of the momentum in as many steps."""
    figure = Figure(figsize=(11, 4.2), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    grads_tNM = gradients(condition)
    m_NM = momentum(grads_tNM)
    u_NN, values_N, v_NM = np.linalg.svd(np.asarray(m_NM, np.float64), full_matrices=False)
    _draw_values(left, "momentum", m_NM, "0.5")
    _draw_values(left, "AdamW's update", adamw(grads_tNM), "C1")
    for each, colour in zip(SETS, ("C3", "C0", "C2", "C4"), strict=True):
        try:
            table = coefficients(each, steps)
        except ValueError as error:  # one sentence: the set is tuned for more steps
            if each == name:
                right.text(0.5, 0.95, error, transform=right.transAxes, ha="center", fontsize=9)
            continue
        o_NM = newton_schulz(m_NM, table, K2.ns_dtype)
        if each == name:
            _draw_values(left, f"Muon's update, {name}", o_NM, colour)
        # Singular vectors stay, so what a value of the momentum became stands on the diagonal between its vectors.
        became_N = np.einsum("nk,nm,km->k", u_NN, np.asarray(o_NM, np.float64), v_NM)
        right.plot(values_N / np.linalg.norm(values_N), became_N, color=colour, lw=2.2 if each == name else 0.8, label=each)
    left.set(yscale="log", xlabel="number of the singular value", ylabel="singular value over the root mean square")
    left.set_title(f"spectra after {GRADIENTS} gradients, and their entropy")
    right.set(xscale="log", xlabel="singular value of the momentum, share of the Frobenius norm", ylabel="its value after")
    right.set_title(f"{steps} steps of Newton-Schulz in {K2.ns_dtype}")
    right.set_ylim(-0.05, 1.6)
    _finish(left, right)
    return figure


def _draw_values(ax: Axes, label: str, x_NM: Float[Array, "N M"], colour: str) -> None:
    values_N = np.linalg.svd(np.asarray(x_NM, np.float64), compute_uv=False)
    entropy = f"{label}: {float(svd_entropy(x_NM)):.3f}"
    ax.plot(np.arange(1, N + 1), values_N / np.sqrt(np.mean(values_N**2)), color=colour, label=entropy)


def draw_rms(rows: int) -> Figure:
    """Returns the picture of the root mean square of updates of `rows` x m matrices by m: orthogonalized, then scaled by
    "adjusted" and by "baseline" in a model of width D_MODEL."""
    found = [rms_of_update(rows, m) for m in COLUMNS]
    figure = Figure(figsize=(7.5, 4.2), dpi=80, layout="constrained")
    ax = figure.subplots()
    ax.axhspan(0.2, 0.4, color="0.93", lw=0, label="AdamW's in practice (Moonlight report 2.2)")
    labels = ("orthogonalized", "times 0.2 sqrt(max(n, m)): adjusted, K2", f"times 0.2 sqrt({D_MODEL}): baseline")
    for label, colour, line in zip(labels, ("0.5", "C3", "C0"), zip(*found, strict=True), strict=True):
        ax.plot(COLUMNS, line, "o-", color=colour, label=label, ms=5)
    ax.set(xscale="log", yscale="log", xlabel="columns m", ylabel="root mean square of the update", title=f"n = {rows} rows")
    ax.set_ylim(0.02, 1.0)
    ax.set_xticks(COLUMNS, [str(m) for m in COLUMNS])
    ax.minorticks_off()
    _finish(ax)
    return figure


def rms_of_update(rows: int, columns: int) -> tuple[float, float, float]:
    """Returns the RMS of a random matrix orthogonalized, then scaled by "adjusted" and by "baseline"."""
    x_nm = jnp.asarray(np.random.default_rng(0).normal(size=(rows, columns)), jnp.float32)
    o_nm = newton_schulz(x_nm, coefficients(K2.ns_coefficients, K2.ns_steps), K2.ns_dtype)
    raw = float(np.sqrt(np.mean(np.square(o_nm))))
    factors = [update_scale(replace(K2, scale=scale), D_MODEL, rows, columns) for scale in ("adjusted", "baseline")]
    return raw, *(raw * factor for factor in factors)


def _finish(*panels: Axes) -> None:
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="0.93", lw=0.6)
        ax.title.set_fontsize(10)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8.5)
