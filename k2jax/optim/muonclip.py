"""MuonClip, the whole optimizer (K2 report, algorithm 1). Read this file first.

clip the gradient's norm -> Muon or AdamW by the leaf's role, each with its weight decay -> learning rate -> QK-Clip

tx = muonclip(config, model)
state = tx.init(params)
updates, state = tx.update(grads, state, params, learning_rate=rate, max_logit_LH=aux.max_logit_LH)
params = optax.apply_updates(params, updates)
"""

from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

import jax
import optax

from k2jax.config import ModelConfig, OptimConfig
from k2jax.kernels import newton_schulz
from k2jax.optim.muon import Path, blocks_of, by_path, is_matrix, nested, scale_by_muon, update_scale
from k2jax.optim.qk_clip import qk_clip

Rule = Literal["muon", "adamw"]


def muonclip(config: OptimConfig, model: ModelConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer as one optax chain over a tree of parameters named by role.

    `update` takes `learning_rate`, a scalar that may be traced, and `max_logit_LH`, {stack: [L, H]} of this step's forward
    pass (read by rule "muonclip" alone). Updates are float32 and are to be added to the parameters. A leaf that no rule
    matches, or a statistic that matches no attention layer, raises ValueError.
    """
    # W <- W - rate * (direction + decay * W), with one rate and one decay for both groups unless AdamW's are set apart.
    muon = optax.chain(scale_by_muon(config, model.d_model), optax.add_decayed_weights(config.weight_decay))
    adamw = optax.chain(
        optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps),
        optax.add_decayed_weights(config.weight_decay * config.adamw_decay),
        optax.scale(config.adamw_rate),
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.partition({"muon": muon, "adamw": adamw}, lambda params: rules(config, params)),
        scale_by_given_rate(),
        qk_clip(config, model.attention) if config.rule == "muonclip" else optax.identity(),
    )


def rules(config: OptimConfig, params: optax.Params) -> optax.Params:
    """Returns a tree like `params` with "muon" or "adamw" at every leaf."""
    return jax.tree.map_with_path(lambda path, _: rule_of(config, tuple(key.key for key in path)), params)


def rule_of(config: OptimConfig, path: Path) -> Rule:
    """Which rule updates the leaf at `path`, by its role: what looks words up, counts them out or rescales goes to AdamW,
    every matrix that acts on dense inputs, router and experts included, to Muon. An unknown role raises ValueError."""
    name = path[-1]
    if config.rule == "adamw" or name in ("embed_WD", "head_WD") or "norm" in name.split("_"):
        return "adamw"
    if is_matrix(name) and "W" not in name.rsplit("_", 1)[-1]:
        return "muon"
    raise ValueError(f"no update rule for {'/'.join(path)}: it is not embed_WD, head_WD, a norm or a matrix by its letters")


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
    """Returns the transform u -> -learning_rate * u, the rate being an argument of `update`: one program for any schedule."""

    def update_fn(updates, state, params=None, *, learning_rate, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


class Row(NamedTuple):
    """What the optimizer does to one leaf in a step; the last six fields are zero or empty under AdamW."""

    path: str
    rule: Rule
    matrices: int  # orthogonalized apart; 0 for a leaf that is the second half of a fused matrix
    n: int  # rows of the matrix the leaf belongs to
    m: int  # columns
    scale: float | None  # on the orthogonalized matrix; None where each matrix's RMS decides
    form: str  # of Newton-Schulz
    flops: int  # of Newton-Schulz over all matrices, counted on the first leaf of a fused matrix


def table(config: OptimConfig, model: ModelConfig, params: optax.Params) -> list[Row]:
    """Describes every leaf of `params` (arrays or ShapeDtypeStructs), in the tree's order."""
    rule = by_path(rules(config, params))
    leaves = by_path(params)
    muon = nested({path: leaf for path, leaf in leaves.items() if rule[path] == "muon"})
    found = {}
    for block in blocks_of(muon, config.split):
        form = newton_schulz.form(block.n, block.m, config.ns_steps)
        flops = block.count * newton_schulz.flops(block.n, block.m, config.ns_steps, form)
        scale = update_scale(config, model.d_model, block.n, block.m)
        for i, path in enumerate(block.paths):
            counts = (0, 0) if i else (block.count, flops)
            found[path] = Row("/".join(path), "muon", counts[0], block.n, block.m, scale, form, counts[1])
    return [found.get(path, Row("/".join(path), "adamw", 0, 0, 0, 0.0, "", 0)) for path in leaves]


def render(rows: list[Row]) -> str:
    """Returns `table`'s rows as text in aligned columns, with the total of matrices and FLOPs."""
    lines = [("leaf", "rule", "matrices", "shape", "scale", "form", "MFLOP")]
    for r in rows:
        scale = "by RMS" if r.scale is None else f"{r.scale:.2f}"
        shape = (str(r.matrices), f"{r.n} x {r.m}", scale, r.form, f"{r.flops / 1e6:,.1f}")
        lines.append((r.path, r.rule, *(shape if r.rule == "muon" else ("",) * 5)))
    lines.append(("total", "", str(sum(r.matrices for r in rows)), "", "", "", f"{sum(r.flops for r in rows) / 1e6:,.1f}"))
    return aligned(lines, left={0, 1, 5})


def aligned(lines: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Returns lines of cells as text in columns as wide as their widest cell; those whose number is in `left` begin alike."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )
