"""Who runs what in which tick: interleaved 1F1B in lock step (report 2.4.2).

The model is cut in v * P chunks of layers. Stage p of P holds every P-th of them, v in all, and a microbatch goes round the
ring of stages v times. Work comes in units, a unit being one chunk of one microbatch. In a tick each stage runs one forward and
one backward unit: unit k of stage p runs forward in tick k + p, and backward in tick k + v * P + P - 1 - p. Units take P
microbatches through chunk 0, the same P through chunk 1 and so on, then the next P; the backward units take the chunks in
reverse.

It follows that a unit's input was made by the neighbour on the ring in the tick before, so nothing waits in a queue; that the
last stage runs a chunk's backward in the tick after its forward; and that stage p has run 2 * (P - p - 1) + (v - 1) * P + 1
forward units when its first backward comes. That is the count of interleaved 1F1B and one more: the two units of a tick are
never of the same microbatch, so neither waits for the other and each can hide the other's exchanges. Units outside
0 <= k < M * v are empty: the stage waits for its first, or has finished. With v = 1 this is 1F1B with twice the warm-up.
"""

import heapq

import numpy as np
from jax import Array

Index = int | np.integer | np.ndarray | Array  # everything below that takes one is arithmetic, so it may be traced


def ticks(P: int, v: int, M: int) -> int:
    """Ticks of a step of M microbatches on P stages of v chunks. ValueError unless M is a multiple of P."""
    _check(P, v, M)
    return M * v + v * P + P - 1


def forward_unit(k: Index, P: int, v: int) -> tuple[Index, Index]:
    """(chunk, microbatch) of forward unit k, which stage p runs in tick k + p."""
    group, r = k // (v * P), k % (v * P)
    return r // P, group * P + r % P


def backward_unit(k: Index, P: int, v: int) -> tuple[Index, Index]:
    """(chunk, microbatch) of backward unit k, which stage p runs in tick k + v * P + P - 1 - p."""
    chunk, microbatch = forward_unit(k, P, v)
    return v - 1 - chunk, microbatch


def forward_index(chunk: Index, microbatch: Index, P: int, v: int) -> Index:
    """The forward unit that runs `chunk` on `microbatch`: the inverse of `forward_unit`."""
    return microbatch // P * (v * P) + chunk * P + microbatch % P


def residual_slots(P: int, v: int, M: int) -> np.ndarray:
    """Returns int32 [P, M * v]: the slot in which a stage keeps what a forward unit leaves for its backward unit.

    A tick's forward unit may write the slot that its backward unit reads, so read first. No stage uses more slots than it has
    run forward units before its first backward one: stage 0 min(M * v, v * P + P - 1). ValueError unless M is a multiple of P.
    """
    _check(P, v, M)
    unit = np.arange(M * v)
    chunk, microbatch = forward_unit(unit, P, v)
    backward = forward_index(v - 1 - chunk, microbatch, P, v)  # the backward units count the chunks in reverse
    table = np.empty((P, M * v), np.int32)
    for p in range(P):
        table[p] = _lowest_free(unit + p, backward + v * P + P - 1 - p)
    return table


def n_slots(P: int, v: int, M: int) -> int:
    """Slots that hold the residuals of every stage."""
    return int(residual_slots(P, v, M).max()) + 1


def _lowest_free(written: np.ndarray, read: np.ndarray) -> list[int]:
    """Gives each interval, from the tick it is written in to the tick it is read in, the lowest slot free by then."""
    slots, free, busy, used = [], [], [], 0
    for start, end in zip(written.tolist(), read.tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        slots.append(heapq.heappop(free))
        heapq.heappush(busy, (end, slots[-1]))
    return slots


def _check(P: int, v: int, M: int) -> None:
    if P < 1 or v < 1:
        raise ValueError(f"a pipeline needs at least one stage and one chunk a stage; got {P} stages and {v} chunks")
    if M < 1 or M % P:
        below, above = M // P * P, (M // P + 1) * P
        near = f"{below} or {above}" if below > 0 else f"{max(above, P)}"
        raise ValueError(f"microbatches must be a multiple of the {P} pipeline stages; got {M}, nearest are {near}")
