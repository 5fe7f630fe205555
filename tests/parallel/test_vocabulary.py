import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from k2jax.parallel import vocabulary

W, D, X, SCALE = 24, 5, 14, 0.3


def on_four_stages(f, in_specs, out_specs):
    mesh = jax.make_mesh((4,), ("pipeline",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def test_loss_and_gradients_equal_the_whole_head():
    rng = np.random.default_rng(0)
    head, total = (rng.normal(size=(W, D)).astype(np.float32) for _ in range(2))
    hidden = 3 * rng.normal(size=(X, D)).astype(np.float32)
    targets = rng.integers(0, W, X).astype(np.int32)
    weights = rng.uniform(size=X).astype(np.float32) * (rng.random(X) < 0.7)

    def nll(head, hidden):
        logp = jax.nn.log_softmax(hidden @ head.T)
        return -(weights * jnp.take_along_axis(logp, targets[:, None], 1)[:, 0]).sum()

    expected, (d_head, d_hidden) = jax.value_and_grad(nll, (0, 1))(head, hidden)
    rows, whole = PartitionSpec("pipeline"), PartitionSpec()
    for chunk in (4, 14, 100):

        def ours(head, total, hidden, targets, weights, chunk=chunk):
            got = vocabulary.cross_entropy(head, hidden, targets, weights, total, SCALE, chunk)
            return got, vocabulary.evaluate(head, hidden, targets, weights, chunk)

        out = vocabulary.HeadGradients(whole, whole, rows), whole
        f = on_four_stages(ours, (rows, rows, whole, whole, whole), out)
        got, evaluated = f(head, total, hidden, targets, weights)
        np.testing.assert_allclose([got.nll, evaluated], [expected] * 2, rtol=1e-6)
        np.testing.assert_allclose(got.d_hidden_XD, SCALE * d_hidden, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.d_head_WD, total + SCALE * d_head, rtol=1e-5, atol=1e-6)


def test_look_up_and_its_gradient_equal_the_whole_table():
    rng = np.random.default_rng(1)
    table, total = (rng.normal(size=(W, D)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, W, (2, 7)).astype(np.int32)
    d_x = rng.normal(size=(2, 7, D)).astype(np.float32)
    rows, whole = PartitionSpec("pipeline"), PartitionSpec()

    def ours(table, total, tokens, d_x):
        return vocabulary.look_up(table, tokens), vocabulary.add_gradient(total, tokens, d_x)

    x, grown = on_four_stages(ours, (rows, rows, whole, whole), (whole, rows))(table, total, tokens, d_x)
    np.testing.assert_array_equal(x, table[tokens])
    expected = total.copy()
    np.add.at(expected, tokens, d_x)
    np.testing.assert_allclose(grown, expected, rtol=1e-6, atol=1e-6)
