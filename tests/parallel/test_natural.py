"""The natural state and the owned one hold the same bits, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.axes import axes_of
from k2jax.config import MeshConfig
from k2jax.optim.muon import by_path
from k2jax.optim.muonclip import muonclip
from k2jax.parallel import mesh as meshes
from k2jax.parallel import zero1
from k2jax.parallel.natural import from_first, from_natural, natural_sharding, to_natural
from tests.parallel.stages import cut

CASES = {
    "every part": (MeshConfig(pipeline=2, chunks=2, expert=2, data=2), "muonclip", {"n_layers": 5, "n_dense": 3}),
    "axes the stages do not divide": (
        MeshConfig(pipeline=3, data=2),
        "muonclip",
        {"n_layers": 4, "n_words": 66, "microbatches": 3},
    ),
    "replicas, dense layers without places for experts": (
        MeshConfig(data=2),
        "muonclip",
        {"n_layers": 5, "n_dense": 2},
    ),
    "no experts at all": (MeshConfig(data=2), "muonclip", {"n_layers": 2, "n_dense": 2, "n_mtp": 0}),
    "a place over, adamw": (MeshConfig(data=3), "adamw", {"n_layers": 1, "n_dense": 0, "n_mtp": 0}),
}


@pytest.fixture(scope="module", params=CASES)
def trip(request, run_of):
    """A random natural state, its owned form on a mesh, and what comes back."""
    sizes, rule, changes = CASES[request.param]
    config = run_of(sizes, rule=rule, batch=96, **changes)
    mesh, plan = meshes.make(config, jax.devices()[: meshes.count(sizes)]), zero1.plan(config, sizes)
    rng = np.random.default_rng(0)

    def fill(x):
        return rng.standard_normal(x.shape).astype(np.float32) if x.ndim else np.int32(7)

    natural = jax.tree.map(fill, plan.natural)
    owned = from_natural(plan, mesh)(*jax.device_put(natural, natural_sharding(plan, mesh)))
    return config, mesh, plan, natural, owned, to_natural(plan, mesh)(*owned)


def test_there_and_back_every_bit_is_the_same(trip):
    config, _, _, natural, _, back = trip
    state = jax.eval_shape(muonclip(config.optim, config.model).init, natural[0])
    assert jax.tree.structure(back[1]) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, natural)


def test_the_first_state_is_that_of_an_optimizer_that_has_seen_nothing(trip):
    config, mesh, plan, (params, _), _, _ = trip
    sharding = natural_sharding(plan, mesh)
    first = jax.device_put((params, muonclip(config.optim, config.model).init(params)), sharding)
    want, got = from_natural(plan, mesh)(*first), from_first(plan, mesh)(first[0])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    alike = jax.tree.map(lambda x, there: x.sharding.is_equivalent_to(there, x.ndim), got, zero1.shardings(plan, mesh))
    assert all(jax.tree.leaves(alike))


def test_owned_arrays_are_parts_of_the_stages_trees(trip):
    _, mesh, plan, natural, (params, opt_state), _ = trip
    assert opt_state["count"] == 7
    assert jax.tree.map(jnp.shape, (params, opt_state)) == jax.tree.map(jnp.shape, zero1.abstract_owned(plan))
    # What an owner holds is gathered for the forward pass; it must be the layers that the layout puts on the stage.
    specs = zero1.specs(plan)[0]
    gather = jax.shard_map(
        lambda owned: zero1.whole(zero1.working(plan, zero1.local(owned), "float32")),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=jax.sharding.PartitionSpec(*meshes.AXES),
        check_vma=False,
    )
    stages = by_path(cut(natural[0], plan.layout, plan.sizes.expert))
    for path, x in by_path(jax.jit(gather)(params)).items():
        expected = np.array(stages[path])
        if path[0] == "mtp" and path[-1] != "norm_D":
            expected[:-1] = 0  # the last stage alone uses them
        np.testing.assert_array_equal(x, np.repeat(expected[:, :, None], plan.sizes.data, axis=2), err_msg=str(path))


def test_no_device_holds_more_than_it_must(trip):
    _, mesh, plan, _, _, back = trip
    shardings = natural_sharding(plan, mesh)
    for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(back), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), path
        name, held = getattr(path[-1], "key", "count"), x.addressable_shards[0].data.size
        experts = name.endswith(("EDF", "EFD"))
        layer = x.shape[x.ndim - len(axes_of(name)) + experts :]  # without the layers and the experts
        divides = any(n % plan.sizes.pipeline == 0 for n in layer)
        parts = (plan.sizes.expert if experts else 1) * (plan.sizes.pipeline if divides else 1)
        assert held * parts == x.size, path
