"""Every configuration of k2jax. Imports nothing of ours; presets are the functions in `configs/`.

The comment beside a field is its help text on the command line. A field has no other default anywhere in the code.
Values are checked on construction: a wrong one raises ValueError with the value and the rule.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


def _require(rule: bool, message: str) -> None:
    if not rule:
        raise ValueError(message)


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{type(config).__name__}.{name} must be positive; got {value}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its YaRN extension (facts of the released config.json)."""

    theta: float = 50_000.0  # base of the rotation frequencies; DeepSeek-V3 uses 10000
    layout: Literal["interleaved", "half"] = "interleaved"  # channel pairs: (2i, 2i+1) as released, or (i, i + R/2)
    yarn_factor: float = 1.0  # context extension; 1 is off (pre-training), 32 is K2 at 128k
    original_context: int = 4096  # context length that YaRN extends
    beta_fast: float = 1.0  # rotations over the original context above which a frequency is kept
    beta_slow: float = 1.0  # rotations below which a frequency is divided by the factor
    mscale: float = 1.0  # YaRN's magnitude coefficient for the rotation tables
    mscale_all_dim: float = 1.0  # YaRN's magnitude coefficient for the softmax scale, squared there

    def __post_init__(self):
        _positive(self, "theta", "original_context", "beta_fast", "beta_slow")
        _require(self.yarn_factor >= 1, f"RopeConfig.yarn_factor must be at least 1; got {self.yarn_factor}")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head latent attention, or grouped-query attention (multi-head when every head has its own keys)."""

    kind: Literal["mla", "gqa"] = "mla"  # gqa covers MHA: n_kv_heads = n_heads
    n_heads: int = 64  # query heads
    n_kv_heads: int = 64  # key-value heads; MLA has one pair a query head, so there it equals n_heads
    q_rank: int = 1536  # MLA: width of the compressed query
    kv_rank: int = 512  # MLA: width of the compressed key-value, what the cache holds
    d_nope: int = 128  # MLA: width of a head's part without position; 0 for gqa
    d_rope: int = 64  # width of a head's part that RoPE rotates; the whole head for gqa
    d_value: int = 128  # width of a head's value
    soft_cap: float = 0.0  # logits become cap * tanh(logit / cap), a baseline to QK-Clip; 0 is off
    qk_norm: bool = False  # RMSNorm of every head's query and key, a baseline to QK-Clip that latent decoding cannot have
    block: int = 512  # queries and keys at a time; no [T, T] array above this size is formed
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self):
        _positive(self, "n_heads", "n_kv_heads", "d_rope", "d_value", "block")
        _require(self.soft_cap >= 0, f"AttentionConfig.soft_cap must not be negative; got {self.soft_cap}")
        _require(self.d_rope % 2 == 0, f"RoPE rotates pairs, so d_rope must be even; got {self.d_rope}")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads must be a multiple of n_kv_heads; got n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}",
        )
        if self.kind == "mla":
            _positive(self, "q_rank", "kv_rank", "d_nope")
            _require(
                self.n_kv_heads == self.n_heads,
                f"MLA has one key and value a query head, so n_kv_heads must equal n_heads={self.n_heads}; "
                f"got {self.n_kv_heads}",
            )
        else:
            _require(self.d_nope == 0, f"gqa rotates whole heads, so d_nope must be 0; got {self.d_nope}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed and shared experts, the sigmoid router and its load balancing."""

    n_experts: int = 384  # routed experts
    n_active: int = 8  # routed experts a token uses
    n_shared: int = 1  # experts that every token uses, with weight 1
    d_expert: int = 2048  # hidden width of an expert
    n_groups: int = 1  # expert groups (DeepSeek-V3: 8); 1 is plain top-k
    n_active_groups: int = 1  # groups a token may choose from
    routed_scale: float = 2.827  # gates sum to this; 0 computes it from n_experts and n_active by Monte Carlo
    bias_speed: float = 1e-3  # step of the selection bias, once per optimizer step; 0 freezes it
    bias_centered: bool = True  # subtract the mean sign (Moonlight) so that the bias does not drift
    balance_weight: float = 1e-4  # alpha of the sequence-wise balance loss

    def __post_init__(self):
        _positive(self, "n_experts", "n_active", "d_expert", "n_groups", "n_active_groups")
        for name in ("n_shared", "routed_scale", "bias_speed", "balance_weight"):
            _require(getattr(self, name) >= 0, f"MoEConfig.{name} must not be negative; got {getattr(self, name)}")
        _require(
            self.n_experts >= self.n_active,
            f"n_experts must be at least n_active; got n_experts={self.n_experts}, n_active={self.n_active}",
        )
        _require(
            self.n_experts % self.n_groups == 0,
            f"n_experts must be a multiple of n_groups; got n_experts={self.n_experts}, n_groups={self.n_groups}",
        )
        _require(
            self.n_active_groups <= self.n_groups,
            f"n_active_groups must be at most n_groups={self.n_groups}; got {self.n_active_groups}",
        )
        chosen = self.n_active_groups * (self.n_experts // self.n_groups)
        _require(chosen >= self.n_active, f"{self.n_active_groups} groups hold {chosen} experts, fewer than {self.n_active=}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. The defaults are Kimi K2 (report, table 2)."""

    n_words: int = 163_840  # rows of the embedding and the head; the tokenizer may use fewer
    d_model: int = 7168  # width of the residual stream
    n_layers: int = 61  # layers, the dense ones included, MTP not
    n_dense: int = 1  # layers at the bottom with a dense feed-forward instead of experts
    d_dense: int = 18_432  # hidden width of a dense feed-forward
    n_mtp: int = 0  # multi-token-prediction layers after the trunk: 0 or 1
    mtp_weight: float = 0.3  # lambda of the MTP loss (DeepSeek-V3: 0.3, later 0.1)
    context: int = 131_072  # longest sequence the model is meant for
    norm_eps: float = 1e-6  # epsilon of every RMSNorm
    init_std: float = 0.006  # standard deviation of every weight at the start (DeepSeek-V3)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of activations and matmul inputs; weights are float32
    loss_chunk: int = 4096  # tokens of logits formed at a time by the cross-entropy
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    def __post_init__(self):
        _positive(self, "n_words", "d_model", "n_layers", "d_dense", "context", "norm_eps", "init_std", "loss_chunk")
        _require(
            0 <= self.n_dense <= self.n_layers,
            f"n_dense must lie in 0..n_layers={self.n_layers}; got {self.n_dense}",
        )
        _require(self.n_mtp in (0, 1), f"n_mtp must be 0 or 1 (K2 trained one, released none); got {self.n_mtp}")

    @property
    def n_moe(self) -> int:
        """Layers of the trunk that have experts."""
        return self.n_layers - self.n_dense


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, stable, decay, anneal (report 2.5). Only the proportions of the four lengths matter: they are stretched
    to the tokens of the run, so K2's are given in tokens and a short run's in hundredths."""

    warmup: float = 500.0 * 2**26  # linear from 0
    stable: float = 10e12 - 500.0 * 2**26  # at the peak
    decay: float = 5.5e12  # from the peak to decay_to
    anneal: float = 460e9  # from decay_to to anneal_to, linear; covers annealing and the long-context stage
    decay_shape: Literal["cosine", "linear"] = "cosine"  # of the way from the peak to decay_to
    decay_to: float = 0.1  # as a fraction of the peak; 2e-5 of 2e-4
    anneal_to: float = 0.035  # as a fraction of the peak; 7e-6 of 2e-4

    def __post_init__(self):
        for name in ("warmup", "stable", "decay", "anneal", "decay_to", "anneal_to"):
            _require(getattr(self, name) >= 0, f"ScheduleConfig.{name} must not be negative; got {getattr(self, name)}")
        total = self.warmup + self.stable + self.decay + self.anneal
        _require(total > 0, "ScheduleConfig needs a phase of positive length; warmup, stable, decay and anneal are all 0")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """MuonClip (report, algorithm 1). One learning rate and one decay drive Muon and AdamW alike, unless told otherwise."""

    rule: Literal["muonclip", "muon", "adamw"] = "muonclip"  # muon is muonclip without the clip; adamw takes every weight
    learning_rate: float = 2e-4  # peak
    weight_decay: float = 0.1  # decoupled, times the learning rate; norm gains are decayed too
    momentum: float = 0.95  # Muon's mu: M = mu M + G
    nesterov: bool = True  # orthogonalize mu M + G (as run) instead of M (as printed)
    split: Literal["joint", "split", "per_head"] = "split"  # what Muon sees of MLA: released matrices, our parts, each head
    ns_steps: int = 5  # Newton-Schulz iterations
    ns_coefficients: Literal["jordan", "you", "polar_express", "eight_two"] = "jordan"  # of its polynomials; K2's are Jordan's
    ns_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of its operands; sums are float32
    update_rms: float = 0.2  # root mean square that Muon's update is brought to
    scale: Literal["adjusted", "update_norm", "baseline"] = "adjusted"  # by sqrt(max(n, m)), the measured RMS, or sqrt(d_model)
    adamw_rate: float = 1.0  # AdamW's learning rate as a multiple of learning_rate
    adamw_decay: float = 1.0  # AdamW's weight decay as a multiple of weight_decay
    adam_b1: float = 0.9  # AdamW's decay of the first moment
    adam_b2: float = 0.95  # AdamW's decay of the second moment
    adam_eps: float = 1e-8  # AdamW's epsilon
    clip_norm: float = 1.0  # gradient norm above which the gradient is scaled down; 0 is off
    qk_tau: float = 100.0  # QK-Clip threshold on a head's largest attention logit
    qk_alpha: float = 0.5  # share of a head's clip that goes to the query (nope part)
    qk_scope: Literal["head", "layer"] = "head"  # layer is the naive clip, for ablation: all heads by the layer's worst
    qk_gqa: Literal["group", "query"] = "group"  # GQA: clip q and k by the group's worst head, or only q by its own
    max_skips: int = 20  # non-finite gradients in a row before training stops
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self):
        _positive(self, "learning_rate", "ns_steps", "update_rms", "adamw_rate", "adam_eps", "qk_tau", "max_skips")
        for name in ("weight_decay", "adamw_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, f"OptimConfig.{name} must not be negative; got {getattr(self, name)}")
        for name in ("momentum", "adam_b1", "adam_b2"):
            _require(0 <= getattr(self, name) < 1, f"OptimConfig.{name} must lie in [0, 1); got {getattr(self, name)}")
        fewest = {"you": 5, "eight_two": 10}.get(self.ns_coefficients, 1)
        _require(
            self.ns_steps >= fewest,
            f"the {self.ns_coefficients!r} coefficients of Newton-Schulz are a schedule of {fewest} steps; "
            f"got OptimConfig.ns_steps={self.ns_steps}",
        )
        _require(0 <= self.qk_alpha <= 1, f"OptimConfig.qk_alpha must lie in [0, 1]; got {self.qk_alpha}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpus, tokenizer and mixture."""

    corpus: str = "builtin"  # builtin | pip | apt | a folder of text, JSONL, Parquet or ArrayRecord files | hf:NAME
    tokenizer: str = "bpe"  # bpe (trained on the training split) | byte | path of a tiktoken.model
    vocab: int = 1024  # entries of the trained BPE, specials included
    web: float = 0.35  # mixture weight of web text; builtin has documentation in its place
    code: float = 0.35  # mixture weight of source code
    math: float = 0.15  # mixture weight of mathematics
    knowledge: float = 0.15  # mixture weight of encyclopedic text
    heldout: float = 0.02  # share of documents, by hash, that validate and are never trained on
    workers: int = 0  # processes that read; batches do not depend on it
    prefetch: int = 2  # batches prepared ahead of the step
    cache: Path = Path("~/.cache/k2jax")  # prepared corpora and tokenizers

    def __post_init__(self):
        for name in ("web", "code", "math", "knowledge", "workers", "prefetch"):
            _require(getattr(self, name) >= 0, f"DataConfig.{name} must not be negative; got {getattr(self, name)}")
        _require(self.web + self.code + self.math + self.knowledge > 0, "DataConfig needs a domain with positive weight")
        _require(0 < self.heldout < 1, f"DataConfig.heldout must lie between 0 and 1; got {self.heldout}")
        _require(self.vocab >= 260, f"DataConfig.vocab must hold 256 bytes and 4 specials, 260; got {self.vocab}")

    @property
    def mixture(self) -> dict[str, float]:
        """Domain -> weight."""
        return {"web": self.web, "code": self.code, "math": self.math, "knowledge": self.knowledge}


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How a run is spread over devices (report 2.4.2). K2: pipeline 16, expert 16, the rest data."""

    pipeline: int = 1  # stages; layers and the vocabulary are split over them
    expert: int = 1  # ranks that share a layer's experts; rows of the batch are split over them too
    data: int = 0  # replicas that split batch and optimizer state (ZeRO-1); 0 is what the devices leave, on a CPU the cores
    chunks: int = 1  # virtual stages a device (interleaved 1F1B); more make the bubble smaller
    buffer: float = 1.25  # rows sent to a device at a time, as a multiple of the balanced load; more go in further rounds
    offload: bool = False  # master weights and optimizer state in host memory

    def __post_init__(self):
        _positive(self, "pipeline", "expert", "chunks", "buffer")
        _require(self.data >= 0, f"MeshConfig.data must not be negative; got {self.data}")


Action = Literal["keep", "recompute", "fp8", "offload", "fp8+offload"]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """What becomes of a layer's activations until its backward pass needs them (report 2.4.3; `k2jax.parallel.activations`).

    A field set to an action overrides what the policy does with that one. A model is cut where `mesh.pipeline` or `mesh.expert`
    is more than 1.
    """

    policy: Literal["auto", "none", "full", "k2"] = "auto"  # keep all; recompute all from the input; K2's. auto: full if cut
    input: Action | None = None  # of the layer; it cannot be recomputed
    norms: Action | None = None  # outputs of the two RMSNorms
    latents: Action | None = None  # compressed query and key-value, and the shared key before its rotation
    heads: Action | None = None  # queries, keys and values of all heads
    attention: Action | None = None  # output of the attention core
    stream: Action | None = None  # between attention and feed-forward
    gates: Action | None = None  # inputs of SwiGLU, of shared experts and dense layers
    hidden: Action | None = None  # its outputs there
    expert_rows: Action | None = None  # rows that came to the experts of a device; in a cut model alone
    expert_gates: Action | None = None  # inputs of SwiGLU of those experts; in a cut model alone

    def __post_init__(self):
        _require(self.input != "recompute", "a layer's input cannot be recomputed; activations.input is 'recompute'")


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The processes of a run, each started with the same command. Under SLURM and Open MPI they find each other."""

    coordinator: str = ""  # HOST:PORT at which process 0 listens for the others
    count: int = 0  # processes; 0 is what SLURM or Open MPI say, or one
    index: int = -1  # which of them this one is, from 0; -1 is what SLURM or Open MPI say
    patience: float = 30.0  # seconds without a sign of life after which a process counts as lost and the others end

    def __post_init__(self):
        _positive(self, "patience")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: `python -m k2jax.train PRESET`."""

    name: str = "run"  # what plots and logs call it
    out: Path = Path("runs/run")  # folder of the results; the same command continues what it holds
    seed: int = 0  # of the weights; data_seed is apart so that models can be compared on the same batches
    data_seed: int = 0  # of the order of the data
    init: str = ""  # folder of a training run, or of weights, whose weights this run begins with; empty draws them
    steps: int = 237_821  # optimizer steps; K2's schedule at 67M tokens a step
    batch: int = 16_384  # sequences a step
    seq_len: int = 4096  # tokens a sequence
    microbatches: int = 1  # parts a device's rows are split in; gradients are summed in float32; 0 is a sequence at a time
    eval_every: int = 1000  # steps between validations; 0 validates only at the end
    eval_batches: int = 16  # validation batches of each domain
    checkpoint_every: int = 1000  # steps between checkpoints; 0 saves only at the end
    probe_every: int = 0  # steps between probes of the weights' spectra (k2jax.optim.probes); 0 is never
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)

    def __post_init__(self):
        _positive(self, "steps", "batch", "seq_len", "eval_batches")
        for name in ("eval_every", "checkpoint_every", "probe_every", "microbatches"):
            _require(getattr(self, name) >= 0, f"RunConfig.{name} must not be negative; got {getattr(self, name)}")
        _require(
            self.batch % max(self.microbatches, 1) == 0,
            f"batch must be a multiple of microbatches; got batch={self.batch}, microbatches={self.microbatches}",
        )
        _require(
            self.seq_len <= self.model.context,
            f"seq_len must be at most the model's context={self.model.context}; got {self.seq_len}",
        )
        _require(
            not (self.model.attention.qk_norm and self.optim.rule == "muonclip"),
            "a norm between the query and key weights and the logits makes QK-Clip inert; "
            "model.attention.qk_norm needs optim.rule muon or adamw, got muonclip",
        )
        _require(
            self.data.tokenizer != "bpe" or self.data.vocab <= self.model.n_words,
            f"the tokenizer's vocabulary must fit the model's n_words={self.model.n_words}; got vocab={self.data.vocab}",
        )

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch * self.seq_len


def to_dict(config: object) -> dict:
    """A config as plain JSON-able values; `Path` becomes a string."""
    plain = dataclasses.asdict(config)
    return _paths_to_str(plain)


def _paths_to_str(value):
    if isinstance(value, dict):
        return {k: _paths_to_str(v) for k, v in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: type, plain: dict):
    """The inverse of `to_dict`; an unknown field raises ValueError that names it."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(plain) - set(fields))
    _require(not unknown, f"{kind.__name__} has no field {unknown}; its fields are {sorted(fields)}")
    values = {}
    for name, value in plain.items():
        annotation = fields[name].type
        if dataclasses.is_dataclass(annotation):
            value = from_dict(annotation, value)
        elif annotation is Path:
            value = Path(value)
        values[name] = value
    return kind(**values)


def differences(a: object, b: object, prefix: str = "") -> list[str]:
    """Names and values of the fields in which two configs differ: `["model.d_model: 64 != 128"]`."""
    found = []
    for f in dataclasses.fields(a):
        x, y, name = getattr(a, f.name), getattr(b, f.name), prefix + f.name
        if dataclasses.is_dataclass(x):
            found += differences(x, y, name + ".")
        elif x != y:
            found.append(f"{name}: {x} != {y}")
    return found
