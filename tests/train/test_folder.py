from dataclasses import replace

import pytest

from k2jax.config import MeshConfig
from k2jax.train import folder
from k2jax.train.folder import Refused


def test_the_same_run_may_come_back_and_other_ways_of_reporting_may_differ(small):
    with folder.claim(small):
        pass
    free = replace(
        small, name="x", eval_every=1, checkpoint_every=2, probe_every=3, data=replace(small.data, workers=2, prefetch=0)
    )
    with folder.claim(free):
        pass


def test_how_the_work_is_divided_may_change_from_session_to_session(small):
    with folder.claim(small):
        pass
    with folder.claim(replace(small, microbatches=1, mesh=MeshConfig(pipeline=2, expert=2, buffer=2.0))):
        pass


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: replace(c, steps=13), "steps: 12 != 13"),
        (lambda c: replace(c, model=replace(c.model, d_model=32)), "model.d_model: 16 != 32"),
        (lambda c: replace(c, optim=replace(c.optim, qk_tau=30.0)), "optim.qk_tau: 0.03 != 30.0"),
    ],
)
def test_a_folder_of_another_run_is_refused_by_the_field_that_differs(small, change, named):
    with folder.claim(small):
        pass
    before = (small.out / "config.json").read_text()
    with pytest.raises(Refused, match=named), folder.claim(change(small)):
        pass
    assert (small.out / "config.json").read_text() == before


def test_foreign_files_are_refused_and_left_alone(small):
    small.out.mkdir()
    (small.out / "thesis.tex").write_text("x")
    with pytest.raises(Refused, match=r"thesis\.tex"), folder.claim(small):
        pass
    assert [p.name for p in small.out.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_and_a_config_of_another_version_are_refused(small):
    small.out.write_text("x")
    with pytest.raises(Refused, match="is a file"):
        folder.check(small)
    small.out.unlink()
    small.out.mkdir()
    (small.out / "config.json").write_text('{"n_heads": 3}')
    with pytest.raises(Refused, match="n_heads"):
        folder.check(small)


def test_two_processes_do_not_share_a_folder(small):
    with folder.claim(small), pytest.raises(Refused, match="one process at a time"), folder.claim(small):
        pass
