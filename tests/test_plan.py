import contextlib
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import k2
from k2jax import plan
from k2jax.config import ActivationConfig, MeshConfig
from k2jax.parallel import mesh
from k2jax.plan import Machine

MACHINE = Machine()


def k2_run(n_mtp=0, **mesh_fields):
    run = k2.config()
    return replace(run, model=replace(run.model, n_mtp=n_mtp), mesh=replace(run.mesh, **mesh_fields))


@pytest.fixture(scope="module")
def planned():
    return plan.plan(k2_run(), 512, MACHINE)


def test_the_reports_terabytes_and_gigabytes(planned):
    text = plan.render(planned, k2_run(), MACHINE)
    assert "6.16 TB" in text and "512 devices" in text
    assert "6.26 TB" in plan.render(planned, k2_run(n_mtp=1), MACHINE)
    # Experts over 256, all else over 16 stages, six bytes a weight: 28.2 GB, and 5.8% more for the slots that hold no layer.
    slots, layers = 64, 61
    assert planned.memory.states / 1e9 == pytest.approx(28.18 * slots / layers, rel=0.01)
    assert 28 < planned.memory.states / 1e9 < 30


def test_states_are_those_of_the_table_and_halve_with_replicas(planned):
    run = k2_run()
    rows = mesh.table(run, mesh.sizes(run, 512))
    assert planned.memory.weights == sum(r.weight for r in rows)
    assert planned.memory.gradients == sum(r.gradient for r in rows)
    once, twice = (plan.plan(run, n, MACHINE).memory for n in (256, 1024))
    assert once.states == twice.states
    assert once.optimizer / twice.optimizer == pytest.approx(4, rel=0.1)  # whole matrices do not divide evenly
    host = plan.plan(k2_run(offload=True), 256, MACHINE).memory
    assert (host.optimizer, host.on_host) == (0, once.optimizer)


def test_bubble_and_ticks_are_the_schedules(planned):
    P, v, M = 16, 4, 512
    assert planned.microbatches == M and planned.ticks == M * v + v * P + P - 1
    assert planned.bubble == (P - 1) / (v * M)
    one = plan.plan(k2_run(chunks=1), 512, MACHINE)
    assert one.bubble == v * planned.bubble


def test_a_wider_expert_axis_sends_more_over_the_network(planned):
    sent = [plan.plan(k2_run(expert=EP), 512, MACHINE).traffic["expert"] for EP in (8, 16, 32)]
    assert sent[0].seconds < sent[1].seconds < sent[2].seconds
    assert plan.plan(k2_run(expert=1, pipeline=64, chunks=1), 512, MACHINE).traffic["expert"].sent == 0
    faster = plan.plan(k2_run(), 512, replace(MACHINE, network=85.0, nvlink=340.0)).traffic["expert"]
    assert faster.seconds == pytest.approx(planned.traffic["expert"].seconds / 2)


def test_policies_move_bytes_and_save_flops(planned):
    def under(policy, **actions):
        return plan.plan(replace(k2_run(), activations=ActivationConfig(policy=policy, **actions)), 512, MACHINE)

    none, full, own = under("none"), under("full"), under("k2")
    assert full.memory == planned.memory  # a mesh's default
    assert none.memory.activations > 10 * full.memory.activations > 100 * own.memory.activations
    assert own.memory.on_host > 15e9 and none.memory.on_host == 0
    assert none.recomputed < own.recomputed < full.recomputed < 1
    assert none.compute < own.compute < full.compute
    assert not plan.fits(none, MACHINE) and plan.fits(full, MACHINE) and plan.fits(own, MACHINE)
    again = under("k2", expert_gates="recompute")
    assert own.recomputed < 0.1 < 0.4 < again.recomputed  # eight experts' gate and up: 43% of a layer's products
    pair, pairs = 2 * 2048 * (1 + 4 / 128), 104 * 512  # bytes of one; of a sequence, 104 blocks with their empty places
    units = (16 * 4 + 16 - 1 + 1) * 1  # slots of v P + P - 1 units, and one for those out of range, of a layer each
    assert own.memory.on_host - again.memory.on_host == pytest.approx(units * pairs * pair, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["configs.k2", "--nodes", "40"], 2, "got 320; next to it are 256 and 512"),
        (["configs.k2", "--nodes", "0"], 2, "--nodes must be at least 1; got 0"),
        (["configs.k2", "--nodes", "64", "--machine.network", "0"], 2, "--machine.network must be positive; got 0"),
        (["configs.k2", "--nodes", "32"], 1, "--mesh.offload"),
        (["configs.k2", "--nodes", "32", "--mesh.offload"], 0, "on the host"),
        (["configs.nothing"], 2, "there is no preset 'configs.nothing'"),
    ],
)
def test_the_command_line(arguments, code, said, capsys):
    assert plan.main(arguments) == code
    out, err = capsys.readouterr()
    assert said in (err if code == 2 else out) and (out + err).count("Traceback") == 0


def test_json_holds_what_the_table_says(planned, capsys):
    assert plan.main(["configs.k2", "--nodes", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["total"] == planned.memory.total and found["sizes"]["data"] == 2
    assert found["traffic"]["expert"]["seconds"] == planned.traffic["expert"].seconds


def test_search_finds_only_meshes_that_fit_fastest_first():
    run = k2_run()
    run = replace(run, batch=64, model=replace(run.model, n_layers=4, d_model=1024))
    found = plan.search(run, 16, replace(MACHINE, memory=24.0))
    assert found and all(plan.fits(one, replace(MACHINE, memory=24.0)) for one in found)
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert {one.devices for one in found} == {16}
    shapes = [(one.sizes.pipeline, one.sizes.expert, one.sizes.chunks) for one in found]
    assert len(set(shapes)) == len(shapes)
    assert "pipeline" in plan.table(found)
    assert not plan.search(run, 16, replace(MACHINE, memory=1.0))


@settings(max_examples=4, deadline=None)
@given(devices=st.sampled_from((2, 4)), layers=st.integers(1, 4), n_mtp=st.integers(0, 1), share=st.floats(0.3, 1.1))
def test_search_finds_what_trying_every_mesh_finds(devices, layers, n_mtp, share):
    base = k2_run(n_mtp)
    small = {"n_layers": layers, "n_words": 2048, "d_model": 256, "d_dense": 512}
    moe = replace(base.model.moe, n_experts=32, d_expert=64)
    run = replace(base, batch=16, seq_len=512, model=replace(base.model, moe=moe, **small))
    ranks = devices if run.model.n_moe + n_mtp else 1  # without experts there are replicas alone
    one_each = replace(run, mesh=MeshConfig(pipeline=1, expert=ranks))
    machine = replace(MACHINE, memory=share * plan.plan(one_each, devices, MACHINE).memory.total / 1e9)
    powers, found = [2**i for i in range(devices.bit_length())], {}
    for offload, P, EP, v in itertools.product((False, True), powers, powers, (1, 2, 4)):
        with contextlib.suppress(ValueError):
            sizes = MeshConfig(pipeline=P, expert=EP, chunks=v, offload=offload)
            one = plan.plan(replace(run, mesh=sizes), devices, machine)
            if plan.fits(one, machine) and one.empty < layers + n_mtp and (v == 1 or P > 1):
                found.setdefault((P, EP, v), one)
    wanted = sorted(found.values(), key=lambda one: one.step)
    assert plan.search(run, devices, machine) == wanted


def test_one_device_has_no_traffic():
    run = replace(k2_run(), mesh=MeshConfig(), batch=4, model=replace(k2_run().model, n_layers=2, d_model=256))
    one = plan.plan(run, 1, MACHINE)
    assert one.traffic["pipeline"].sent == one.traffic["expert"].sent == 0 and one.bubble == 0
