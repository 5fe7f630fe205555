"""Coroutines that exchange: one alone, or two of which each one's exchange runs beside the other's computation.

A coroutine yields what travels and is sent what arrived (`k2jax.parallel.layer`). The forward and the backward unit of one tick
are of different microbatches, so neither waits for the other's result (report 2.4.2, figure 7). The order is fixed by
optimization barriers: a scheduler left alone puts both computations first and both exchanges after them.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from jax import lax

Travel = Callable[[Any], Any]
Coroutine = Generator[Any, Any, "Done"]  # of arrays, or trees of them


class Done(NamedTuple):
    """What a coroutine ends with: arrays that the other unit's next computation comes after, and the rest."""

    tied: Any
    rest: Any


def alone(travel: Travel, unit: Coroutine) -> Done:
    """Runs one coroutine to its end."""
    words, done = _advance(unit, None)
    while done is None:
        words, done = _advance(unit, travel(words))
    return done


def paired(travel: Travel, first: Coroutine, second: Callable[[Any], Coroutine], inputs: Any) -> tuple[Done, Done]:
    """Runs two coroutines with the same number of exchanges in turn; `second(inputs)` starts once the first has words to send.

    first:   compute | travel  | compute | travel  | compute
    second:            compute | travel  | compute | travel | compute
    """
    words, first_done = _advance(first, None)
    words, inputs = lax.optimization_barrier((words, inputs))
    unit, arrived = second(inputs), None
    while first_done is None:
        came, (other, _) = travel(words), _advance(unit, arrived)
        came, other = lax.optimization_barrier((came, other))
        arrived, (words, first_done) = travel(other), _advance(first, came)
        if first_done is None:
            arrived, words = lax.optimization_barrier((arrived, words))
        else:
            arrived, tied = lax.optimization_barrier((arrived, first_done.tied))
            first_done = Done(tied, first_done.rest)
    _, second_done = _advance(unit, arrived)
    return first_done, second_done


def _advance(unit: Coroutine, arrived: Any) -> tuple[Any, Done | None]:
    """Sends what arrived; returns the next words, or the end."""
    try:
        return unit.send(arrived), None
    except StopIteration as end:
        return None, end.value
