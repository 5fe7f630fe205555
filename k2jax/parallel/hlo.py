"""Reads the scheduled program of a compiled GPU step: `compiled.as_text()`.

Instructions of a scheduled computation stand in the order in which they are issued. A collective is a start and a done: what
stands between them runs while it is under way. A while loop's body is a computation of its own.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "collective-broadcast")
GEMM_CALLS = ("cublas", "cudnn", "triton", "gemm")  # in the target of a custom call
CALLS = re.compile(r"\b(?:calls|body|to_apply|\w+_computation)=%?([\w.-]+)|\bbranch_computations=\{([^}]*)\}")
WORDS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # "bf16[4,8]{1,0}"; a tuple in parentheses
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str  # what follows the operands
    computation: str
    index: int  # place in its computation

    @property
    def bytes(self) -> int:
        """Of the result, all its parts."""
        return round(sum(n * size for n, size in parts(self.shape)))

    @property
    def calls(self) -> list[str]:
        """The computations it runs: a fusion's, a loop's body, a reduction's."""
        return [name.lstrip("%") for one, several in CALLS.findall(self.attributes) for name in (one or several).split(", ")]

    @property
    def trips(self) -> int | None:
        """Of a while loop, where the compiler knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Exchange:
    """A collective, of one array or of several sent together."""

    kind: str  # one of COLLECTIVES
    start: Instruction
    done: Instruction
    operands: tuple[Instruction, ...]
    between: tuple[Instruction, ...]  # issued after the start and before the done
    groups: tuple[tuple[int, ...], ...]  # positions in the mesh that exchange, flat; of a permute (source, target) pairs

    @property
    def is_sync(self) -> bool:
        """Whether the compiler had the start wait for the end, whatever stands between them."""
        return '"is_sync":true' in self.start.attributes

    @property
    def bytes(self) -> int:
        """What a device puts in."""
        return sum(operand.bytes for operand in self.operands)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes it runs over, given {axis: size} in the mesh's order; no group is everybody."""
        groups = self.groups or (tuple(range(math.prod(sizes.values()))),)
        places = [np.array(np.unravel_index(group, tuple(sizes.values()))) for group in groups]
        return tuple(axis for i, axis in enumerate(sizes) if any(len(set(place[i])) > 1 for place in places))

    def shift(self, sizes: Mapping[str, int]) -> set[tuple[int, ...]]:
        """How far a permute moves each device's part along the mesh axes, modulo their sizes; a ring's is one shift."""
        shape = tuple(sizes.values())
        source, target = (np.array(np.unravel_index(ids, shape)) for ids in zip(*self.groups, strict=True))
        return set(map(tuple, ((target - source).T % shape).tolist()))


@dataclass(frozen=True)
class Program:
    """The computations of a compiled module, each in the order of its schedule."""

    computations: dict[str, list[Instruction]]
    entry: str
    _flops: dict[str, int] = field(default_factory=dict)

    def walk(self, computation: str) -> Iterator[Instruction]:
        """Every instruction that a computation runs, in loops, branches and calls too; fusions stay closed."""
        for i in self.computations[computation]:
            yield i
            if i.opcode in ("while", "conditional", "call"):
                for name in i.calls:
                    yield from self.walk(name)

    def loops(self) -> list[Instruction]:
        """All while loops, outer before inner."""
        return [i for i in self.walk(self.entry) if i.opcode == "while"]

    def bodies(self, wanted: Callable[[list[Exchange]], bool]) -> list[str]:
        """Bodies of the loops whose own collectives, those of inner loops left out, are as wanted."""
        names = dict.fromkeys(body for loop in self.loops() for body in loop.calls)
        return [name for name in names if wanted(self.exchanges(name))]

    def exchanges(self, computation: str) -> list[Exchange]:
        """The collectives of a computation, inner loops left out, in order of their starts."""
        lines = self.computations[computation]
        by_name = {i.name: i for i in lines}
        done = {i.operands[0]: i for i in lines if i.opcode.endswith("-done")}
        found = []
        for i in lines:
            kind, real = self._collective(i)
            if kind:
                end = done.get(i.name, i)
                operands = tuple(by_name[o] for o in i.operands)
                found.append(Exchange(kind, i, end, operands, tuple(lines[i.index + 1 : end.index]), _groups(real.attributes)))
        return found

    def all_exchanges(self, computation: str) -> list[Exchange]:
        """The collectives of a computation and of everything it runs, each once however often it runs."""
        inside = dict.fromkeys([computation, *(i.computation for i in self.walk(computation))])
        return [exchange for name in inside for exchange in self.exchanges(name)]

    def exchanges_run(self, computation: str, times: int = 1, sure: bool = True) -> Iterator[tuple[Exchange, int, bool]]:
        """The collectives of a computation and of all that it runs, how often each runs, and whether that is sure: in a loop
        of unknown length it is the count for one trip."""
        for exchange in self.exchanges(computation):
            yield exchange, times, sure
        for i in self.computations[computation]:
            if i.opcode in ("while", "conditional", "call"):
                known = i.opcode == "call" or i.trips is not None
                for name in i.calls:
                    yield from self.exchanges_run(name, times * (i.trips or 1), sure and known)

    def _collective(self, i: Instruction) -> tuple[str, Instruction]:
        """The kind of a collective's start, and the instruction with its groups; "" if it is none."""
        if i.opcode == "async-start":  # the collective is wrapped in a computation
            return self._collective(self.computations[i.calls[0]][-1])
        kind = i.opcode.removesuffix("-start")
        return (kind if kind in COLLECTIVES else ""), i

    def flops(self, i: Instruction) -> int:
        """Of the matrix products in an instruction; a loop of unknown length counts one trip, a library's call 1."""
        if i.opcode == "dot":
            return _dot_flops(i, self.computations[i.computation])
        return _is_gemm_call(i) + (i.trips or 1) * sum(self._flops_inside(name) for name in i.calls)

    def _flops_inside(self, computation: str) -> int:
        if computation not in self._flops:
            self._flops[computation] = sum(self.flops(i) for i in self.computations[computation])
        return self._flops[computation]

    def is_compute(self, i: Instruction) -> bool:
        """Whether it multiplies matrices, and is not a loop with collectives of its own, which would wait for another."""
        return self.flops(i) > 0 and not (i.opcode == "while" and any(self.all_exchanges(name) for name in i.calls))

    def cover(self, exchange: Exchange) -> list[Instruction]:
        """The matrix products that run while an exchange is under way."""
        return [i for i in exchange.between if self.is_compute(i) and not exchange.is_sync]

    def copies(self, computation: str, above: int) -> list[Instruction]:
        """Copies of more than `above` bytes that a computation makes, in inner loops and in fusions too.

        A copy of a constant is none: it fills a buffer, which has to be done once however it is done.
        """
        return [i for i in self.walk(computation) if self._copied(i) > above and not self._is_filled(i)]

    def _is_filled(self, i: Instruction) -> bool:
        by_name = {j.name: j for j in self.computations[i.computation]}
        given = [by_name[name] for name in i.operands]
        return all(j.opcode in ("constant", "broadcast", "iota", "fusion") and self._is_filled(j) for j in given)

    def _copied(self, i: Instruction) -> int:
        if i.opcode in ("copy", "copy-start"):
            return round(max(n * size for n, size in parts(i.shape)))
        if i.opcode == "fusion":
            return max((self._copied(j) for name in i.calls for j in self.computations[name]), default=0)
        return 0


def parse(text: str) -> Program:
    """Reads `compiled.as_text()`. Raises ValueError if the program is not a scheduled one."""
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the program must be scheduled, HloModule ..., is_scheduled=true; compile it for a GPU")
    computations, entry, name, lines = {}, "", "", []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name, lines = header[2], []
            computations[name] = lines
            entry = name if header[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line):
            shape, rest = _split(found[2])
            opcode, rest = rest.lstrip().split("(", 1)
            operands, attributes = _split("(" + rest)
            given = tuple(re.findall(r"%([\w.-]+)", operands))
            lines.append(Instruction(found[1], shape, opcode, given, attributes, name, len(lines)))
    return Program(computations, entry)


def parts(shape: str) -> list[tuple[int, float]]:
    """Elements and bytes an element of an array, or of each array of a tuple."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(math.prod(map(int, dims.split(","))) if dims else 1, _element(dtype)) for dtype, dims in found]


def _element(dtype: str) -> float:
    return float(WORDS[dtype]) if dtype in WORDS else int(re.search(r"\d+", dtype)[0]) / 8


def _split(text: str) -> tuple[str, str]:
    """What stands in the parentheses that the text begins with, or before its first space, and the rest."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: at + 1], text[at + 1 :]
    raise ValueError(f"parentheses must close; got {text[:80]!r}")


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Replica groups, written out {{0,1},{2,3}} or counted [2,2]<=[4] or [2,2]<=[2,2]T(1,0); or a permute's pairs."""
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in found.groups())
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None).reshape(shape)
        return tuple(map(tuple, ids.tolist()))
    return ()


def _dot_flops(i: Instruction, lines: Sequence[Instruction]) -> int:
    left = next(j for j in lines if j.name == i.operands[0])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)[1]
    dims = [int(n) for n in re.search(r"\[([\d,]*)\]", left.shape)[1].split(",") if n]
    return 2 * parts(i.shape)[0][0] * math.prod(dims[int(n)] for n in contracted.split(",") if n)


def _is_gemm_call(i: Instruction) -> int:
    target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
    return int(i.opcode == "custom-call" and bool(target) and any(word in target[1].lower() for word in GEMM_CALLS))
