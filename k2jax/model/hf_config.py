"""A published `config.json` and our `ModelConfig`, both ways: Kimi K2 and DeepSeek-V3, and dense models of Llama's type."""

from collections.abc import Mapping

from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from k2jax.model.moe import routed_scale

LATENT = ("kimi_k2", "deepseek_v3")  # model types with MLA and experts
DENSE = ("llama",)
# Fields of the architecture that have one value in every model we can hold.
FIXED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "seq_aux": (True,),
    "rope_interleave": (True,),
    "pretraining_tp": (1,),
    "ep_size": (1,),
}
# Fields that say nothing of the architecture.
IGNORED = (
    *("architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "output_router_logits", "is_llama_config"),
)


def from_published(fields: Mapping[str, object]) -> tuple[ModelConfig, bool]:
    """Our config of a published one, and whether the head is the embedding.

    What the published one does not say (the MTP loss's weight, the speed of the selection bias) has our default.
    Raises ValueError, naming the field, for one that is missing, unknown, or has a value that we cannot hold.
    """
    left = {name: value for name, value in fields.items() if name not in IGNORED}
    kind = left.pop("model_type", None)
    if kind not in LATENT + DENSE:
        raise ValueError(f"config.json: model_type must be one of {', '.join(LATENT + DENSE)}; got {kind!r}")
    for name in FIXED.keys() & left.keys():
        if (value := left.pop(name)) not in FIXED[name]:
            raise ValueError(f"config.json: {name} must be {FIXED[name][0]!r}; got {value!r}")
    _check_quantization(left.pop("quantization_config", None))

    def take(name, *default):
        if name not in left and not default:
            raise ValueError(f"config.json: {name} is missing")
        value = left.pop(name, *default)
        return default[0] if value is None and default else value

    layers, rope = take("num_hidden_layers"), _rope(take, "interleaved" if kind in LATENT else "half")
    if kind in LATENT:
        attention, moe = _latent(take, rope), _experts(take)
        dense, mtp = take("first_k_dense_replace"), take("num_nextn_predict_layers", 0)
    else:
        attention, moe, dense, mtp = _grouped(take, rope, fields), MoEConfig(), layers, 0
    config = ModelConfig(
        n_words=take("vocab_size"),
        d_model=take("hidden_size"),
        n_layers=layers,
        n_dense=dense,
        d_dense=take("intermediate_size"),
        n_mtp=mtp,
        context=take("max_position_embeddings"),
        norm_eps=take("rms_norm_eps"),
        init_std=take("initializer_range", 0.02),
        dtype="float32" if "float32" in (take("torch_dtype", None), take("dtype", None)) else "bfloat16",
        attention=attention,
        moe=moe,
    )
    tied = take("tie_word_embeddings", False)
    if left:
        raise ValueError(f"config.json: fields that are not known, and may change the model: {', '.join(sorted(left))}")
    return config, tied


def _latent(take, rope: RopeConfig) -> AttentionConfig:
    nope, width = take("qk_nope_head_dim"), take("qk_rope_head_dim")
    for name, value in (("head_dim", width), ("qk_head_dim", nope + width)):  # newer files repeat them
        if (given := take(name, value)) != value:
            raise ValueError(f"config.json: {name} must be {value} to agree with the other widths; got {given}")
    return AttentionConfig(
        kind="mla",
        n_heads=take("num_attention_heads"),
        n_kv_heads=take("num_key_value_heads"),
        q_rank=take("q_lora_rank"),
        kv_rank=take("kv_lora_rank"),
        d_nope=nope,
        d_rope=width,
        d_value=take("v_head_dim"),
        rope=rope,
    )


def _grouped(take, rope: RopeConfig, fields: Mapping[str, object]) -> AttentionConfig:
    heads = take("num_attention_heads")
    width = take("head_dim", fields["hidden_size"] // heads)
    groups = take("num_key_value_heads", heads)
    return AttentionConfig(kind="gqa", n_heads=heads, n_kv_heads=groups, d_nope=0, d_rope=width, d_value=width, rope=rope)


def _experts(take) -> MoEConfig:
    return MoEConfig(
        n_experts=take("n_routed_experts"),
        n_active=take("num_experts_per_tok"),
        n_shared=take("n_shared_experts"),
        d_expert=take("moe_intermediate_size"),
        n_groups=take("n_group"),
        n_active_groups=take("topk_group"),
        routed_scale=take("routed_scaling_factor"),
        balance_weight=take("aux_loss_alpha", MoEConfig.balance_weight),
    )


def _rope(take, layout: str) -> RopeConfig:
    """Positions; `rope_parameters` is how newer files write `rope_theta` and `rope_scaling`."""
    given = dict(take("rope_scaling", None) or take("rope_parameters", None) or {})
    theta = given.pop("rope_theta", None) or take("rope_theta")
    take("rope_theta", None)
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)
    if kind == "default":
        return RopeConfig(theta=theta, layout=layout)
    if kind != "yarn":
        raise ValueError(f"config.json: rope_scaling must be of type yarn, or null; got {kind!r}")
    names = {
        "factor": "yarn_factor",
        "original_max_position_embeddings": "original_context",
        **{name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
    if unknown := sorted(given.keys() - names.keys()):
        raise ValueError(f"config.json: fields of rope_scaling that are not known: {', '.join(unknown)}")
    if missing := sorted(names.keys() - given.keys()):
        raise ValueError(f"config.json: rope_scaling lacks {', '.join(missing)}")
    return RopeConfig(theta=theta, layout=layout, **{names[name]: value for name, value in given.items()})


def _check_quantization(given: Mapping[str, object] | None) -> None:
    if given is not None and (given.get("quant_method"), given.get("weight_block_size")) != ("fp8", [128, 128]):
        raise ValueError(f"config.json: weights may be quantized to fp8 in blocks of [128, 128]; got {given}")


def to_published(config: ModelConfig, dtype: str) -> dict[str, object]:
    """The published config of our model.

    Raises ValueError, naming the field, for what the published code cannot run.
    """
    a, m = config.attention, config.moe
    latent = a.kind == "mla"
    for wrong, rule in (
        (a.soft_cap, f"attention.soft_cap must be 0; got {a.soft_cap}"),
        (a.qk_norm, "attention.qk_norm must be False; got True"),
        (not latent and config.n_dense < config.n_layers, "a gqa model must be dense, n_dense = n_layers"),
        (not latent and a.d_value != a.d_rope, f"a gqa model's d_value must be d_rope={a.d_rope}; got {a.d_value}"),
        (
            a.rope.layout != ("interleaved" if latent else "half"),
            f"{a.kind} weights have another rope layout; got {a.rope.layout}",
        ),
        (latent and config.n_dense == config.n_layers and config.n_mtp, "MTP's layer has experts, a dense model none"),
    ):
        if wrong:
            raise ValueError(f"published code cannot run this model: {rule}")
    common = {
        "architectures": ["DeepseekV3ForCausalLM" if latent else "LlamaForCausalLM"],
        "model_type": "deepseek_v3" if latent else "llama",
        "vocab_size": config.n_words,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "intermediate_size": config.d_dense,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "num_attention_heads": a.n_heads,
        "num_key_value_heads": a.n_kv_heads,
        "rope_theta": a.rope.theta,
        "rope_scaling": _scaling(a.rope),
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
    }
    if not latent:
        return common | {"head_dim": a.d_rope}
    return common | {
        "q_lora_rank": a.q_rank,
        "kv_lora_rank": a.kv_rank,
        "qk_nope_head_dim": a.d_nope,
        "qk_rope_head_dim": a.d_rope,
        "v_head_dim": a.d_value,
        "first_k_dense_replace": config.n_dense,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": config.n_mtp,
        "n_routed_experts": m.n_experts,
        "num_experts_per_tok": m.n_active,
        "n_shared_experts": m.n_shared,
        "moe_intermediate_size": m.d_expert,
        "n_group": m.n_groups,
        "topk_group": m.n_active_groups,
        "routed_scaling_factor": m.routed_scale or routed_scale(m.n_experts, m.n_active, m.n_shared),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "seq_aux": True,
        "aux_loss_alpha": m.balance_weight,
    }


def _scaling(rope: RopeConfig) -> dict[str, object] | None:
    if rope.yarn_factor == 1:
        return None
    return {
        "type": "yarn",
        "factor": rope.yarn_factor,
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
