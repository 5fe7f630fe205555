"""What the compiled training step does on H100s: its collectives, what runs beside them, and that nothing large is copied."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from k2jax.config import AttentionConfig, MeshConfig, ModelConfig, MoEConfig, RunConfig
from k2jax.parallel import aot, hlo, mesh, owned_update, schedule
from k2jax.train.step import abstract_state, make_step

SIZES = {"pipeline": 4, "expert": 2, "data": 2}  # 16 devices: with 2 stages the two rings would be one
CHUNKS, MICROBATCHES = 2, 8
D, F, T, WORDS, EXPERTS, BF16 = 256, 128, 256, 1024, 8, 2
RESIDUAL = T * D * BF16  # bytes of one layer's kept input


def run_config():
    """One layer a chunk, the first one dense; widths that make real matrix products."""
    attention = AttentionConfig(n_heads=4, n_kv_heads=4, q_rank=128, kv_rank=128, d_nope=64, d_rope=64, d_value=64, block=128)
    model = ModelConfig(
        n_words=WORDS,
        d_model=D,
        n_layers=SIZES["pipeline"] * CHUNKS,
        n_dense=1,
        d_dense=2 * F,
        context=T,
        dtype="bfloat16",
        loss_chunk=128,
        attention=attention,
        moe=MoEConfig(n_experts=EXPERTS, n_active=2, d_expert=F, routed_scale=1.0),
    )
    batch = MICROBATCHES * SIZES["expert"] * SIZES["data"]
    return RunConfig(batch=batch, seq_len=T, microbatches=MICROBATCHES, model=model, mesh=MeshConfig(**SIZES, chunks=CHUNKS))


@pytest.fixture(scope="module")
def program():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    config = run_config()
    devices = mesh.make(config, aot.h100(math.prod(SIZES.values())))
    rows = jax.ShapeDtypeStruct((config.batch, T + 1), jnp.int32, sharding=NamedSharding(devices, mesh.BATCH))
    batch = {name: rows for name in ("tokens_BT", "segments_BT", "positions_BT")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owned_update, "AT_ONCE", 0)  # matrices one by one, as large ones are
        step = make_step(config, devices).lower(abstract_state(config, devices), batch, jnp.float32(1e6))
    return hlo.parse(step.compile(compiler_options=aot.OVERLAP).as_text())


@pytest.fixture(scope="module")
def ticks(program):
    """The three loops over ticks, in order: forward units, both, backward units."""
    return [i for i in program.computations[program.entry] if i.opcode == "while" and _moves_on(program, i.calls[0])]


@pytest.fixture(scope="module")
def steady(ticks):
    return ticks[1].calls[0]


def _moves_on(program, body):
    return any(e.kind == "collective-permute" for e in program.exchanges(body))


def count(exchanges):
    """Arrays sent by kind and axes; those sent together count each."""
    found = Counter()
    for e in exchanges:
        found[e.kind, *e.axes(SIZES)] += len(e.operands)
    return found


def test_three_loops_of_as_many_ticks_as_the_schedule_says(ticks):
    period = SIZES["pipeline"] * CHUNKS
    both = MICROBATCHES * CHUNKS + SIZES["pipeline"] - 1 - period
    assert [loop.trips for loop in ticks] == [period, both, period]
    assert sum(loop.trips for loop in ticks) == schedule.ticks(SIZES["pipeline"], CHUNKS, MICROBATCHES)


def test_collectives_of_a_tick(program, ticks):
    """Forward: dispatch, combine, permute. Backward: dispatch, combine of the gradients, permute."""
    one_way = {("all-to-all", "expert"): 2, ("collective-permute", "pipeline"): 1}
    counts = [count(program.exchanges(loop.calls[0])) for loop in ticks]
    assert counts == [one_way, {kind: 2 * n for kind, n in one_way.items()}, one_way]


def test_a_tick_sums_nothing_but_the_vocabulary(program, steady):
    """In inner loops: further rounds of the exchanges; look-up, its gradient, and the head's input, maximum, sums, gradient."""
    inner = count(program.all_exchanges(steady)) - count(program.exchanges(steady))
    assert inner == {("all-to-all", "expert"): 4, ("all-reduce", "pipeline"): 6}


def test_weights_are_gathered_once_before_the_ticks_and_gradients_scattered_once_after(program, ticks):
    first, last = ticks[0].index, ticks[-1].index
    outside = program.exchanges(program.entry)
    before = count(e for e in outside if e.kind in ("all-gather", "reduce-scatter") and e.start.index < first)
    # Arrays in bfloat16 and in float32 (norms, router); three stacks of experts.
    assert before == {("all-gather", "expert", "data"): 2, ("all-gather", "data"): 3}
    after = count(e for e in outside if e.kind == "reduce-scatter" and e.start.index > last)
    assert after == {("reduce-scatter", "expert", "data"): 1, ("reduce-scatter", "data"): 3}
    # Of the optimizer's results nothing is gathered: only the largest logits and the loads of each stage's slots.
    gathered = [e for e in outside if e.kind == "all-gather" and e.start.index > last]
    assert sum(e.bytes for e in gathered) == 4 * CHUNKS * (4 + EXPERTS)


def test_gathered_weights_are_half_precision(program, ticks):
    gathers = [e for e in program.exchanges(program.entry) if e.kind == "all-gather" and e.start.index < ticks[0].index]
    (experts,) = [e for e in gathers if e.axes(SIZES) == ("data",)]
    pairs = CHUNKS * EXPERTS // SIZES["expert"]  # of slot and expert on a device
    assert experts.bytes == 3 * pairs * D * F * BF16 // SIZES["data"]


def test_newton_schulz_runs_without_collectives(program, ticks):
    loops = [i for i in program.computations[program.entry] if i.opcode == "while" and i.index > ticks[-1].index]
    compute = [loop for loop in loops if program.flops(loop)]
    assert compute and all(program.is_compute(loop) for loop in compute)


def test_every_exchange_of_the_steady_tick_has_compute_beside_it(program, steady):
    for exchange in program.exchanges(steady):
        assert program.cover(exchange), f"nothing runs beside {exchange.start.name}: {[i.name for i in exchange.between]}"


def test_the_input_gradient_leaves_before_the_experts_weight_gradients(program, steady):
    lines = program.computations[steady]
    gradient = f"f32[{CHUNKS * EXPERTS // SIZES['expert']},{F},{D}]"  # of the down projections, all slots and experts
    products = [i for i in lines if i.opcode == "custom-call" and i.shape.startswith(gradient) and program.is_compute(i)]
    permutes = [e for e in program.exchanges(steady) if e.kind == "collective-permute"]
    (gradient_permute,) = [e for e in permutes if e.shift(SIZES) == {(SIZES["pipeline"] - 1, 0, 0)}]
    assert gradient_permute.start.index < products[-1].index
    assert any(products[-1] in e.between for e in permutes)  # one permute at a time: the other's may be the one under way


def test_the_steady_tick_copies_nothing_larger_than_a_residual(program, steady):
    copies = [(i.name, i.shape, i.op_name) for i in program.copies(steady, above=RESIDUAL)]
    assert not copies


def test_devices_that_do_not_fill_their_hosts_are_refused():
    with pytest.raises(ValueError, match=r"multiple of per_node.*n_devices=12"):
        aot.h100(12)


def test_chips_that_do_not_fill_a_torus_are_refused():
    with pytest.raises(ValueError, match=r"fill a torus.*n_devices=12"):
        aot.v5p(12)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(aot, "ptxas", lambda: None)
    with pytest.raises(RuntimeError, match=r"ptxas.*pip install -e '\.\[aot\]'"):
        aot.h100(8)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"libtpu.*pip install -e '\.\[tpu\]'"):
        aot.v5p(8)


@pytest.mark.parametrize(("n_devices", "last"), [(16, (1, 1, 3)), (256, (3, 7, 7)), (512, (7, 7, 7))])
def test_a_torus_of_v5p_is_as_round_as_can_be(n_devices, last):
    pytest.importorskip("libtpu", reason="compiling for TPU v5p needs pip install -e '.[tpu]'")
    devices = aot.v5p(n_devices)
    assert len(devices) == n_devices and {d.platform for d in devices} == {"tpu"}
    assert tuple(max(d.coords[axis] for d in devices) for axis in range(3)) == last


def test_h100_and_cpu_devices_live_in_one_process():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    assert len(jax.devices()) == 8 and jax.devices()[0].platform == "cpu"
    devices = aot.h100(16)
    assert len(devices) == 16 and devices[0].device_kind.startswith("NVIDIA H100")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    assert "is_scheduled=true" in jax.jit(jnp.dot).lower(x, x).compile().as_text()
    assert jax.jit(jnp.dot)(jnp.eye(2), jnp.eye(2)).devices() == {jax.devices()[0]}
