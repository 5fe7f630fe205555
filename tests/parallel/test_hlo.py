import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k2jax.parallel import hlo
from k2jax.parallel.aot import OVERLAP, h100

SIZES = {"pipeline": 2, "expert": 2, "data": 2}
ALL = P(tuple(SIZES))
T, D, E, TICKS = 512, 256, 4, 16
ROWS = T * D * 2  # bytes of one device's rows


def dot(x, w):
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def experts(x, w):
    return lax.fori_loop(0, E, lambda e, x: dot(x, w[e]), x)


def weight_gradients(total, x, g):
    x, g = (a.reshape(E, -1, D) for a in (x, g))
    return lax.fori_loop(
        0, E, lambda e, total: total.at[e].add(jnp.dot(x[e].T, g[e], preferred_element_type=jnp.float32)), total
    )


def exchange(x):
    return lax.all_to_all(x, "expert", 0, 0, tiled=True)


def ring(x):
    return lax.ppermute(x, "pipeline", [(0, 1), (1, 0)])


def paired(x, g, total, w):
    """Each stream's exchange beside the other's experts, then the permute beside the weight gradients."""
    x, g_far = lax.optimization_barrier((exchange(x), experts(g, w)))
    x_far, g = lax.optimization_barrier((experts(x, w), exchange(g_far)))
    g, x, g_far = lax.optimization_barrier((g, x, g_far))
    return x_far, ring(g), weight_gradients(total, x, g_far)


def chained(x, g, total, w):
    """Nothing to do while a stream is exchanged."""
    return experts(exchange(experts(x, w)), w), g, total


def beside_another(x, g, total, w):
    """Beside the exchange runs nothing but a loop that has exchanges of its own."""
    x, g = lax.optimization_barrier((exchange(x), lax.fori_loop(0, E, lambda e, g: exchange(dot(g, w[e])), g)))
    return experts(x, w), g, total


def reduced(x, g, total, w):
    """A sum over two axes in every tick."""
    total = weight_gradients(total, x, g)
    return x, g, lax.psum(total, ("expert", "data")) * 0.25


def target():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    return Mesh(np.array(h100(8)).reshape(2, 2, 2), tuple(SIZES))


def compiled(f, *shapes, **options):
    mesh = target()
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    f = jax.shard_map(f, mesh=mesh, in_specs=tuple(s for _, s in shapes), out_specs=ALL, check_vma=False)
    return hlo.parse(jax.jit(f).lower(*args).compile(compiler_options=OVERLAP | options).as_text())


@functools.cache
def loop_of(tick, **options):
    """The program of a loop of ticks, and the name of its body."""

    def run(x, g, w):
        start = x, g, jnp.zeros((E, D, D), jnp.float32)
        return lax.fori_loop(0, TICKS, lambda _, carry: tick(*carry, w), start)

    rows = ((8 * T, D), ALL)
    program = compiled(run, rows, rows, ((E, D, D), P()), **options)
    (outer,) = [i for i in program.computations[program.entry] if i.opcode == "while"]
    assert outer.trips == TICKS
    return program, outer.calls[0]


def test_covered_exchanges_are_found_with_axis_size_and_cover():
    program, body = loop_of(paired)
    first, second, permute = program.exchanges(body)
    assert [e.kind for e in (first, second, permute)] == ["all-to-all", "all-to-all", "collective-permute"]
    assert [e.axes(SIZES) for e in (first, second, permute)] == [("expert",), ("expert",), ("pipeline",)]
    assert [e.bytes for e in (first, second, permute)] == [ROWS] * 3
    for e, flops in ((first, E * 2 * T * D * D), (second, E * 2 * T * D * D), (permute, 2 * T * D * D)):
        (loop,) = program.cover(e)
        assert loop.opcode == "while" and loop.trips == E
        assert program.flops(loop) == flops
    assert program.bodies(lambda found: {"all-to-all", "collective-permute"} <= {e.kind for e in found}) == [body]


def test_an_exchange_with_nothing_beside_it_has_no_cover():
    program, body = loop_of(chained)
    (alone,) = program.exchanges(body)
    assert alone.kind == "all-to-all" and not program.cover(alone)


def test_what_stands_between_the_ends_of_a_synchronous_exchange_is_no_cover():
    program, body = loop_of(paired, xla_gpu_disable_async_collectives="ALLTOALL")
    first, second, permute = program.exchanges(body)
    assert first.is_sync and second.is_sync and not permute.is_sync
    assert any(program.is_compute(i) for i in first.between) and not program.cover(first)
    assert program.cover(permute)


def test_a_loop_with_exchanges_of_its_own_is_no_cover():
    program, body = loop_of(beside_another)
    (outer,) = program.exchanges(body)
    assert len(program.all_exchanges(body)) == 2
    assert not program.cover(outer)


def test_a_hidden_sum_is_found_in_the_body():
    program, body = loop_of(reduced)
    (found,) = program.exchanges(body)
    assert found.kind == "all-reduce" and found.axes(SIZES) == ("expert", "data")
    assert found.bytes == E * D * D * 4
    assert all(e.kind != "all-reduce" for e in loop_of(paired)[0].all_exchanges(loop_of(paired)[1]))


@pytest.mark.parametrize("read_first", [True, False])
def test_a_buffer_copied_every_tick_is_found(read_first):
    """Eight residuals, one read and one written in a tick; a read after the write needs the buffer twice."""
    slots, above = 8, 4 * ROWS

    def tick(t, carry, w):
        before, x = carry
        read = lax.dynamic_index_in_dim(before, (t * 3) % slots, keepdims=False)
        if read_first:
            read, before = lax.optimization_barrier((read, before))
        kept = lax.dynamic_update_index_in_dim(before, dot(x, w), t % slots, 0)
        if not read_first:
            before, kept = lax.optimization_barrier((before, kept))
            read = lax.dynamic_index_in_dim(before, (t * 3) % slots, keepdims=False)
        return kept, exchange(dot(x + read, w))

    def run(kept, x, w):
        return lax.fori_loop(0, TICKS, lambda t, c: tick(t, c, w), (kept, x))

    program = compiled(run, ((8 * slots, T, D), ALL), ((8 * T, D), ALL), ((D, D), P()))
    (body,) = program.bodies(bool)
    assert bool(program.copies(body, above)) != read_first


def test_collectives_outside_loops():
    """ZeRO-1's two: a sum of which each rank keeps a part, and the parts put together."""

    def run(x):
        part = lax.psum_scatter(x.astype(jnp.float32), ("expert", "data"), tiled=True)
        return lax.all_gather(part * 2, "data", tiled=True)

    program = compiled(run, ((8 * T, D), ALL))
    scatter, gather = program.exchanges(program.entry)
    assert (scatter.kind, scatter.axes(SIZES), scatter.bytes) == ("reduce-scatter", ("expert", "data"), 2 * ROWS)
    assert (gather.kind, gather.axes(SIZES), gather.bytes) == ("all-gather", ("data",), 2 * ROWS // 4)
    assert program.loops() == []


def test_forms_of_replica_groups():
    def axes(groups):
        line = f"  %a = f32[4]{{0}} all-reduce(%x), {groups}, to_apply=%sum"
        head = "HloModule m, is_scheduled=true\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
        program = hlo.parse(head + line + "\n}")
        return program.exchanges("main")[0].axes({"pipeline": 2, "expert": 3, "data": 4})

    assert axes("replica_groups=[6,4]<=[24]") == ("data",)
    assert axes("replica_groups=[2,12]<=[24]") == ("expert", "data")
    assert axes("replica_groups=[8,3]<=[2,3,4]T(0,2,1)") == ("expert",)
    assert axes("replica_groups=[12,2]<=[2,12]T(1,0)") == ("pipeline",)
    assert axes("replica_groups={{0,12},{1,13}}") == ("pipeline",)
    assert axes("replica_groups={}") == ("pipeline", "expert", "data")


def test_a_collective_wrapped_in_a_computation():
    text = """HloModule m, is_scheduled=true

%wrapped (p: bf16[8,4]) -> bf16[4,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %inner = bf16[4,4]{1,0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%sum
}

ENTRY %main (x: bf16[8,4]) -> (bf16[4,4], /*index=1*/f32[]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %start = ((bf16[8,4]{1,0}), bf16[4,4]{1,0}, s32[]) async-start(%x), calls=%wrapped
  %product = f32[]{:S(5)} custom-call(%x), custom_call_target="__cublas$gemm"
  %done = bf16[4,4]{1,0} async-done(%start)
  ROOT %out = (bf16[4,4]{1,0}, /*index=1*/f32[]) tuple(%done, %product)
}
"""
    program = hlo.parse(text)
    (found,) = program.exchanges("main")
    assert (found.kind, found.bytes, found.done.name) == ("reduce-scatter", 64, "done")
    assert [i.name for i in program.cover(found)] == ["product"]
    assert program.computations["main"][-1].bytes == 36


def test_an_unscheduled_program_is_refused():
    with pytest.raises(ValueError, match="must be scheduled"):
        hlo.parse(jax.jit(lambda x: x + 1).lower(1.0).as_text("hlo"))
