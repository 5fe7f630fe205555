"""Pipeline schedules as programs of items, with their published bubbles and memory.

A model is cut in chunks, numbered along the path of a microbatch; a unit is one chunk of one microbatch, forward or backward.
A device runs its items one after the other. An item is a forward unit, a backward unit (input gradients), the weight gradients
of a unit, or several of these: a forward and a backward unit in one item are paired, the exchanges of each beside the
computation of the other (report 2.4.2, figure 7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k2jax.parallel import schedule

Unit = tuple[int, int]  # chunk along the microbatch's path, microbatch
EMPTY: Unit = (-1, -1)  # a unit that a lock-step program computes and throws away


class Item(NamedTuple):
    """What a device does in one go."""

    forward: Unit | None = None
    backward: Unit | None = None
    weights: Unit | None = None


class Sizes(NamedTuple):
    """P stages of `layers` layers in v chunks, M microbatches."""

    P: int
    v: int
    M: int
    layers: int


@dataclass(frozen=True)
class Schedule:
    """A program for every device, and what is published of it."""

    name: str
    items: list[list[Item]]  # by device
    device_of: list[int]  # of every chunk
    depth: int  # chunks on a microbatch's path
    layers: int  # a chunk
    bubble: Callable[[float, float, float], float]  # time a device waits, of forward, input and weight gradients of a stage
    residuals: int  # most that a device keeps, in layers of one microbatch
    lock_step: bool = False  # gradients leave before the weight gradients are made, and an item ends when its transfers have
    equal_costs: bool = False  # the bubble is exact where forward, input and weight gradients take as long, else about right
    copies: int = 1  # of a stage's parameters and gradients on a device

    def before(self, kind: str, unit: Unit) -> Unit | None:
        """The unit whose result this one takes from elsewhere; None at either end of the path."""
        chunk, microbatch = unit
        step = -1 if kind == "forward" else 1
        end = 0 if kind == "forward" else self.depth - 1
        return None if chunk % self.depth == end else (chunk + step, microbatch)

    def after(self, kind: str, unit: Unit) -> Unit | None:
        """The unit that takes this one's result."""
        return self.before("backward" if kind == "forward" else "forward", unit)


def all_of(sizes: Sizes) -> list[Schedule]:
    """Every schedule that the sizes allow: DualPipe only if `has_dualpipe`."""
    P, v, M, layers = sizes
    found = [gpipe(P, M, layers), one_f_one_b(P, M, layers), zb_h1(P, M, layers)]
    found += [dualpipe(P, M, layers)] if has_dualpipe(sizes) else []
    return [*found, interleaved(P, v, M, layers), lock_step(P, v, M, layers)]


def has_dualpipe(sizes: Sizes) -> bool:
    """Whether stages and microbatches are even, and microbatches at least two a stage."""
    return sizes.P % 2 == 0 and sizes.M % 2 == 0 and sizes.M >= 2 * sizes.P


def gpipe(P: int, M: int, layers: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018)."""
    items = []
    for p in range(P):
        forwards = [Item(forward=(p, m)) for m in range(M)]
        items.append(forwards + [Item(backward=(p, m), weights=(p, m)) for m in reversed(range(M))])
    return Schedule("GPipe", items, _ring(P, 1), P, layers, _fused_bubble(P, 1), M * layers)


def one_f_one_b(P: int, M: int, layers: int) -> Schedule:
    """A forward and a backward in turn, after P - p - 1 forwards (PipeDream-flush; Narayanan et al. 2021)."""
    units = [[(p, m) for m in range(M)] for p in range(P)]
    items = [_alternate(units[p], units[p], P - p - 1) for p in range(P)]
    return Schedule("1F1B", items, _ring(P, 1), P, layers, _fused_bubble(P, 1), min(M, P) * layers)


def interleaved(P: int, v: int, M: int, layers: int) -> Schedule:
    """Interleaved 1F1B as Megatron-LM runs it: 2(P - p - 1) + (v - 1)P warm-up forwards (Narayanan et al. 2021)."""
    forwards, backwards = _units(schedule.forward_unit, P, v, M), _units(schedule.backward_unit, P, v, M)
    items = [_alternate(forwards[p], backwards[p], 2 * (P - p - 1) + (v - 1) * P) for p in range(P)]
    kept = min(M * v, v * P + P - 1) * layers // v
    return Schedule("interleaved", items, _ring(P, v), v * P, layers // v, _fused_bubble(P, v), kept)


def lock_step(P: int, v: int, M: int, layers: int) -> Schedule:
    """Ours, `k2jax.parallel`: interleaved with one more warm-up forward, so that a tick pairs a forward and a backward.

    Its residuals are one more than its slots: those of the unit that ends and of the one that starts in the same tick.
    """
    forwards, backwards = _units(schedule.forward_unit, P, v, M), _units(schedule.backward_unit, P, v, M)
    items = []
    for p in range(P):
        program = []
        for t in range(schedule.ticks(P, v, M)):
            # Which phases a tick belongs to is the same on all devices; a device without a unit computes an empty one.
            ahead = _at(forwards[p], t - p) if t < M * v + P - 1 else None
            back = _at(backwards[p], t - v * P - (P - 1 - p)) if t >= v * P else None
            program.append(Item(ahead, back, back))
        items.append(program)
    kept = min(M * v, v * P + P) * layers // v
    return Schedule("ours", items, _ring(P, v), v * P, layers // v, _fused_bubble(P, v), kept, lock_step=True)


def zb_h1(P: int, M: int, layers: int) -> Schedule:
    """1F1B whose weight gradients come later, where they fill the drain (Qi et al. 2023): stage p keeps up to p waiting."""
    items = []
    for p in range(P):
        warm, waiting = min(P - p - 1, M), []
        program = [Item(forward=(p, m)) for m in range(warm)]
        for m in range(M):
            if m + warm < M:
                program.append(Item(forward=(p, m + warm)))
            program.append(Item(backward=(p, m)))
            waiting.append((p, m))
            if len(waiting) > p:
                program.append(Item(weights=waiting.pop(0)))
        items.append(program + [Item(weights=unit) for unit in waiting])

    def wait(F, B, W):
        return (P - 1) * (F + B - W)

    return Schedule("ZB-H1", items, _ring(P, 1), P, layers, wait, min(M, P) * layers, equal_costs=True)


def dualpipe(P: int, M: int, layers: int) -> Schedule:
    """Microbatches from both ends, M / 2 each way, over two copies of the parameters (DeepSeek-V3 report 3.2.1).

    The order is that of the published program. Device p holds stage p of the one path and stage P - 1 - p of the other, whose
    chunks are numbered from P. P must be even, M even and at least 2P.
    """
    items = [_dualpipe_device(P, M, p) for p in range(P)]
    both_ways = [*range(P), *reversed(range(P))]

    def wait(F, B, W):
        return (P / 2 - 1) * ((F + B + W) + (B + W) - 3 * W)

    return Schedule("DualPipe", items, both_ways, P, layers, wait, (P + 1) * layers, equal_costs=True, copies=2)


class _Program:
    """A device's items in DualPipe. Way 0 is the path that the device is nearer the start of; its units count from 0 each."""

    def __init__(self, P: int, p: int):
        far = p >= P // 2
        self.chunk = (P + P - 1 - p, p) if far else (p, P + P - 1 - p)
        self.done = {"forward": [0, 0], "backward": [0, 0]}
        self.items, self.waiting = [], []

    def _next(self, kind: str, way: int) -> Unit:
        self.done[kind][way] += 1
        return self.chunk[way], self.done[kind][way] - 1

    def forward(self, way: int) -> None:
        self.items.append(Item(forward=self._next("forward", way)))

    def backward(self, way: int, later: bool = False) -> None:
        unit = self._next("backward", way)
        self.items.append(Item(backward=unit, weights=None if later else unit))
        if later:
            self.waiting.append(unit)

    def pair(self, ahead: int, back: int) -> None:
        unit = self._next("backward", back)
        self.items.append(Item(self._next("forward", ahead), unit, unit))

    def weights(self) -> None:
        self.items.append(Item(weights=self.waiting.pop(0)))


def _dualpipe_device(P: int, M: int, p: int) -> list[Item]:
    """The eight steps of the published program; `out` is the number of devices further out, `inn` of those further in."""
    program, out = _Program(P, p), min(p, P - 1 - p)
    inn = P // 2 - 1 - out
    for _ in range(2 * inn):
        program.forward(0)
    for _ in range(out + 1):
        program.forward(0)
        program.forward(1)
    for _ in range(inn):
        program.backward(1, later=True)
        program.weights()
        program.forward(1)
    for i in range(M // 2 - P + out + 1):
        if i == 0 and inn == 0:  # the innermost devices do not pair their first two: that would make the others wait
            program.forward(0)
            program.backward(1)
        else:
            program.pair(0, 1)
        program.pair(1, 0)
    for _ in range(inn):
        program.backward(1)
        program.pair(1, 0)
    for i in range(out + 1):
        program.backward(1, later=i > out // 2)
        program.backward(0, later=i >= (out + 1) // 2)
    for _ in range(inn):
        program.weights()
        program.backward(0, later=True)
    while program.waiting:
        program.weights()
    return program.items


def _ring(P: int, v: int) -> list[int]:
    """The device of every chunk."""
    return [chunk % P for chunk in range(v * P)]


def _fused_bubble(P: int, v: int) -> Callable[[float, float, float], float]:
    """The bubble where weight gradients belong to the backward unit."""
    return lambda F, B, W: (P - 1) * (F + B + W) / v


def _alternate(forwards: Sequence[Unit], backwards: Sequence[Unit], warm_up: int) -> list[Item]:
    """Warm-up forwards, then a forward and a backward in turn, then the backwards that are left."""
    program = [Item(forward=unit) for unit in forwards[:warm_up]]
    for i, back in enumerate(backwards):
        program += [Item(forward=unit) for unit in forwards[warm_up + i : warm_up + i + 1]]
        program.append(Item(backward=back, weights=back))
    return program


def _units(decode: Callable, P: int, v: int, M: int) -> list[list[Unit]]:
    """The units of every stage in order."""
    pairs = [decode(k, P, v) for k in range(M * v)]
    return [[(chunk * P + p, microbatch) for chunk, microbatch in pairs] for p in range(P)]


def _at(units: Sequence[Unit], k: int) -> Unit:
    return units[k] if 0 <= k < len(units) else EMPTY
