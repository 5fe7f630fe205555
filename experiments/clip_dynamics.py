"""A toy of QK-Clip: logits that grow and stop growing, under no clip, K2's clip by head, and a clip by layer (report 2.1).

The largest logit of head h follows d log(logit_h) / dt = 2 (r_h exp(-t / T) - lambda): its query and its key each grow at a
rate r_h that falls with the learning rate, and weight decay shrinks both. A few heads, all in the first layers, have a large
r_h. The weights are real ones of MLA, one number a head and leaf, and `k2jax.optim.qk_clip` clips them. The claims:

1. By head, no head at or below tau is touched.
2. By layer, the naive clip, heads that did nothing shrink with their layer's worst.
3. The clip ends by itself: the last step that fires is T log(max r_h / lambda), where weight decay overtakes growth.
4. What the clip lets through over tau is the growth of one step, since it divides by the logit of the forward pass before.

    python -m experiments.clip_dynamics            ten seconds; claims, figure.png and summary.json
    python -m experiments.clip_dynamics --tau 30 --hot 40

Time is in thousands of steps. The defaults are set by hand so that an eighth of the heads meets tau, the first at about 7, the
last until 70, and ends near 30, as in the report's figure 2 and appendix D: those numbers go in, the four claims come out.
"""

import functools
import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from experiments import _record
from experiments._study import Claim
from k2jax.config import AttentionConfig, OptimConfig
from k2jax.optim.qk_clip import qk_clip
from k2jax.train.folder import write

Scheme = Literal["none", "head", "layer"]
SCHEMES: dict[Scheme, str] = {"none": "no clip", "head": "by head (K2)", "layer": "by layer (naive)"}
LAYERS, HEADS = 8, 16
HOT_LAYERS = 3  # the first ones, among which hot heads are dealt out
COLD = (0.02, 0.12)  # r_h of the other heads, spread evenly
STEP = 0.1  # thousands of steps in one step of the toy
MOST = 20  # of r_h T and lambda times the length
ROPE_SHARE = 0.25  # of a logit, from the rotated part, whose key all heads of a layer share
GROWS = {"q_nope_QHN": 1, "k_nope_CHN": 1, "q_rope_QHR": 2}  # times the rate; the shared key stays, its queries grow for both
CLAIMS = (
    "by head, no head at or below tau is touched",
    "by layer, heads that did nothing shrink with their layer's worst",
    "the clip ends by itself",
    "what passes tau is the growth of one step",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    tau: float = 100.0  # QK-Clip's threshold on a head's largest logit
    hot: int = 16  # heads with a large r_h, of 128
    drive: float = 0.42  # r_h of the hottest head at the start, in 1 / thousand steps; the mildest hot head has half
    decay: float = 15.4  # T, thousands of steps in which growth falls by e
    weight_decay: float = 0.0045  # lambda, in 1 / thousand steps
    length: float = 220.0  # of the training, in thousands of steps
    out: Path = Path("runs/clip_dynamics")  # folder of the results

    def __post_init__(self):
        for name in ("drive", "decay", "weight_decay", "length"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a positive number; got {value}")
        if not 1 < self.tau < math.inf:
            raise ValueError(f"--tau must be above 1, where every logit starts; got {self.tau}")
        if not 0 <= self.hot <= HOT_LAYERS * HEADS:
            raise ValueError(f"--hot must lie in 0..{HOT_LAYERS * HEADS}, the heads of {HOT_LAYERS} layers; got {self.hot}")
        for rate, span in (("drive", "decay"), ("weight_decay", "length")):
            product = getattr(self, rate) * getattr(self, span)
            if product > MOST:  # logits are exp(2 * product) apart
                both = f"--{rate} times --{span}".replace("_", "-")
                raise ValueError(f"{both} must be at most {MOST}, or float32 does not hold the logits; got {product:g}")
        if not STEP <= self.length <= 1e5 * STEP:
            raise ValueError(f"--length must lie in {STEP}..{1e5 * STEP:g} thousand steps; got {self.length}")


class Trace(NamedTuple):
    """A toy run; t counts its steps."""

    options: Options
    scheme: Scheme
    time_t: np.ndarray  # thousands of steps
    logit_tLH: np.ndarray  # before the step
    lost_tLH: np.ndarray  # log of the factor that the clip has taken off heads at or below tau, summed up to the step
    layers: dict[str, np.ndarray]  # the weights at the end; their logits are in units of tau

    @property
    def fired_tLH(self) -> np.ndarray:
        """Which heads' own logit was above tau."""
        return self.logit_tLH > self.options.tau

    @property
    def last_fired(self) -> float | None:
        """Time of the last step in which a head was above tau, in thousands of steps; None if none ever was."""
        steps = np.flatnonzero(self.fired_tLH.any((1, 2)))
        return float(self.time_t[steps[-1]]) if steps.size else None


def hot_heads(options: Options) -> np.ndarray:
    """Returns which heads are hot, [L, H]: the first heads of the first layers, dealt out in turn."""
    hot_LH = np.zeros((LAYERS, HEADS), bool)
    for i in range(options.hot):
        hot_LH[i % HOT_LAYERS, i // HOT_LAYERS] = True
    return hot_LH


def growth(options: Options) -> np.ndarray:
    """Returns r_h, [L, H]: hot heads evenly from `drive` down to half of it, the others evenly over COLD in random order."""
    hot_LH = hot_heads(options)
    r_LH = np.random.default_rng(0).permutation(np.linspace(*COLD, LAYERS * HEADS)).reshape(LAYERS, HEADS)
    r_LH.T[hot_LH.T] = options.drive * np.linspace(1, 0.5, options.hot)
    return r_LH


def simulate(options: Options, scheme: Scheme) -> Trace:
    """Runs the toy in float32: forward pass, update, clip by the logits of that forward pass, as algorithm 1 has it.

    The toy's own unit of logits is tau, so that one compiled program serves every tau.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be {', '.join(SCHEMES)}; got {scheme!r}")
    time = np.arange(0, options.length - STEP / 2, STEP, dtype=np.float32)
    given = (growth(options), 1 / options.tau, options.decay, options.weight_decay)
    logit_tLH, lost_tLH, layers = jax.tree.map(np.asarray, _run(scheme, time, *map(np.float32, given)))
    return Trace(options, scheme, time, np.float32(options.tau) * logit_tLH, lost_tLH, layers)


def fresh(logit: jax.Array | float) -> dict[str, jax.Array]:
    """Returns the attention weights at the start, L layers in which every head has this logit."""
    per_head, shared = jnp.ones((LAYERS, 1, HEADS, 1)), jnp.ones((LAYERS, 1, 1))
    nope, rope = jnp.sqrt((1 - ROPE_SHARE) * logit) * per_head, ROPE_SHARE * logit * per_head
    return {"q_nope_QHN": nope, "k_nope_CHN": nope, "q_rope_QHR": rope, "k_rope_DR": shared}


def logits(layers: dict[str, jax.Array]) -> jax.Array:
    """Returns the [L, H] logits on inputs of 1: a content part and a rotated part, whose key is the layer's."""
    q_nope, k_nope, q_rope = (layers[name][:, 0, :, 0] for name in GROWS)
    return q_nope * k_nope + q_rope * layers["k_rope_DR"][:, 0]


@functools.partial(jax.jit, static_argnames="scheme")
def _run(scheme: Scheme, time_t, r_LH, start, decay, weight_decay):
    config = OptimConfig(qk_tau=1.0, qk_scope="layer" if scheme == "layer" else "head")
    clip = qk_clip(config, AttentionConfig(n_heads=HEADS, n_kv_heads=HEADS))

    def step(carry, time):
        layers, lost_LH = carry
        logit_LH = logits(layers)
        rate = STEP * (r_LH * jnp.exp(-time / decay) - weight_decay)[:, None, :, None]
        updates = {name: w * jnp.expm1(GROWS[name] * rate) if name in GROWS else 0 * w for name, w in layers.items()}
        clipped = updates = jax.lax.optimization_barrier(updates)  # rounded once, so that bits tell what was touched
        if scheme != "none":
            params = {"stack": {"attention": layers}}
            tree, _ = clip.update(
                {"stack": {"attention": updates}}, clip.init(params), params, max_logit_LH={"stack": logit_LH}
            )
            clipped = tree["stack"]["attention"]
        touched_LH = sum(jnp.any(clipped[name] != updates[name], (1, 3)) for name in GROWS) > 0
        free, layers = optax.apply_updates(layers, updates), optax.apply_updates(layers, clipped)
        taken_LH = jnp.where(touched_LH & (logit_LH <= 1), jnp.log(logits(free) / logits(layers)), 0.0)
        return (layers, lost_LH + taken_LH), (logit_LH, lost_LH + taken_LH)

    (layers, _), (logit_tLH, lost_tLH) = jax.lax.scan(step, (fresh(start), jnp.zeros((LAYERS, HEADS))), time_t)
    return logit_tLH, lost_tLH, layers


def claims(traces: Mapping[Scheme, Trace]) -> list[Claim]:
    """Returns the four claims of this module with what the runs of all schemes say of them."""
    none, head, layer = (traces[scheme] for scheme in SCHEMES)
    options = head.options
    if head.last_fired is None:
        return [Claim(str(i), text, "no head reached tau", "untested") for i, text in enumerate(CLAIMS, 1)]
    never_LH, taken_LH = ~none.fired_tLH.any(0), layer.lost_tLH[-1]
    worst, share = math.exp(taken_LH[never_LH].max(initial=0)), head.fired_tLH.any(0).mean()
    predicted = options.decay * math.log(options.drive / options.weight_decay)
    step, over = math.exp(2 * STEP * options.drive), float(head.logit_tLH.max()) / options.tau
    measured = [
        (f"largest factor taken off such a head: {math.exp(head.lost_tLH.max()):.9g}", head.lost_tLH.max() == 0),
        (
            f"of {never_LH.sum()} heads that never reach tau {(taken_LH[never_LH] > 0).sum()} shrink, by up to {worst:,.0f}x",
            worst > 1,
        ),
        (
            f"{share:.1%} of the heads ever fired, the last at {head.last_fired:.1f} of {options.length:g} thousand steps; "
            f"T log(max r / lambda) = {predicted:.1f}",
            head.last_fired < options.length - 1.5 * STEP,
        ),
        (
            f"at most {over:.3f} tau, where a step grows by at most {step:.3f}; at the end {head.logit_tLH[-1].max():.1f}; "
            f"without a clip up to {none.logit_tLH.max() / options.tau:,.0f} tau",
            over <= step * (1 + 1e-4),
        ),
    ]
    return [
        Claim(str(i), text, told, "pass" if holds else "fail")
        for i, (text, (told, holds)) in enumerate(zip(CLAIMS, measured, strict=True), 1)
    ]


def draw(*traces: Trace) -> Figure:
    """Returns the figure: the logits of every head, a panel a run, and beside them the share of heads above tau."""
    columns = 3 if len(traces) == 2 else 2
    rows = -(-(len(traces) + 1) // columns)
    figure = Figure(figsize=(5.2 * columns, 0.5 + 3.6 * rows), dpi=80, layout="constrained")
    *panels, last = figure.subplots(rows, columns, squeeze=False).ravel()
    low, high = min(t.logit_tLH.min() for t in traces), max(t.logit_tLH.max() for t in traces)
    colours = {"none": "0.5", "head": "C2", "layer": "C1"}
    for ax, trace in zip(panels, traces, strict=True):
        _draw_logits(ax, trace)
        ax.set_ylim(low / 2, max(high, trace.options.tau) * 2)
        share_t = 100 * trace.fired_tLH.mean((1, 2))
        last.plot(trace.time_t, share_t, color=colours[trace.scheme], label=SCHEMES[trace.scheme], lw=1.4)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    last.set(xlabel="thousands of steps", ylabel="% of all heads", title="heads above tau")
    last.legend(frameon=False, fontsize=9)
    for ax in (*panels, last):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="0.93", lw=0.6)
        ax.title.set_fontsize(10)
    return figure


def _draw_logits(ax: Axes, trace: Trace) -> None:
    """Hot heads and those of their layers as lines, all others as a band."""
    options, every = trace.options, slice(None, None, max(1, len(trace.time_t) // 150))
    time_t, hot_LH = trace.time_t[every], hot_heads(options)
    beside_LH = hot_LH.any(1, keepdims=True) & ~hot_LH
    other = trace.logit_tLH[every, ~hot_LH & ~beside_LH]
    ax.fill_between(time_t, other.min(1), other.max(1), color="0.85", lw=0, label="heads of other layers")
    for label, which_LH, colour in (("heads beside hot ones", beside_LH, "C0"), ("hot heads", hot_LH, "C3")):
        ax.plot([], [], color=colour, label=label)
        ax.plot(time_t, trace.logit_tLH[every, which_LH], color=colour, lw=0.6)
    ax.axhline(options.tau, color="black", lw=0.9, ls="--", label=f"tau = {options.tau:g}")
    ax.set_yscale("log")
    lost = float(np.exp(trace.lost_tLH[-1].max()))
    taken = f"; heads under tau lose up to {lost:,.0f}x" if lost > 1 else ""
    ax.set(xlabel="thousands of steps", ylabel="largest logit of each head", title=SCHEMES[trace.scheme] + taken)


def main(options: Options) -> int:
    """Runs the three schemes, draws, prints the claims; returns the exit status."""
    console = Console()
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder; {options.out} is a file")
    options.out.mkdir(parents=True, exist_ok=True)
    traces = {scheme: simulate(options, scheme) for scheme in SCHEMES}
    told = claims(traces)
    draw(*traces.values()).savefig(options.out / "figure.png", pil_kwargs={"optimize": True}, metadata={"Software": None})
    head = traces["head"]
    summary = {
        "experiment": "clip_dynamics",
        "command": shlex.join(["python", "-m", "experiments.clip_dynamics", *sys.argv[1:]]),
        "versions": _record.versions(("k2jax", "jax", "optax", "numpy")),
        "machine": _record.machine(),
        "options": {name: value for name, value in asdict(options).items() if name != "out"},
        "max_logit": {scheme: float(trace.logit_tLH.max()) for scheme, trace in traces.items()},
        "final_max_logit": {scheme: float(trace.logit_tLH[-1].max()) for scheme, trace in traces.items()},
        "collateral_factor": {scheme: math.exp(trace.lost_tLH[-1].max()) for scheme, trace in traces.items()},
        "share_ever_fired": float(head.fired_tLH.any(0).mean()),
        "last_fired": head.last_fired,
        "claims": [claim._asdict() for claim in told],
    }
    write(options.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
    colour = {"pass": "green", "fail": "red", "untested": "yellow"}
    for claim in told:
        console.print(f"[{colour[claim.verdict]}]{claim.verdict}[/]: {claim.text}: {claim.measured}", highlight=False)
    console.print(f"wrote figure.png and summary.json to {options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, prog="python -m experiments.clip_dynamics", description=__doc__)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
