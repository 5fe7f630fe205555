import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig
from k2jax.train.step import init_state


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory):
    """One cache of compiled programs for these tests and the processes that they start."""
    folder = tmp_path_factory.mktemp("programs")
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield folder
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of 40 short documents in two domains."""
    folder = tmp_path_factory.mktemp("texts")
    words = [a + b for a in ("ba", "ko", "ri", "tu") for b in ("la", "min", "so", "x")]
    for i in range(40):
        path = folder / ("web" if i % 2 else "math") / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        rng = random.Random(i)
        path.write_text(" ".join(rng.choice(words) for _ in range(10 + 7 * i)))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def base(texts, cache):
    """A run of seconds: one layer with experts, bytes, 12 steps of two microbatches, a threshold at which the clip fires."""
    attention = AttentionConfig(n_heads=2, n_kv_heads=2, q_rank=8, kv_rank=8, d_nope=8, d_rope=8, d_value=8, block=32)
    return RunConfig(
        steps=12,
        batch=4,
        seq_len=32,
        microbatches=2,
        eval_every=5,
        eval_batches=2,
        checkpoint_every=5,
        mesh=MeshConfig(data=1),  # of the eight devices that tests have
        model=ModelConfig(
            n_words=260,
            d_model=16,
            n_layers=1,
            n_dense=0,
            d_dense=32,
            context=32,
            init_std=0.1,
            dtype="float32",
            loss_chunk=64,
            attention=attention,
            moe=MoEConfig(n_experts=4, n_active=2, d_expert=8, routed_scale=1.0),
        ),
        optim=OptimConfig(
            learning_rate=1e-2,
            ns_dtype="float32",
            qk_tau=0.03,
            schedule=ScheduleConfig(warmup=5.0, stable=55.0, decay=40.0, anneal=0.0),
        ),
        data=DataConfig(
            corpus=str(texts), tokenizer="byte", web=0.7, code=0.0, math=0.3, knowledge=0.0, heldout=0.1, cache=cache
        ),
    )


@pytest.fixture
def small(base, tmp_path):
    """The same in a folder of its own."""
    return replace(base, out=tmp_path / "run")


@pytest.fixture(scope="session")
def fresh_state(base):
    """Makes the state before the first step of `base`; each call a new one, since a step consumes its state."""
    state = jax.tree.map(np.array, init_state(base))
    return lambda: jax.tree.map(jnp.array, state)


@pytest.fixture
def every_part(small):
    """The same with a dense layer and MTP: every part of the model."""
    return replace(small, model=replace(small.model, n_layers=2, n_dense=1, n_mtp=1))
