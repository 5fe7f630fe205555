"""Parameters, FLOPs and sparsity of a model, by formula: nothing is allocated, all counts are exact integers.

Conventions. A multiply-add is two FLOPs. Training costs three forward passes (one forward, two for the gradients), so a weight
that multiplies a token costs six. Counted are matrix products alone: projections, experts, router, head and the attention core,
the latter over the pairs a causal mask keeps, (T + 1) / 2 keys a query. The embedding is a look-up and costs nothing; the head
is a product. Left out: norms, softmax, rotations, recomputation and the optimizer.
"""

from typing import NamedTuple

from k2jax.config import ModelConfig, RunConfig


class ParamCount(NamedTuple):
    """Weights of a model; the router's selection bias counts as weights, as the report's totals do.

    `active` is what one token uses in the trunk: attention, norms of the layers, router, shared and chosen experts, dense
    feed-forward, embedding and head. It is 32.86B for K2; the report's 32.6B follows from no standard convention.
    """

    trunk: int  # everything but MTP
    mtp: int  # 0 without MTP; embedding and head are shared with the trunk
    embedding: int  # the head has as many
    experts: int  # routed experts of the trunk
    active_layers: int  # a token's weights without embedding and head

    @property
    def total(self) -> int:
        return self.trunk + self.mtp

    @property
    def active_with_head(self) -> int:
        return self.active_layers + self.embedding

    @property
    def active(self) -> int:
        return self.active_layers + 2 * self.embedding

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.total


class TrainingFlops(NamedTuple):
    """Training FLOPs a token, by part; MTP's layer and its second use of the head are in the parts."""

    attention: int  # projections
    attention_core: int  # queries with keys, weights with values, causal
    feed_forward: int  # dense, shared and chosen experts
    router: int
    head: int
    mtp_projection: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def without_router(self) -> int:
        return self.total - self.router


def count_params(config: ModelConfig | RunConfig) -> ParamCount:
    """Counts the weights of a model without building it (report, table 2; the parts in DeepSeek-V3's names)."""
    model = _model_of(config)
    expert = _feed_forward(model, model.moe.d_expert)
    n_experts, n_shared, n_active = model.moe.n_experts, model.moe.n_shared, model.moe.n_active
    dense = _feed_forward(model, model.d_dense)
    attention = _attention(model) + _norms(model)
    moe = (n_experts + n_shared) * expert + _router(model) + n_experts
    embedding = model.n_words * model.d_model
    trunk = model.n_layers * attention + model.n_dense * dense + model.n_moe * moe + 2 * embedding + model.d_model
    mtp = _mtp_projection(model) + 3 * model.d_model + attention + moe
    active_moe = (n_active + n_shared) * expert + _router(model)
    return ParamCount(
        trunk=trunk,
        mtp=model.n_mtp * mtp,
        embedding=embedding,
        experts=model.n_moe * n_experts * expert,
        active_layers=model.n_layers * attention + model.n_dense * dense + model.n_moe * active_moe,
    )


def training_flops(config: ModelConfig | RunConfig, seq_len: int) -> TrainingFlops:
    """FLOPs of training on one token of a sequence of `seq_len` tokens, forward and backward (conventions above)."""
    model, attention = _model_of(config), _model_of(config).attention
    n_blocks, n_moe = model.n_layers + model.n_mtp, model.n_moe + model.n_mtp
    experts = (model.moe.n_active + model.moe.n_shared) * _feed_forward(model, model.moe.d_expert)
    pair = attention.n_heads * (attention.d_nope + attention.d_rope + attention.d_value)  # multiply-adds a query and key
    return TrainingFlops(
        attention=6 * n_blocks * _attention(model),
        attention_core=3 * n_blocks * pair * (seq_len + 1),
        feed_forward=6 * (model.n_dense * _feed_forward(model, model.d_dense) + n_moe * experts),
        router=6 * n_moe * _router(model),
        head=6 * (1 + model.n_mtp) * model.n_words * model.d_model,
        mtp_projection=6 * model.n_mtp * _mtp_projection(model),
    )


def decode_flops(config: ModelConfig | RunConfig, context: int) -> int:
    """FLOPs of decoding one token after `context` others, in the convention behind the report's remark on 64 and 128 heads.

    Two FLOPs an active weight, embedding and head included; attention reads keys and values of one width each, the rotary part
    left out. Doubling K2's heads then adds 83% at 128k tokens and 25% at 4k (report 2.3). Moving the absorbed form's wider
    products or the rotary part in would change the figure, so compare only within the convention.
    """
    model, attention = _model_of(config), _model_of(config).attention
    key_width = attention.d_nope if attention.kind == "mla" else attention.d_rope
    core = 2 * model.n_layers * attention.n_heads * context * (key_width + attention.d_value)
    return 2 * count_params(model).active + core


def sparsity(config: ModelConfig | RunConfig) -> float:
    """Routed experts over those a token uses (report 2.3); 48 for K2."""
    moe = _model_of(config).moe
    return moe.n_experts / moe.n_active


def _model_of(config: ModelConfig | RunConfig) -> ModelConfig:
    return config.model if isinstance(config, RunConfig) else config


def _attention(model: ModelConfig) -> int:
    """Weights of one layer's attention that multiply a token: no norms."""
    a, d = model.attention, model.d_model
    if a.kind == "gqa":
        return d * (a.n_heads * (a.d_rope + a.d_value) + a.n_kv_heads * (a.d_rope + a.d_value))
    query = d * a.q_rank + a.q_rank * a.n_heads * (a.d_nope + a.d_rope)
    key_value = d * (a.kv_rank + a.d_rope) + a.kv_rank * a.n_heads * (a.d_nope + a.d_value)
    return query + key_value + a.n_heads * a.d_value * d


def _norms(model: ModelConfig) -> int:
    """Gains of one layer: before its two halves, of MLA's latents, and of queries and keys under `qk_norm`."""
    a = model.attention
    latents = a.q_rank + a.kv_rank if a.kind == "mla" else 0
    return 2 * model.d_model + latents + (2 * (a.d_nope + a.d_rope) if a.qk_norm else 0)


def _feed_forward(model: ModelConfig, width: int) -> int:
    """Weights of one SwiGLU: gate, up and down."""
    return 3 * model.d_model * width


def _router(model: ModelConfig) -> int:
    return model.d_model * model.moe.n_experts


def _mtp_projection(model: ModelConfig) -> int:
    return 2 * model.d_model * model.d_model
