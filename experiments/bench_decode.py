"""Is it the latent that makes MLA worth having at decode? Run: python -m experiments.bench_decode

Decodes with one model and two caches: latents, in the absorbed form, and every head's keys and values, as attention without a
latent has them. The model has K2's 64 heads and a quarter of its widths in attention, two layers, one with experts. Contexts of
1k, 8k and 32k tokens a sequence, two sequences, both caches in turn within every round; about five minutes and 4 GB on two
cores. Prints tokens a second and bytes of cache a token of each, their ratios, and tokens a second of reading a prompt.
"""

import json
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments._timing import interleaved
from k2jax.allocator import keep_freed_memory
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig
from k2jax.infer import step
from k2jax.model import cached, transformer
from k2jax.model.cached import Past

FORMS = {"absorbed": "latent", "materialized": "heads"}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Shapes and rounds."""

    contexts: tuple[int, ...] = (1024, 8192, 32_768)  # tokens that a sequence has in the cache
    sequences: int = 2  # that decode together
    heads: int = 64
    divide: int = 4  # K2's widths in attention by this
    block: int = 128  # tokens a block of the cache
    chunk: int = 256  # tokens of a prompt read at a time
    rounds: int = 9  # timings of each form, interleaved
    json: bool = False  # print one JSON object instead of a table


def model(bench: Bench) -> ModelConfig:
    """K2's attention at a fraction of its widths, under small feed-forward layers."""
    widths = {"q_rank": 1536, "kv_rank": 512, "d_nope": 128, "d_rope": 64, "d_value": 128}
    attention = AttentionConfig(
        n_heads=bench.heads, n_kv_heads=bench.heads, **{name: n // bench.divide for name, n in widths.items()}
    )
    return ModelConfig(
        **{"n_words": 1024, "d_model": 512, "n_layers": 2, "n_dense": 1, "d_dense": 1152, "dtype": "float32"},
        context=max(bench.contexts) + bench.chunk + bench.block,
        attention=attention,
        moe=MoEConfig(n_experts=32, n_active=4, d_expert=128, routed_scale=0.0),
    )


class Decoder:
    """Sequences of one length in a cache of one kind, and the programs that go on with them."""

    def __init__(self, bench: Bench, config: ModelConfig, weights: tuple[dict, dict], kind: cached.Kind, context: int):
        B, G, N = bench.sequences, *cached.widths(config.attention, kind)
        J = -(-(context + bench.chunk) // bench.block)
        self.config, self.kind, self.weights, self.rope = config, kind, weights, step.rope_table(config)
        # The time does not depend on the numbers, but zeros may be pages that no memory holds.
        block = np.random.default_rng(0).standard_normal((1, 1, G * bench.block, N), np.float32)
        self.pool = jnp.asarray(np.broadcast_to(block, (config.n_layers, B * J + 1, *block.shape[2:])))
        self.table = jnp.arange(1, B * J + 1, dtype=jnp.int32).reshape(B, J)
        self.context = context
        self.forward = jax.jit(step.forward, static_argnums=(0, 1))

    def read(self, rows: int, T: int) -> tuple[jax.Array, jax.Array]:
        """Logits after T more tokens of the first rows, and the cache with them; the next call overwrites them there."""
        table, length, count = self.table[:rows], jnp.full(rows, self.context), jnp.full(rows, T)
        past, tokens = Past(self.pool, table, length), jnp.ones((rows, T), jnp.int32)
        logits, new = self.forward(self.config, self.kind, *self.weights, self.rope, past, tokens, count)
        self.pool = step.keep(self.pool, table, length, new, count)
        return logits, self.pool


def main(bench: Bench) -> dict:
    """Runs the rounds; returns the figures by context, and those of prompts."""
    keep_freed_memory()
    config = model(bench)
    weights = transformer.init(config, 0)
    rows, prompts = {}, {}
    for context in bench.contexts:
        decoders = {form: Decoder(bench, config, weights, kind, context) for form, kind in FORMS.items()}
        programs = {form: lambda d=d: d.read(bench.sequences, 1) for form, d in decoders.items()}
        times = interleaved(programs, bench.rounds)
        row = {}
        for form, kind in FORMS.items():
            low, median, high = statistics.quantiles(times[form], n=4)
            row[f"{form}_tokens_per_s"] = 1e3 * bench.sequences / median
            row[f"{form}_ms_quartiles"] = [low, high]
            row[f"{form}_cache_bytes_per_token"] = 4 * config.n_layers * int(np.prod(cached.widths(config.attention, kind)))
        row["absorbed_over_materialized"] = row["absorbed_tokens_per_s"] / row["materialized_tokens_per_s"]
        row["cache_bytes_per_token"] = row["absorbed_cache_bytes_per_token"]
        rows[str(context)] = row
        times = interleaved(
            {form: lambda d=d: d.read(1, bench.chunk) for form, d in decoders.items()}, max(bench.rounds // 3, 3)
        )
        prompts[str(context)] = {f"{form}_tokens_per_s": 1e3 * bench.chunk / statistics.median(times[form]) for form in FORMS}
    return {"heads": bench.heads, "sequences": bench.sequences, "chunk": bench.chunk, "contexts": rows, "prefill": prompts}


if __name__ == "__main__":
    bench = tyro.cli(Bench, description=__doc__)
    result = main(bench)
    if bench.json:
        print(json.dumps(result))
    else:
        print("context  absorbed tokens/s  materialized tokens/s  ratio  bytes/token of each  prompt tokens/s of each")
        for n, r in result["contexts"].items():
            p = result["prefill"][n]
            print(
                f"{n:>7}  {r['absorbed_tokens_per_s']:17.1f}  {r['materialized_tokens_per_s']:21.1f}"
                f"  {r['absorbed_over_materialized']:5.2f}  {r['absorbed_cache_bytes_per_token']:9,}"
                f" {r['materialized_cache_bytes_per_token']:9,}"
                f"  {p['absorbed_tokens_per_s']:11.0f} {p['materialized_tokens_per_s']:11.0f}"
            )
