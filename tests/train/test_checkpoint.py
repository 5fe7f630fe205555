import json
import logging
import resource
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from k2jax.config import MeshConfig
from k2jax.parallel import mesh
from k2jax.train import checkpoint, step
from k2jax.train.checkpoint import Checkpoints
from k2jax.train.folder import DiskFull, Refused

SPREAD = {"pipeline": 1, "data": 1}


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    yield checkpoints
    checkpoints.close()


@pytest.fixture
def state(fresh_state):
    return fresh_state()


def at(state, step):
    return state._replace(step=np.int32(step))


def test_what_is_restored_is_what_was_saved_though_the_state_is_given_away_at_once(small, state, saved):
    want = jax.tree.map(np.array, at(state, 3))
    saved.save(small, at(state, 3), {"next": 3, "order": "abc"}, {"step": 1.5}, SPREAD)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 9, s), donate_argnums=0)
    overwrite(at(state, jax.numpy.int32(3)))  # while the files are being written
    saved.wait()
    got, position, seconds, spread = saved.restore(small)
    assert (position, seconds, spread) == ({"next": 3, "order": "abc"}, {"step": 1.5}, SPREAD)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, got), want)


def test_any_mesh_goes_on_from_a_checkpoint_of_any_other_with_the_same_bits(small, tmp_path):
    config, rng = replace(small, batch=16), np.random.default_rng(0)
    want = jax.tree.map(lambda x: rng.integers(0, 9, x.shape).astype(x.dtype), step.abstract_state(config))
    want = state = want._replace(step=np.int32(1))
    for axes in ({}, {"pipeline": 2, "expert": 2}, {"expert": 4}, {}):
        config = replace(config, mesh=MeshConfig(**axes))
        grid = mesh.make(config) if axes else None
        with Checkpoints(tmp_path / "checkpoints", grid) as saved:
            if saved.latest:
                state = saved.restore(config).state
            if grid:
                assert jax.tree.structure(state) == jax.tree.structure(step.abstract_state(config, grid))
            state = state._replace(step=state.step + 1)
            saved.save(config, state, {}, {}, axes)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, state), want._replace(step=np.int32(5)))


def test_small_arrays_are_written_without_a_program_for_each_shape(small, tmp_path, caplog):
    """Replicas share the writing of large arrays, each a cut of its own; for small ones that only takes time to compile."""
    config = replace(small, batch=16, mesh=MeshConfig(data=2))
    grid = mesh.make(config, jax.devices()[:2])
    state = step.init_state(config, grid)
    with Checkpoints(tmp_path / "checkpoints", grid) as saved, jax.log_compiles():
        saved.save(config, state, {}, {}, SPREAD)
    compiled = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "Finished XLA compilation" in text]
    assert compiled  # the conversion
    assert not [text for text in compiled if "slice" in text]


def test_the_last_two_are_kept(small, state, saved, tmp_path):
    for number in (1, 2, 3):
        saved.save(small, at(state, number), {}, {}, SPREAD)
    saved.wait()
    assert saved.latest == 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == ["2", "3"]


def test_a_checkpoint_of_another_config_is_refused_by_the_field_that_differs(small, state, saved):
    saved.save(small, at(state, 1), {}, {}, SPREAD)
    saved.wait()
    other = replace(small, seed=5, model=replace(small.model, moe=replace(small.model.moe, n_experts=8)))
    with pytest.raises(Refused, match=r"seed: 0 != 5; model\.moe\.n_experts: 4 != 8"):
        saved.restore(other)


def test_a_checkpoint_that_was_not_finished_does_not_count(small, state, saved, tmp_path):
    saved.save(small, at(state, 1), {}, {}, SPREAD)
    saved.save(small, at(state, 2), {}, {}, SPREAD)
    saved.wait()
    folder = tmp_path / "checkpoints"
    cut = folder / "2.orbax-checkpoint-tmp"  # as a kill leaves it: the name is given last
    (folder / "2").rename(cut)
    (cut / "commit_success.txt").unlink(missing_ok=True)
    again = Checkpoints(folder)
    assert again.latest == 1
    assert int(again.restore(small)[0].step) == 1
    again.save(small, at(state, 2), {}, {}, SPREAD)
    again.close()
    assert again.latest == 2


def test_too_little_room_is_said_before_anything_is_written(small, state, saved, tmp_path, monkeypatch):
    saved.save(small, at(state, 1), {}, {}, SPREAD)
    saved.wait()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"the checkpoint of step 2 could not .* the checkpoint of step 1 is whole"):
        saved.save(small, at(state, 2), {}, {}, SPREAD)
    assert saved.latest == 1 and int(saved.restore(small)[0].step) == 1


def test_writing_that_fails_midway_leaves_the_checkpoint_before_it(small, state, saved, tmp_path):
    saved.save(small, at(state, 1), {}, {}, SPREAD)
    saved.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(DiskFull, match="no space is left; the checkpoint of step 1 is whole"):
            saved.save(small, at(state, 2), {}, {}, SPREAD)
            saved.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.latest == 1
    again.restore(small)
    again.close()


def test_the_config_in_a_checkpoint_is_readable_json(small, state, saved, tmp_path):
    saved.save(small, at(state, 1), {}, {}, SPREAD)
    saved.wait()
    record = json.loads((tmp_path / "checkpoints" / "1" / "record" / "metadata").read_text())
    assert record["config"]["model"]["d_model"] == 16
