"""Continuous batching: sequences come, decode together at their own positions, and go, while others decode.

The cache is one pool of blocks. A sequence takes the blocks of its prompt when it is admitted and one more whenever it has
filled its last; if there is none, the youngest sequence is set aside: its blocks are copied to the host and put back when there
is room. Two programs are compiled, a chunk of one sequence's prompt and a token of every sequence, whatever comes.
"""

import dataclasses
import functools
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k2jax.config import ModelConfig
from k2jax.infer import step
from k2jax.infer.sampling import Sampling, Settings, sample, settings
from k2jax.model import cached
from k2jax.model.cached import Kind, Past
from k2jax.model.store import Weights


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shapes of the programs and size of the cache."""

    rows: int = 8  # sequences that decode together
    tokens: int = 32_768  # that the cache holds, of all sequences
    block: int = 128  # tokens by which a sequence's part of the cache grows
    chunk: int = 256  # tokens of a prompt read at a time
    cache: Literal["auto", "latent", "heads"] = "auto"  # of MLA: latents, or every head's keys and values; auto is the smaller

    def __post_init__(self):
        for name in ("rows", "tokens", "block", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} must be positive; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to go on from."""

    prompt: tuple[int, ...]
    max_new: int = 128  # tokens to make at most
    stop: tuple[int, ...] = ()  # tokens that end it
    sampling: Sampling = field(default_factory=Sampling)


class Event(NamedTuple):
    """A token of a sequence."""

    sequence: int
    token: int
    done: Literal["stop", "length"] | None  # why it is the last


@dataclass
class Sequence:
    """A request under way. The cache has the first `length` of its tokens; the others are yet to be read."""

    request: Request
    tokens: list[int]
    length: int = 0
    blocks: list[int] = field(default_factory=list)  # in the pool, in order
    saved: list[np.ndarray] = field(default_factory=list)  # the blocks [L, P, N] while it is set aside

    def save(self, path: Path) -> None:
        """Writes a sequence that is set aside."""
        record = {"request": dataclasses.asdict(self.request), "tokens": self.tokens, "length": self.length}
        blocks = np.stack(self.saved) if self.saved else np.zeros((0, 0, 0, 0), np.uint8)
        record |= {"shape": blocks.shape, "dtype": str(blocks.dtype)}
        with path.open("wb") as file:
            np.savez(file, record=json.dumps(record), blocks=np.frombuffer(blocks.tobytes(), np.uint8))

    @classmethod
    def load(cls, path: Path) -> "Sequence":
        """Reads what `save` wrote."""
        with np.load(path) as held:
            record = json.loads(str(held["record"]))
            blocks = np.frombuffer(held["blocks"].tobytes(), jnp.dtype(record["dtype"])).reshape(record["shape"])
        plain = record["request"]
        sampling = Sampling(**plain.pop("sampling"))
        request = Request(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}, sampling=sampling)
        return cls(request, record["tokens"], record["length"], saved=list(blocks))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(config: ModelConfig, kind: Kind, params, bias, rope, past: Past, tokens_BT, count_B, rows: Settings):
    """The next token of each row, and what the cache is to keep."""
    logits_BW, new_LBTGN = step.forward(config, kind, params, bias, rope, past, tokens_BT, count_B)
    return sample(logits_BW, rows, past.length_B + count_B), new_LBTGN


@functools.partial(jax.jit, donate_argnums=0)
def _put(pool_LMPN, block_LPN, m):
    return jax.lax.dynamic_update_index_in_dim(pool_LMPN, block_LPN, m, 1)


@jax.jit
def _take(pool_LMPN, m):
    return jax.lax.dynamic_index_in_dim(pool_LMPN, m, 1, keepdims=False)


class Engine:
    """Sequences that are decoded together, from the weights of one model."""

    def __init__(self, weights: Weights, config: EngineConfig | None = None):
        self.model, self._params, self._bias = weights
        self.config = c = config or EngineConfig()
        self._kind = cached.kind_of(self.model.attention) if c.cache == "auto" else c.cache
        self._rope = step.rope_table(self.model)
        G, N = cached.widths(self.model.attention, self._kind)
        n_blocks = -(-c.tokens // c.block)
        # Block 0 takes what no sequence keeps.
        self._pool = jnp.zeros((self.model.n_layers, n_blocks + 1, G * c.block, N), self.model.dtype)
        self._free = list(range(n_blocks, 0, -1))
        self._width = min(n_blocks, -(-self.model.context // c.block))
        self._rows: list[int | None] = [None] * c.rows
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[int] = deque()
        self._next = 0

    @property
    def bytes_per_token(self) -> int:
        """That the cache takes for a token, all layers together."""
        G, N = cached.widths(self.model.attention, self._kind)
        return self.model.n_layers * G * N * self._pool.dtype.itemsize

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def submit(self, request: Request) -> int:
        """Takes a request; gives its sequence's number. Raises ValueError for one that could never be met."""
        total = len(request.prompt) + request.max_new
        most = min(self.model.context, self._width * self.config.block)
        if not request.prompt or request.max_new < 1:
            raise ValueError(
                f"a request needs a prompt and max_new of at least 1; got {len(request.prompt)}, {request.max_new}"
            )
        if total > most:
            raise ValueError(f"prompt and max_new together may have {most} tokens (context, cache); got {total}")
        if not all(0 <= token < self.model.n_words for token in request.prompt):
            raise ValueError(f"tokens of a prompt must be below n_words={self.model.n_words}; got {max(request.prompt)}")
        return self.resume(Sequence(request, list(request.prompt)))

    def resume(self, sequence: Sequence) -> int:
        """Takes a sequence that was set aside; gives its number."""
        expected = (self.model.n_layers, *self._pool.shape[2:]), self._pool.dtype
        for block in sequence.saved:
            if (block.shape, block.dtype) != expected:
                raise ValueError(f"a saved sequence has blocks like the engine's, {expected}; got {block.shape}, {block.dtype}")
        number, self._next = self._next, self._next + 1
        self._sequences[number] = sequence
        self._waiting.append(number)
        return number

    def remove(self, number: int) -> Sequence:
        """Gives a sequence up, its cache copied to the host: `resume` goes on with it, here or in another engine."""
        if number in self._rows:
            self._set_aside(number)
        self._waiting.remove(number)
        return self._sequences.pop(number)

    def run(self) -> Iterator[Event]:
        """Steps until every sequence is done; gives tokens as they come."""
        while self._sequences:
            yield from self.step()

    def step(self) -> list[Event]:
        """Admits what there is room for, reads a chunk of the oldest unread prompt, and decodes a token of all others."""
        self._admit()
        unread = {n: len(s.tokens) - s.length for n in self._rows if n is not None for s in [self._sequences[n]]}
        events = []
        decoding = [n for n, count in unread.items() if count == 1]
        if prompts := [n for n, count in unread.items() if count > 1]:
            events += self._read([min(prompts)], self.config.chunk, [self._sequences[min(prompts)]])
        for n in sorted(decoding):
            if n in self._rows:  # it may be set aside for an older one
                self._grow(n)
        alive = [n if n in decoding else None for n in self._rows]
        if any(n is not None for n in alive):
            events += self._read(alive, 1, [None if n is None else self._sequences[n] for n in alive])
        return events

    def _admit(self) -> None:
        while self._waiting and None in self._rows:
            sequence = self._sequences[self._waiting[0]]
            needed = -(-len(sequence.tokens) // self.config.block)
            if needed > len(self._free):
                return
            sequence.blocks = [self._free.pop() for _ in range(needed)]
            for m, block in zip(sequence.blocks, sequence.saved, strict=False):
                self._pool = _put(self._pool, block, m)
            sequence.saved = []
            self._rows[self._rows.index(None)] = self._waiting.popleft()

    def _grow(self, number: int) -> None:
        """Gives a sequence room for its next token, if need be for the youngest's."""
        sequence = self._sequences[number]
        if sequence.length < len(sequence.blocks) * self.config.block:
            return
        if not self._free:
            youngest = max(n for n in self._rows if n is not None)
            self._set_aside(youngest)
            if youngest == number:
                return
        sequence.blocks.append(self._free.pop())

    def _set_aside(self, number: int) -> None:
        sequence = self._sequences[number]
        used = -(-sequence.length // self.config.block)
        sequence.saved = [np.asarray(_take(self._pool, m)) for m in sequence.blocks[:used]]
        self._release(number)
        self._waiting.appendleft(number)

    def _release(self, number: int) -> None:
        self._free += self._sequences[number].blocks
        self._sequences[number].blocks = []
        self._rows[self._rows.index(number)] = None

    def _read(self, numbers: list[int | None], T: int, rows: list[Sequence | None]) -> list[Event]:
        """Reads up to T unread tokens of each row's sequence; those that have then none unread get a new one."""
        B = len(rows)
        tokens_BT, count_B, length_B = np.zeros((B, T), np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
        table_BJ = np.zeros((B, self._width), np.int32)
        for b, s in enumerate(rows):
            if s is not None:
                new = s.tokens[s.length : s.length + T]
                tokens_BT[b, : len(new)], count_B[b], length_B[b] = new, len(new), s.length
                table_BJ[b, : len(s.blocks)] = s.blocks
        past = Past(self._pool, table_BJ, length_B)
        chosen = settings([s.request.sampling if s else Sampling() for s in rows])
        next_B, new = _advance(self.model, self._kind, self._params, self._bias, self._rope, past, tokens_BT, count_B, chosen)
        self._pool = step.keep(self._pool, table_BJ, length_B, new, count_B)
        events = []
        for number, s, count, token in zip(numbers, rows, count_B, np.asarray(next_B), strict=True):
            if s is not None:
                s.length += int(count)
                if s.length == len(s.tokens):
                    events.append(self._append(number, s, int(token)))
        return events

    def _append(self, number: int, sequence: Sequence, token: int) -> Event:
        sequence.tokens.append(token)
        made = len(sequence.tokens) - len(sequence.request.prompt)
        done = "stop" if token in sequence.request.stop else "length" if made == sequence.request.max_new else None
        if done:
            self._release(number)
            del self._sequences[number]
        return Event(number, token, done)


def generate(weights: Weights, requests: list[Request], config: EngineConfig | None = None) -> list[list[int]]:
    """The new tokens of each request, a stop token included."""
    engine = Engine(weights, config)
    made: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    for event in engine.run():
        made[event.sequence].append(event.token)
    return list(made.values())
