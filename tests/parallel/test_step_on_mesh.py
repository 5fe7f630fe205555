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


def run(config, mesh, batches, poison=False):
    """Final natural state, the metrics of every step, the evaluation's loss; and, to `poison`, what a nan leaves behind."""
    devices = None if mesh is None else meshes.make(config, jax.devices()[: meshes.count(mesh)])
    step, state = steps.make_step(config, devices), steps.init_state(config, devices)
    rows = []
    for batch in batches:
        state, metrics = step(state, batch, np.float32(config.tokens))
        rows.append(jax.tree.map(np.asarray, metrics))
    evaluated = [float(x) for x in steps.make_eval(config, devices)(state, batches[0])]
    found = jax.tree.map(np.asarray, state if mesh is None else steps.to_natural(config, devices, state))
    if poison:
        state = state._replace(params=state.params | {"muon": state.params["muon"] * np.nan})
        before = jax.tree.map(np.array, state)
        state, metrics = step(state, batches[0], np.float32(config.tokens))
        after = jax.tree.map(np.array, state)
        assert not np.isfinite(metrics["grad_norm"]) and after.skips == 1 and after.step == STEPS + 1
        for name in ("params", "opt_state", "router_bias", "last_fired_LH"):
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
    return found, rows, evaluated


@pytest.fixture(scope="module")
def one_device(run_of, packed):
    """The reference run, with every fourth head over the threshold in some step."""
    config = run_of(MeshConfig(data=1), microbatches=1)
    batches = [packed(i, config.batch, config.seq_len + 1) for i in range(STEPS)]
    return config, batches, run(config, None, batches)


@pytest.mark.parametrize("name", MESHES)
def test_twenty_steps_equal_one_device(name, one_device):
    sizes, M = MESHES[name]
    config, batches, (state, rows, evaluated) = one_device
    poison = name == "pipeline 2, expert 2, data 2"
    mine, my_rows, my_evaluated = run(replace(config, mesh=sizes, microbatches=M), sizes, batches, poison)
    assert any(fired.any() for row in rows for fired in row["fired_LH"].values())
    for i, (a, b) in enumerate(zip(my_rows, rows, strict=True)):
        rtol = 1e-5 if i == 0 else 2e-3
        for key in ("loss", "mtp_loss", "balance_loss", "grad_norm", "update_rms"):
            np.testing.assert_allclose(a[key], b[key], rtol=rtol, err_msg=f"{key} of step {i + 1}")
        for stack in b["max_logit_LH"]:
            np.testing.assert_allclose(a["max_logit_LH"][stack], b["max_logit_LH"][stack], rtol=rtol, atol=1e-5)
        if i == 0:
            jax.tree.map(np.testing.assert_array_equal, a["load_LE"], b["load_LE"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), mine.router_bias, state.router_bias)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(mine.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))
    np.testing.assert_allclose(my_evaluated, evaluated, rtol=1e-4)
