import random

import pytest

from k2jax.config import DataConfig

WORDS = [f"{a}{b}{c}" for a in ("ba", "ko", "ri", "tu", "ze") for b in ("la", "mi", "no", "su") for c in ("n", "rt", "x", "")]


def prose(seed: int, n_words: int) -> str:
    """Words at random: two seeds share no run of five."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


@pytest.fixture
def write():
    """Writes {relative path: text} into a folder."""

    def write_files(folder, texts):
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return folder

    return write_files


@pytest.fixture
def make_config(tmp_path):
    """DataConfig of a folder, cached in tmp_path, by default with web text alone and the byte tokenizer."""

    def make(corpus, **changes):
        defaults = dict(tokenizer="byte", web=1.0, code=0.0, math=0.0, knowledge=0.0, heldout=0.1, cache=tmp_path / "cache")
        return DataConfig(corpus=str(corpus), **{**defaults, **changes})

    return make


@pytest.fixture
def four_domains(tmp_path, write):
    """A folder of 60 documents a domain, of 5 to 300 words."""
    texts = {}
    for k, domain in enumerate(("web", "code", "math", "knowledge")):
        for i in range(60):
            texts[f"{domain}/{i}.txt"] = f"{domain} {prose(1000 * k + i, 5 + (37 * i) % 296)}"
    return write(tmp_path / "texts", texts)
