import pytest

from k2jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig


@pytest.fixture(scope="session")
def run_of():
    """Makes a config of tiny shapes: `run_of(mesh, n_layers=3, ...)`; every part of the model is in it unless left out."""

    def make(mesh: MeshConfig, *, microbatches=4, batch=16, rule="muonclip", moe=None, optim=None, **model) -> RunConfig:
        attention = AttentionConfig(n_heads=2, n_kv_heads=2, q_rank=8, kv_rank=8, d_nope=8, d_rope=8, d_value=8, block=32)
        experts = {"n_experts": 8, "n_active": 2, "d_expert": 8, "routed_scale": 1.0, "balance_weight": 1e-2}
        shape = {"n_words": 64, "d_model": 16, "n_layers": 3, "n_dense": 1, "d_dense": 24, "n_mtp": 1, "context": 32}
        schedule = ScheduleConfig(warmup=5.0, stable=55.0, decay=40.0, anneal=0.0)
        return RunConfig(
            steps=20,
            batch=batch,
            seq_len=16,
            microbatches=microbatches,
            model=ModelConfig(
                **shape | model,
                init_std=0.1,
                dtype="float32",
                loss_chunk=8,
                attention=attention,
                moe=MoEConfig(**experts | (moe or {})),
            ),
            optim=OptimConfig(
                **{"rule": rule, "ns_dtype": "float32", "learning_rate": 1e-2, "qk_tau": 0.03, "schedule": schedule}
                | (optim or {})
            ),
            data=DataConfig(tokenizer="tokens"),  # none is read here
            mesh=mesh,
        )

    return make
