import dataclasses
import re
import subprocess
import sys

import pytest

from configs import tiny
from k2jax.config import HostsConfig, RunConfig
from k2jax.train.__main__ import Command, main, parse


def test_a_preset_and_fields_at_any_depth():
    command = parse(
        ["configs.tiny", "--steps", "7", "--model.moe.n-experts", "64", "--optim.rule", "adamw", "--data.web", "0.5"]
    )
    config = command.run
    assert (config.steps, config.model.moe.n_experts, config.optim.rule, config.data.web) == (7, 64, "adamw", 0.5)
    assert parse(["configs.tiny"]) == Command(run=tiny.config())


def test_the_place_among_processes_is_no_part_of_the_run():
    command = parse(["configs.tiny", "--hosts.coordinator", "node0:1234", "--hosts.count", "4", "--hosts.index", "2"])
    assert command == Command(run=tiny.config(), hosts=HostsConfig(coordinator="node0:1234", count=4, index=2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python -m k2jax.train PRESET"),
        (["configs.huge"], "there is no preset 'configs.huge'; there are .*configs.tiny"),
        (["k2jax.axes"], "a preset must have a function config"),
        (["--steps", "3"], "the first argument must be a preset; got --steps"),
        (["configs.tiny", "--stepz", "3"], "Unrecognized options: --stepz"),
        (["configs.tiny", "--model.moe.n-expert", "3"], "--model.moe.n-expert, 3; near are .*--model.moe.n-experts"),
        (["configs.tiny", "--steps", "many"], "--steps: invalid literal for int.*'many'"),
        (["configs.tiny", "--steps", "0"], "RunConfig.steps must be positive; got 0"),
        (["configs.tiny", "--optim.rule", "sgd"], "'sgd' for argument '--optim.rule'.*muonclip"),
        (["configs.tiny", "--model.attention.d-rope", "7"], "d_rope must be even; got 7"),
        (["configs.tiny", "--model.attention.n-heads", "3"], "n_heads=3, n_kv_heads=2"),
        (["configs.tiny", "--model.moe.n-experts", "2"], "n_experts must be at least n_active; got n_experts=2, n_active=4"),
        (["configs.tiny", "--seq-len", "1024"], "seq_len must be at most the model's context=512; got 1024"),
        (["configs.tiny", "--data.vocab", "2048"], "n_words=1024; got vocab=2048"),
        (["configs.tiny", "--batch", "6", "--microbatches", "4"], "batch=6, microbatches=4"),
        (["configs.tiny", "--hosts.patience", "0"], "HostsConfig.patience must be positive; got 0"),
        (["configs.tiny", "--hosts.count", "2"], "needs --hosts.coordinator, --hosts.count and --hosts.index; got .*count=2"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and err.count("\n") == 1 and not re.search("[│╭─]|--- |Traceback", err)


def fields(kind, prefix=""):
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            yield from fields(f.type, f"{prefix}{f.name}.")
        else:
            yield f"--{prefix}{f.name}".replace("_", "-")


def test_help_names_every_field_and_says_what_it_means():
    command = [sys.executable, "-m", "k2jax.train", "configs.tiny", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = [*fields(RunConfig), *fields(HostsConfig, "hosts.")]
    assert len(flags) > 60
    missing = [flag for flag in flags if not re.search(rf"{re.escape(flag)}[\s,]", out)]
    assert not missing
    said = " ".join(re.sub("[│]", " ", out).split())
    for words in (
        "optimizer steps",
        "routed experts a token uses",
        "QK-Clip threshold",
        "share of documents",
        "lambda of the MTP loss",
        "HOST:PORT at which process 0 listens",
    ):
        assert words in said


def test_a_mistake_in_a_run_is_one_sentence_too(small, tmp_path, capsys, monkeypatch):
    code = "from pathlib import Path\nfrom k2jax.config import *\ndef config():\n    return "
    (tmp_path / "their_preset.py").write_text(code + repr(small).replace("PosixPath", "Path") + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    small.out.mkdir()
    (small.out / "other.txt").write_text("")
    assert main(["their_preset"]) == 2
    assert "other.txt" in capsys.readouterr().err
