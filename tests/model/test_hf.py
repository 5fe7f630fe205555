import contextlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import deepseek_v3, k2
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig, RunConfig
from k2jax.model import hf, hf_names, store
from k2jax.model.hf_config import from_published, to_published
from k2jax.model.tensor_files import create, read_header
from k2jax.model.transformer import init

CONFIG = ModelConfig(
    n_words=40,
    d_model=16,
    n_layers=4,
    n_dense=2,
    d_dense=20,
    n_mtp=1,
    context=64,
    init_std=0.3,
    dtype="float32",
    attention=AttentionConfig(n_heads=3, n_kv_heads=3, q_rank=10, kv_rank=8, d_nope=6, d_rope=4, d_value=5, block=32),
    moe=MoEConfig(n_experts=6, n_active=2, d_expert=7, routed_scale=1.5),
)
GOLDEN = Path(__file__).parent / "golden"


def weights(config=CONFIG):
    params, bias = init(config, 0)
    return store.Weights(config, params, jax.tree.map(lambda b: b + 0.1 * jnp.arange(b.shape[1]).reshape(1, -1), bias))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published folder in several shards, bfloat16."""
    folder = tmp_path_factory.mktemp("published")
    store.save(folder / "ours", weights())
    hf.export_weights(folder / "ours", folder / "hf", shard_bytes=20_000)
    return folder / "hf"


def copied(published, tmp_path):
    return Path(shutil.copytree(published, tmp_path / "copy"))


def contents(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in read_header(path).items()}


def test_export_of_import_is_byte_equal(published, tmp_path):
    hf.import_weights(published, tmp_path / "ours")
    hf.export_weights(tmp_path / "ours", tmp_path / "again", shard_bytes=20_000)
    files = sorted(p.name for p in published.iterdir() if p.name != hf.MARK)
    assert len(files) > 3 and files == sorted(p.name for p in (tmp_path / "again").iterdir() if p.name != hf.MARK)
    for name in files:
        assert (published / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize("folder", ["deepseek_v3", "llama"])
def test_what_a_public_class_saved_comes_out_byte_equal(folder, tmp_path):
    hf.import_weights(GOLDEN / folder, tmp_path / "ours")
    hf.export_weights(tmp_path / "ours", tmp_path / "again")
    before, after = contents(GOLDEN / folder), contents(tmp_path / "again")
    if folder == "llama":  # its head was the embedding; ours is a weight of its own
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert x.dtype == after[name].dtype and x.map().tobytes() == after[name].map().tobytes(), name
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert from_published(fields)[0] == from_published(json.loads((GOLDEN / folder / "config.json").read_text()))[0]


def test_every_weight_has_a_published_place(tmp_path):
    """Import of a float32 export gives each weight and bias back, bit for bit."""
    before = weights()
    store.save(tmp_path / "ours", before)
    hf.export_weights(tmp_path / "ours", tmp_path / "hf", dtype="float32")
    hf.import_weights(tmp_path / "hf", tmp_path / "back")
    after = store.load(tmp_path / "back", "float32")
    assert replace(after.config, loss_chunk=CONFIG.loss_chunk, attention=CONFIG.attention, moe=CONFIG.moe) == CONFIG
    jax.tree.map(np.testing.assert_array_equal, before[1:], after[1:])


def test_heads_land_where_the_published_code_looks(tmp_path):
    """Needles: one number in each part of one head, at the published row and column."""
    a, params = CONFIG.attention, jax.tree.map(jnp.zeros_like, weights().params)
    at = params["moe"]["attention"]
    at["q_nope_QHN"] = at["q_nope_QHN"].at[1, 9, 2, 3].set(1)
    at["q_rope_QHR"] = at["q_rope_QHR"].at[1, 9, 2, 3].set(2)
    at["k_nope_CHN"] = at["k_nope_CHN"].at[1, 7, 1, 5].set(3)
    at["v_CHV"] = at["v_CHV"].at[1, 7, 1, 4].set(4)
    at["k_rope_DR"] = at["k_rope_DR"].at[1, 11, 2].set(5)
    at["o_HVD"] = at["o_HVD"].at[1, 2, 4, 13].set(6)
    params["mtp"]["project_JD"] = params["mtp"]["project_JD"].at[3, 5].set(7)  # from the hidden state
    store.save(tmp_path / "ours", weights()._replace(params=params))
    hf.export_weights(tmp_path / "ours", tmp_path / "hf", dtype="float32")
    held, layer = contents(tmp_path / "hf"), "model.layers.3.self_attn."

    def needles(name):
        x = held[name].map()
        return {tuple(int(i) for i in at): x[tuple(at)] for at in np.argwhere(x)}

    assert needles(layer + "q_b_proj.weight") == {(2 * (a.d_nope + a.d_rope) + 3, 9): 1, (2 * 10 + 6 + 3, 9): 2}
    assert needles(layer + "kv_b_proj.weight") == {(1 * (a.d_nope + a.d_value) + 5, 7): 3, (1 * 11 + 6 + 4, 7): 4}
    assert needles(layer + "kv_a_proj_with_mqa.weight") == {(a.kv_rank + 2, 11): 5}
    assert needles(layer + "o_proj.weight") == {(13, 2 * a.d_value + 4): 6}
    assert needles("model.layers.4.eh_proj.weight") == {(5, CONFIG.d_model + 3): 7}


def test_fp8_blocks_are_multiplied_by_their_scales(published, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 130)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    expected = np.empty(x.shape, ml_dtypes.bfloat16)
    for i in range(300):
        for j in range(130):
            expected[i, j] = np.float32(x[i, j]) * scale[i // 128, j // 128]
    np.testing.assert_array_equal(hf.dequantized(x, scale), expected)

    # A whole checkpoint of which one tensor is FP8.
    folder, name = copied(published, tmp_path), "model.layers.2.mlp.experts.4.up_proj.weight"
    index = json.loads((folder / hf.INDEX).read_text())
    shard = folder / index["weight_map"][name]
    held = {n: np.array(t.map()) for n, t in read_header(shard).items()}
    held[name], held[name + hf.SCALE] = held[name].astype(ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, np.float32)
    with create(shard, {n: (t.shape, t.dtype) for n, t in held.items()}) as places:
        for n, t in held.items():
            places[n].map("r+")[...] = t
    with pytest.raises(ValueError, match=f"differs in {name}_scale_inv"):
        hf.open_published(folder)
    index["weight_map"][name + hf.SCALE] = shard.name
    (folder / hf.INDEX).write_text(json.dumps(index))
    hf.import_weights(folder, tmp_path / "ours")
    up_DF = store.load(tmp_path / "ours", "float32").params["moe"]["ffn"]["up_EDF"][0, 4]
    np.testing.assert_array_equal(up_DF, 0.5 * held[name].astype(np.float32).T)


def test_goes_on_after_an_interruption_and_makes_no_file_again(published, tmp_path, monkeypatch):
    hf.import_weights(published, tmp_path / "whole")
    one, calls = hf._import_one, []

    def dies(*args):
        calls.append(args)
        if len(calls) == 60:
            raise KeyboardInterrupt
        one(*args)

    monkeypatch.setattr(hf, "_import_one", dies)
    with pytest.raises(KeyboardInterrupt):
        hf.import_weights(published, tmp_path / "ours")
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "ours").glob("[!.]*.safetensors")}
    assert 0 < len(done) < len(store.files(CONFIG))
    with pytest.raises(ValueError, match=r"is not whole: .*safetensors is missing"):
        store.load(tmp_path / "ours", "float32")
    hf.import_weights(published, tmp_path / "ours")
    for name in store.files(CONFIG):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert name not in done or (tmp_path / "ours" / name).stat().st_mtime_ns == done[name]


def test_a_target_that_is_something_else_is_refused(published, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        hf.import_weights(published, tmp_path)
    hf.import_weights(published, tmp_path / "ours")
    with pytest.raises(ValueError, match="is made of something else"):
        hf.import_weights(published, tmp_path / "ours", dtype="float32")


def test_import_straight_onto_a_mesh(published, tmp_path):
    hf.import_weights(published, tmp_path / "ours")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = {"down_EFD": PartitionSpec(None, "a", None, "b"), "head_WD": PartitionSpec("b")}
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, spec.get(leaf.key, PartitionSpec())), store.leaves(CONFIG))
    spread, whole = store.load(tmp_path / "ours", "float32", shardings), store.load(tmp_path / "ours", "float32")
    jax.tree.map(np.testing.assert_array_equal, spread[1:], whole[1:])
    down = spread.params["moe"]["ffn"]["down_EFD"]
    assert down.sharding.spec == spec["down_EFD"] and down.addressable_shards[0].data.shape == (2, 3, 7, 8)


@contextlib.contextmanager
def changed_json(path):
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 3}, r"6 tensors are missing: model.layers.3.eh_proj.weight.*not of this model: model.layers.4"),
        (
            {"num_hidden_layers": 5},
            r"tensors are missing: model.layers.5.*6 tensors are not of this model: model.layers.4.eh_proj",
        ),
        ({"n_routed_experts": 5}, r"9 tensors are not of this model: .*layers.2.mlp.experts.5.down_proj.*6 shapes are not"),
        ({"kv_lora_rank": 9}, r"shapes are not the config's: .*kv_a_layernorm.weight is \(8,\), not \(9,\)"),
        ({"sliding_window": 128}, "fields that are not known, and may change the model: sliding_window"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'; got 'softmax'"),
        ({"model_type": "gpt2"}, "model_type must be one of kimi_k2, deepseek_v3, llama; got 'gpt2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "must be of type yarn, or null; got 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling lacks beta_fast"),
        ({"num_attention_heads": 0}, "n_heads must be positive"),
    ],
)
def test_a_config_that_disagrees_is_refused_by_name(published, tmp_path, fields, said):
    folder = copied(published, tmp_path)
    with changed_json(folder / "config.json") as config:
        config |= fields
    with pytest.raises(ValueError, match=said):
        hf.import_weights(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_field_shard_and_bytes_are_refused_by_name(published, tmp_path):
    folder = copied(published, tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{shard.name} is cut short"):
        hf.open_published(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=f"is not whole: {shard.name}, which its index names, is missing"):
        hf.open_published(folder)
    shard.write_bytes(data)
    with changed_json(folder / "config.json") as config:
        del config["q_lora_rank"]
    with pytest.raises(ValueError, match=r"config.json: q_lora_rank is missing"):
        hf.open_published(folder)


def test_mtp_that_shares_no_head_is_refused(published, tmp_path):
    folder, name = copied(published, tmp_path), "model.layers.4.shared_head.head.weight"
    contents(folder)[name].map("r+")[3, 3] += 1
    with pytest.raises(ValueError, match=f"{name} differs from lm_head.weight"):
        hf.import_weights(folder, tmp_path / "ours")


def test_the_full_size_models_have_the_published_tensors():
    """Kimi K2 and DeepSeek-V3 with their MTP layer: counts of tensors and weights."""
    config = replace(k2.released(), n_mtp=1)
    wanted = hf_names.entries(config)
    # A layer: 7 of attention, 2 norms; dense 3; experts 3 each, 3 shared, the router and its bias; MTP 4 and 2 copies; ends 3.
    assert len(wanted) == 62 * 9 + 3 + 61 * (3 * 384 + 3 + 2) + 6 + 3
    assert sum(math.prod(e.shape) for e in wanted if not e.copy) == 1_043_570_379_648
    shape = {e.name: e.shape for e in wanted}
    assert shape["model.layers.60.self_attn.q_b_proj.weight"] == (64 * 192, 1536)
    assert shape["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert shape["model.layers.1.mlp.experts.383.down_proj.weight"] == (7168, 2048)


@pytest.mark.parametrize("config", [k2.released(), deepseek_v3.config().model], ids=["k2", "deepseek_v3"])
def test_config_there_and_back(config):
    back, tied = from_published(to_published(config, config.dtype))
    ours = replace(
        config.moe, bias_speed=back.moe.bias_speed, bias_centered=back.moe.bias_centered
    )  # training's, not published
    rope = config.attention.rope
    if rope.yarn_factor == 1:  # without YaRN its other fields mean nothing
        rope = RopeConfig(theta=rope.theta)
    assert back == replace(config, moe=ours, attention=replace(config.attention, rope=rope)) and not tied


def test_models_that_published_code_cannot_run_are_refused(tmp_path):
    for attention, said in (({"soft_cap": 5.0}, "soft_cap"), ({"qk_norm": True}, "qk_norm")):
        with pytest.raises(ValueError, match=f"published code cannot run this model: attention.{said}"):
            to_published(replace(CONFIG, attention=replace(CONFIG.attention, **attention)), "bfloat16")


def test_a_training_run_is_exported(tmp_path):
    """What orbax wrote for `k2jax.train` gives the same published files as the weights themselves."""
    import orbax.checkpoint as ocp

    from k2jax.config import to_dict

    before, run = weights(), tmp_path / "run"
    state = {"params": before.params, "router_bias": before.router_bias, "opt_state": {"mu": jnp.ones(3)}}
    with ocp.CheckpointManager(run / "checkpoints") as manager:
        for step in (2, 11):
            args = ocp.args.Composite(state=ocp.args.StandardSave(jax.tree.map(lambda w, s=step: w * (s / 11), state)))
            manager.save(step, args=args)
    (run / "config.json").write_text(json.dumps(to_dict(RunConfig(model=CONFIG, seq_len=64, data=_bytes()))))
    store.save(tmp_path / "ours", before)
    for source in ("run", "ours"):
        hf.export_weights(tmp_path / source, tmp_path / f"{source}_hf", dtype="float32")
    one, other = ((tmp_path / f"{source}_hf" / hf.SINGLE).read_bytes() for source in ("run", "ours"))
    assert one == other


def _bytes():
    from k2jax.config import DataConfig

    return DataConfig(tokenizer="byte")


def test_commands(published, tmp_path, capsys):
    assert hf.main(["import", str(published), str(tmp_path / "ours")]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    assert hf.main(["inspect", str(tmp_path / "hf")]) == 0
    assert "12 numbers a token and layer in the cache" in capsys.readouterr().out
    assert hf.main(["inspect", str(tmp_path)]) == 2
    assert "error: a published folder holds config.json" in capsys.readouterr().err
