"""What becomes of a layer's activations between its forward and its backward pass (report 2.4.3).

The model names what it computes (`checkpoint_name`); a policy says for every name whether it is kept, recomputed, stored in FP8
or on the host. `collect` runs a function and returns its named values too, `replay` runs it again with those stored in their
places: what only led to them is then dead code, which the compiler removes, while gradients flow on through it. `store` and
`load` stand between the two, so FP8 and the host are nowhere in the model, and no FP8 number meets a product.

| name | what | width, K2 |
|---|---|---|
| input | of the layer | 7168 |
| norms | of attention's and the feed-forward's input | 2 x 7168 |
| latents | of query, key and value, and the rotated key before its rotation | 1536 + 512 + 64 |
| heads | queries, keys, values: MLA's up-projections | 64 x (192 + 192 + 128) |
| attention | its output before the output projection, with the log-sum-exp of its rows | 64 x 128 |
| stream | the residual stream between attention and feed-forward | 7168 |
| gates | gate and up projection of shared or dense feed-forwards: SwiGLU's inputs | 2 x 2048 |
| hidden | SwiGLU's outputs there | 2048 |
| expert_rows | in a cut model, the rows that came to a device's experts | 8 x 7168 |
| expert_gates | in a cut model, gate and up projection of the experts for those rows: SwiGLU's inputs | 8 x 2 x 2048 |

The experts chosen for each token, and their weights, are always kept: chosen again from rounded numbers they might be others,
and with them the backward pass can send its first rows at once. What only an unbalanced routing has is sent and computed again:
further rounds of an exchange, and pairs of (row, expert) beyond those that `layer.Shape.keep` has room for. In the plain loop
the gradient of the routed experts is one function's (`kernels.grouped_matmul`), which keeps both, or with all else neither.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k2jax.config import Action, ActivationConfig, ModelConfig, RunConfig
from k2jax.kernels import fp8

NAMES = ("input", "norms", "latents", "heads", "attention", "stream", "gates", "hidden", "expert_rows", "expert_gates")
FOLLOWS = {"routing": None, "attention_lse": "attention"}  # small ones without an action of their own: kept, or as another is

POLICIES: dict[str, dict[str, Action]] = {
    "none": dict.fromkeys(NAMES, "keep"),
    "full": dict.fromkeys(NAMES, "recompute") | {"input": "keep"},
    # Norms, SwiGLU and MLA's up-projections are recomputed, inputs of SwiGLU and of the experts' up-projections are FP8, all
    # that is stored goes to the host.
    "k2": {
        "input": "offload",
        "norms": "recompute",
        "latents": "offload",
        "heads": "recompute",
        "attention": "offload",
        "stream": "offload",
        "gates": "fp8+offload",
        "hidden": "recompute",
        "expert_rows": "fp8+offload",
        "expert_gates": "fp8+offload",
    },
}

Named = dict[str, tuple[Any, ...]]  # name -> the values of that name, in order


def actions(config: ActivationConfig, cut: bool) -> dict[str, Action]:
    """What to do with each name: the policy's, unless the config says otherwise. `cut`: whether the model is (`mesh.cut`)."""
    policy = {"auto": "full" if cut else "none"}.get(config.policy, config.policy)
    return {name: getattr(config, name) or action for name, action in POLICIES[policy].items()}


def stored_names(of: Mapping[str, Action]) -> set[str]:
    """The names whose values outlive the forward pass."""
    own = {name for name, action in of.items() if action != "recompute"}
    return own | {name for name, leader in FOLLOWS.items() if leader is None or leader in own}


# --- named values of a function


def collect(f: Callable, names: set[str]) -> Callable[..., tuple[Any, Named]]:
    """Returns the function that also returns the values of these names in `f`."""

    def g(*args):
        found: Named = {}

        def visit(name, x):
            if name in names:
                found[name] = (*found.get(name, ()), x)
            return x

        return _interpret(f, args, visit), found

    return g


def replay(f: Callable, named: Named) -> Callable:
    """Returns the function that is `f` with these values in the places of those that it would compute.

    The value of a name is what was given, its gradient goes to what would have been there.
    """

    def g(*args):
        left = {name: list(values) for name, values in named.items()}
        return _interpret(f, args, lambda name, x: _instead(x, left[name].pop(0)) if name in left else x)

    return g


@jax.custom_jvp
def _instead(x, value):
    """`value`, with the tangent of x."""
    return value


_instead.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def _interpret(f: Callable, args: tuple, visit: Callable[[str, jax.Array], jax.Array]):
    """`f(*args)` with `visit(name, x)` for every x that bears a name."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), visit)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _evaluate(jaxpr, consts, args, visit) -> list[jax.Array]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "name":
            out = [visit(equation.params["name"], *given)]
        elif equation.primitive.name in ("jit", "pjit") and _has_names(inner.jaxpr):
            out = _evaluate(inner.jaxpr, inner.consts, given, visit)
        else:
            with equation.ctx.manager:
                out = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
            out = out if equation.primitive.multiple_results else [out]
        values.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_names(jaxpr) -> bool:
    """Whether a function, or one that it calls, names a value. Loops and functions with gradients of their own are not looked
    into: what they name is theirs."""
    return any(
        e.primitive.name == "name" or (e.primitive.name in ("jit", "pjit") and _has_names(e.params["jaxpr"].jaxpr))
        for e in jaxpr.eqns
    )


# --- between forward and backward pass


def store(of: Mapping[str, Action], named: Named) -> Named:
    """Named values as they are kept: in FP8 where their action says so. They are still on the device."""
    return {name: tuple(fp8.store(x) if "fp8" in _action(of, name) else x for x in xs) for name, xs in named.items()}


def load(stored: Named, dtype: str) -> Named:
    """The inverse of `store`; what was FP8 comes back in `dtype`."""

    def one(x):
        return fp8.load(x, dtype) if isinstance(x, fp8.Stored) else x

    return {name: tuple(map(one, xs)) for name, xs in stored.items()}


def put_away(of: Mapping[str, Action], stored: Named) -> Named:
    """Stored values where they lie until they are needed: on the host where their action says so."""
    return _moved(of, stored, jax.memory.Space.Host)


def fetch(of: Mapping[str, Action], stored: Named) -> Named:
    """The inverse of `put_away`."""
    return _moved(of, stored, jax.memory.Space.Device)


def _moved(of: Mapping[str, Action], stored: Named, space: jax.memory.Space) -> Named:
    return {name: jax.device_put(xs, space) if _is_on_host(of, name) else xs for name, xs in stored.items()}


def empty(of: Mapping[str, Action], shapes: Named, slots: int) -> Named:
    """Zeros [slots, ...] for stored values of these shapes, where those lie."""

    def on_host(x):
        # Slot by slot: zeros for all would first lie on the device.
        return lax.scan(
            lambda _, __: (None, jax.device_put(jnp.zeros(x.shape, x.dtype), jax.memory.Space.Host)), None, length=slots
        )[1]

    def one(name, x):
        return on_host(x) if _is_on_host(of, name) else jnp.zeros((slots, *x.shape), x.dtype)

    return {name: jax.tree.map(lambda x, name=name: one(name, x), xs) for name, xs in shapes.items()}


def any_on_host(of: Mapping[str, Action]) -> bool:
    """Whether anything is stored on the host."""
    return any("offload" in action for action in of.values())


def _action(of: Mapping[str, Action], name: str) -> Action:
    """The action of a name; what follows another is never rounded."""
    if name not in FOLLOWS:
        return of[name]
    leader = FOLLOWS[name]
    return "offload" if leader and "offload" in of[leader] else "keep"


def _is_on_host(of: Mapping[str, Action], name: str) -> bool:
    return "offload" in _action(of, name)


# --- what a policy costs, by counting


class Cost(NamedTuple):
    """Of a layer and token."""

    device: float  # bytes stored on the device between forward and backward pass
    host: float  # and on the host
    recomputed: float  # matrix-product FLOPs done a second time, over those of a forward pass


def cost(model: ModelConfig, of: Mapping[str, Action], seq_len: int, rows: float, pairs: float) -> Cost:
    """What a policy stores and recomputes of a layer with experts, a token.

    `rows` is how many rows an exchange has for each token of a device, `pairs` how many (row, expert) are kept; empty places
    included.
    """
    a, F = model.attention, model.moe.n_shared * model.moe.d_expert
    element = jnp.dtype(model.dtype).itemsize
    width = {
        "input": model.d_model,
        "norms": 2 * model.d_model,
        "latents": a.q_rank + a.kv_rank + a.d_rope if a.kind == "mla" else 0,
        "heads": a.n_heads * (a.d_nope + a.d_rope) + a.n_kv_heads * (a.d_nope + a.d_rope + a.d_value),
        "attention": a.n_heads * a.d_value,
        "stream": model.d_model,
        "gates": 2 * F,
        "hidden": F,
        "expert_rows": rows * model.d_model,
        "expert_gates": pairs * 2 * model.moe.d_expert,
    }
    held = {False: 8.0 * model.moe.n_active, True: 0.0}  # the routing: expert and weight of each choice
    for name, action in of.items():
        if action != "recompute":
            size = 1 + 4 / fp8.TILE if "fp8" in action else element
            held["offload" in action] += size * width[name] + (4 * a.n_heads if name == "attention" else 0)
    pieces = _forward_flops(model, seq_len)
    # No gradient needs a down projection's output; every one needs the router's scores.
    again = sum(flops for name, flops in pieces.items() if of.get(name, "keep") == "recompute") + pieces["router"]
    return Cost(held[False], held[True], again / sum(pieces.values()))


def _forward_flops(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Matrix-product FLOPs of a forward pass through a layer with experts, a token, by the name that they lead to."""
    a, D, F = model.attention, model.d_model, model.moe.d_expert
    heads = a.n_heads * (a.d_nope + a.d_rope), a.n_kv_heads * (a.d_nope + a.d_value)
    if a.kind == "mla":
        down, up = D * (a.q_rank + a.kv_rank + a.d_rope), a.q_rank * heads[0] + a.kv_rank * heads[1]
    else:
        down, up = 0, D * (a.n_heads * a.d_rope + a.n_kv_heads * (a.d_rope + a.d_value))
    core = a.n_heads * (a.d_nope + a.d_rope + a.d_value) * (seq_len + 1) / 2
    counts = {
        "latents": down,
        "heads": up,
        "attention": core,
        "stream": a.n_heads * a.d_value * D,
        "gates": 2 * D * model.moe.n_shared * F,
        "router": D * model.moe.n_experts,
        "expert_gates": 2 * D * model.moe.n_active * F,
        "down": D * (model.moe.n_shared + model.moe.n_active) * F,
    }
    return {name: 2.0 * n for name, n in counts.items()}


# --- around a layer of the plain loop


def around(config: RunConfig) -> Callable[[Callable], Callable]:
    """What the plain training loop puts around the function of one layer, `(x, layer, context) -> (x, seen)`."""
    of = actions(config.activations, cut=False)
    if set(of.values()) == {"keep"}:
        return lambda f: f
    names = stored_names(of)

    def wrap(f: Callable) -> Callable:
        @jax.custom_vjp
        def layer(x_BTD, *rest):
            return f(x_BTD, *rest)

        def forward(x_BTD, *rest):
            out, named = collect(f, names)(x_BTD, *rest)
            return out, (put_away(of, store(of, named | {"input": (x_BTD,)})), rest)

        def backward(saved, d_out):
            # Not before the gradient is there: else the compiler would find what the forward pass computed, and keep it.
            (stored, rest), d_out = lax.optimization_barrier((saved, d_out))
            named = load(fetch(of, stored), config.model.dtype)
            (x_BTD,) = named.pop("input")
            return jax.vjp(replay(f, named), x_BTD, *rest)[1](d_out)

        layer.defvjp(forward, backward)
        return layer

    return wrap
