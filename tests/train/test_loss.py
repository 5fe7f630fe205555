import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.model import transformer
from k2jax.train import loss as loss_module
from k2jax.train.loss import count_targets, cross_entropy, loss, target_masks


def random_head(seed=0, B=3, T=7, D=5, W=11, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(B, T, D)), rng.normal(size=(W, D))
    targets, mask = rng.integers(0, W, (B, T)), rng.random((B, T)) < 0.7
    return jnp.asarray(hidden, dtype), jnp.asarray(head, jnp.float32), jnp.asarray(targets, jnp.int32), jnp.asarray(mask)


def plain(hidden_BTD, head_WD, targets_BT, mask_BT):
    logp = jax.nn.log_softmax((hidden_BTD.astype(jnp.float32) @ head_WD.T), -1)
    nll = -jnp.take_along_axis(logp, targets_BT[..., None], -1)[..., 0]
    return jnp.sum(nll * mask_BT)


@pytest.mark.parametrize("chunk", [1, 4, 6, 21, 100])
def test_cross_entropy_and_its_gradients_are_those_of_log_softmax(chunk):
    hidden, head, targets, mask = random_head()
    value, count = cross_entropy(hidden, head, targets, mask, chunk)
    np.testing.assert_allclose(value, plain(hidden, head, targets, mask), rtol=2e-6)
    assert int(count) == int(mask.sum())
    ours = jax.grad(lambda h, w: -3 * cross_entropy(h, w, targets, mask, chunk)[0], (0, 1))(hidden, head)
    theirs = jax.grad(lambda h, w: -3 * plain(h, w, targets, mask), (0, 1))(hidden, head)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_bfloat16_states_give_float32_losses():
    hidden, head, targets, mask = random_head(dtype=jnp.bfloat16)
    value, grads = jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, mask, 4)[0], (0, 1))(hidden, head)
    assert value.dtype == jnp.float32 and grads[0].dtype == jnp.bfloat16 and grads[1].dtype == jnp.float32
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(value, plain(hidden, rounded, targets, mask), rtol=1e-5)


def test_large_logits_do_not_overflow():
    hidden, head, targets, mask = random_head()
    value, grads = jax.value_and_grad(lambda h: cross_entropy(1e4 * h, head, targets, mask, 4)[0])(hidden)
    assert np.isfinite(value) and np.isfinite(grads).all()


def largest_array(jaxpr):
    """Elements of the largest intermediate, loop bodies included."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [v.aval.size for v in eqn.outvars if hasattr(v.aval, "size")]
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            sizes += [largest_array(inner)] if hasattr(inner, "eqns") else []
    return max(sizes)


def test_no_more_logits_than_a_chunk_exist_forward_or_backward():
    hidden, head, targets, mask = random_head(B=4, T=32, D=2, W=64)

    def trace(chunk):
        return jax.make_jaxpr(jax.grad(lambda h, w: cross_entropy(h, w, targets, mask, chunk)[0], (0, 1)))(hidden, head).jaxpr

    assert largest_array(trace(8)) == 8 * 64
    assert largest_array(trace(128)) == 128 * 64  # the measure sees what it looks for


def test_targets_are_of_the_same_document():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 2, 3, 3, 3, 3, 3]])
    next_BT, after_BT = target_masks(segments)
    assert next_BT.astype(int).tolist() == [[1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 1, 1]]
    assert after_BT.astype(int).tolist() == [[1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
    assert [int(n) for n in count_targets(segments)] == [8, 4]
    assert [int(n) for n in count_targets(jnp.zeros((2, 8), jnp.int32))] == [1, 1]


def test_position_i_predicts_token_i_plus_1_and_its_mtp_state_token_i_plus_2(small, make_batch, monkeypatch):
    batch, W = jax.tree.map(jnp.asarray, make_batch(0, 3, 17, n_words=30)), 30
    one_hot = 100 * jax.nn.one_hot(jnp.pad(batch["tokens_BT"], ((0, 0), (0, 1))), W)
    aux = transformer.Aux({}, {}, jnp.zeros(()))

    def objective(next_shift, mtp_shift):
        output = transformer.Output(one_hot[:, next_shift : next_shift + 16], one_hot[:, mtp_shift : mtp_shift + 16], aux)
        monkeypatch.setattr(loss_module.transformer, "apply", lambda *_: output)
        return loss(small.model, {"head_WD": jnp.eye(W)}, {}, batch)

    right, parts = objective(1, 2)
    assert right < 1e-6
    wrong, parts = objective(1, 1)
    assert parts.next_token < 1e-6 and parts.mtp > 10
    np.testing.assert_allclose(wrong, small.model.mtp_weight * parts.mtp, rtol=1e-6)
    assert objective(0, 2)[1].next_token > 10


def test_a_packed_row_has_the_loss_of_its_documents_apart(every_part):
    model, rng = every_part.model, np.random.default_rng(1)
    documents = [rng.integers(0, 260, n).astype(np.int32) for n in (9, 1, 14, 2, 5)]

    def rows(packed):
        batch = {name: np.zeros((5, 33), np.int32) for name in ("tokens_BT", "segments_BT", "positions_BT")}
        starts = np.cumsum([0] + [len(d) for d in documents])
        for i, document in enumerate(documents):
            row, start = (0, starts[i]) if packed else (i, 0)
            place = (row, slice(start, start + len(document)))
            batch["tokens_BT"][place], batch["segments_BT"][place] = document, i + 1
            batch["positions_BT"][place] = np.arange(len(document))
        return batch

    params, router_bias = transformer.init(model, 0)
    run = jax.jit(lambda batch: (loss(model, params, router_bias, batch)[1], count_targets(batch["segments_BT"])))
    (together, counts), (apart, counts_apart) = run(rows(packed=True)), run(rows(packed=False))
    assert counts == counts_apart == (8 + 13 + 1 + 4, 7 + 12 + 3)
    np.testing.assert_allclose(together.next_token, apart.next_token, rtol=2e-6)
    np.testing.assert_allclose(together.mtp, apart.mtp, rtol=2e-6)
    for stack in ("dense", "moe", "mtp"):
        np.testing.assert_allclose(together.max_logit_LH[stack], apart.max_logit_LH[stack], rtol=1e-5)
    for stack in ("moe", "mtp"):
        np.testing.assert_array_equal(together.load_LE[stack], apart.load_LE[stack])
