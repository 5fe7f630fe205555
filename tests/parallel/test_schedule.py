"""The index arithmetic, held by a simulator that moves labelled objects between stages, tick by tick."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2jax.parallel import schedule

SIZES = [(P, v) for P in (1, 2, 3, 4, 8, 16) for v in (1, 2, 3, 4)]


@dataclass
class Stage:
    """One device: what came in over the ring, the residuals it keeps, and what it has run as (tick, chunk, microbatch)."""

    activation: tuple | None = None  # (virtual stage that made it, microbatch)
    gradient: tuple | None = None
    slots: dict = field(default_factory=dict)  # slot -> (chunk, microbatch) that waits for its backward
    forward: list = field(default_factory=list)
    backward: list = field(default_factory=list)
    peak: int = 0


@dataclass
class Run:
    stages: list
    look_ups: list = field(default_factory=list)  # (tick, microbatch), as are the others
    heads: list = field(default_factory=list)
    embedding_gradients: list = field(default_factory=list)


def simulate(P: int, v: int, M: int) -> Run:
    """Runs a step; asserts that every input is there, from the right neighbour, and that no residual is lost."""
    run, last = Run([Stage() for _ in range(P)]), v * P - 1
    slot_of = schedule.residual_slots(P, v, M)
    for tick in range(schedule.ticks(P, v, M)):
        sent_on, sent_back, kept = {}, {}, {}
        for p, stage in enumerate(run.stages):
            k = tick - v * P - (P - 1) + p
            if 0 <= k < M * v:
                chunk, microbatch = schedule.backward_unit(k, P, v)
                virtual = chunk * P + p
                if virtual == last:
                    # The head needs the last chunk's output, which went round the ring to stage 0 in the tick before.
                    assert run.stages[0].activation == (last, microbatch)
                    run.heads.append((tick, microbatch))
                else:
                    assert stage.gradient == (virtual + 1, microbatch)
                slot = slot_of[p, schedule.forward_index(chunk, microbatch, P, v)]
                assert stage.slots.pop(slot) == (chunk, microbatch)  # so its forward was before
                stage.backward.append((tick, chunk, microbatch))
                sent_back[p] = virtual, microbatch
            k = tick - p
            if 0 <= k < M * v:
                chunk, microbatch = schedule.forward_unit(k, P, v)
                virtual = chunk * P + p
                if virtual == 0:
                    run.look_ups.append((tick, microbatch))
                else:
                    assert stage.activation == (virtual - 1, microbatch)
                assert slot_of[p, k] not in stage.slots
                kept[p] = slot_of[p, k], (chunk, microbatch)
                stage.forward.append((tick, chunk, microbatch))
                sent_on[p] = virtual, microbatch
        arrived = run.stages[P - 1].gradient
        if arrived is not None and arrived[0] == 0:
            run.embedding_gradients.append((tick, arrived[1]))
        for p, stage in enumerate(run.stages):  # what is sent arrives for the next tick, and only for it
            if p in kept:
                stage.slots[kept[p][0]] = kept[p][1]
            stage.peak = max(stage.peak, len(stage.slots))
            stage.activation = sent_on.get((p - 1) % P)
            stage.gradient = sent_back.get((p + 1) % P)
    arrived = run.stages[P - 1].gradient  # the last one comes after the last tick
    run.embedding_gradients.append((schedule.ticks(P, v, M), arrived[1]))
    return run


@pytest.mark.parametrize("P, v", SIZES)
def test_every_unit_runs_once_each_way_and_the_step_has_its_ticks(P, v):
    for M in (P, 2 * P, 4 * P):
        run, every = simulate(P, v, M), {(c, m) for c in range(v) for m in range(M)}
        for stage in run.stages:
            for done in (stage.forward, stage.backward):
                assert len(done) == M * v and {(c, m) for _, c, m in done} == every
            assert stage.slots == {}
        last_tick = max(tick for stage in run.stages for tick, *_ in stage.backward)
        assert schedule.ticks(P, v, M) == last_tick + 1 == M * v + v * P + P - 1


@pytest.mark.parametrize("P, v", SIZES)
def test_order_within_a_stage(P, v):
    run = simulate(P, v, 2 * P)
    for p, stage in enumerate(run.stages):
        first = stage.backward[0][0]
        assert sum(tick < first for tick, *_ in stage.forward) == 2 * (P - p - 1) + (v - 1) * P + 1
        # The pair of a tick is independent: one microbatch never has a forward and a backward unit in it, on no stage.
        microbatch = {tick: m for tick, _, m in stage.backward}
        both = [(m, microbatch[tick]) for tick, _, m in stage.forward if tick in microbatch]
        assert all(forward != backward for forward, backward in both)
        assert len(both) == 2 * P * v - (2 * (P - p - 1) + (v - 1) * P + 1)
    forward = {m: tick for tick, c, m in run.stages[-1].forward if c == v - 1}
    backward = {m: tick for tick, c, m in run.stages[-1].backward if c == v - 1}
    assert all(backward[m] == forward[m] + 1 for m in range(2 * P))


@pytest.mark.parametrize("P, v", SIZES)
def test_slots_are_as_few_as_the_live_residuals_and_flat_in_the_microbatches(P, v):
    used = {}
    for M in (P, 2 * P, 4 * P, 8 * P):
        run, table = simulate(P, v, M), schedule.residual_slots(P, v, M)
        assert table.dtype == np.int32 and table.shape == (P, M * v)
        assert [stage.peak for stage in run.stages] == (table.max(1) + 1).tolist()
        assert (np.diff(table.max(1)) <= 0).all()
        used[M] = schedule.n_slots(P, v, M)
        assert used[M] == run.stages[0].peak == min(M * v, v * P + P - 1)
    assert used[2 * P] == used[4 * P] == used[8 * P] <= v * P + P


@pytest.mark.parametrize("P, v", SIZES)
def test_edge_work_falls_in_the_first_ticks_of_a_round(P, v):
    """Look-up, head and the embedding gradient a tick late share the ticks t with t mod v*P < P, in microbatch order."""
    for M in (P, 2 * P, 4 * P):
        run = simulate(P, v, M)
        for edge in (run.look_ups, run.heads, run.embedding_gradients):
            assert [microbatch for _, microbatch in edge] == list(range(M))
            assert all(tick % (v * P) < P for tick, _ in edge)
        delay = [late - soon for (late, _), (soon, _) in zip(run.heads, run.look_ups, strict=True)]
        assert set(delay) == {v * P}
        first_chunk = [tick for tick, c, _ in run.stages[0].backward if c == 0]
        assert [tick - 1 for tick, _ in run.embedding_gradients] == first_chunk


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 6))
def test_any_size(P, v, rounds):
    run = simulate(P, v, rounds * P)
    assert all(len(stage.backward) == rounds * P * v and not stage.slots for stage in run.stages)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 4))
def test_index_is_the_inverse(P, v):
    k = np.arange(5 * v * P)
    chunk, microbatch = schedule.forward_unit(k, P, v)
    np.testing.assert_array_equal(schedule.forward_index(chunk, microbatch, P, v), k)
    reverse, same = schedule.backward_unit(k, P, v)
    np.testing.assert_array_equal(reverse, v - 1 - chunk)
    np.testing.assert_array_equal(same, microbatch)


def test_traced_indices_decode_as_integers_do():
    P, v = 4, 3
    for decode in (schedule.forward_unit, schedule.backward_unit):
        k = jnp.arange(-20, 60)  # empty units too
        chunk, microbatch = jax.jit(lambda k, decode=decode: decode(k, P, v))(k)
        want = [decode(int(i), P, v) for i in k]
        np.testing.assert_array_equal(np.stack([chunk, microbatch], 1), want)
    assert int(jax.jit(lambda c, m: schedule.forward_index(c, m, P, v))(2, 5)) == schedule.forward_index(2, 5, P, v)


@pytest.mark.parametrize("M, near", [(3, "4"), (0, "4"), (-2, "4"), (9, "8 or 12")])
def test_microbatches_that_do_not_divide_are_refused(M, near):
    for function in (schedule.ticks, schedule.residual_slots, schedule.n_slots):
        with pytest.raises(ValueError, match=rf"multiple of the 4 pipeline stages; got {M}, nearest are {near}$"):
            function(4, 2, M)
    with pytest.raises(ValueError, match="at least one stage and one chunk a stage; got 4 stages and 0 chunks"):
        schedule.ticks(4, 0, 4)
