"""The published forward pass once more: plain NumPy in float64, published tensor names, one function a part.

Written from DeepSeek-V3's equations 1-25 and the fields of config.json; shares no line with k2jax.
"""

import math

import numpy as np


def rms_norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(w, prefix, x):
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def yarn_m(factor, a):
    return 0.1 * a * math.log(factor) + 1 if factor > 1 else 1.0


def rope(c):
    """Frequencies and the factor on the softmax scale."""
    given = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    base = given.get("rope_theta") or c["rope_theta"]
    D = c.get("qk_rope_head_dim") or c["head_dim"]
    theta = np.array([base ** (-2 * i / D) for i in range(D // 2)])
    if (given.get("rope_type") or given.get("type") or "default") == "default":
        return theta, 1.0
    s, length = given["factor"], given["original_max_position_embeddings"]

    def dim_for(rotations):
        return D * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(math.floor(dim_for(given["beta_fast"])), 0), min(math.ceil(dim_for(given["beta_slow"])), D - 1)
    for i in range(D // 2):
        ramp = min(max((i - low) / (high - low or 0.001), 0), 1)
        theta[i] = theta[i] * (1 - ramp) + theta[i] / s * ramp
    assert given["mscale"] == given["mscale_all_dim"]  # so that the tables keep their size
    return theta, yarn_m(s, given["mscale_all_dim"]) ** 2


def turn_pairs(x, angles):
    """Channels 2i and 2i + 1 of x [T, D] are a complex number, turned by its angle."""
    z = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def turn_halves(x, angles):
    """Channels i and i + D/2."""
    n = x.shape[1] // 2
    z = (x[:, :n] + 1j * x[:, n:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], 1)


def softmax_attention(q, k, v, scale):
    s = scale * q @ k.T
    s[np.triu_indices(len(s), 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


def mla(c, w, prefix, x, positions):
    H, N, R, V, C = (
        c[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    theta, stretch = rope(c)
    angles = positions[:, None] * theta
    c_q = rms_norm(x @ w[f"{prefix}.q_a_proj.weight"].T, w[f"{prefix}.q_a_layernorm.weight"], c["rms_norm_eps"])
    q = (c_q @ w[f"{prefix}.q_b_proj.weight"].T).reshape(-1, H, N + R)
    kv = x @ w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    c_kv = rms_norm(kv[:, :C], w[f"{prefix}.kv_a_layernorm.weight"], c["rms_norm_eps"])
    k_rope = turn_pairs(kv[:, C:], angles)
    up = (c_kv @ w[f"{prefix}.kv_b_proj.weight"].T).reshape(-1, H, N + V)
    out = []
    for h in range(H):
        q_h = np.concatenate([q[:, h, :N], turn_pairs(q[:, h, N:], angles)], 1)
        k_h = np.concatenate([up[:, h, :N], k_rope], 1)
        out.append(softmax_attention(q_h, k_h, up[:, h, N:], (N + R) ** -0.5 * stretch))
    return np.concatenate(out, 1) @ w[f"{prefix}.o_proj.weight"].T


def gqa(c, w, prefix, x, positions):
    H, G = c["num_attention_heads"], c["num_key_value_heads"]
    theta, stretch = rope(c)
    angles = positions[:, None] * theta
    q, k, v = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    d, out = q.shape[1] // H, []
    for h in range(H):
        g = h // (H // G)
        q_h, k_h = turn_halves(q[:, h * d : (h + 1) * d], angles), turn_halves(k[:, g * d : (g + 1) * d], angles)
        out.append(softmax_attention(q_h, k_h, v[:, g * d : (g + 1) * d], d**-0.5 * stretch))
    return np.concatenate(out, 1) @ w[f"{prefix}.o_proj.weight"].T


def router(c, w, prefix, x):
    """Chosen experts of each token, sorted, and the gate of each."""
    score = 1 / (1 + np.exp(-(x @ w[f"{prefix}.gate.weight"].T)))
    biased = score + w[f"{prefix}.gate.e_score_correction_bias"]
    chosen, gates = [], []
    for s, b in zip(score, biased, strict=True):
        groups = b.reshape(c["n_group"], -1)
        best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1), kind="stable")[: c["topk_group"]]
        allowed = np.full(groups.shape, -np.inf)
        allowed[best] = groups[best]
        chosen.append(np.sort(np.argsort(-allowed.ravel(), kind="stable")[: c["num_experts_per_tok"]]))
        gates.append(c["routed_scaling_factor"] * s[chosen[-1]] / (s[chosen[-1]].sum() + 1e-20))
    return np.array(chosen), np.array(gates)


def moe(c, w, prefix, x):
    chosen, gates = router(c, w, prefix, x)
    y = swiglu(w, f"{prefix}.shared_experts", x)
    for t, (experts, weights) in enumerate(zip(chosen, gates, strict=True)):
        for e, g in zip(experts, weights, strict=True):
            y[t] += g * swiglu(w, f"{prefix}.experts.{e}", x[t])
    return y, chosen


def layer(c, w, i, x, positions):
    """One layer of one sequence [T, D]; the output, and the router's choice if it has one."""
    prefix, eps = f"model.layers.{i}", c["rms_norm_eps"]
    attention = mla if "kv_lora_rank" in c else gqa
    z = rms_norm(x, w[f"{prefix}.input_layernorm.weight"], eps)
    x = x + attention(c, w, f"{prefix}.self_attn", z, positions)
    z = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
    if f"{prefix}.mlp.gate.weight" not in w:
        return x + swiglu(w, f"{prefix}.mlp", z), None
    y, chosen = moe(c, w, f"{prefix}.mlp", z)
    return x + y, chosen


def forward(c, w, tokens, positions=None):
    """Logits [T, W], every layer's output [L, T, D] and the routers' choices [n, T, K] of one sequence."""
    w = {name: np.asarray(x, np.float64) for name, x in w.items()}
    positions = np.arange(len(tokens)) if positions is None else positions
    x, hidden, choices = w["model.embed_tokens.weight"][tokens], [], []
    for i in range(c["num_hidden_layers"]):
        x, chosen = layer(c, w, i, x, positions)
        hidden.append(x)
        choices += [] if chosen is None else [chosen]
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms_norm(x, w["model.norm.weight"], c["rms_norm_eps"]) @ head.T, np.stack(hidden), choices


def mtp(c, w, tokens):
    """Logits [T - 1, W] of the multi-token-prediction layer: place i, with token i + 1, predicts token i + 2."""
    w = {name: np.asarray(x, np.float64) for name, x in w.items()}
    hidden, n, eps = forward(c, w, tokens)[1][-1], c["num_hidden_layers"], c["rms_norm_eps"]
    embedded = w[f"model.layers.{n}.embed_tokens.weight"][tokens[1:]]
    # Published code joins the embedding first.
    parts = [
        rms_norm(embedded, w[f"model.layers.{n}.enorm.weight"], eps),
        rms_norm(hidden[:-1], w[f"model.layers.{n}.hnorm.weight"], eps),
    ]
    x = np.concatenate(parts, 1) @ w[f"model.layers.{n}.eh_proj.weight"].T
    x, _ = layer(c, w, n, x, np.arange(len(tokens) - 1))
    return rms_norm(x, w[f"model.layers.{n}.shared_head.norm.weight"], eps) @ w[f"model.layers.{n}.shared_head.head.weight"].T
