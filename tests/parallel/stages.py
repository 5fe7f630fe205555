"""The natural tree cut into stage trees and put together again, the obvious way: NumPy and loops over layers."""

import numpy as np

from k2jax.parallel.layout import DENSE, IDENTITY, MOE, MTP

STACKS = {MOE: "moe", DENSE: "dense"}


def layer_of(params, lay, stage, slot):
    """One layer's nested dict of arrays, or None at an identity slot."""
    kind, index = lay.kind_ZL[stage, slot], lay.layer_ZL[stage, slot]
    if kind == IDENTITY:
        return None
    stack = params["mtp"]["block"] if kind == MTP else params[STACKS[kind]]
    return tree_map(lambda w: w[index], stack)


def tree_map(f, *trees):
    if isinstance(trees[0], dict):
        return {k: tree_map(f, *(t[k] for t in trees)) for k in trees[0]}
    return f(*trees)


def cut(params, lay, expert):
    """[P, EP] stage trees as one tree of arrays with the leading axes [P, EP]."""
    params = tree_map(np.asarray, params)
    first = params.get("moe") or (params["mtp"]["block"] if "mtp" in params else params["dense"])
    pattern = tree_map(lambda w: w[0] * 0, first)
    rows = []
    for p in range(lay.stages):
        layers = []
        for s in range(lay.slots):
            layer = layer_of(params, lay, p, s)
            kind = lay.kind_ZL[p, s]
            if layer is None:
                layer = pattern
            if kind == DENSE:
                layer = layer | {"ffn": pattern["ffn"]}
            layers.append(layer)
        routed = [layers[s]["ffn"] for s in lay.moe_slots]
        layers = [{k: w for k, w in layer.items() if k != "ffn"} for layer in layers]
        tree = {"slots": tree_map(lambda *w: np.stack(w), *layers), "norm_D": params["norm_D"]}
        if routed:
            tree["slots"]["ffn"] = tree_map(lambda *w: np.stack(w), *routed)
        if lay.dense_ZJ.shape[1]:
            ffn = params["dense"]["ffn"]
            held = [tree_map(lambda w, i=i: w[max(i, 0)] * (i >= 0), ffn) for i in lay.dense_ZJ[p]]
            tree["dense"] = tree_map(lambda *w: np.stack(w), *held)
        if "mtp" in params:
            tree["mtp"] = {k: w for k, w in params["mtp"].items() if k != "block"}
        for name in ("embed_WD", "head_WD"):
            tree[name] = np.split(params[name], lay.stages)[p]
        ranks = []
        for e in range(expert):
            slots = dict(tree["slots"])
            if routed:
                experts = ("gate_EDF", "up_EDF", "down_EFD")
                slots["ffn"] = slots["ffn"] | {name: np.split(slots["ffn"][name], expert, axis=1)[e] for name in experts}
            ranks.append(tree | {"slots": slots})
        rows.append(tree_map(lambda *w: np.stack(w), *ranks))
    return tree_map(lambda *w: np.stack(w), *rows)


def join(stages, like, lay, expert):
    """The inverse of `cut` for gradients [P, EP, ...] that are already summed over ranks; `like` is a natural tree."""
    out = tree_map(lambda w: np.zeros_like(np.asarray(w)), like)
    stages = tree_map(np.asarray, stages)

    def of(tree, p, e):
        return tree_map(lambda w: w[p, e], tree)

    for p in range(lay.stages):
        tree = of(stages, p, 0)
        ffn = dict(tree["slots"]["ffn"])
        for name in ("gate_EDF", "up_EDF", "down_EFD"):
            ffn[name] = np.concatenate([stages["slots"]["ffn"][name][p, e] for e in range(expert)], axis=1)
        slots = tree["slots"] | {"ffn": ffn}
        for s in range(lay.slots):
            kind, index = lay.kind_ZL[p, s], lay.layer_ZL[p, s]
            if kind == IDENTITY:
                continue
            target = out["mtp"]["block"] if kind == MTP else out[STACKS[kind]]
            layer = tree_map(lambda w, s=s: w[s], slots)
            if kind == DENSE:
                j = list(lay.dense_ZJ[p]).index(index)
                layer = layer | {"ffn": tree_map(lambda w, j=j: w[j], tree["dense"])}
            tree_map(lambda t, w, index=index: t.__setitem__(index, w), target, layer)
            if kind == MTP:
                for name in ("hidden_norm_D", "embed_norm_D", "project_JD", "norm_D"):
                    out["mtp"][name] = tree["mtp"][name]
        n = tree["embed_WD"].shape[0]
        for name in ("embed_WD", "head_WD"):
            out[name][p * n : (p + 1) * n] = tree[name]
        out["norm_D"] = tree["norm_D"]
    return out
