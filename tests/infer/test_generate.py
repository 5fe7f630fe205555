import json

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from k2jax.config import DataConfig, RunConfig, to_dict
from k2jax.data.tokenizers import ByteTokenizer
from k2jax.infer import generate
from k2jax.infer.engine import EngineConfig, Event, Request
from k2jax.infer.engine import generate as complete
from k2jax.infer.sampling import Sampling
from k2jax.model import hf, store
from tests.infer import models

ENGINE = EngineConfig(rows=2, tokens=64, block=8, chunk=8)
FLAGS = [
    "--engine.rows",
    "2",
    "--engine.tokens",
    "64",
    "--engine.block",
    "8",
    "--engine.chunk",
    "8",
    "--sampling.temperature",
    "0",
]


@pytest.fixture(scope="module")
def weights():
    return models.weights(models.BYTES)


@pytest.fixture(scope="module")
def expected(weights):
    sampling = Sampling(temperature=0.0)
    prompts = [(256, *b"ab"), (256, *b"xyz"), (5, 6, 7)]
    return complete(weights, [Request(prompt=p, max_new=6, stop=(257,), sampling=sampling) for p in prompts], ENGINE)


def test_from_a_folder_of_weights_with_a_tokenizer(weights, expected, tmp_path, capsys):
    store.save(tmp_path / "ours", weights)
    ByteTokenizer().save(tmp_path / "ours")
    assert generate.main(["--checkpoint", str(tmp_path / "ours"), "--prompt", "ab", "xyz", "--max-new", "6", *FLAGS]) == 0
    assert capsys.readouterr().out == "".join(ByteTokenizer().decode(ids) + "\n" for ids in expected[:2])


def test_from_an_imported_checkpoint_in_ids(weights, expected, tmp_path, capsys):
    store.save(tmp_path / "ours", weights)
    hf.export_weights(tmp_path / "ours", tmp_path / "hf", dtype="float32")
    hf.import_weights(tmp_path / "hf", tmp_path / "back")
    folder = str(tmp_path / "back")
    assert generate.main(["--checkpoint", folder, "--ids", "5", "6", "7", "--max-new", "6", *FLAGS]) == 0
    assert capsys.readouterr().out == " ".join(map(str, expected[2])) + " \n"
    assert generate.main(["--checkpoint", folder, "--prompt", "ab"]) == 2
    assert "has no tokenizer.json or tiktoken.model; give the prompt as --ids" in capsys.readouterr().err


def test_from_a_training_run_and_its_published_copy(weights, expected, tmp_path, capsys):
    """The last checkpoint's weights and the run's tokenizer, which goes along with an export and an import."""
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        for step in (1, 2):
            bias = {"moe": weights.router_bias["moe"] * (step / 2)}
            state = {"params": weights.params, "router_bias": bias, "skips": jnp.zeros(())}
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    run = RunConfig(model=models.BYTES, seq_len=64, data=DataConfig(tokenizer="byte"))
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(run)))
    ByteTokenizer().save(tmp_path / "run")
    hf.export_weights(tmp_path / "run", tmp_path / "hf", dtype="float32")
    hf.import_weights(tmp_path / "hf", tmp_path / "back")
    for folder in ("run", "back"):
        assert generate.main(["--checkpoint", str(tmp_path / folder), "--prompt", "ab", "--max-new", "6", *FLAGS]) == 0
        assert capsys.readouterr().out == ByteTokenizer().decode(expected[0]) + "\n"


def test_characters_of_several_bytes_appear_whole_and_sequences_in_order():
    word = "aé漢"
    events = [Event(0, b, None) for b in word.encode()[:4]] + [Event(1, ord("z"), "length")]
    events += [Event(0, b, None) for b in word.encode()[4:]] + [Event(0, 257, "stop")]
    shown = list(generate.pieces(iter(events), ByteTokenizer()))
    assert "".join(shown) == "aé漢\nz\n"
    assert [piece for piece in shown if piece] == ["a", "é", "漢", "\n", "z", "\n"]


def test_wrong_commands_are_refused_in_a_sentence(weights, tmp_path, capsys):
    assert generate.main(["--checkpoint", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "python -m k2jax.model.hf import` made; " in capsys.readouterr().err
    store.save(tmp_path / "ours", weights)
    for flags in ([], ["--prompt", "a", "--ids", "3"]):
        assert generate.main(["--checkpoint", str(tmp_path / "ours"), *flags]) == 2
        assert "generate needs either --prompt or --ids" in capsys.readouterr().err
    assert generate.main(["--checkpoint", str(tmp_path / "ours"), "--ids", "3", "--max-new", "1000"]) == 2
    assert "may have 256 tokens" in capsys.readouterr().err
