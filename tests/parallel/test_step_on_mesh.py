"""Twenty steps on every kind of mesh against one device: same batches, same numbers."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k2jax.config import MeshConfig
from k2jax.parallel import mesh as meshes
from k2jax.train import step as steps

STEPS = 20
MESHES = {
    "pipeline 4": (MeshConfig(pipeline=4, data=1), 4),
    "pipeline 4, 2 chunks": (MeshConfig(pipeline=4, chunks=2, data=1), 4),
    "pipeline 2, 2 chunks, 16 microbatches": (MeshConfig(pipeline=2, chunks=2, data=1), 16),
    "expert 2": (MeshConfig(chunks=2, expert=2, data=1), 4),
    "expert 4": (MeshConfig(chunks=2, expert=4, data=1), 4),
    "expert 8": (MeshConfig(chunks=2, expert=8, data=1), 2),
    "data 2": (MeshConfig(chunks=2, data=2), 4),
    "data 4": (MeshConfig(chunks=2, data=4), 4),
    "pipeline 2, expert 2, data 2": (MeshConfig(pipeline=2, chunks=2, expert=2, data=2), 4),
}
# Shares of a leaf's largest value, or of the number; two to five times what was seen, in float32.
GRADIENT, FIRST, LATER, FIRST_PARAMS, LAST_PARAMS = 5e-6, 1e-6, 5e-6, 3e-6, 1e-5
NUMBERS = ("loss", "mtp_loss", "balance_loss", "grad_norm", "update_rms")


def run(config, mesh, batches, poison=False):
    """Natural states after the first and the last step, metrics, and the evaluation's loss; `poison` adds a step with nan."""
    devices = None if mesh is None else meshes.make(config, jax.devices()[: meshes.count(mesh)])

    def natural(state):
        return jax.tree.map(np.array, state if mesh is None else steps.to_natural(config, devices, state))

    step, state = steps.make_step(config, devices), steps.init_state(config, devices)
    rows, states = [], []
    for batch in batches:
        state, metrics = step(state, batch, np.float32(config.tokens))
        rows.append(jax.tree.map(np.asarray, metrics))
        if len(rows) in (1, STEPS):
            states.append(natural(state))
    evaluated = [float(x) for x in steps.make_eval(config, devices)(state, batches[0])]
    if poison:
        state = state._replace(params=state.params | {"muon": state.params["muon"] * np.nan})
        before = jax.tree.map(np.array, state)
        state, metrics = step(state, batches[0], np.float32(config.tokens))
        after = jax.tree.map(np.array, state)
        assert not np.isfinite(metrics["grad_norm"]) and after.skips == 1 and after.step == STEPS + 1
        for name in ("params", "opt_state", "router_bias", "last_fired_LH"):
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
    return states, rows, evaluated


@pytest.fixture(scope="module")
def one_device(run_of, make_batch):
    """The reference run; heads go over the threshold in some steps."""
    config = run_of(MeshConfig(data=1), microbatches=1)
    batches = [make_batch(i, config.batch, config.seq_len + 1, config.model.n_words) for i in range(STEPS)]
    return config, batches, run(config, None, batches)


def close(a, b, share, path=()):
    """Within a share of the largest value of `b`."""
    np.testing.assert_allclose(a, b, rtol=0, atol=share * np.abs(b).max(initial=0), err_msg=jax.tree_util.keystr(path))


def all_close(a, b, share):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        close(x, y, share, path)


@pytest.mark.parametrize("name", MESHES)
def test_twenty_steps_equal_one_device(name, one_device):
    sizes, M = MESHES[name]
    config, batches, (states, rows, evaluated) = one_device
    poison = name == "pipeline 2, expert 2, data 2"
    mine, my_rows, my_evaluated = run(replace(config, mesh=sizes, microbatches=M), sizes, batches, poison)
    assert any(fired.any() for row in rows for fired in row["fired_LH"].values())
    jax.tree.map(np.testing.assert_array_equal, my_rows[0]["load_LE"], rows[0]["load_LE"])
    # After one step the momentum, and Adam's first moment but for a factor, are the gradients.
    all_close(mine[0].opt_state, states[0].opt_state, GRADIENT)
    for i, (a, b) in enumerate(zip(my_rows, rows, strict=True)):
        share = FIRST if i == 0 else LATER
        for key in NUMBERS:
            np.testing.assert_allclose(a[key], b[key], rtol=share, err_msg=f"{key} of step {i + 1}")
        all_close(a["max_logit_LH"], b["max_logit_LH"], share)
    all_close(mine[0].params, states[0].params, FIRST_PARAMS)
    all_close(mine[1].params, states[1].params, LAST_PARAMS)
    all_close(mine[1].router_bias, states[1].router_bias, 1e-6)
    np.testing.assert_allclose(my_evaluated, evaluated, rtol=LATER)


def test_a_replica_runs_the_plain_loop(run_of, make_batch):
    """In bfloat16, with a dense layer that no experts could make up, on a mesh of one: gradients are float32 as without it."""
    config = run_of(MeshConfig(data=1), microbatches=2, d_dense=20)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    same_step(config, MeshConfig(data=1), make_batch, FIRST, FIRST)


# AdamW divides a gradient by its own size: where it is near zero, its rounding shows.
@pytest.mark.parametrize(("rule", "params"), [("muonclip", FIRST_PARAMS), ("adamw", LAST_PARAMS)])
def test_a_model_without_experts_is_trained_on_replicas(rule, params, run_of, make_batch):
    config = run_of(MeshConfig(data=2), rule=rule, n_layers=2, n_dense=2, n_mtp=0, d_dense=20)
    same_step(config, config.mesh, make_batch, GRADIENT, params)


def same_step(config, sizes, make_batch, opt_state, params):
    """One step and an evaluation, on a mesh and without one."""
    batches = [make_batch(0, config.batch, config.seq_len + 1, config.model.n_words)]
    found, expected = run(config, sizes, batches), run(config, None, batches)
    all_close(found[0][0].opt_state, expected[0][0].opt_state, opt_state)
    all_close(found[0][0].params, expected[0][0].params, params)
    for key in NUMBERS:
        np.testing.assert_allclose(found[1][0][key], expected[1][0][key], rtol=FIRST, err_msg=key)
    np.testing.assert_allclose(found[2], expected[2], rtol=FIRST)
