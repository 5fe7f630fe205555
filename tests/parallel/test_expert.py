import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k2jax.config import MoEConfig
from k2jax.parallel.expert import Exchange, bytes_per_token, capacity, share

K2 = MoEConfig()


def test_capacity_is_the_share_of_tokens_that_visit_a_rank():
    assert capacity(K2, 16, 4096, 1.0) == 1664  # 0.406 of them: a token visits 6.5 of 16 ranks
    assert capacity(K2, 16, 4096, 100.0) == 4096  # a token queues once at a rank, so no queue is longer
    assert capacity(K2, 1, 4096, 1.25) == 4096
    assert capacity(K2, 16, 10**6, 1.0) == math.ceil(10**6 * share(K2, 16))
    chosen = np.argsort(np.random.default_rng(0).random((4000, 384)), 1)[:, :8]
    for ranks in (8, 16, 64):
        drawn = np.mean([len(set(row)) for row in chosen // (384 // ranks)])
        assert drawn == pytest.approx(ranks * share(K2, ranks), rel=0.01)


def test_bytes_per_token_count_both_ways_and_not_the_rank_itself():
    assert bytes_per_token(K2, 16, 7168, 2) == pytest.approx(15 * 0.4062 * 2 * 7168 * 2, rel=1e-3)
    assert bytes_per_token(K2, 1, 7168, 2) == 0


@pytest.mark.parametrize("ranks, local, tokens, room", [(2, 3, 12, 12), (4, 2, 11, 3), (4, 2, 9, 1), (3, 1, 1, 1)])
def test_over_its_rounds_every_token_reaches_every_rank_of_its_experts_once(ranks, local, tokens, room):
    n_experts, K, rng = ranks * local, 3, np.random.default_rng(tokens)
    expert = np.stack([rng.permutation(n_experts)[:K] for _ in range(tokens)]).astype(np.int32)
    expert = np.where(rng.random((tokens, K)) < 0.3, -1, expert)
    goes = rng.random(tokens) < 0.8
    weight = rng.uniform(0.1, 1, (tokens, K)).astype(np.float32)
    x = rng.normal(size=(tokens, 2)).astype(jnp.bfloat16)
    exchange = Exchange(ranks, n_experts, room)
    x, expert, weight = jnp.asarray(x), jnp.asarray(expert), jnp.asarray(weight)
    queues = exchange.queue_up(expert, jnp.asarray(goes))
    arrived = {}
    unpack = jax.jit(lambda words: exchange.unpack(words, (x,), K))
    for turn in range(int(queues.rounds)):
        words = jax.jit(exchange.pack)((x,), weight, expert, queues, turn)
        assert words.shape == (ranks, room, 2 + 4 * K + 2) and words.dtype == jnp.uint16
        for r in range(ranks):
            rows = jax.tree.map(np.asarray, unpack(words[r]))
            assert rows.rounds == queues.rounds
            for row, w, e in zip(rows.rows[0], rows.weight_XK, rows.expert_XK, strict=True):
                for k in range(K):
                    if e[k] >= 0:
                        key = (tuple(np.asarray(row, np.float32)), r * local + int(e[k]))
                        assert key not in arrived
                        arrived[key] = float(w[k])
    expected = {
        (tuple(np.asarray(x[n], np.float32)), int(expert[n, k])): float(weight[n, k])
        for n in range(tokens)
        for k in range(K)
        if goes[n] and expert[n, k] >= 0
    }
    assert arrived == expected


@pytest.mark.parametrize("routing", ["random", "all to one expert", "all to one rank", "an expert with none"])
def test_exchange_and_its_gradients_equal_the_sum_over_experts(routing):
    """Forward: y = sum_k w_k e_k(x), e_k(x) = (k + 1) x; the answers carry the gradients back. Four ranks, two groups."""
    ranks, local, tokens, K, D, room = 4, 2, 12, 2, 3, 4
    E = ranks * local
    rng = np.random.default_rng(1)
    shape = (2 * ranks, tokens)
    expert = np.argsort(rng.random((*shape, E)), -1)[..., :K].astype(np.int32)
    if routing == "all to one expert":
        expert[:4, :, 0], expert[:4, :, 1] = 5, 0  # the other group stays balanced: rounds differ between groups
    elif routing == "all to one rank":
        expert[..., 0], expert[..., 1] = 2, 3
    elif routing == "an expert with none":
        expert = np.where(expert == 6, (expert[..., ::-1] + 1) % 6, expert).astype(np.int32)
    weight = rng.uniform(0.1, 1, (*shape, K)).astype(np.float32)
    x, d_y = rng.normal(size=(2, *shape, D)).astype(np.float32)
    exchange = Exchange(ranks, E, room)

    def rank(x, d_y, weight, expert):
        x, d_y, weight, expert = (a[0] for a in (x, d_y, weight, expert))
        queues = exchange.queue_up(expert, jnp.ones(tokens, bool))

        def turn(i, carry):
            y, d_x, d_w, count, _ = carry
            rows = exchange.unpack(exchange.travel(exchange.pack((x, d_y), weight, expert, queues, i)), (x, d_y), K)
            here, there = rows.rows
            factor_XK = (jnp.where(rows.expert_XK >= 0, rows.expert_XK + 1, 0) + local * jax.lax.axis_index("expert")) * (
                rows.expert_XK >= 0
            )
            gate_X1 = (rows.weight_XK * factor_XK).sum(-1, keepdims=True)
            back = exchange.travel(exchange.pack_answer(gate_X1 * here))
            d_gate_XK = factor_XK * (here * there).sum(-1, keepdims=True)
            grads = exchange.travel(exchange.pack_answer(gate_X1 * there, d_gate_XK))
            more_x, more_w = exchange.collect_gradients(grads, x.dtype, D, queues, i)
            count = count + (rows.expert_XK >= 0).sum()
            return y + exchange.collect(back, queues, i), d_x + more_x, d_w + more_w, count, rows.rounds

        rounds = exchange.unpack(exchange.travel(exchange.pack((x,), weight, expert, queues, 0)), (x,), K).rounds
        start = jnp.zeros_like(x), jnp.zeros_like(x), jnp.zeros_like(weight), 0, rounds
        return jax.tree.map(lambda a: jnp.asarray(a)[None], jax.lax.fori_loop(0, rounds, turn, start))

    mesh = jax.make_mesh((2, ranks), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("data", "expert"))
    f = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    y, d_x, d_w, count, rounds = f(x, d_y, weight, expert)
    factor = (weight * (expert + 1)).sum(-1, keepdims=True)
    np.testing.assert_allclose(y, factor * x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(d_x, factor * d_y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(d_w, (expert + 1) * (x * d_y).sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert count.sum() == expert.size  # no pair is lost or doubled
    longest = max((expert[g] // local == r).any(-1).sum() for g in range(4) for r in range(ranks))
    assert set(np.asarray(rounds[:4]).tolist()) == {-(-int(longest) // room)}
    if routing == "all to one expert":
        assert rounds[0] == 3 and rounds[4] < 3
