"""Does YaRN carry a model to eight times its training length? Passkeys at every depth of the context (report 2.5).

K2 is trained at 4k tokens, then at 32k, and reaches 128k by YaRN. Here a model of two layers with latent attention (MLA) is
trained by MuonClip at 64 tokens on passkey documents and text. Then its context is made 8 times as long, with YaRN of factor 8
and without it, which leaves four ways: the model as it stands, and after a short phase at 512 tokens on long passkey documents
and text. That phase begins with the first one's weights and a fresh optimizer; with YaRN it is on from its first step.

A passkey document is filler, syllables at random, in which a key of four different letters is stated and at the end asked for:
`ba ko ... key=GACH; tu ri ... key=GACH`. Documents that train state the key one to three times, those that test state it once,
at a depth that is varied from the beginning to the end. A key is found when each of its letters is the likeliest after those
before it: what greedy decoding writes.

The claims, of which the report names the method alone: (a) after the long phase with YaRN passkeys are found at 8 times the
first phase's length, wherever they are; (b) without a step at that length, YaRN finds what the model as it stands does not;
(c) without YaRN the same long phase does not get there; (d) the loss on short texts rises by less than 5%.

    python -m experiments.long_context                  10 minutes on two cores, by estimate
    python -m experiments.long_context --preset smoke   under 2 minutes; shows that everything works, not the claims
    python -m experiments.long_context --preset full    hours on two cores

It writes summary.json, with the shares found by way, length and depth and the verdicts, and figure.png to the folder --out. A
killed experiment goes on when the same command is given again.
"""

import functools
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import _figures
from experiments._study import Claim, Options, Study, Trained, command_line, conclude, study, train
from k2jax.config import AttentionConfig, DataConfig, ModelConfig, OptimConfig, RopeConfig, RunConfig, ScheduleConfig
from k2jax.data import tokenizers
from k2jax.data.corpora import Corpus, prepare
from k2jax.data.pipeline import heldout_batches
from k2jax.model import store, transformer
from k2jax.model.store import Weights
from k2jax.train.folder import write
from k2jax.train.loss import cross_entropy, target_masks

FACTOR = 8  # long over short
TEXT, SHORT, LONG = "web", "knowledge", "math"  # what the corpus's domains hold here: text, passkeys of both lengths
SYLLABLES, LETTERS, KEY = ("ba", "ko", "ri", "tu"), "ABCDEFGHIJ", 4
DEPTHS = 8
SOLVED = 0.95  # share of the keys found, mean over depths, from which a length counts as solved
GAIN = 0.5  # share of the keys, over that of the model as it stands, from which YaRN counts as what finds them
HARM = 0.05  # rise of the loss on short texts that is still harmless


class Size(NamedTuple):
    """A preset: a model, and its two phases."""

    d_model: int
    n_layers: int
    short: int  # tokens a sequence
    batch: int
    steps: int
    rate: float
    long_batch: int
    long_steps: int
    long_rate: float
    seeds: int
    tests: int  # documents a depth

    @property
    def long(self) -> int:
        return FACTOR * self.short


SIZES = {
    "smoke": Size(32, 2, 64, 16, 60, 0.01, 4, 10, 0.003, seeds=1, tests=8),
    "default": Size(64, 2, 64, 32, 1500, 0.01, 8, 150, 0.003, seeds=2, tests=32),
    "full": Size(128, 4, 128, 64, 3000, 0.007, 16, 300, 0.002, seeds=3, tests=64),
}


class Way(NamedTuple):
    """A way to 8 times the length."""

    phase: str  # whose weights they are
    yarn: bool
    label: str


WAYS = {
    "plain": Way("short", False, "as trained"),
    "yarn": Way("short", True, "YaRN"),
    "long_plain": Way("long_plain", False, "long phase without YaRN"),
    "long_yarn": Way("long_yarn", True, "long phase with YaRN"),
}


class Measured(NamedTuple):
    """What a seed's model came to in one way."""

    found: dict[int, list[float]]  # length -> share of the keys found, by depth from the first to the last place
    text_loss: float  # of held-out texts at the short length, nats a byte


def passkey(rng: random.Random, characters: int, statements: int, depth: float | None = None) -> str:
    """A passkey document of so many characters; its last ones are the key. A statement's place is drawn unless given."""
    key = "".join(rng.sample(LETTERS, KEY))
    statement, question = f"key={key}; ", f"key={key}"
    room = characters - statements * len(statement) - len(question)
    text = " ".join(rng.choice(SYLLABLES) for _ in range(room // 3 + 1))[:room]
    places = sorted(rng.randint(0, room) for _ in range(statements)) if depth is None else [round(depth * room)] * statements
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, room], strict=True)]
    return statement.join(pieces) + question


def documents(size: Size, texts: Sequence[str]) -> Iterator[dict[str, str]]:
    """The records of the corpus: texts, and passkey documents that fill a row of either length."""
    yield from ({"domain": TEXT, "text": text} for text in texts)
    rng = random.Random(0)
    for domain, length, count in (
        (SHORT, size.short, size.batch * size.steps // 2),
        (LONG, size.long, size.long_batch * size.long_steps),
    ):
        for _ in range(count):
            # A row holds one token more than the model sees; two are [BOS] and [EOS].
            yield {"domain": domain, "text": passkey(rng, length - 1, rng.randint(1, 3))}


def corpus_folder(opened: Study, size: Size) -> Path:
    """The folder of the records, written once beside the prepared corpora; texts are those that the options name."""
    options = opened.options
    source = prepare(DataConfig(corpus=options.corpus, tokenizer="byte", cache=options.cache))
    records = "".join(f"{json.dumps(record)}\n" for record in documents(size, _texts(source)))
    folder = options.cache.expanduser() / f"passkeys-{hashlib.sha256(records.encode()).hexdigest()[:16]}"
    if not (folder / "records.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "records.jsonl", records)
    return folder


def _texts(corpus: Corpus) -> list[str]:
    found = []
    for held in (corpus.train[TEXT], corpus.heldout[TEXT]):
        ends = zip(held.offsets[:-1], held.offsets[1:], strict=True)
        found += [corpus.tokenizer.decode(held.tokens[a + 1 : b - 1]) for a, b in ends]
    return found


def plan(opened: Study, size: Size, folder: Path) -> dict[tuple[str, int], RunConfig]:
    """(phase, seed) -> its run; the long phases begin with the weights of the short one."""
    model = _model(size)
    data = DataConfig(corpus=str(folder), tokenizer="byte", cache=opened.options.cache, code=0.0, **{TEXT: 0.25})
    runs = {}
    for seed in range(opened.options.seeds or size.seeds):
        for phase in dict.fromkeys(way.phase for way in WAYS.values()):
            name, short = f"{phase}_seed{seed}", phase == "short"
            runs[phase, seed] = RunConfig(
                name=name,
                out=opened.folder / "runs" / name,
                seed=seed,
                data_seed=seed,
                init="" if short else str(runs["short", seed].out),
                steps=size.steps if short else size.long_steps,
                batch=size.batch if short else size.long_batch,
                seq_len=size.short if short else size.long,
                eval_every=0,
                eval_batches=4,
                checkpoint_every=200,
                model=with_yarn(model) if phase == "long_yarn" else model,
                optim=_optim(size.rate if short else size.long_rate),
                data=replace(data, **{SHORT: 0.75 * short, LONG: 0.75 * (not short)}),
            )
    return runs


def _model(size: Size) -> ModelConfig:
    H = size.d_model // 16
    return ModelConfig(
        n_words=tokenizers.ByteTokenizer.n_words,
        d_model=size.d_model,
        n_layers=size.n_layers,
        n_dense=size.n_layers,
        d_dense=size.d_model,
        context=size.long,
        init_std=0.05,
        dtype="float32",
        attention=AttentionConfig(
            **{"n_heads": H, "n_kv_heads": H, "q_rank": size.d_model // 2, "kv_rank": size.d_model // 2},
            **{"d_nope": 16, "d_rope": 16, "d_value": 16, "block": 128},
            rope=RopeConfig(theta=10_000.0, original_context=size.short),
        ),
    )


def with_yarn(model: ModelConfig) -> ModelConfig:
    """The model with its context extended by YaRN; K2's betas."""
    a = model.attention
    return replace(model, attention=replace(a, rope=replace(a.rope, yarn_factor=float(FACTOR))))


def _optim(rate: float) -> OptimConfig:
    schedule = ScheduleConfig(warmup=5.0, stable=60.0, decay=35.0, anneal=0.0, decay_shape="linear", decay_to=0.05)
    return OptimConfig(learning_rate=rate, ns_dtype="float32", schedule=schedule)


def main(options: Options) -> int:
    """Runs the experiment; returns the exit status."""
    opened, size = study("long_context", options), SIZES[options.preset]
    runs = plan(opened, size, corpus_folder(opened, size))
    trained, corpus, errors = train(opened, [config for (phase, _), config in runs.items() if phase == "short"])
    follow = [config for (phase, seed), config in runs.items() if phase != "short" and f"short_seed{seed}" in trained]
    if follow:
        more, _, others = train(opened, follow)
        trained, errors = trained | more, errors + others
    seeds = [
        seed for phase, seed in runs if phase == "short" and all(f"{w.phase}_seed{seed}" in trained for w in WAYS.values())
    ]
    found = {}
    for key, way in WAYS.items():
        found[key] = [measure(size, trained[f"{way.phase}_seed{seed}"], way.yarn, corpus) for seed in seeds]
        for seed, m in zip(seeds, found[key], strict=True):
            shares = ", ".join(f"{np.mean(of):.0%} at {length}" for length, of in m.found.items())
            opened.console.print(
                f"{way.label}, seed {seed}: {shares}; short texts {m.text_loss:.4f}", highlight=False, soft_wrap=True
            )
    if seeds:
        _figures.save(draw(size, found, f"{options.preset}, corpus {options.corpus}"), opened.folder / "figure.png")
    findings = {"ways": {key: [m._asdict() for m in of] for key, of in found.items()}, "seeds": seeds}
    return conclude(opened, corpus, claims(size, found) if seeds else [], findings, errors)


def measure(size: Size, run: Trained, yarn: bool, corpus: Corpus) -> Measured:
    """Tests the last weights of a run, with YaRN or without."""
    config, params, router_bias = store.load(run.config.out, "float32")
    plain = replace(config, attention=replace(config.attention, rope=replace(config.attention.rope, yarn_factor=1.0)))
    weights = Weights(with_yarn(plain) if yarn else plain, params, router_bias)
    shares = {}
    for length in (size.short * 2**i for i in range(FACTOR.bit_length())):
        rng = random.Random(length)
        depths = np.linspace(0, 1, DEPTHS)
        shares[length] = [share_found(weights, _tests(rng, length, depth, size.tests)) for depth in depths]
    heldout = heldout_batches(corpus, TEXT, batch=size.batch, seq_len=size.short, count=16)
    sums = np.array([_nll(*weights, batch) for batch in heldout])
    return Measured(shares, float(sums[:, 0].sum() / sums[:, 1].sum()))


def _tests(rng: random.Random, length: int, depth: float, count: int) -> np.ndarray:
    """Token rows of test documents, as packing would lay them out."""
    t = tokenizers.ByteTokenizer()
    return np.array([[t.bos, *t.encode(passkey(rng, length - 1, 1, depth)), t.eos] for _ in range(count)], np.int32)


def share_found(weights: Weights, tokens_BT: np.ndarray) -> float:
    """Share of the documents of which every letter of the key is the likeliest."""
    likeliest_BK = _likeliest(*weights, tokens_BT)
    return float((likeliest_BK == tokens_BT[:, -KEY - 1 : -1]).all(1).mean())


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(config: ModelConfig, params: dict, router_bias: dict, tokens_BT: jax.Array) -> jax.Array:
    """The likeliest token at each place of the key."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD = transformer.apply(config, params, router_bias, tokens_BT, jnp.ones_like(tokens_BT), positions_BT).hidden_BTD
    return (hidden_BTD[:, -KEY - 1 : -1] @ params["head_WD"].T).argmax(-1)


@functools.partial(jax.jit, static_argnums=0)
def _nll(config: ModelConfig, params: dict, router_bias: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Sum of the loss and the number of targets."""
    tokens_BT, segments_BT = batch["tokens_BT"], batch["segments_BT"]
    hidden_BTD = transformer.apply(config, params, router_bias, tokens_BT, segments_BT, batch["positions_BT"]).hidden_BTD
    mask_BT = target_masks(segments_BT)[0]
    return cross_entropy(hidden_BTD, params["head_WD"], tokens_BT[:, 1:], mask_BT, config.loss_chunk)


def claims(size: Size, found: Mapping[str, Sequence[Measured]]) -> list[Claim]:
    """(a) to (d), each with what was measured and its verdict."""
    mean = {way: float(np.mean([m.found[size.long] for m in of])) for way, of in found.items()}
    worst = {way: float(np.mean([m.found[size.long] for m in of], axis=0).min()) for way, of in found.items()}
    rise = {
        way: max(m.text_loss / before.text_loss - 1 for m, before in zip(of, found["plain"], strict=True))
        for way, of in found.items()
    }
    solved = mean["long_yarn"] >= SOLVED
    return [
        Claim(
            "a",
            f"at {FACTOR} times the length, after a long phase with YaRN, {SOLVED:.0%} of the passkeys are found",
            f"{mean['long_yarn']:.1%} of the keys; {worst['long_yarn']:.0%} at the worst depth",
            "pass" if solved else "fail",
        ),
        Claim(
            "b",
            f"without a step at that length YaRN finds more of them, by at least {GAIN:.0%} of all",
            f"{mean['yarn']:.1%} with YaRN, {worst['yarn']:.0%} at the worst depth; {mean['plain']:.1%} without",
            "pass" if mean["yarn"] - mean["plain"] >= GAIN else "fail",
        ),
        Claim(
            "c",
            "the same long phase without YaRN does not find them",
            f"{mean['long_plain']:.1%} of the keys; {worst['long_plain']:.0%} at the worst depth",
            "untested" if not solved else "fail" if mean["long_plain"] >= SOLVED else "pass",
        ),
        Claim(
            "d",
            f"the loss on short texts rises by less than {HARM:.0%}, in every seed",
            f"{rise['long_yarn']:+.1%}; YaRN without a long phase {rise['yarn']:+.1%}, "
            f"a long phase without YaRN {rise['long_plain']:+.1%}",
            "pass" if rise["long_yarn"] < HARM else "fail",
        ),
    ]


def draw(size: Size, found: Mapping[str, Sequence[Measured]], title: str) -> Figure:
    """Left the keys found at the long length by depth, right by length; means over the seeds."""
    figure, axes = _figures.panels(1, 2, f"Passkeys beyond the training length: {title}")
    colours = {"plain": "0.6", "yarn": "tab:orange", "long_plain": "tab:blue", "long_yarn": "tab:green"}
    for way, of in found.items():
        shares = {length: np.mean([m.found[length] for m in of], axis=0) for length in of[0].found}
        label = f"{WAYS[way].label} (short texts {np.mean([m.text_loss for m in of]):.3f})"
        axes[0, 0].plot(np.linspace(0, 1, DEPTHS), shares[size.long], "o-", color=colours[way], ms=3, lw=1.2)
        means = [share.mean() for share in shares.values()]
        axes[0, 1].plot(list(shares), means, "o-", color=colours[way], ms=3, lw=1.2, label=label)
    axes[0, 1].set_xscale("log", base=2)
    axes[0, 1].axvline(size.short, color="0.3", lw=0.8, ls="--")
    for ax in axes[0]:
        ax.set_ylim(-0.03, 1.03)
    _figures.dress(axes[0, 0], f"At {size.long} tokens", "depth of the key in the context", "share of keys found")
    _figures.dress(axes[0, 1], f"First phase at {size.short} tokens", "length (tokens)", "share of keys found")
    _figures.legend(axes[0, 1], "best")
    return figure


if __name__ == "__main__":
    command_line(main, "long_context", __doc__)
