import math
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from configs import deepseek_v3, k2, tiny
from k2jax.axes import LEGEND
from k2jax.config import DataConfig, MeshConfig, ModelConfig, MoEConfig, RunConfig
from k2jax.model import transformer
from k2jax.optim.muonclip import rule_of
from k2jax.parallel import mesh, ownership
from k2jax.parallel.mesh import AXES, BATCH, SHARD_OF, WHOLE, local_rows, make, microbatches, place, render, sizes, spec, table

K2 = replace(k2.config(), microbatches=0, mesh=MeshConfig(pipeline=16, expert=16, chunks=4))

DENSE = {"n_dense": 3}  # all of its layers


def run(batch=48, n=1, *, model=None, **axes):
    moe = MoEConfig(n_experts=6, n_active=2, n_shared=1, d_expert=8)
    base = ModelConfig(n_words=64, d_model=16, n_layers=3, n_dense=1, d_dense=24, moe=moe)
    return RunConfig(
        batch=batch,
        microbatches=n,
        seq_len=8,
        data=DataConfig(tokenizer="byte"),
        mesh=MeshConfig(**axes),
        model=replace(base, **model or {}),
    )


def refused(config, n_devices):
    with pytest.raises(ValueError) as error:
        sizes(config, n_devices)
    return str(error.value)


def test_what_the_devices_leave_is_data():
    assert sizes(run(), 1) == MeshConfig(data=1)
    assert sizes(run(), 8).data == 8
    assert sizes(run(n=2, pipeline=2, expert=2), 8) == MeshConfig(pipeline=2, expert=2, data=2)
    assert sizes(run(data=3), 8) == MeshConfig(data=3)  # fewer than there are, because asked for
    for nodes in (32, 64, 256):
        assert sizes(K2, 8 * nodes).data == nodes // 32


def test_device_counts_that_do_not_fit_are_refused_with_those_that_do():
    said = refused(K2, 320)
    assert said.startswith("the number of devices must be a multiple of pipeline * expert = 16 * 16 = 256; got 320; ")
    assert said.endswith("256 and 512")
    assert "needs 256 devices; there are 8; any multiple of 256 would fit" in refused(K2, 8)
    assert "needs 12 devices; there are 8; data=2 would fit" in refused(run(n=2, pipeline=2, expert=2, data=3), 8)


@pytest.mark.parametrize(
    ("config", "n_devices", "said"),
    [
        (run(expert=4), 4, "must divide n_experts=6; got mesh.expert=4; next to it are 3 and 6"),
        (run(expert=8), 8, "must divide n_experts=6; got mesh.expert=8; next to it are 6"),
        (run(batch=40, n=2, pipeline=2, expert=3), 6, r"2 \* 3 \* 1 = 6; got 40; next to it are 36 and 42"),
        (run(batch=3), 8, r"microbatches \* expert \* data = 1 \* 1 \* 8 = 8; got 3; next to it are 8"),
        (run(batch=6, n=0, pipeline=4), 4, r"pipeline \* expert \* data = 4 \* 1 \* 1 = 4; got 6; next to it are 4 and 8"),
        (run(n=6, pipeline=4), 4, "stages; got microbatches=6, mesh.pipeline=4; next to it are 4 and 8"),
        (run(n=3, pipeline=3), 3, "got n_words=64, mesh.pipeline=3; next to it are 63 and 66"),
        (run(model={"d_dense": 20}, expert=2), 2, r"\(n_shared \+ j\) \* d_expert; got d_dense=20; next to it are 16 and 24"),
        (run(model={"d_dense": 32}, n=2, pipeline=2), 2, "got d_dense=32; next to it are 24"),
        (run(model=DENSE, expert=2), 2, "without experts .* n_layers=3 and n_dense=3 .* expert 2"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_in_one_sentence(config, n_devices, said):
    with pytest.raises(ValueError, match=said) as error:
        sizes(config, n_devices)
    assert "\n" not in str(error.value) and ". " not in str(error.value)
    with pytest.raises(ValueError, match=said):
        make(config, jax.devices()[:n_devices])


def test_what_a_mesh_needs_is_not_asked_of_one_device():
    one = run(batch=3, n=3, model={"d_dense": 20, "n_words": 61})
    assert mesh.count(sizes(one, 1)) == 1
    assert mesh.count(sizes(run(model={"d_dense": 20}), 8)) == 8  # nor of replicas, what only a cut model needs


@pytest.mark.parametrize(
    ("config", "cores", "devices"),
    [
        (run(batch=48), 8, 8),
        (run(batch=48), 7, 6),
        (run(batch=4, n=2), 7, 2),
        (run(batch=48, model={"moe": MoEConfig(n_experts=256, n_active=2)}), 8, 3),  # 64 rows an expert
        (run(batch=48, n=2, model={"moe": MoEConfig(n_experts=256, n_active=2)}), 8, 1),
        (run(batch=48, n=0), 8, 8),
        (run(batch=48, n=0, model={"moe": MoEConfig(n_experts=256, n_active=2)}), 8, 1),
        (run(batch=48, n=0, model=DENSE | {"moe": MoEConfig(n_experts=256, n_active=2)}), 8, 8),
        (run(batch=5), 4, 1),
        (run(batch=48, data=3), 2, 3),
        (run(batch=48, n=2, pipeline=2, expert=2), 2, 4),
        (run(batch=48, n=2, pipeline=2, expert=2), 9, 8),
    ],
)
def test_a_run_takes_the_cores_that_its_batch_divides_over(config, cores, devices, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    took = Mock(side_effect=RuntimeError)  # jax has its devices by now
    monkeypatch.setattr("jax.config.update", took)
    config = replace(config, seq_len=512, model=replace(config.model, context=512))
    mesh.take_cores(config)
    took.assert_called_once_with("jax_num_cpu_devices", devices)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    mesh.take_cores(config)
    took.assert_called_once()


def test_a_run_from_the_command_line_takes_its_cores():
    program = """
import os; os.sched_getaffinity = lambda _: range(6)
from k2jax.parallel import mesh
from configs import tiny
mesh.take_cores(tiny.config())
import jax; print(jax.device_count())
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert out.stdout == "4\n"  # of 16 rows


def test_the_full_size_presets_fit_their_meshes():
    assert microbatches(K2, sizes(K2, 512)) == 16_384 // 32
    assert microbatches(replace(K2, microbatches=64), sizes(K2, 512)) == 64
    deepseek = replace(deepseek_v3.config(), microbatches=0, mesh=MeshConfig(pipeline=16, expert=8))
    assert sizes(deepseek, 1024).data == 8
    assert sizes(replace(tiny.config(), mesh=MeshConfig(expert=4)), 8).data == 2


def test_expert_ranks_are_neighbours_then_replicas_then_stages():
    made = make(run(n=2, pipeline=2, expert=2), jax.devices()[::-1])
    assert made.axis_names == AXES and made.axis_types == (AxisType.Auto,) * 3
    ids = np.vectorize(lambda d: d.id)(made.devices)
    np.testing.assert_array_equal(ids, [[[0, 2], [1, 3]], [[4, 6], [5, 7]]])  # [pipeline, expert, data]
    assert make(run(data=2)).devices.size == 2


def test_no_process_is_left_out():
    with pytest.raises(ValueError, match=r"takes 2 of 8 devices and leaves none to process 1; data=8 would use all"):
        make(run(data=2), [Mock(spec=jax.Device, id=n, process_index=n // 4) for n in range(8)])


def test_rows_are_split_over_data_and_expert_and_placed_as_they_were():
    made = make(run(n=2, pipeline=2, expert=2))
    rows = local_rows(made, 48)
    np.testing.assert_array_equal(rows, np.arange(48))  # one process: all of them
    batch = {"tokens_BT": np.arange(48 * 3).reshape(48, 3)}
    placed = place(made, batch, rows, 48)["tokens_BT"]
    assert placed.sharding == NamedSharding(made, BATCH)
    np.testing.assert_array_equal(placed, batch["tokens_BT"])
    for shard in placed.addressable_shards:
        _, expert, data = np.argwhere(made.devices == shard.device)[0]
        np.testing.assert_array_equal(np.asarray(shard.data)[:, 0] // 3, np.arange(12) + 12 * (2 * data + expert))


@pytest.mark.parametrize("config", [K2, deepseek_v3.config(), tiny.config()], ids=lambda c: c.name)
def test_no_matrix_is_cut(config):
    """There is no tensor parallelism: layers, words and experts are split, and nothing else is."""
    assert SHARD_OF.keys() == {"L", "W", "E"} and set(SHARD_OF.values()) <= set(AXES)
    for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(config.model)[0]):
        name = path[-1].key
        axes = dict(zip(spec(name, leaf.ndim), leaf.shape, strict=True))
        sizes = axes.get("pipeline"), axes.get("expert")
        stacks = {config.model.n_dense, config.model.n_moe, config.model.n_mtp, config.model.n_words, None}
        assert sizes[0] in stacks and sizes[1] in (config.model.moe.n_experts, None)
        assert (sizes[1] is not None) == name.endswith(("EDF", "EFD"))
    assert spec("router_DE", 3) == jax.P("pipeline", None, None) and WHOLE.keys() == {"router_DE"}
    assert set(SHARD_OF) <= set(LEGEND)


def test_k2_needs_28_to_30_gb_for_weights_and_gradients_at_any_size():
    totals = {n: mesh._sum(table(K2, sizes(K2, n))) for n in (256, 512, 2048)}
    for weight, gradient, _ in totals.values():
        assert 28e9 < weight + gradient < 30e9
        assert abs(weight + gradient - 6 * (3.964e9 + 0.733e9)) < 0.06 * 29e9  # the even split; slots are 64, not 61
    # Master and momentum shrink with the replicas; at 256 devices they do not fit beside the rest.
    assert totals[256][2] > 31.7e9 and totals[2048][2] < 5e9
    text = render(sizes(K2, 512), table(K2, sizes(K2, 512)))
    assert "an expert lies on 2 of them, all else of a stage on 32" in text
    assert "moe/ffn/gate_EDF            60 x 384 x 7168 x 2048  pipeline, expert  2,642.4   5,284.8        5,284.8" in text
    assert text.splitlines()[-1].startswith("weights and gradients 29.8")


@pytest.mark.parametrize("n_mtp", [0, 1])
@pytest.mark.parametrize("axes", [{"pipeline": 16, "expert": 16, "chunks": 4}, {"pipeline": 8, "expert": 32, "data": 2}])
def test_the_table_adds_up_to_the_arrays_of_a_stage(n_mtp, axes):
    config = replace(K2, mesh=MeshConfig(**axes), model=replace(K2.model, n_mtp=n_mtp))
    over = sizes(config, 512)
    stage = ownership.stage_shapes(config.model, over)
    stage.pop("dense")  # placed in slots
    assert mesh._sum(table(config, over))[1] == pytest.approx(4 * sum(x.size for x in jax.tree.leaves(stage)), abs=100)


@pytest.mark.parametrize("model", [{"n_dense": 1, "n_mtp": 1}, DENSE, {"n_dense": 0}])
@pytest.mark.parametrize("chunks", [1, 3])  # 3 leave slots empty
def test_the_table_of_a_replica_adds_up_too(model, chunks):
    config = run(data=2, chunks=chunks, model=model)
    rows, plan = table(config, sizes(config, 2)), ownership.plan(config, sizes(config, 2))
    gradient, state = mesh._sum(rows)[1:]
    assert gradient == 4 * sum(math.prod(shape) for shape in plan.stage.values())
    if chunks == 1:
        assert rows[-1][3:] == (0, 0, 0)
    copies = {path: 2 if rule_of(config.optim, path) == "muon" else 3 for path in plan.stage}  # master and moments
    assert state == pytest.approx(sum(copies[path] * 4 * math.prod(shape) / 2 for path, shape in plan.stage.items()), rel=1e-6)
