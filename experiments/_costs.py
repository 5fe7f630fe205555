"""What a K2 layer costs on a device, from its FLOPs and bytes: the default costs of `experiments.pipeline_schedules`.

A microbatch is one sequence of 4096 tokens. Rates are those that are reached, as given; nothing here was measured.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from configs import k2
from experiments._simulator import Costs
from k2jax.config import ModelConfig
from k2jax.parallel import activations
from k2jax.parallel.expert import share
from k2jax.plan import Machine
from k2jax.scaling import flops

SKEW = 0.5  # standard deviation of the logarithm of an expert's popularity


def layer(machine: Machine, expert: int, recompute: bool) -> Costs:
    """Costs of one MoE layer of K2 with its experts over `expert` devices."""
    run = k2.config()
    model = replace(run.model, n_layers=1, n_dense=0)
    found, moe = flops.training_flops(model, run.seq_len), model.moe
    shared = moe.n_shared / (moe.n_shared + moe.n_active)

    def ms(flops_a_token: float) -> float:
        return run.seq_len * flops_a_token / (machine.tflops * 1e9)

    # A weight costs as much forward as in either gradient. Attention's products without weights cost twice as much backward.
    dense, core = found.attention / 3 + found.router / 3 + found.feed_forward / 3 * shared, found.attention_core / 3
    experts = ms(found.feed_forward / 3 * (1 - shared))
    return Costs(
        attention=ms(dense + core),
        experts=experts,
        attention_back=ms(dense + 2 * core),
        experts_back=experts,
        attention_weights=ms(dense),
        experts_weights=experts,
        exchange=exchange(model, run.seq_len, machine, expert),
        transfer=run.seq_len * model.d_model * 2 / (machine.network * 1e6),
        copy=run.seq_len * kept_bytes(model, run.seq_len, expert) / (machine.host * 1e6),
        recompute=recompute,
    )


def exchange(model: ModelConfig, tokens: int, machine: Machine, expert: int) -> float:
    """Milliseconds of one exchange: a bf16 row for each token and device, nodes and NVLink at the same time."""
    row = tokens * share(model.moe, expert) * model.d_model * 2  # bytes to each device
    near = min(expert, machine.devices)
    return max((expert - near) * row / machine.network, (near - 1) * row / machine.nvlink) / 1e6


def kept_bytes(model: ModelConfig, seq_len: int, expert: int) -> float:
    """Bytes a token that a layer keeps on the host by the report's policy (2.4.3), buffers without an empty place."""
    rows = expert * share(model.moe, expert)
    return activations.cost(model, activations.POLICIES["k2"], seq_len, rows, float(model.moe.n_active)).host


def states_gb(stages: int, expert: int) -> float:
    """GB a device of bf16 parameters and float32 gradients of K2: experts over both axes, all else over the stages."""
    count = flops.count_params(k2.config())
    return 6 * (count.experts / (stages * expert) + (count.total - count.experts) / stages) / 1e9


class Choice(NamedTuple):
    """One size of the expert axis."""

    expert: int
    local: int  # experts a device
    reached: float  # devices a token goes to
    exchange: float  # ms
    cover: float  # ms of computation beside it, the least in a pair
    uneven: float  # load of the fullest device over the mean
    states_gb: float


def expert_sizes(machine: Machine, stages: int, recompute: bool) -> list[Choice]:
    """The study behind the report's choice of the smallest expert axis: exchange, cover and balance by size."""
    model = k2.config().model
    found = []
    for expert in (4, 8, 16, 32, 64):
        costs = layer(machine, expert, recompute)
        local = model.moe.n_experts // expert
        reached = expert * share(model.moe, expert)
        gb = states_gb(stages, expert)
        found.append(Choice(expert, local, reached, costs.exchange, costs.cover, _uneven(model.moe.n_experts, expert), gb))
    return found


def _uneven(n_experts: int, expert: int) -> float:
    """Mean over 256 draws of log-normal popularities of the experts, of standard deviation `SKEW`; always the same draws."""
    popularity = np.exp(SKEW * np.random.default_rng(0).standard_normal((256, expert, n_experts // expert)))
    load = popularity.sum(2)
    return float((load.max(1) / load.mean(1)).mean())
