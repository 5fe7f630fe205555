import jax
import numpy as np
import pytest


def _quintic(x: np.ndarray, steps: int = 5) -> np.ndarray:
    """Newton-Schulz on one matrix in float64, as Moonlight's report writes it."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.fixture
def quintic():
    return _quintic


D, H = 8, 3
CLIPPED = {"q_nope_QHN": (6, H, 4), "q_rope_QHR": (6, H, 2), "k_nope_CHN": (5, H, 4)}
ATTENTION = CLIPPED | {
    "q_down_DQ": (D, 6),
    "q_norm_Q": (6,),
    "kv_down_DC": (D, 5),
    "kv_norm_C": (5,),
    "k_rope_DR": (D, 2),
    "v_CHV": (5, H, 3),
    "o_HVD": (H, 3, D),
}
EXPERTS = {"router_DE": (D, 4), "gate_EDF": (4, D, 7), "down_EFD": (4, 7, D)}


def _layers(count, attention, ffn):
    layer = {"attention_norm_D": (D,), "attention": attention, "ffn_norm_D": (D,), "ffn": ffn}
    return jax.tree.map(lambda shape: (count, *shape), layer, is_leaf=lambda x: isinstance(x, tuple))


@pytest.fixture
def shapes():
    """Shapes of a tiny K2: one dense layer, two expert layers, one MTP layer, 3 heads, 4 experts. Leaves whose like is in the
    expert layers are left out of the others: each costs compile time."""
    return {
        "embed_WD": (11, D),
        "head_WD": (11, D),
        "norm_D": (D,),
        "dense": _layers(1, CLIPPED, {"up_DF": (D, 12)}),
        "moe": _layers(2, ATTENTION, EXPERTS | {"shared_down_FD": (7, D)}),
        "mtp": {"hidden_norm_D": (D,), "project_JD": (2 * D, D), "block": _layers(1, CLIPPED, {"up_EDF": (4, D, 7)})},
    }


@pytest.fixture
def few():
    """A few of those leaves, of every kind."""
    ffn = {"router_DE": (D, 4), "gate_EDF": (4, D, 7)}
    return {"embed_WD": (11, D), "norm_D": (D,), "moe": {"attention": _layers(2, CLIPPED, ffn)["attention"], "ffn": ffn}}


@pytest.fixture
def normal():
    """normal(shapes, seed): a tree of standard normal float32 arrays."""

    def draw(shapes, seed):
        rng = np.random.default_rng(seed)

        def fill(node):
            if isinstance(node, dict):
                return {key: fill(value) for key, value in node.items()}
            return rng.standard_normal(node).astype(np.float32)

        return fill(shapes)

    return draw
