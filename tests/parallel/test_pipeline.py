"""Gradients and observations of the pipelined program against `jax.grad` of the model on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k2jax.config import ActivationConfig, MeshConfig
from k2jax.model import transformer
from k2jax.parallel import pipeline, stage
from k2jax.parallel.layer import EXPERTS
from k2jax.parallel.mesh import RANKS
from k2jax.train.loss import target_masks
from k2jax.train.step import gradients
from tests.parallel.stages import cut, join

WITHOUT = {"n_mtp": 0, "n_dense": 0}
K2_UNROUNDED = ActivationConfig(policy="k2", gates="offload", expert_rows="offload", expert_gates="offload")  # without FP8
CASES = {
    "two layers a chunk, kept on the host": (
        MeshConfig(pipeline=2, chunks=2, data=1),
        {"n_layers": 6, "n_dense": 3},
        K2_UNROUNDED,
    ),
    "seven layers in eight slots, all kept": (
        MeshConfig(pipeline=4, chunks=2, data=1),
        {"n_layers": 7, **WITHOUT, "microbatches": 8},
        ActivationConfig(policy="none"),
    ),
    "buffers of a row, those of the first round kept": (
        MeshConfig(expert=8, data=1, buffer=0.01),
        {"microbatches": 2, "n_dense": 3},
        ActivationConfig(expert_rows="keep", expert_gates="keep"),
    ),
}


def on_mesh(config, params, bias, batch):
    """Natural gradients, parts and the evaluation's loss of the pipelined program."""
    sizes, M = config.mesh, config.microbatches
    pipe = stage.pipeline(config, sizes, M)
    shape = (sizes.pipeline, sizes.expert, sizes.data)
    mesh = jax.make_mesh(shape, ("pipeline", "expert", "data"), axis_types=(AxisType.Auto,) * 3)

    def body(stages, bias, batch):
        masks = target_masks(batch["segments_BT"])
        weights = [m / jnp.maximum(jax.lax.psum(m.sum(), RANKS), 1) for m in masks]
        arrays = *(batch[name] for name in ("tokens_BT", "segments_BT", "positions_BT")), *weights
        rows = stage.Batch(*(a.reshape(M, -1, a.shape[-1]) for a in arrays))
        weights = jax.tree.map(lambda w: w[0, 0], stages)
        grads, parts = pipeline.gradients(pipe, weights, bias, rows)

        def reduce(path, g):
            return jax.lax.psum(g, "data" if path[-1].key in EXPERTS else RANKS)[None, None]

        grads = jax.tree.map_with_path(reduce, grads)
        seen = {"max_logit_LH": parts.max_logit_LH, "load_LE": parts.load_LE}
        seen = {name: stage.by_stack(pipe, x) for name, x in seen.items()}
        return grads, parts._replace(**seen), pipeline.evaluate(pipe, weights, bias, rows)

    split, everywhere = PartitionSpec("pipeline", "expert"), PartitionSpec()
    specs = (split, everywhere, PartitionSpec(("data", "expert")))
    f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(split, everywhere, everywhere), check_vma=False)
    grads, parts, loss = jax.jit(f)(cut(params, pipe.layout, sizes.expert), bias, batch)
    return join(grads, params, pipe.layout, sizes.expert), parts, loss


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_observations_equal_one_device(case, run_of, make_batch):
    sizes, changes, policy = CASES[case]
    config = replace(run_of(sizes, **changes), activations=policy)
    few = case.startswith("buffers of a row")
    batch = make_batch(0, config.batch, config.seq_len + 1, 64)
    params, bias = transformer.init(config.model, 0)
    rng = np.random.default_rng(1)
    bias = {k: jnp.asarray(rng.normal(size=b.shape) * 0.01, jnp.float32) for k, b in bias.items()}
    if few:  # all tokens to two experts of one rank, the others idle
        bias = {k: b.at[:, :2].add(5.0) for k, b in bias.items()}

    alone = replace(config, microbatches=1, activations=ActivationConfig())
    reference = jax.jit(lambda *given: gradients(alone, *given))(params, bias, batch)
    expected, seen, _ = jax.tree.map(np.asarray, reference)
    grads, parts, evaluated = jax.tree.map(np.asarray, on_mesh(config, params, bias, batch))
    np.testing.assert_allclose(
        [parts.next_token, evaluated, parts.mtp], [seen.next_token, seen.next_token, seen.mtp], rtol=1e-6
    )
    np.testing.assert_allclose(parts.balance, seen.balance, rtol=1e-5)
    for stack, logit_LH in seen.max_logit_LH.items():
        np.testing.assert_allclose(parts.max_logit_LH[stack], logit_LH, rtol=1e-6)
    for stack, load_LE in seen.load_LE.items():
        np.testing.assert_array_equal(parts.load_LE[stack], load_LE)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        bound = 1e-5 * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))
    if few:
        here, following = batch["segments_BT"][:, :-1], batch["segments_BT"][:, 1:]
        inside = (here > 0) & (here == following)  # MTP's is the only router here: a document's end is padding to it
        assert parts.rounds == inside.sum(1).max()  # every token of a row to one rank, one a round


def test_the_parts_of_the_pipeline_for_k2():
    from configs import k2

    config = replace(k2.config(), model=replace(k2.config().model, n_mtp=1))
    pipe = stage.pipeline(config, MeshConfig(pipeline=16, chunks=4, expert=16, data=1), 1024)
    assert pipe.shape.exchange.capacity == 2080  # 1.25 * 0.406 * 4096 rows
    assert (pipe.layout.kind_ZL == 0).sum() == 2  # 61 layers and MTP in 64 slots
    assert pipe.shape.keep * pipe.shape.block < 1.7 * 8 * 4096
