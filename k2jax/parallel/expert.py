"""The exchange of tokens between expert ranks: dropless, in buffers of fixed size, in as many rounds as the routing needs.

A token travels once to every rank that holds any of its experts. Rank by rank its rows queue up; a round carries the next
`capacity` of every queue in one `all_to_all`, so a balanced routing takes one round and the worst takes a few more of the same
program: no token is dropped and memory does not depend on the routing. Each row also carries its weights, its experts and the
number of rounds its sender needs, so that all ranks agree on the most without a further collective.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k2jax.config import MoEConfig


class Queues(NamedTuple):
    """Where each (token, choice) queues."""

    rank_XK: jax.Array  # rank of the expert; the number of ranks if the token goes nowhere
    place_XK: jax.Array  # place in that rank's queue, the same for all choices of a token there
    first_XK: jax.Array  # whether this is the token's first choice on that rank
    rounds: jax.Array  # rounds that this sender needs


class Rows(NamedTuple):
    """Rows as they arrive, [ranks * capacity, ...]."""

    rows: tuple[jax.Array, ...]  # activations, each [.., D]
    weight_XK: jax.Array  # float32
    expert_XK: jax.Array  # place among the experts here; -1 for none
    rounds: jax.Array  # rounds that some sender of the group needs


def share(moe: MoEConfig, ranks: int) -> float:
    """The share of tokens that visit a rank under balanced routing, all choices equally likely: not all experts lie elsewhere.

    0.406 for K2 with 24 of 384 experts on a rank, so a token visits 6.5 of 16 ranks.
    """
    elsewhere = moe.n_experts - moe.n_experts // ranks
    return 1 - math.comb(elsewhere, moe.n_active) / math.comb(moe.n_experts, moe.n_active)


def capacity(moe: MoEConfig, ranks: int, tokens: int, buffer: float) -> int:
    """Rows a device sends to another in a round: `buffer` times what balanced routing sends there."""
    return tokens if ranks == 1 else max(1, min(tokens, math.ceil(buffer * tokens * share(moe, ranks))))


def bytes_per_token(moe: MoEConfig, ranks: int, d_model: int, element: int) -> float:
    """Bytes that a token moves between devices on its way to a layer's experts and back, forward, under balanced routing."""
    return (ranks - 1) * share(moe, ranks) * 2 * d_model * element


Words = Array | tuple  # what travels; with one rank, the parts as they are


class Exchange(NamedTuple):
    """The fixed numbers of an exchange over the mesh axis `expert`."""

    ranks: int
    n_experts: int
    capacity: int

    @property
    def local(self) -> int:
        """Experts a rank."""
        return self.n_experts // self.ranks

    def queue_up(self, expert_XK: Int[Array, "X K"], goes_X: Bool[Array, " X"]) -> Queues:
        """Queues every token that goes anywhere at each rank that holds one of its experts; an expert of -1 is none."""
        ranks, K = self.ranks, expert_XK.shape[1]
        rank_XK = jnp.where(goes_X[:, None] & (expert_XK >= 0), expert_XK // self.local, ranks)
        visits_XR = (rank_XK[:, :, None] == jnp.arange(ranks)[None, None]).any(1)
        before_XR = jnp.cumsum(visits_XR, axis=0, dtype=jnp.int32) - visits_XR
        place_XK = jnp.take_along_axis(before_XR, jnp.minimum(rank_XK, ranks - 1), axis=1)
        earlier_KK = jnp.arange(K)[:, None] > jnp.arange(K)[None, :]
        first_XK = ~((rank_XK[:, :, None] == rank_XK[:, None, :]) & earlier_KK[None]).any(-1)
        longest = visits_XR.sum(0, dtype=jnp.int32).max()
        return Queues(rank_XK, place_XK, first_XK, jnp.maximum(1, -(-longest // self.capacity)))

    def pack(
        self,
        rows: tuple[Float[Array, "X D"], ...],
        weight_XK: Float[Array, "X K"],
        expert_XK: Int[Array, "X K"],
        queues: Queues,
        turn: Int[Array, ""] | int,
    ) -> Words:
        """The rows of round `turn` for every rank as one array of words [ranks, capacity, ...], ready to travel.

        With one rank nothing travels: `Rows` as they are.
        """
        if self.ranks == 1:
            return Rows(rows, weight_XK, jnp.where(queues.rank_XK == 0, expert_XK, -1), queues.rounds)
        words, sent = _word(rows[0].dtype), []
        token_RC = self._tokens(queues, turn)
        place = jnp.minimum(token_RC, expert_XK.shape[0] - 1)
        filled = (token_RC < expert_XK.shape[0])[..., None]
        for x in rows:
            sent.append(_to_words(jnp.where(filled, x[place], 0), words))
        rank_R11 = jnp.arange(self.ranks)[:, None, None]
        here = filled & (queues.rank_XK[place] == rank_R11)
        sent.append(_to_words(jnp.where(here, weight_XK[place], 0), words))
        sent.append(_to_words(jnp.where(here, expert_XK[place] % self.local, -1), words))
        sent.append(_to_words(jnp.broadcast_to(queues.rounds, (*token_RC.shape, 1)), words))
        return jnp.concatenate(sent, -1)

    def unpack(self, words: Words, like: tuple[Array, ...], k: int) -> Rows:
        """What arrived, [ranks * capacity, ...]; `like` tells how many arrays of rows travelled, and their width."""
        if self.ranks == 1:
            return words
        words, rows, at = words.reshape(-1, words.shape[-1]), [], 0
        for x in like:
            rows.append(_from_words(words[:, at : at + x.shape[-1]], x.dtype))
            at += x.shape[-1]
        wide = 4 // words.dtype.itemsize
        weight_XK = _from_words(words[:, at : at + k * wide], jnp.float32)
        expert_XK = _from_words(words[:, at + k * wide : at + 2 * k * wide], jnp.int32)
        rounds = _from_words(words[:, at + 2 * k * wide :], jnp.int32).max()
        return Rows(tuple(rows), weight_XK, expert_XK, rounds)

    def travel(self, words: Words) -> Words:
        """Swaps rank r's part for what rank r sends here; the same call brings answers back."""
        return words if self.ranks == 1 else lax.all_to_all(words, "expert", 0, 0, tiled=True)

    def pack_answer(self, y_XD: Float[Array, "X D"], d_weight_XK: Float[Array, "X K"] | None = None) -> Words:
        """Answers to the rows that arrived, in their places: [ranks, capacity, ...]."""
        if self.ranks == 1:
            return y_XD if d_weight_XK is None else (y_XD, d_weight_XK)
        if d_weight_XK is None:
            return y_XD.reshape(self.ranks, self.capacity, -1)
        words = _word(y_XD.dtype)
        both = jnp.concatenate([_to_words(y_XD, words), _to_words(d_weight_XK, words)], -1)
        return both.reshape(self.ranks, self.capacity, -1)

    def collect(self, y_RCD: Array, queues: Queues, turn: Int[Array, ""] | int) -> Float[Array, "X D"]:
        """Sums each token's answers of round `turn`; accumulates in float32."""
        if self.ranks == 1:
            return y_RCD
        total = None
        for k in range(queues.rank_XK.shape[1]):
            here, at = self._answer(queues, turn, k)
            part = jnp.where((here & queues.first_XK[:, k])[:, None], y_RCD.reshape(-1, y_RCD.shape[-1])[at], 0)
            total = part.astype(jnp.float32) + (0 if total is None else total)
        return total.astype(y_RCD.dtype)

    def collect_gradients(
        self, words: Words, dtype, d_model: int, queues: Queues, turn: Int[Array, ""] | int
    ) -> tuple[Float[Array, "X D"], Float[Array, "X K"]]:
        """The tokens' and the weights' gradients out of answers that hold both."""
        if self.ranks == 1:
            return words
        d_y = _from_words(words[..., :d_model], dtype)
        d_weight_XK = _from_words(words[..., d_model:], jnp.float32).reshape(-1, queues.rank_XK.shape[1])
        columns = []
        for k in range(queues.rank_XK.shape[1]):
            here, at = self._answer(queues, turn, k)
            columns.append(jnp.where(here, d_weight_XK[at, k], 0))
        return self.collect(d_y, queues, turn), jnp.stack(columns, -1)

    def _answer(self, queues, turn, k):
        """Whether choice k was served in this round, and the flat place of its answer."""
        place_X = queues.place_XK[:, k] - turn * self.capacity
        here = (queues.rank_XK[:, k] < self.ranks) & (place_X >= 0) & (place_X < self.capacity)
        return here, jnp.where(here, queues.rank_XK[:, k] * self.capacity + place_X, 0)

    def _tokens(self, queues: Queues, turn):
        """Token of each place of this round's buffer [ranks, capacity]; the number of tokens where there is none."""
        X, K = queues.rank_XK.shape
        token_XK = jnp.broadcast_to(jnp.arange(X, dtype=jnp.int32)[:, None], (X, K))
        place_XK = queues.place_XK - turn * self.capacity
        goes = queues.first_XK & (place_XK >= 0) & (place_XK < self.capacity) & (queues.rank_XK < self.ranks)
        flat_XK = jnp.where(goes, queues.rank_XK * self.capacity + place_XK, self.ranks * self.capacity)
        empty = jnp.full(self.ranks * self.capacity, X, jnp.int32)
        return empty.at[flat_XK].set(token_XK, mode="drop").reshape(self.ranks, self.capacity)


def _word(dtype):
    """The unsigned integer of a dtype's size: what travels is words, so that no integer is ever a denormal float."""
    return {2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize]


def _to_words(x: Array, words) -> Array:
    out = lax.bitcast_convert_type(x, words)
    return out.reshape(*x.shape[:-1], -1)  # a wider element becomes several words


def _from_words(x: Array, dtype) -> Array:
    wide = jnp.dtype(dtype).itemsize // x.dtype.itemsize
    if wide > 1:
        x = x.reshape(*x.shape[:-1], -1, wide)
    return lax.bitcast_convert_type(x, dtype)
