"""What a step of a pipeline schedule takes: time, waiting, residuals, exposed communication.

Every device has a lane for computation, one for the experts' exchanges, one for the transfers it sends to other stages, and two
for copies to and from the host. An item's forward or backward unit alternates between computing and exchanging, layer by layer,
and waits for itself; in a pair each step of the one runs beside a step of the other. Left out: embedding, head and optimizer,
uneven loads, and that lanes slow each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from experiments._schedules import EMPTY, Item, Schedule, Unit

CAUSES = ("exchange", "transfer", "copy", "bubble")  # why a device does not compute
PHASES = ("warm-up", "steady", "drain")


class Costs(NamedTuple):
    """Milliseconds, for one microbatch and, but for `transfer`, one layer."""

    attention: float  # forward: attention, router, shared expert; what needs no exchange
    experts: float  # forward
    attention_back: float  # input gradients
    experts_back: float
    attention_weights: float  # weight gradients
    experts_weights: float
    exchange: float  # dispatch or combine, forward or backward: four a layer
    transfer: float  # from a stage to the next
    copy: float  # what a layer keeps for its backward: to the host, and as long back
    recompute: bool  # the backward repeats the forward up to the experts' hidden state, and its first exchange is twice as long

    @property
    def forward(self) -> float:
        return self.attention + self.experts

    @property
    def repeated(self) -> tuple[float, float]:
        """What the backward does again: of attention, and of the experts, whose last of three products is not needed."""
        return (self.attention, self.experts * 2 / 3) if self.recompute else (0.0, 0.0)

    @property
    def backward(self) -> float:
        return self.attention_back + self.experts_back + sum(self.repeated)

    @property
    def weights(self) -> float:
        return self.attention_weights + self.experts_weights

    @property
    def cover(self) -> float:
        """The longest exchange that is hidden in a pair: each of four runs beside one computation of the other unit."""
        beside_first = self.attention / (2 if self.recompute else 1)
        return min(beside_first, self.experts_back + self.repeated[1], self.experts, self.attention_back)

    def faster(self, times: float) -> "Costs":
        """The same on a device that computes `times` as fast, with the same links."""
        return Costs(*(ms / times for ms in self[:6]), *self[6:])

    def silent(self) -> "Costs":
        """The same without communication."""
        return self._replace(exchange=0.0, transfer=0.0, copy=0.0)


EQUAL = Costs(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, exchange=0.0, transfer=0.0, copy=0.0, recompute=False)


class Task(NamedTuple):
    """A stretch of a lane."""

    lane: str
    kind: str  # forward, backward or weights of an item
    unit: Unit
    ms: float
    key: tuple
    needs: tuple[tuple, ...]  # keys of the tasks that must have ended


class Ran(NamedTuple):
    """When a task ran, in ms from the start of the step."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step that was simulated."""

    schedule: Schedule
    costs: Costs
    lanes: list[dict[str, list[Ran]]]  # by device, in order of time

    @property
    def makespan(self) -> float:
        """Milliseconds of a step."""
        return max(ran[-1].end for lanes in self.lanes for ran in lanes.values() if ran)

    @property
    def work(self) -> float:
        """Milliseconds that each device computes, empty units left out; the same for all devices."""
        return sum(r.end - r.start for r in self.lanes[0]["compute"] if r.task.unit != EMPTY)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs a step: a task starts once its lane is free and all it needs has ended. RuntimeError if items wait in a circle."""
    queues = {}
    for device in range(len(schedule.items)):
        for task in _Device(schedule, device, costs).tasks():
            queues.setdefault((device, task.lane), []).append(task)
    lanes: list[dict[str, list[Ran]]] = [{} for _ in schedule.items]
    ended, blocked, ready = {}, {}, list(queues)
    while ready:
        device, lane = ready.pop()
        queue, ran = queues[device, lane], lanes[device].setdefault(lane, [])
        while len(ran) < len(queue):
            task = queue[len(ran)]
            missing = next((key for key in task.needs if key not in ended), None)
            if missing is not None:
                blocked.setdefault(missing, []).append((device, lane))
                break
            start = max([ended[key] for key in task.needs] + [ran[-1].end if ran else 0.0])
            ran.append(Ran(task, start, start + task.ms))
            ended[task.key] = start + task.ms
            ready.extend(blocked.pop(task.key, ()))
    if len(ended) < sum(map(len, queues.values())):
        raise RuntimeError(f"{schedule.name}: items wait for each other in a circle")
    return Timeline(schedule, costs, lanes)


@dataclass(frozen=True)
class _Device:
    schedule: Schedule
    device: int
    costs: Costs

    def tasks(self) -> Iterator[Task]:
        """All tasks of a device, those of a lane in order."""
        program = self.schedule.items[self.device]
        away = self._copied(program) if self.costs.copy else set()
        ends: list[tuple] = [(), ()]  # keys at which the item before the last, and the last, were over
        for i, item in enumerate(program):
            needs = self._arrivals(item)
            if item.backward in away:  # fetched while the item before runs
                key = ("fetched", item.backward)
                yield self._copy("fetch", item.backward, key, (("stored", item.backward), *ends[-2]))
                needs = (*needs, key)
            last = ends[-1]
            for j, step in enumerate(_steps(item, self.costs, self.schedule.layers)):
                keys = tuple((self.device, i, j, lane) for lane, *_ in step)
                for key, (lane, kind, unit, ms) in zip(keys, step, strict=True):
                    yield Task(lane, kind, unit, ms, key, (*last, *needs))
                last, needs = keys, ()
            over, sends = last, list(self._sends(item))
            if item.weights is not None:
                key = (self.device, i, "weights")
                yield Task("compute", "weights", item.weights, self.schedule.layers * self.costs.weights, key, last)
                over = (key,)
            for kind, unit, key, ms in sends:
                yield Task("send", kind, unit, ms, key, last if self.schedule.lock_step else over)
            if item.forward in away:
                yield self._copy("store", item.forward, ("stored", item.forward), last)
            ends.append((*over, *(key for *_, key, _ in sends)) if self.schedule.lock_step else over)

    def _arrivals(self, item: Item) -> tuple[tuple, ...]:
        """Keys of the transfers that bring an item its inputs; what the device itself made is there by the order of items."""
        found = []
        for kind, unit in (("forward", item.forward), ("backward", item.backward)):
            if unit not in (None, EMPTY) and (before := self.schedule.before(kind, unit)) is not None:
                found.append(("sent", kind, before))
        return tuple(found)

    def _sends(self, item: Item) -> Iterator[tuple[str, Unit, tuple, float]]:
        """Transfers of an item, the gradient first. In lock step all devices pass something on, whether or not it is used."""
        alone = len(self.schedule.items) == 1
        for kind, unit in (("backward", item.backward), ("forward", item.forward)):
            if unit is None:
                continue
            after = None if unit == EMPTY else self.schedule.after(kind, unit)
            if after is not None or self.schedule.lock_step:
                key = ("sent", kind, unit) if unit != EMPTY else ("sent", kind, self.device, id(item))
                yield kind, unit, key, 0.0 if alone else self.costs.transfer

    def _copied(self, program: Sequence[Item]) -> set[Unit]:
        """Units whose backward comes late enough to keep their residuals on the host meanwhile."""
        forward = {item.forward: i for i, item in enumerate(program)}
        return {u for i, item in enumerate(program) if (u := item.backward) not in (None, EMPTY) and i - forward[u] > 2}

    def _copy(self, lane: str, unit: Unit, key: tuple, needs: tuple) -> Task:
        return Task(lane, lane, unit, self.schedule.layers * self.costs.copy, key, needs)


Step = tuple[str, str, Unit, float]  # lane, kind, unit, ms


def _steps(item: Item, costs: Costs, layers: int) -> list[list[Step]]:
    """An item in steps, what is in one step running side by side."""
    ahead, back = _forward(item.forward, costs, layers), _backward(item.backward, costs, layers)
    if not ahead or not back:
        return [[step] for step in ahead or back]
    alone = len(back) - len(ahead)  # what is recomputed before the first exchange
    return [[step] for step in back[:alone]] + [[a, b] for a, b in zip(ahead, back[alone:], strict=True)]


def _forward(unit: Unit | None, costs: Costs, layers: int) -> list[Step]:
    if unit is None:
        return []
    exchange = ("exchange", "forward", unit, costs.exchange)
    return [
        ("compute", "forward", unit, costs.attention),
        exchange,
        ("compute", "forward", unit, costs.experts),
        exchange,
    ] * layers


def _backward(unit: Unit | None, costs: Costs, layers: int) -> list[Step]:
    if unit is None:
        return []
    again, again_experts = costs.repeated
    steps = [("compute", "backward", unit, again)] if costs.recompute else []
    for layer in range(layers):
        last = costs.attention_back + (again if layer < layers - 1 else 0.0)  # with the next layer's repeated attention
        steps += [
            ("exchange", "backward", unit, costs.exchange * (2 if costs.recompute else 1)),
            ("compute", "backward", unit, costs.experts_back + again_experts),
            ("exchange", "backward", unit, costs.exchange),
            ("compute", "backward", unit, last),
        ]
    return steps


# --- what a timeline shows


def peak_residuals(timeline: Timeline) -> list[int]:
    """Most residuals that each device keeps at a time, in layers of one microbatch.

    A unit's are kept from the start of its forward to the end of its weight gradients, wherever that may be.
    """
    peaks = []
    for lanes in timeline.lanes:
        starts, ends = {}, {}
        for task, start, end in lanes["compute"]:
            if task.kind == "forward":
                starts.setdefault(task.unit, start)
            elif task.kind == "weights":
                ends[task.unit] = end
        starts.pop(EMPTY, None)
        events = sorted([(t, 1) for t in starts.values()] + [(ends[unit], -1) for unit in starts])
        kept = peak = 0
        for _, change in events:
            kept += change
            peak = max(peak, kept)
        peaks.append(peak * timeline.schedule.layers)
    return peaks


class Idle(NamedTuple):
    """Milliseconds that a device does not compute, mean over the devices."""

    by_phase: dict[str, dict[str, float]]  # phase -> cause -> ms
    exchanged: float  # of all exchanges in the steady phase

    def total(self, cause: str) -> float:
        return sum(causes[cause] for causes in self.by_phase.values())

    @property
    def hidden(self) -> float:
        """Share of the steady phase's exchanges that run beside computation; 1 if there are none."""
        return 1 - self.by_phase["steady"]["exchange"] / self.exchanged if self.exchanged else 1.0


def idle(timeline: Timeline) -> Idle:
    """Why devices do not compute: an exchange is under way, or a transfer to them, or a copy; or none of these, the bubble.

    Warm-up lasts until a device's first backward unit, drain is what follows its last forward unit. Empty units are bubble.
    """
    schedule, n = timeline.schedule, len(timeline.lanes)
    coming: list[list] = [[] for _ in range(n)]
    for lanes in timeline.lanes:
        for task, start, end in lanes.get("send", ()):
            after = None if task.unit == EMPTY else schedule.after(task.kind, task.unit)
            if after is not None and end > start:
                coming[schedule.device_of[after[0]]].append((start, end))
    by_phase = {phase: dict.fromkeys(CAUSES, 0.0) for phase in PHASES}
    exchanged = 0.0
    for device, lanes in enumerate(timeline.lanes):
        real = [r for r in lanes["compute"] if r.task.unit != EMPTY]
        drain = max(r.end for r in real if r.task.kind == "forward")
        steady = min(r.start for r in real if r.task.kind == "backward")
        bounds = [0.0, steady, max(steady, drain), timeline.makespan]
        exchange, copy = _spans(lanes, "exchange"), sorted(_spans(lanes, "store") + _spans(lanes, "fetch"))
        waits = [
            (a, b) for (_, a), (b, _) in pairwise([(0, 0), *_spans(lanes, "compute", empty=True), (timeline.makespan,) * 2])
        ]
        parts = {}
        for cause, spans in (("exchange", exchange), ("transfer", _merged(coming[device])), ("copy", _merged(copy))):
            parts[cause] = _common(waits, spans)
            waits = _without(waits, spans)
        parts["bubble"] = _merged(waits + [(r.start, r.end) for r in lanes["compute"] if r.task.unit == EMPTY])
        for phase, span in zip(PHASES, pairwise(bounds), strict=True):
            for cause, spans in parts.items():
                by_phase[phase][cause] += _length(_common(spans, [span])) / n
        exchanged += _length(_common(exchange, [(steady, max(steady, drain))])) / n
    return Idle(by_phase, exchanged)


class Row(NamedTuple):
    """A schedule's step. Times in ms, residuals in layers of one microbatch on the fullest device."""

    name: str
    step: float
    work: float  # that each device computes
    idle: Idle
    bubble: float  # simulated without communication
    bubble_formula: float
    bubble_error: float  # of the formula where it is said to hold, over the step
    residuals: int
    residuals_formula: int
    copies: int
    timeline: Timeline


def run(plan: Schedule, costs: Costs) -> Row:
    """Simulates a schedule with and without communication."""
    silent, real = simulate(plan, costs.silent()), simulate(plan, costs)
    held = simulate(plan, EQUAL) if plan.equal_costs else silent
    error = abs(_bubble(held) - _bubble_formula(held)) / held.makespan
    waiting, kept = idle(real), max(peak_residuals(real))
    bubbles = _bubble(silent), _bubble_formula(silent), error
    return Row(plan.name, real.makespan, real.work, waiting, *bubbles, kept, plan.residuals, plan.copies, real)


def _bubble(timeline: Timeline) -> float:
    return timeline.makespan - timeline.work


def _bubble_formula(timeline: Timeline) -> float:
    plan, costs = timeline.schedule, timeline.costs
    layers = plan.layers * len(plan.device_of) // (len(plan.items) * plan.copies)  # of a stage
    return plan.bubble(layers * costs.forward, layers * costs.backward, layers * costs.weights)


def exposed_exchanges(lanes: dict[str, list[Ran]]) -> "Spans":
    """When a device exchanges and does not compute."""
    return _without(_spans(lanes, "exchange"), _spans(lanes, "compute", empty=True))


Spans = list[tuple[float, float]]  # disjoint, in order


def _spans(lanes: dict[str, list[Ran]], lane: str, empty: bool = False) -> Spans:
    return [(r.start, r.end) for r in lanes.get(lane, ()) if r.end > r.start and (empty or r.task.unit != EMPTY)]


def _merged(spans: Spans) -> Spans:
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def _common(a: Spans, b: Spans) -> Spans:
    """Where both are."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(a: Spans, b: Spans) -> Spans:
    """Where `a` is and `b` is not."""
    if not a:
        return []
    edges = [a[0][0], *(t for span in b for t in span), a[-1][1]]
    outside = [(s, e) for s, e in zip(edges[::2], edges[1::2], strict=True) if e > s]
    return _common(a, outside)


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
