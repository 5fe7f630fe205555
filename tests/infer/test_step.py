import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import k2
from k2jax.infer import step
from k2jax.model import cached
from k2jax.model.cached import Past
from k2jax.model.mla import MLA
from k2jax.model.weights import working_dtype
from tests.infer import models

S = 4  # tokens a block
CASES = {
    "mla_latent": (models.MLA, "latent"),
    "mla_heads": (models.MLA, "heads"),
    "mla_qk_norm": (models.NORMED, "heads"),
    "gqa": (models.GQA, "heads"),
}

forward = jax.jit(step.forward, static_argnums=(0, 1))


class Cache:
    """Three rows whose blocks lie in the pool in no order."""

    def __init__(self, config, kind, n_blocks=16):
        self.config, self.kind = config, kind
        G, N = cached.widths(config.attention, kind)
        # Not zero: what a step reads must be what was written.
        self.pool = jnp.full((config.n_layers, 3 * n_blocks + 1, G * S, N), 7.0)
        order = np.random.default_rng(0).permutation(3 * n_blocks) + 1
        self.table, self.length = order.reshape(3, n_blocks).astype(np.int32), np.zeros(3, np.int32)
        self.rope = step.rope_table(config)

    def read(self, weights, tokens_BT, count_B, width):
        """The logits after the next `count_B` tokens of each row of a batch, of which each has read some."""
        new_BT = np.zeros((3, width), np.int32)
        for b, count in enumerate(count_B):
            new_BT[b, :count] = tokens_BT[b, self.length[b] : self.length[b] + count]
        count_B = np.array(count_B, np.int32)
        past = Past(self.pool, self.table, self.length)
        logits_BW, new = forward(self.config, self.kind, *weights[1:], self.rope, past, new_BT, count_B)
        self.pool = step.keep(self.pool, self.table, self.length, new, count_B)
        self.length = self.length + count_B
        return logits_BW


@pytest.mark.parametrize("case", CASES)
def test_prefill_in_chunks_and_decoding_equal_the_forward_pass_of_training(case):
    """Three rows at different places, some without new tokens; every token's logits against the teacher-forced ones."""
    config, kind = CASES[case]
    weights = models.weights(config)
    tokens_BT = np.random.default_rng(1).integers(0, 60, (3, 40)).astype(np.int32)
    expected = models.logits(weights, jnp.asarray(tokens_BT))
    cache = Cache(config, kind)
    plan = [([13, 5, 1], 13), ([0, 13, 8], 13), *[([1, 1, 1], 1)] * 5, ([9, 0, 13], 13), *[([1, 0, 1], 1)] * 3]
    for count_B, width in plan:
        logits_BW = cache.read(weights, tokens_BT, count_B, width)
        for b in np.flatnonzero(count_B):
            np.testing.assert_allclose(logits_BW[b], expected[b, cache.length[b] - 1], atol=1e-4, rtol=1e-4)
    assert set(cache.length) == {30, 23}


def test_absorbed_and_expanded_forms_are_chosen_by_work_and_agree():
    a = k2.released().attention
    # For each key and head: 2 * 512 + 64 products a query, or 320 and once 512 * 256; equal at 170.67 queries.
    layer = nnx.eval_shape(lambda: MLA(k2.released()))
    assert type(cached.form(layer, "latent", 170)) is cached.Absorbed
    assert type(cached.form(layer, "latent", 171)) is cached.Expanded
    assert a.kv_rank * (a.d_nope + a.d_value) / (2 * a.kv_rank + a.d_rope - 320) == pytest.approx(170.67, abs=0.01)

    weights, tokens_BT = models.weights(models.MLA), np.random.default_rng(2).integers(0, 60, (3, 12)).astype(np.int32)
    caches = Cache(models.MLA, "latent"), Cache(models.MLA, "latent")
    one = caches[0].read(weights, tokens_BT, [12, 12, 12], 12)
    for _ in range(4):
        three = caches[1].read(weights, tokens_BT, [3, 3, 3], 3)
    # The small model's forms part at 4 queries.
    small = nnx.eval_shape(lambda: MLA(models.MLA))
    assert (
        type(cached.form(small, "latent", 3)) is cached.Absorbed and type(cached.form(small, "latent", 12)) is cached.Expanded
    )
    np.testing.assert_allclose(one, three, atol=1e-5)
    kept = [np.asarray(c.pool)[:, c.table[:, :3]] for c in caches]
    np.testing.assert_allclose(*kept, atol=1e-5)


@functools.cache
def lowered(kind):
    config = models.MLA
    G, N = cached.widths(config.attention, kind)
    pool = jax.ShapeDtypeStruct((2, 20_001, G * S, N), jnp.float32)

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    where = integers(3, 16), integers(3)
    params, bias = models.weights(config)[1:]
    args = params, bias, step.rope_table(config), Past(pool, *where), integers(3, 1), integers(3)
    new = jax.eval_shape(functools.partial(step.forward, config, kind), *args)[1]
    read = forward.lower(config, kind, *args).compile()
    return read, step.keep.lower(pool, *where, new, integers(3)).compile(), 4 * 2 * 20_001 * G * S * N


@pytest.mark.parametrize("kind", ["latent", "heads"])
def test_no_step_copies_the_cache(kind):
    read, keep, nbytes = lowered(kind)
    assert read.memory_analysis().temp_size_in_bytes < nbytes / 20
    assert keep.memory_analysis().temp_size_in_bytes < nbytes / 20
    assert keep.memory_analysis().alias_size_in_bytes >= nbytes


def test_a_step_looks_rotations_up():
    """Neither a cosine nor a sine is computed, nor a power of the base."""
    text = lowered("latent")[0].as_text()
    assert "gather" in text
    for operation in ("cosine(", "sine(", "power("):
        assert operation not in text


def test_cache_of_k2_is_576_numbers_a_token_and_layer():
    a = k2.released().attention
    assert cached.widths(a, "latent") == (1, 576) and cached.kind_of(a) == "latent"
    assert cached.widths(a, "heads") == (64, 320)


def test_a_latent_cache_can_not_have_qk_norm():
    assert cached.kind_of(models.NORMED.attention) == "heads"
    with pytest.raises(ValueError, match="a latent cache needs MLA without qk_norm; got kind='mla', qk_norm=True"):
        cached.widths(models.NORMED.attention, "latent")
    with pytest.raises(ValueError, match="got kind='gqa'"):
        cached.widths(models.GQA.attention, "latent")


def test_bfloat16_stays_close():
    """Weights and cache in bfloat16, as released models run; every form."""
    low = replace(models.MLA, dtype="bfloat16")
    weights, tokens_BT = models.weights(models.MLA), np.random.default_rng(3).integers(0, 60, (3, 14)).astype(np.int32)
    rounded = jax.tree.map_with_path(lambda path, w: w.astype(working_dtype(path[-1].key, "bfloat16")), weights.params)
    caches = Cache(models.MLA, "latent"), Cache(low, "latent")
    caches[1].pool = caches[1].pool.astype(jnp.bfloat16)
    for counts, width in (([13, 7, 1], 13), ([1, 1, 1], 1)):
        high_BW = caches[0].read(weights, tokens_BT, counts, width)
        low_BW = caches[1].read(weights._replace(params=rounded), tokens_BT, counts, width)
        assert low_BW.dtype == jnp.float32 and caches[1].pool.dtype == jnp.bfloat16
        assert 0 < jnp.median(jnp.abs(low_BW - high_BW)) < 0.02 * jnp.std(high_BW)
