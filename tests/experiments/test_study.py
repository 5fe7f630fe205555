import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from configs import stress
from experiments import _study
from experiments._study import Claim, Options, Study, command, command_line, conclude, placed, study, train
from k2jax.config import differences

CORPUS = SimpleNamespace(tier="builtin", sha256="ab" * 32, tokens=10**7)


@pytest.fixture
def opened(tmp_path):
    options = Options(preset="smoke", out=tmp_path / "study", corpus="pip", cache=tmp_path / "cache")
    return Study("some_study", options, options.out, Console(file=StringIO(), width=200))


@pytest.fixture
def outcomes(monkeypatch):
    """What the runs come to, in place of training them: a run's name -> its loss, or the error it ends with."""
    found = {}

    def run_all(jobs, home, **_):
        for config, _cost in jobs:
            end = found[config.name]
            result = None if isinstance(end, str) else SimpleNamespace(val_loss=end, seconds={"step": 1.0})
            config.out.mkdir(parents=True, exist_ok=True)
            (config.out / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
            yield _study._runner.Outcome(config, result, end if result is None else "", 1.0, 1.0)

    monkeypatch.setattr(_study._runner, "run_all", run_all)
    monkeypatch.setattr(_study._runner, "training_rate", lambda: 1e9)
    monkeypatch.setattr(_study, "prepare", lambda *_, **__: CORPUS)
    return found


def test_a_study_is_placed_by_its_name_and_preset_unless_told():
    assert study("some_study", Options(preset="smoke")).folder == Path("runs/some_study/smoke")
    assert study("some_study", Options(out=Path("there"))).folder == Path("there")
    with pytest.raises(ValueError, match="--seeds must be at least 1; got 0"):
        Options(seeds=0)


def test_a_placed_run_has_the_studys_corpus_and_is_else_the_same(opened):
    base = stress.config("smoke")
    config = placed(opened, "a", base)
    assert {d.split(":")[0] for d in differences(base, config)} == {"name", "out", "data.corpus", "data.cache"}
    assert (config.name, config.out, config.data.corpus) == ("a", opened.folder / "runs" / "a", "pip")


def test_training_returns_rows_of_what_ended_and_the_errors_of_the_rest(opened, outcomes):
    outcomes |= {"a": 3.0, "b": "b ended with exit code 3", "c": np.nan}
    trained, corpus, errors = train(opened, [placed(opened, name, stress.config("smoke")) for name in "abc"])
    assert {name: run.result.val_loss for name, run in trained.items()} == {"a": 3.0, "c": pytest.approx(np.nan, nan_ok=True)}
    assert trained["a"].rows == [{"step": 1}, {"step": 2}]  # without the line that was cut off
    assert (corpus, errors) == (CORPUS, ["b ended with exit code 3"])
    said = opened.console.file.getvalue()
    assert "3 runs" in said and "a: validation 3.0000" in said and "c: validation diverged" in said and errors[0] in said


def test_a_folder_of_something_else_is_refused_before_anything_is_trained(opened, outcomes, tmp_path):
    outcomes |= {"a": 3.0}
    runs = [placed(opened, "a", stress.config("smoke"))]
    train(opened, runs)
    train(opened, runs)  # again, in the same folder
    other = opened._replace(options=Options(preset="default", out=opened.folder, corpus="pip", cache=tmp_path / "cache"))
    with pytest.raises(ValueError, match="holds another study: preset 'smoke', not 'default'"):
        train(other, runs)
    mark = opened.folder / "study.json"
    mark.write_text(mark.read_text().replace(CORPUS.sha256, "cd"))
    with pytest.raises(ValueError, match="holds another study: corpus_sha256 'cd', not 'abab"):
        train(opened, runs)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("")
    with pytest.raises(ValueError, match="not empty and is no folder of this experiment"):
        train(opened._replace(folder=tmp_path / "thesis"), runs)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_the_summary_has_claims_findings_and_how_to_repeat_it(opened):
    opened.folder.mkdir()
    claims = [Claim("1", "it holds", "0.5", "pass"), Claim("2", "so does this", "-", "untested")]
    findings = {"runs": [{"loss": np.float32(np.nan), "steps": np.int64(3), "curve": np.arange(2.0), "out": Path("x")}]}
    assert conclude(opened, CORPUS, claims, findings, []) == 0
    summary = json.loads((opened.folder / "summary.json").read_text())
    assert summary["claims"][0] == {"number": "1", "text": "it holds", "measured": "0.5", "verdict": "pass"}
    assert summary["runs"] == [{"loss": None, "steps": 3, "curve": [0.0, 1.0], "out": "x"}]
    assert summary["command"] == command(opened) == "python -m experiments.some_study --preset smoke --corpus pip"
    assert summary["corpus"] == {"tier": "builtin", "sha256": CORPUS.sha256, "tokens": 10**7}
    assert {"versions", "machine", "experiment", "preset"} <= set(summary)
    said = opened.console.file.getvalue()
    assert "it holds" in said and "untested" in said
    assert conclude(opened, CORPUS, claims, {}, ["a ended with exit code 3"]) == 1


@pytest.mark.parametrize(
    "raised,said",
    [(ValueError("no such corpus"), "error: no such corpus"), (KeyboardInterrupt(), "stopped; the same command goes on")],
)
def test_what_the_user_can_mend_ends_in_a_sentence(raised, said, monkeypatch):
    def main(options):
        assert options.preset == "full"
        raise raised

    monkeypatch.setattr("sys.argv", ["some_study", "--preset", "full"])
    with pytest.raises(SystemExit, match=said):
        command_line(main, "some_study", "What it is.")
