from dataclasses import replace

from experiments import bench_decode
from experiments.bench_decode import Bench, Decoder, model
from k2jax.model import cached, transformer

TINY = Bench(contexts=(20, 40), heads=4, divide=32, block=8, chunk=16, rounds=2)


def test_reports_both_forms_at_every_context():
    result = bench_decode.main(replace(TINY, contexts=(20,)))
    row = result["contexts"]["20"]
    assert row["absorbed_over_materialized"] == row["absorbed_tokens_per_s"] / row["materialized_tokens_per_s"]
    assert row["cache_bytes_per_token"] == 2 * (512 + 64) // 32 * 4
    assert row["materialized_cache_bytes_per_token"] == 2 * 4 * (128 + 64 + 128) // 32 * 4
    assert result["prefill"]["20"]["absorbed_tokens_per_s"] > 0


def test_the_forms_decode_with_the_same_shapes_and_a_cache_of_the_context():
    config = model(TINY)
    weights = transformer.init(config, 0)
    for kind in bench_decode.FORMS.values():
        decoder = Decoder(TINY, config, weights, kind, 40)
        G, N = cached.widths(config.attention, kind)
        assert decoder.pool.shape == (2, 2 * 7 + 1, G * 8, N) and decoder.context == 40
        before = decoder.pool.sum()
        logits, pool = decoder.read(2, 1)
        assert logits.shape == (2, 1024) and pool.sum() != before
