import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.infer import engine
from k2jax.infer.engine import Engine, EngineConfig, Event, Request, Sequence, generate
from k2jax.infer.sampling import Sampling
from tests.infer import models

SMALL = EngineConfig(rows=3, tokens=40, block=4, chunk=8)  # room for the longest request alone


@pytest.fixture(scope="module")
def weights():
    return models.weights(models.MLA)


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 60, n).tolist()) for n in lengths]


def requests(temperature=0.0, max_new=10):
    sampling = [Sampling(temperature=temperature, top_p=0.95, seed=s) for s in range(5)]
    return [Request(prompt=p, max_new=max_new, sampling=s) for p, s in zip(prompts((1, 19, 8, 9, 30)), sampling, strict=True)]


@pytest.fixture(scope="module")
def alone(weights):
    """Each request by itself; two programs do for all, whatever the lengths."""
    before = engine._advance._cache_size()
    made = {t: [generate(weights, [request], SMALL)[0] for request in requests(t)] for t in (0.0, 1.0)}
    assert engine._advance._cache_size() - before <= 2  # a chunk of one row; a token of all rows
    return made


@pytest.mark.parametrize("config", [models.MLA, models.GQA], ids=["mla", "gqa"])
def test_greedy_tokens_are_the_teacher_forced_argmax(config):
    weights = models.weights(config)
    made = generate(weights, requests(), SMALL)
    for request, new in zip(requests(), made, strict=True):
        tokens_BT = jnp.asarray([[*request.prompt, *new][:-1]])
        padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, 40 - tokens_BT.shape[1])))  # one program for all
        expected = models.logits(weights, padded_BT)[0, len(request.prompt) - 1 : tokens_BT.shape[1]].argmax(-1)
        np.testing.assert_array_equal(new, expected)


def test_sequences_together_are_what_they_are_alone(weights, alone, monkeypatch):
    """The cache is full before long: younger sequences are set aside for older ones, and no token changes."""
    aside, set_aside = [], Engine._set_aside
    monkeypatch.setattr(Engine, "_set_aside", lambda self, n: (aside.append(n), set_aside(self, n))[1])
    for temperature in (0.0, 1.0):
        assert generate(weights, requests(temperature), SMALL) == alone[temperature]
    assert aside


def test_sequences_that_come_while_others_decode(weights, alone):
    work, made = Engine(weights, SMALL), {}
    waiting = requests(1.0)
    while waiting or sum(map(len, made.values())) < 50:
        if waiting:
            made[work.submit(waiting.pop(0))] = []
        for event in work.step():
            made[event.sequence].append(event.token)
    assert list(made.values()) == alone[1.0]
    assert work.step() == [] and work.free_blocks == 10


def test_a_saved_sequence_goes_on_in_another_engine(weights, alone, tmp_path):
    first = Engine(weights, SMALL)
    numbers = [first.submit(request) for request in requests(1.0)[:3]]
    before = [event.token for _ in range(6) for event in first.step() if event.sequence == numbers[1]]
    assert 0 < len(before) < 10
    first.remove(numbers[1]).save(tmp_path / "sequence")
    assert first.remove(numbers[2]).saved  # blocks are free again
    second, sequence = Engine(weights, SMALL), Sequence.load(tmp_path / "sequence")
    assert sequence.request == requests(1.0)[1] and sequence.length == len(sequence.tokens) - 1
    number = second.resume(sequence)
    after = [event.token for event in second.run() if event.sequence == number]
    assert before + after == alone[1.0][1]
    other = Engine(models.weights(models.GQA), SMALL)
    with pytest.raises(ValueError, match="a saved sequence has blocks like the engine's"):
        other.resume(Sequence.load(tmp_path / "sequence"))


def test_stop_tokens_end_a_sequence(weights, alone):
    stop = alone[0.0][1][4]
    first = alone[0.0][1].index(stop)
    request = Request(prompt=requests()[1].prompt, max_new=10, stop=(stop,), sampling=Sampling(temperature=0.0))
    work = Engine(weights, SMALL)
    work.submit(request)
    events = list(work.run())
    assert [e.token for e in events] == alone[0.0][1][: first + 1]
    assert [e.done for e in events] == [None] * first + ["stop"]
    assert isinstance(events[0], Event)


def test_the_cache_takes_the_bytes_that_are_stated(weights):
    work = Engine(weights, SMALL)
    assert work.bytes_per_token == 2 * (5 + 6) * 4  # layers, latent and rotated key, float32
    assert work._pool.nbytes == (40 + 4) * work.bytes_per_token  # and a block that no sequence has
    heads = Engine(weights, EngineConfig(rows=1, tokens=96, block=4, cache="heads"))
    assert heads.bytes_per_token == 2 * 3 * (4 + 6 + 3) * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ()}, "a request needs a prompt and max_new of at least 1; got 0, 10"),
        ({"max_new": 0}, "got 1, 0"),
        ({"max_new": 40}, "prompt and max_new together may have 40 tokens .*; got 41"),
        ({"prompt": (60,)}, "tokens of a prompt must be below n_words=60; got 60"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(weights, change, said):
    with pytest.raises(ValueError, match=said):
        Engine(weights, SMALL).submit(Request(**{"prompt": (1,), "max_new": 10} | change))


def test_wrong_engine_configs_are_refused():
    with pytest.raises(ValueError, match=r"EngineConfig.block must be positive; got 0"):
        EngineConfig(block=0)
